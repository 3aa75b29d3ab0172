"""The folder of a sweep's results: it belongs to one recipe, and one process at a time writes to it."""

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jaxpruner.baselines.recipe import Recipe, read_recipe

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LOCK, _RECIPE = '.lock', 'recipe.toml'


@contextlib.contextmanager
def claimed(out: Path, recipe: Recipe) -> Iterator[None]:
    """Keeps other processes from writing to a folder of results, and other recipes.

    The file `.lock` names the process that writes; the system lets go of it when that process ends, however it ends.

    Args:
      out: made where it is missing.
      recipe: written where there is none.

    Raises:
      ValueError: another process writes there, or the folder has results of another recipe.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, claimed(Path(folder), Recipe('resnet')):
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['.lock', 'recipe.toml']
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / _LOCK).open('a+') as lock:
        _acquire(lock, out)
        lock.truncate(0)
        lock.write(f'process {os.getpid()} on {socket.gethostname()}\n')
        lock.flush()
        try:
            _check_recipe(out / _RECIPE, recipe)
            yield
        finally:
            lock.truncate(0)


def _acquire(lock: IO[str], out: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise ValueError(
            f'{lock.read().strip() or "another process"} is writing to {out}: wait until it has finished, or choose '
            'another --out'
        ) from None
    except OSError as error:  # some network file systems have no locks
        warnings.warn(f'{out} cannot be locked ({error}): see to it that no other process writes there', stacklevel=4)


def _check_recipe(path: Path, recipe: Recipe) -> None:
    """Writes the recipe, or compares it with the one that is there."""
    if not path.exists():
        recipe.write(path)
        return
    there = read_recipe(path, recipe)
    if there != recipe:
        ours, theirs = recipe.to_toml().splitlines(), there.to_toml().splitlines()
        differing = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), ('', ''))
        raise ValueError(
            f'{path} is another recipe ({differing[1]!r} there, {differing[0]!r} now); its results cannot be '
            'continued: choose another --out, or the same recipe'
        )
