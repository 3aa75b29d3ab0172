"""Warnings that point at the line of the caller's own code, however many libraries stand between it and the check."""

import sys
import warnings

# Libraries that call this one on behalf of someone; nobody can change a line of theirs.
_LIBRARIES = frozenset(
    {'jaxpruner', 'jax', 'jaxlib', 'optax', 'flax', 'equinox', 'haiku', 'functools', 'contextlib'}
)


def warn(message: str) -> None:
    """Warns as `warnings.warn` does, at the innermost line that is neither this package's nor a library's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None:
        library = frame.f_globals.get('__name__', '').partition('.')[0]
        # The constructor of a dataclass is generated: it has no line that can be shown.
        if library not in _LIBRARIES and frame.f_code.co_filename != '<string>':
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
