"""Warnings that point at the line of the caller's own code, however many libraries stand between it and the check."""

import contextlib
import contextvars
import sys
import types
import warnings
from collections.abc import Iterator

# Libraries that call this one on behalf of someone; nobody can change a line of theirs.
_LIBRARIES = frozenset(
    {'jaxpruner', 'jax', 'jaxlib', 'optax', 'flax', 'equinox', 'haiku', 'functools', 'contextlib'}
)

# The messages that are not given again, where that is asked for.
_GIVEN: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar('given', default=None)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns as `warnings.warn` does, at the innermost line that is neither this package's nor a library's."""
    given = _GIVEN.get()
    if given is not None and message in given:
        return
    frame = _caller()
    code = frame.f_code
    warnings.warn_explicit(
        message,
        category,
        filename=code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get('__name__', code.co_filename),
        registry=frame.f_globals.setdefault('__warningregistry__', {}),
    )
    if given is not None:  # where warnings are errors, each call raises
        given.add(message)


@contextlib.contextmanager
def each_once(given: set[str]) -> Iterator[None]:
    """Gives each message once inside, as where several checks look at the same leaf; `given` collects them."""
    token = _GIVEN.set(given)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def _caller() -> types.FrameType:
    frame = sys._getframe(2)
    while _is_of_a_library(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_of_a_library(frame: types.FrameType) -> bool:
    # The constructor of a dataclass is generated: it has no line that can be shown.
    is_generated = frame.f_code.co_filename == '<string>' and frame.f_code.co_name == '__init__'
    return is_generated or frame.f_globals.get('__name__', '').partition('.')[0] in _LIBRARIES
