"""Errors of orbax in one line: its libraries print hundreds of their own, which are kept from stderr."""

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Iterator

_LONGEST_REASON = 300  # letters
_LOGGERS = ('absl', 'asyncio', 'orbax')


@contextlib.contextmanager
def orbax_errors(
    what: str, remedy: str, error_class: type[Exception] = ValueError
) -> Iterator[None]:
    """Turns whatever orbax and tensorstore raise into one error of one line: what could not be done, why, the remedy.

    >>> with orbax_errors('a: orbax cannot read it', 'save it anew'):
    ...     raise KeyError('params')
    Traceback (most recent call last):
      ...
    ValueError: a: orbax cannot read it: 'params'; save it anew
    """
    _silence_closed_loops()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_critical)
    try:
        yield
    except Exception as error:
        gc.collect()  # so that futures that nobody waits for complain now
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0][:_LONGEST_REASON]
        raise error_class(f'{what}: {reason}; {remedy}') from error
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(_is_critical)


def _is_critical(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


@functools.cache
def _silence_closed_loops() -> None:
    """Drops what tensorstore's threads report to an event loop that has been closed.

    They may do so at any time after the first error, so the hook stays.
    """
    before = sys.unraisablehook

    def hook(ignored: 'sys.UnraisableHookArgs') -> None:
        error = ignored.exc_value
        if not isinstance(error, RuntimeError) or 'loop is closed' not in str(error):
            before(ignored)

    sys.unraisablehook = hook
