"""Files and folders that appear whole or not at all.

They are written beside their place under a temporary name, put on the disk, and renamed. A process that is killed
leaves the target as it was, and a temporary file that the next writer of the same target removes.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpruner.files.system_errors import errors_named

_MARK = 'jaxpruner-tmp'
_TEMPORARY = re.compile(rf'\.(.+)\.[0-9a-f]{{16}}\.{_MARK}(\..*)?', re.DOTALL)


def replace_file(path: Path, write: Callable[[Path], Any], keeps_ending: bool = False) -> None:
    """Calls `write` with a temporary path, and puts the file that it writes in the place of the one that is there.

    The folder is made where it is missing; the rest is as in `replacing`.
    """
    path = Path(path)
    with errors_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, keeps_ending) as temporary:
        write(temporary)


@contextlib.contextmanager
def replacing(
    path: Path, keeps_ending: bool = False, overwrite: bool = True, is_folder: bool = False
) -> Iterator[Path]:
    """Yields the path of an empty file to write, which afterwards stands in the place of the one that is there.

    A file that is replaced keeps its permissions. Where a link stands, the file that it leads to is replaced.

    Args:
      path: the file; its folder exists.
      keeps_ending: whether the temporary path ends as the file's own does; readers that look for an ending would then
        find it.
      overwrite: whether a file that is there is replaced.
      is_folder: yields an empty folder to fill instead; nothing is replaced by it.

    Raises:
      FileExistsError: something stands there that is not to be replaced, or that is no file.
      OSError: it cannot be written; the error names the file and the remedy.
    """
    target = Path(os.path.realpath(path))
    ending = path.suffix if keeps_ending else ''
    temporary = target.with_name(f'.{target.name}.{secrets.token_hex(8)}.{_MARK}{ending}')
    with errors_named(path, temporary):
        check_target(path, overwrite, is_folder)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        if is_folder:
            temporary.mkdir()
        else:
            # What is private is so from the beginning.
            first_mode = 0o666 if mode is None else mode | 0o600
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, first_mode))
        try:
            yield temporary
            for written in [*temporary.rglob('*'), temporary]:
                _sync(written)
            if mode is not None and mode != stat.S_IMODE(temporary.stat().st_mode):
                temporary.chmod(mode)  # which fails on file systems that have no others
            check_target(path, overwrite, is_folder)  # something may have come meanwhile
            os.replace(temporary, target)
            _sync(target.parent)
        finally:
            _remove(temporary)


def check_target(path: Path, overwrite: bool, is_folder: bool = False) -> None:
    """Refuses what cannot be written, or must not be replaced, before any work is done."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f'{path}: there is no folder {path.parent}')
    is_folder = is_folder or path.is_dir()
    if os.path.lexists(path) and (is_folder or not overwrite):
        hint = 'choose another name' if is_folder else 'choose another name, or overwrite it'
        raise FileExistsError(f'{path} exists; {hint}')
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileExistsError(f'{path} is no file but a device or a pipe; name a file')


@contextlib.contextmanager
def target_claimed(path: Path) -> Iterator[None]:
    """Keeps others from writing to a file or folder meanwhile, and removes what killed processes left of it.

    The lock is a file beside the target, `.NAME.lock`, which is removed afterwards.

    Raises:
      BlockingIOError: another process, or another thread, is writing there.
      OSError: the lock cannot be made; the error names the target.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f'.{target.name}.lock')
    with errors_named(path, lock), locked(lock, path, removes=True):
        remove_strays(target.parent, target.name)
        yield


@contextlib.contextmanager
def locked(lock: Path, target: Path, removes: bool = False) -> Iterator[None]:
    """Holds a lock file, made where it is missing, while a target is written.

    The system releases it when the process ends, however it ends. `removes` says that the file goes afterwards.

    Raises:
      BlockingIOError: another process, or another thread, holds it; the error names the target.
    """
    import filelock  # an extra needs it

    held = filelock.FileLock(lock, timeout=0)
    is_held = False
    while not is_held:
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
            is_held = lock.stat().st_ino == number
        if not is_held:
            held.release()
    try:
        yield
    finally:
        if removes:
            with contextlib.suppress(OSError):  # Windows removes no open file
                lock.unlink(missing_ok=True)
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


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    is_windows = sys.platform == 'win32'
    if is_windows and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems sync no folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
