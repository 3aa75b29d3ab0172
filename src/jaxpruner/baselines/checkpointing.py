"""Checkpoints of an unfinished sweep: one of orbax for each group of cells that train together.

A checkpoint replaces the one before it only when it is complete; a damaged one is set aside.
"""

import hashlib
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxpruner.baselines.task import Feed
from jaxpruner.checkpoints.orbax_folder import orbax_errors

_CORRUPT = '.corrupt'  # what the name of a checkpoint ends in that was set aside
_NAMES = ocp.path.step.standard_name_format(step_format_fixed_length=6)


class CellKey(NamedTuple):
    """One training of a sweep."""

    algorithm: str
    sparsity: float
    seed: int

    @property
    def name(self) -> str:
        """As its files are called."""
        return f'{self.algorithm}_{self.sparsity}_{self.seed}'


class Progress(NamedTuple):
    """How far cells have been trained, besides their carries; plain values and NumPy arrays."""

    cells: Sequence[CellKey]
    step: int
    seconds: float = 0.0
    # Leaf path -> the masks that are kept over time, uint8[1 + evaluations, cells, …leaf shape].
    snapshots: Mapping[str, np.ndarray] = MappingProxyType({})


class Checkpoints:
    """The checkpoints of a sweep: the last one of each group of cells."""

    def __init__(self, folder: Path):
        """Touches nothing yet."""
        self._folder = folder.absolute()

    def save(self, progress: Progress, carries: Any, feed: Feed | None = None) -> None:
        """Writes a checkpoint and removes the one before of the same cells.

        `carries` is a pytree of arrays, typed keys among them. Where the checkpoint cannot be written an `OSError`
        says so, and the one before stays.
        """
        arrays = {
            'carries': [np.asarray(_plain(leaf)) for leaf in jax.tree.leaves(carries)],
            'snapshots': list(progress.snapshots.values()),
            'feed': {} if feed is None else feed.state(),
        }
        about = {**progress._asdict(), 'snapshots': list(progress.snapshots)}
        items: Any = ocp.args.Composite(
            arrays=ocp.args.PyTreeSave({name: tree for name, tree in arrays.items() if tree}),
            about=ocp.args.JsonSave(about),
        )
        group = self._group(progress.cells)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1,
            step_name_format=_NAMES,
            cleanup_tmp_directories=True,  # what killed runs had begun to write
            enable_async_checkpointing=False,
        )
        what = f'{group}: the checkpoint cannot be written'
        failing = orbax_errors(what, 'free space there, or choose another --out', OSError)
        with failing, ocp.CheckpointManager(group, options=options) as manager:
            latest = manager.latest_step()
            manager.save(0 if latest is None else latest + 1, args=items)

    def begun(self) -> list[Progress]:
        """The progress of each group without its arrays, the furthest first; damaged checkpoints are set aside."""
        found = [self._read_progress(group) for group in self._groups()]
        return sorted(filter(None, found), key=lambda progress: -progress.step)

    def restore(
        self, begun: Progress, like: Any, feed: Feed | None = None
    ) -> tuple[Progress, Any] | None:
        """Reads the progress and the carries of a group; `None` where they are damaged.

        `begun` comes from the method of that name; `like` has the shapes and dtypes of the carries; `feed` is new and
        takes up its position.
        """
        path = _latest_path(self._group(begun.cells))
        assert path is not None, 'begun comes before restore'
        try:
            about = _read(path, 'about', ocp.args.JsonRestore())
            arrays = _read(path, 'arrays', ocp.args.PyTreeRestore())
            leaves, treedef = jax.tree.flatten(like)
            stored = [_as_leaf(*pair) for pair in zip(arrays['carries'], leaves, strict=True)]
            if feed is not None:
                feed.set_state(arrays['feed'])
        except Exception as error:  # whatever orbax raises for damaged files
            _set_aside(path, error)
            return None
        snapshots = dict(zip(about['snapshots'], arrays.get('snapshots', ()), strict=True))
        return begun._replace(snapshots=snapshots), treedef.unflatten(stored)

    def clear(self, finished: Collection[CellKey]) -> None:
        """Removes the checkpoints of groups whose cells are all finished."""
        for group in self._groups():
            progress = self._read_progress(group)
            if progress is not None and not set(progress.cells) <= set(finished):
                continue
            for path in list(group.iterdir()):
                # Not those that were set aside, nor files that somebody put there.
                if path.is_dir() and _CORRUPT not in path.name:
                    shutil.rmtree(path)
            if not any(group.iterdir()):
                group.rmdir()

    def _group(self, cells: Sequence[CellKey]) -> Path:
        """The folder of cells that train together."""
        names = ' '.join(cell.name for cell in cells)
        digest = hashlib.sha256(names.encode()).hexdigest()
        return self._folder / f'{cells[0].algorithm}_{digest[:8]}'

    def _groups(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if path.is_dir())

    def _read_progress(self, group: Path) -> Progress | None:
        """The progress of the last checkpoint, without arrays; `None` where there is none, or a damaged one."""
        if (path := _latest_path(group)) is None:
            return None
        try:
            about = _read(path, 'about', ocp.args.JsonRestore())
            cells = [CellKey(*cell) for cell in about['cells']]
            return Progress(cells, about['step'], about['seconds'])
        except Exception as error:  # whatever orbax raises for damaged files
            _set_aside(path, error)
            return None


def _latest_path(group: Path) -> Path | None:
    """The last checkpoint that was written to its end."""
    steps = [metadata.step for metadata in _NAMES.find_all(group)]
    return group / _NAMES.build_name(max(steps)) if steps else None


def _read(path: Path, name: str, restore: Any) -> Any:
    """Reads one item of a checkpoint."""
    items = ocp.args.Composite(**{name: restore})
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    with orbax_errors('orbax cannot read it', 'its cells begin anew'), checkpointer:
        return checkpointer.restore(path, items)[name]


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_name(path.name + _CORRUPT)
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    reason = (str(error) or type(error).__name__).splitlines()[0]
    warnings.warn(f'{path} cannot be resumed from ({reason}); it is now {aside.name}', stacklevel=3)


def _plain(leaf: Any) -> Any:
    """An array as it is, a typed key as its numbers."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_leaf(array: Any, like: Any) -> jax.Array:
    """A stored array as a leaf like this one: an array, or a key."""
    # A copy: carries are donated, and an array that shares NumPy's memory must not be.
    own = jnp.array(array, copy=True)
    return jax.random.wrap_key_data(own) if _is_key(like) else own


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
