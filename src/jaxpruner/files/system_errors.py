"""Errors of the operating system that name the file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def errors_named(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Names the file in errors of the operating system that name none, or `temporary`, another name of it.

    >>> with errors_named(Path('a.txt')):
    ...     raise OSError(28, 'No space left on device')
    Traceback (most recent call last):
      ...
    OSError: [Errno 28] No space left on device: 'a.txt'
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.filename) not in ('None', str(path), str(temporary)):
            raise
        raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error
