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
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpruner.caller_warnings import warn
from jaxpruner.files.system_errors import errors_named

if sys.platform == 'win32':
    import msvcrt
else:
    import fcntl

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
def replacing(path: Path, keeps_ending: bool = False, overwrite: bool = True) -> Iterator[Path]:
    """Yields the path of an empty file to write, which afterwards stands in the place of the one that is there.

    A file that is replaced keeps its permissions. Where a link stands, the file that it leads to is replaced.

    Args:
      path: the file; its folder exists.
      keeps_ending: whether the temporary path ends as the file's own does; readers that look for an ending would then
        find it.
      overwrite: whether a file that is there is replaced.

    Raises:
      FileExistsError: something stands there that is not to be replaced, or that is no file.
      OSError: it cannot be written; the error names the file and the remedy.
    """
    target = Path(os.path.realpath(path))
    temporary = _temporary_name(target, path.suffix if keeps_ending else '')
    try:
        with errors_named(path, temporary):
            permissions = _replaceable_permissions(path, overwrite)
            # What is private is so from the beginning.
            mode = 0o666 if permissions is None else permissions | 0o600
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            yield temporary
            _sync(temporary)
            permissions = _replaceable_permissions(path, overwrite)
            if permissions is not None and permissions != stat.S_IMODE(temporary.stat().st_mode):
                temporary.chmod(permissions)  # which fails on file systems that have no others
            os.replace(temporary, target)
            _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields the path of an empty folder to fill, which afterwards has its own; nothing is there yet.

    Raises:
      FileExistsError: something is there.
      OSError: it cannot be written; the error names the folder and the remedy.
    """
    temporary = _temporary_name(path)
    try:
        with errors_named(path, temporary):
            check_target(path, overwrite=False, is_folder=True)
            temporary.mkdir()
            yield temporary
            for inside in [*temporary.rglob('*'), temporary]:
                _sync(inside)
            check_target(path, overwrite=False, is_folder=True)
            os.replace(temporary, path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(path: Path, overwrite: bool, is_folder: bool = False) -> None:
    """Refuses what cannot be written, or must not be replaced, before any work is done."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f'{path}: there is no folder {path.parent}')
    is_folder = is_folder or path.is_dir()
    if os.path.lexists(path) and (is_folder or not overwrite):
        hint = 'choose another name' if is_folder else 'choose another name, or overwrite it'
        raise FileExistsError(f'{path} exists; {hint}')


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
    with errors_named(path, lock), locked(lock, path):
        remove_strays(target.parent, target.name)
        try:
            yield
        finally:
            # While it is still held: whoever waits for it then sees that it is gone, and makes another.
            with contextlib.suppress(OSError):  # Windows removes no open file
                lock.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(lock: Path, target: Path) -> Iterator[None]:
    """Holds a lock file, made where it is missing, while a target is written; in it stands which process holds it.

    The system releases it when the process ends, however it ends.

    Raises:
      BlockingIOError: another process, or another thread, holds it; the error names the target.
    """
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(lock.open('a+b', buffering=0))
            try:
                if sys.platform == 'win32':
                    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                else:
                    # Not lockf, whose lock ends when the process closes any other descriptor of the file.
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Otherwise the lock would last as long as a forked process has the file open.
                    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            except (BlockingIOError, PermissionError):
                holder = ''
                with contextlib.suppress(OSError):  # Windows reads no locked file
                    file.seek(0)
                    holder = file.read().decode(errors='replace').strip()
                raise BlockingIOError(
                    f'{holder or "another process"} is writing to {target}: wait until it has finished, or write '
                    'elsewhere'
                ) from None
            except OSError as error:  # some network file systems have no locks
                warn(
                    f'{target} cannot be locked ({error}): see to it that no other process writes there'
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                    break  # else the process that held it has removed it in the meantime
        with contextlib.suppress(OSError):  # on a full disk the lock holds, too
            file.truncate(0)
            file.write(f'process {os.getpid()} on {socket.gethostname()}\n'.encode())
        yield


def remove_strays(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes left half written in a folder that nobody else is writing to.

    `name` is the file or folder that they were writing, `None` for all; the folder may be missing.
    """
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or name not in (None, match[1]):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _temporary_name(path: Path, ending: str = '') -> Path:
    return path.with_name(f'.{path.name}.{secrets.token_hex(8)}.{_MARK}{ending}')


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


def _replaceable_permissions(path: Path, overwrite: bool) -> int | None:
    """Returns the permissions of the file that is replaced, `None` if there is none, and refuses all but files."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f'{path} is a folder; choose another name')
    if not stat.S_ISREG(mode):
        raise FileExistsError(f'{path} is no file but a device or a pipe; name a file')
    if not overwrite:
        raise FileExistsError(f'{path} exists; choose another name, or overwrite it')
    return stat.S_IMODE(mode)
