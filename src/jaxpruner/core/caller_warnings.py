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

_SAID: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar('said', default=None)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns as `warnings.warn` does, at the innermost line that is neither this package's nor a library's.

    Args:
      message: what is wrong, where, and what would be right.
      category: the class of the warning.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter('always')
    ...     warn('w stays dense')
    >>> 'caller_warnings.py' in caught[0].filename, str(caught[0].message)
    (False, 'w stays dense')
    """
    said = _SAID.get()
    if said is not None and message in said:
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
    if said is not None:  # where warnings are errors, each call raises
        said.add(message)


@contextlib.contextmanager
def each_once(said: set[str]) -> Iterator[None]:
    """Inside, what has been said is not said again, as where several checks look at the same leaf.

    Args:
      said: the messages so far; those of this time are added.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter('always')
    ...     with each_once(set()):
    ...         warn('w stays dense')
    ...         warn('w stays dense')
    >>> len(caught)
    1
    """
    token = _SAID.set(said)
    try:
        yield
    finally:
        _SAID.reset(token)


def _caller() -> types.FrameType:
    frame = sys._getframe(2)
    while _is_of_a_library(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_of_a_library(frame: types.FrameType) -> bool:
    # The constructor of a dataclass is generated: it has no line that can be shown.
    is_generated = frame.f_code.co_filename == '<string>' and frame.f_code.co_name == '__init__'
    return is_generated or frame.f_globals.get('__name__', '').partition('.')[0] in _LIBRARIES
