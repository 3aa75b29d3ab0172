"""Locks that one process holds on a file, and that the system releases when the process ends, however it ends."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxpruner.caller_warnings import warn

if sys.platform == 'win32':
    import msvcrt
else:
    import fcntl

# Locks that this process holds, by their paths without links: some systems do not keep two of its threads apart.
_held: set[str] = set()
_held_guard = threading.Lock()


@contextlib.contextmanager
def locked(lock: Path, target: Path, remove: bool = False) -> Iterator[None]:
    """Holds a lock while a target is written: a file, made where it is missing, that says which process holds it.

    Afterwards the file is empty, or removed.

    Raises:
      BlockingIOError: another process, or another thread, holds it; the error names the target.
    """
    name = os.path.realpath(lock)
    with _held_guard:
        if name in _held:
            raise _is_writing('another thread', target)
        _held.add(name)
    try:
        with _acquired(lock, target) as file:
            _write_holder(file, f'process {os.getpid()} on {socket.gethostname()}\n')
            try:
                yield
            finally:
                _write_holder(file, '')
                if remove:
                    # While it is still held: a process that waits then sees that it is gone, and makes another.
                    with contextlib.suppress(OSError):  # Windows removes no open file
                        lock.unlink(missing_ok=True)
    finally:
        _held.discard(name)


@contextlib.contextmanager
def _acquired(lock: Path, target: Path) -> Iterator[IO[bytes]]:
    while True:
        with lock.open('a+b', buffering=0) as file:
            _lock_file(file, target)
            if _is_same_file(file, lock):
                try:
                    yield file
                finally:
                    _unlock_descriptor(file.fileno())
                return
            # The process that held it has removed it in the meantime.


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock_file(file: IO[bytes], target: Path) -> None:
    try:
        _lock_descriptor(file.fileno())
    except (BlockingIOError, PermissionError):
        raise _is_writing(_read_holder(file), target) from None
    except OSError as error:  # some network file systems have no locks
        warn(f'{target} cannot be locked ({error}): see to it that no other process writes there')


if sys.platform == 'win32':

    def _lock_descriptor(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # released by the system, too

    def _unlock_descriptor(descriptor: int) -> None:
        pass  # closing the file does

else:

    def _lock_descriptor(descriptor: int) -> None:
        # Not lockf, whose lock ends when the process closes any other descriptor of the file.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock_descriptor(descriptor: int) -> None:
        # Otherwise the lock would last as long as a forked process has the file open.
        with contextlib.suppress(OSError):  # where there are no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _write_holder(file: IO[bytes], text: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds, too
        file.truncate(0)
        file.write(text.encode())


def _read_holder(file: IO[bytes]) -> str:
    with contextlib.suppress(OSError, ValueError):
        file.seek(0)
        return file.read().decode().strip() or 'another process'
    return 'another process'


def _is_writing(holder: str, target: Path) -> BlockingIOError:
    return BlockingIOError(
        f'{holder} is writing to {target}: wait until it has finished, or write elsewhere'
    )
