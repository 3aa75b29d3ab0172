"""Errors of orbax in one line: its libraries print hundreds of their own, which are kept from stderr."""

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Iterator

_LONGEST_REASON = 300  # letters


@contextlib.contextmanager
def orbax_errors(what: str, remedy: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Turns whatever orbax and tensorstore raise into one error of one line.

    Args:
      what: could not be done, with the path.
      remedy: what to do.
      kind: of the error.

    >>> with orbax_errors('a: orbax cannot read it', 'save it anew'):
    ...     raise KeyError('params')
    Traceback (most recent call last):
      ...
    ValueError: a: orbax cannot read it: 'params'; save it anew
    """
    _silence_closed_loops()
    loggers = [logging.getLogger(name) for name in ('absl', 'asyncio', 'orbax')]
    for logger in loggers:
        logger.addFilter(_is_critical)
    try:
        yield
    except Exception as error:
        gc.collect()  # so that futures that nobody waits for complain now
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise kind(f'{what}: {lines[0][:_LONGEST_REASON]}; {remedy}') from error
    finally:
        for logger in loggers:
            logger.removeFilter(_is_critical)


def _is_critical(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


@functools.cache
def _silence_closed_loops() -> None:
    """After the first error tensorstore's threads still report to an event loop that has been closed.

    They do so at any time afterwards, so that this stays as it is once set.
    """
    before = sys.unraisablehook

    def hook(ignored: 'sys.UnraisableHookArgs') -> None:
        is_of_a_closed_loop = isinstance(
            ignored.exc_value, RuntimeError
        ) and 'loop is closed' in str(ignored.exc_value)
        if not is_of_a_closed_loop:
            before(ignored)

    sys.unraisablehook = hook
