"""The folder of a sweep's results: of one recipe, with one process that writes at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxpruner.baselines.recipe import Recipe, read_recipe
from jaxpruner.files import atomic_files
from jaxpruner.files.atomic_files import locked
from jaxpruner.files.system_errors import errors_named

_LOCK, _RECIPE = '.lock', 'recipe.toml'
_WRITTEN_BY_SWEEPS = ('cells', 'metrics', 'masks')


@contextlib.contextmanager
def claimed(out: Path, recipe: Recipe) -> Iterator[None]:
    """Keeps other processes and other recipes from writing to a folder of results.

    The folder is made where it is missing. The file `.lock` in it names the process that writes;
    the system releases the lock when that process ends, however it ends. A `ValueError` names what
    is in the way.
    """
    with contextlib.ExitStack() as stack:
        with errors_named(out):
            out.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(out / _LOCK, out))
            except BlockingIOError as error:
                raise ValueError(f'{error}, to another --out') from None
        for folder in _WRITTEN_BY_SWEEPS:
            atomic_files.remove_strays(out / folder)
        _check_recipe(out, recipe)
        yield


def keep_recipe(out: Path, recipe: Recipe) -> None:
    """Writes the recipe of a claimed folder, in which no cell has begun with another one."""
    if not ((out / _RECIPE).exists() and _has_begun(out)):
        recipe.write(out / _RECIPE)


def _has_begun(out: Path) -> bool:
    """Whether a cell has a result or a checkpoint."""
    return any(out.glob('cells/*.json')) or any(out.glob('checkpoints/*/*'))


def _check_recipe(out: Path, recipe: Recipe) -> None:
    """Refuses a folder in which cells have begun with another recipe."""
    path = out / _RECIPE
    if not (path.exists() and _has_begun(out)):
        return
    existing = read_recipe(path, recipe)
    if existing == recipe:
        return
    lines = recipe.to_toml().splitlines()
    existing_lines = existing.to_toml().splitlines()
    pairs = zip(lines, existing_lines, strict=False)
    different = (pair for pair in pairs if pair[0] != pair[1])
    new_line, old_line = next(different, ('', ''))
    raise ValueError(
        f'{path} is another recipe ({old_line!r} there, {new_line!r} now); its results cannot be '
        'continued: choose another --out, or the same recipe'
    )
