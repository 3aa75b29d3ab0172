"""Files and folders that appear whole or not at all.

What is written lies beside its place under a name of its own, is put on the disk, and is renamed. A process that is
killed leaves the target as it was, and a temporary file that the next writer of the same target removes.
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
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxpruner.core.caller_warnings import warn
from jaxpruner.core.system_errors import errors_named

if sys.platform == 'win32':
    import msvcrt
else:
    import fcntl

_MARK = 'jaxpruner-tmp'
_TEMPORARY = re.compile(rf'\.(.+)\.[0-9a-f]{{16}}\.{_MARK}(\..*)?', re.DOTALL)

# Locks that this process holds, by their paths without links: some systems do not keep two of its threads apart.
_held: set[str] = set()
_held_guard = threading.Lock()


def replace_file(path: Path, write: Callable[[Path], Any], keeps_ending: bool = False) -> None:
    """Writes a file that appears when it is whole, over one that is there.

    Args:
      path: the file; its folder is made where it is missing.
      write: writes the file at the path that it is given.
      keeps_ending: whether that path ends as the file's own does; readers that look for an ending would then find it.

    Raises:
      OSError: it cannot be written; the error names the file and the remedy.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(Path(folder, 'a.txt'), lambda temporary: temporary.write_text('whole'))
    ...     [file.name for file in Path(folder).iterdir()], Path(folder, 'a.txt').read_text()
    (['a.txt'], 'whole')
    """
    path = Path(path)
    with errors_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, keeps_ending) as temporary:
        write(temporary)


@contextlib.contextmanager
def replacing(path: Path, keeps_ending: bool = False, overwrite: bool = True) -> Iterator[Path]:
    """A context in which a file is written at another path, and after which it has its own.

    A file that is replaced keeps its permissions. Where a link stands, the file that it leads to is replaced.

    Args:
      path: the file; its folder exists.
      keeps_ending: as for `replace_file`.
      overwrite: whether a file that is there is replaced.

    Returns:
      Where to write: an empty file, in the same folder.

    Raises:
      FileExistsError: something stands there; only files are replaced.
      OSError: it cannot be written; the error names the file and the remedy.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, replacing(Path(folder, 'a.txt')) as temporary:
    ...     _ = temporary.write_text('whole')
    """
    ending = path.suffix if keeps_ending else ''
    target = Path(os.path.realpath(path))
    temporary = _temporary_name(target, ending)
    try:
        with errors_named(path, temporary):
            _check_replaceable(path, overwrite)
            before = _permissions(path)
            mode = 0o666 if before is None else before | 0o600  # private from the beginning
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            yield temporary
            sync(temporary)
            _check_replaceable(path, overwrite)
            _copy_permissions(path, temporary)
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A context in which a folder is filled at another path, and after which it has its own.

    Args:
      path: the folder; nothing is there yet, and its parent exists.

    Returns:
      Where to write.

    Raises:
      FileExistsError: something is there.
      OSError: it cannot be written; the error names the folder and the remedy.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with new_folder(Path(folder, 'new')) as temporary:
    ...         _ = Path(temporary, 'a.txt').write_text('whole')
    ...     [file.name for file in Path(folder, 'new').iterdir()]
    ['a.txt']
    """
    temporary = _temporary_name(path)
    try:
        with errors_named(path, temporary):
            _check_free(path)
            temporary.mkdir()
            yield temporary
            for inside in [*temporary.rglob('*'), temporary]:
                sync(inside)
            _check_free(path)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def target_claimed(path: Path) -> Iterator[None]:
    """Keeps other processes from writing to a file or folder meanwhile, and removes what killed ones left of it.

    The lock is a file beside the target, `.NAME.lock`, which is removed afterwards. The system releases the lock of a
    process that ends, however it ends.

    Args:
      path: the file or folder.

    Raises:
      BlockingIOError: another process, or another thread, is writing there.
      OSError: the lock cannot be made; the error names the target.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, target_claimed(Path(folder, 'a.txt')):
    ...     [file.name for file in Path(folder).iterdir()]
    ['.a.txt.lock']
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f'.{target.name}.lock')
    with errors_named(path, lock), locked(lock, path, remove=True):
        remove_strays(target.parent, target.name)
        yield


@contextlib.contextmanager
def locked(lock: Path, target: Path, remove: bool = False) -> Iterator[None]:
    """Holds a lock: a file that says which process holds it, for as long as it does.

    Args:
      lock: the file; made where it is missing.
      target: what is written meanwhile, for errors.
      remove: whether the file goes afterwards; else it stays, and is empty.

    Raises:
      BlockingIOError: another process, or another thread, holds it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder, '.lock'), Path(folder)):
    ...     Path(folder, '.lock').read_text().startswith(f'process {os.getpid()} on ')
    True
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
                    # While it is still held: who waits for it then finds that it is gone, and makes another.
                    with contextlib.suppress(OSError):  # Windows removes no open file
                        lock.unlink(missing_ok=True)
    finally:
        _held.discard(name)


def remove_strays(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes left half written in a folder that nobody else is writing to.

    Args:
      folder: the folder; it may be missing.
      name: of the file or folder that was written; `None` for all.

    >>> remove_strays(Path('no such folder'))
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


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sync(Path(folder))
    """
    if sys.platform == 'win32' and path.is_dir():
        return  # which opens no folders
    descriptor = os.open(path, os.O_RDWR if sys.platform == 'win32' else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if (
            error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir()
        ):  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _acquired(lock: Path, target: Path) -> Iterator[IO[bytes]]:
    while True:
        with lock.open('a+b', buffering=0) as file:
            _lock_file(file, target)
            if _is_still(file, lock):
                try:
                    yield file
                finally:
                    _unlock_descriptor(file.fileno())
                return
            # The process that held it has removed it in the meantime.


def _is_still(file: IO[bytes], lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), lock.stat())
    except FileNotFoundError:
        return False


def _lock_file(file: IO[bytes], target: Path) -> None:
    try:
        _lock_descriptor(file.fileno())
    except (BlockingIOError, PermissionError):
        raise _is_writing(_holder(file), target) from None
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
        with contextlib.suppress(OSError):  # where there are no locks
            fcntl.flock(
                descriptor, fcntl.LOCK_UN
            )  # else it would last as long as a forked process has the file open


def _write_holder(file: IO[bytes], text: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds, too
        file.truncate(0)
        file.write(text.encode())


def _holder(file: IO[bytes]) -> str:
    with contextlib.suppress(OSError, ValueError):
        file.seek(0)
        return file.read().decode().strip() or 'another process'
    return 'another process'


def _is_writing(who: str, target: Path) -> BlockingIOError:
    return BlockingIOError(
        f'{who} is writing to {target}: wait until it has finished, or write elsewhere'
    )


def _temporary_name(path: Path, ending: str = '') -> Path:
    return path.with_name(f'.{path.name}.{secrets.token_hex(8)}.{_MARK}{ending}')


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f'{path} exists; choose another name')


def _check_replaceable(path: Path, overwrite: bool) -> None:
    """Refuses to put a file in the place of a device or a folder, and of a file unless it may be replaced."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f'{path} is a folder; choose another name')
    if not stat.S_ISREG(mode):
        raise FileExistsError(f'{path} is no file but a device or a pipe; name a file')
    if not overwrite:
        raise FileExistsError(f'{path} exists; choose another name, or overwrite it')


def _permissions(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(path.stat().st_mode)
    return None


def _copy_permissions(path: Path, temporary: Path) -> None:
    mode = _permissions(path)
    if mode is not None and mode != _permissions(temporary):  # some file systems have no others
        temporary.chmod(mode)
