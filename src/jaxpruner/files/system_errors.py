"""Errors of the operating system that name the file and say what to do."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_FULL = 'free some there, or name another place'
_FORBIDDEN = 'change its permissions, or name another place'
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: 'name a place where larger files are allowed',
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: 'name another place',
    errno.EEXIST: 'choose another name',
    errno.ENOTDIR: 'a part of this path is a file; name another place',
    errno.ENAMETOOLONG: 'choose a shorter name',
    errno.ELOOP: 'a symbolic link there leads to itself; remove it, or name another place',
}


def with_remedy(error: OSError, name: object = None) -> OSError:
    """Returns the same error with the name of a file, by default its own, and the remedy if one is known."""
    name = error.filename if name is None else name
    if error.errno is None or name is None:
        return error
    reason = error.strerror or os.strerror(error.errno)
    remedy = _REMEDIES.get(error.errno, '')
    if remedy and remedy not in reason:
        reason = f'{reason}; {remedy}'
    return OSError(error.errno, reason, str(name))  # of the class that belongs to the number


@contextlib.contextmanager
def errors_named(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Names the file and the remedy in errors of the operating system; `temporary` is another name of the file.

    >>> with errors_named(Path('a.txt')):
    ...     raise OSError(errno.ENOSPC, 'No space left on device')
    Traceback (most recent call last):
      ...
    OSError: [Errno 28] No space left on device; free some there, or name another place: 'a.txt'
    """
    try:
        yield
    except OSError as error:
        names = ('None', str(path), str(temporary))
        if error.errno is None or str(error.filename) not in names:
            raise
        raise with_remedy(error, path) from error
