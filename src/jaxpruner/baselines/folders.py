"""The folder of a sweep's results: it belongs to one recipe, and one process at a time writes to it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxpruner.baselines.recipe import Recipe, read_recipe
from jaxpruner.core import atomic_files
from jaxpruner.core.system_errors import errors_named

_LOCK, _RECIPE = '.lock', 'recipe.toml'
_WRITTEN_BY_SWEEPS = ('cells', 'metrics', 'masks')


@contextlib.contextmanager
def claimed(out: Path, recipe: Recipe) -> Iterator[None]:
    """Keeps other processes from writing to a folder of results, and other recipes.

    The file `.lock` names the process that writes; the system lets go of it when that process ends, however it ends.

    Args:
      out: made where it is missing.
      recipe: written where there is none.

    Raises:
      ValueError: another process writes there, or the folder has results of another recipe.
      OSError: nothing can be written there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, claimed(Path(folder), Recipe('resnet')):
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['.lock', 'recipe.toml']
    """
    with contextlib.ExitStack() as stack:
        with errors_named(out):
            out.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(atomic_files.locked(out / _LOCK, out))
            except BlockingIOError as error:
                raise ValueError(f'{error}, to another --out') from None
        for folder in _WRITTEN_BY_SWEEPS:
            atomic_files.remove_strays(out / folder)
        _check_recipe(out / _RECIPE, recipe)
        yield


def _check_recipe(path: Path, recipe: Recipe) -> None:
    """Writes the recipe, or compares it with the one that is there."""
    if not path.exists():
        recipe.write(path)
        return
    there = read_recipe(path, recipe)
    if there != recipe:
        ours, theirs = recipe.to_toml().splitlines(), there.to_toml().splitlines()
        differing = next(
            (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), ('', '')
        )
        raise ValueError(
            f'{path} is another recipe ({differing[1]!r} there, {differing[0]!r} now); its results cannot be '
            'continued: choose another --out, or the same recipe'
        )
