"""Files and folders that appear whole or not at all.

They are written beside their place under a temporary name, put on the disk, and renamed. A process that is killed
leaves the target as it was, and a temporary file that the next writer of the same target removes.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MARK = 'jaxpruner-tmp'
_TEMPORARY = re.compile(rf'\.(.+)\.[0-9a-f]{{16}}\.{_MARK}(\..*)?', re.DOTALL)


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


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Calls `write` with a temporary path, and puts the file that it writes in the place of the one that is there.

    The folder is made where it is missing; the rest is as in `replacing`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        write(temporary)


@contextlib.contextmanager
def replacing(path: Path, overwrite: bool = True, is_folder: bool = False) -> Iterator[Path]:
    """Yields the path of an empty file to write, which afterwards stands in the place of the one that is there.

    The temporary path ends as the file's own does. A file that is replaced keeps its permissions. Where a link stands,
    the file that it leads to is replaced.

    Args:
      path: the file; its folder exists.
      overwrite: whether a file that is there is replaced.
      is_folder: yields an empty folder to fill instead; nothing is replaced by it.

    Raises:
      FileExistsError: something stands there that is not to be replaced, or that is no file.
      OSError: it cannot be written; the error names the file.
    """
    target = Path(os.path.realpath(path))
    name = f'.{target.name}.{secrets.token_hex(8)}.{_MARK}{path.suffix}'
    temporary = target.with_name(name)
    with errors_named(path, temporary):
        check_target(path, overwrite, is_folder)
        is_replaced = target.exists()
        if is_folder:
            temporary.mkdir()
        else:
            # What is private is so from the beginning.
            mode = 0o600 if is_replaced else 0o666
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        try:
            yield temporary
            for file in [temporary, *temporary.rglob('*')]:
                if file.is_file():
                    with file.open('rb+') as written:
                        os.fsync(written.fileno())
            if is_replaced:
                shutil.copymode(target, temporary)
            check_target(path, overwrite, is_folder)  # something may have come meanwhile
            os.replace(temporary, target)
        finally:
            _remove(temporary)


def check_target(path: Path, overwrite: bool, is_folder: bool = False) -> None:
    """Refuses what cannot be written, or must not be replaced, before any work is done."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f'{path}: there is no folder {path.parent}')
    may_be_replaced = overwrite and not is_folder and path.is_file()
    if os.path.lexists(path) and not may_be_replaced:
        raise FileExistsError(
            f'{path} exists; choose another name, or replace a file with overwrite=True (--overwrite)'
        )


@contextlib.contextmanager
def target_claimed(path: Path) -> Iterator[None]:
    """Keeps others from writing to a file or folder meanwhile, and removes what killed processes left of it.

    The lock is a file beside the target, `.NAME.lock`.

    Raises:
      BlockingIOError: another process, or another thread, is writing there.
      OSError: the lock cannot be made; the error names the target.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f'.{target.name}.lock')
    with errors_named(path, lock), locked(lock, path):
        remove_strays(target.parent, target.name)
        yield


@contextlib.contextmanager
def locked(lock: Path, target: Path) -> Iterator[None]:
    """Holds a lock file, made where it is missing, while a target is written.

    The system releases it when the process ends, however it ends. The file goes
    afterwards.

    Raises:
      BlockingIOError: another process, or another thread, holds it; the error names the target.
    """
    import filelock  # an extra needs it

    held = filelock.FileLock(lock, timeout=0)
    while True:
        lock.touch()
        # Whoever held the lock may have removed it. The file that is locked must be the one that others find.
        with contextlib.suppress(FileNotFoundError):
            number = lock.stat().st_ino
            try:
                held.acquire()
            except filelock.Timeout:
                raise BlockingIOError(
                    f'another process is writing to {target}: wait until it has finished, or write elsewhere'
                ) from None
            if lock.stat().st_ino == number:
                break
        held.release()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file
            lock.unlink()
        held.release()


def remove_strays(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes left half written in a folder that nobody else is writing to.

    `name` is the file or folder that they were writing, `None` for all; the folder may be missing.
    """
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _TEMPORARY.fullmatch(entry.name)
        if match is not None and name in (None, match[1]):
            _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
