"""Where an unfinished sweep is: an orbax checkpoint for each group of cells that are trained together.

A checkpoint replaces the one before it only when it is complete; one that cannot be read is set aside.
"""

import hashlib
import os
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxpruner.baselines.feeds import Feed
from jaxpruner.checkpoints.orbax_errors import orbax_errors

_FEED = '.feed'  # what the name of a feed's folder has behind the checkpoint's


class Progress(NamedTuple):
    """What is known of the cells that are being trained, besides their carries; plain values and NumPy arrays.

    >>> Progress([('magnitude', 0.8, 0)], step=0).seconds
    0.0
    """

    cells: Sequence[tuple[str, float, int]]  # algorithm, sparsity, seed
    step: int
    seconds: float = 0.0
    history: tuple = ()  # of each evaluation so far: {'step': …, name: [one for each cell]}
    snapshots: Any = MappingProxyType({})  # leaf path -> uint8[1 + evaluations, cells, …leaf shape]


class Checkpoints:
    """The checkpoints of a sweep: one for each group of cells, but for the moment in which the next replaces it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Checkpoints(Path(folder), 'a recipe').begun()
    []
    """

    def __init__(self, folder: Path, identity: str):
        """Touches nothing yet.

        Args:
          folder: made when it is needed; each group has its own in it.
          identity: of the recipe; a checkpoint of another one is set aside.
        """
        self._folder, self._identity = folder.absolute(), identity

    def save(self, progress: Progress, carries: Any, feed: Feed | None = None) -> None:
        """Writes a checkpoint and removes the one before of the same cells.

        Args:
          progress: what belongs to the carries.
          carries: a pytree of arrays with a leading axis of cells, typed keys among them.
          feed: where batches come from, if not from the program.

        Raises:
          OSError: it cannot be written; the one before stays.
        """
        about = {
            **progress._asdict(),
            'identity': self._identity,
            'leaves': sorted(progress.snapshots),
        }
        del about['snapshots']
        arrays = {
            'carries': _numbered(carries),
            'snapshots': _numbered(_in_order(progress.snapshots)),
        }
        group = self._group(progress.cells)
        older = _complete(group)
        for killed in group.glob(
            '*tmp*'
        ):  # what a run that was killed had begun to write or to remove
            shutil.rmtree(killed)
        path = group / f'{int(older[-1].name) + 1 if older else 0:06d}'
        _remove_stray_feeds(group)
        if feed is not None:  # before the checkpoint, whose own folder says that all is there
            _feed_folder(path).mkdir(parents=True)
            feed.save(_feed_folder(path))
        saved = ocp.args.PyTreeSave({name: tree for name, tree in arrays.items() if tree})
        with (
            orbax_errors(
                f'{path}: the checkpoint cannot be written',
                'free space there, or choose another --out',
                OSError,
            ),
            ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer,
        ):
            checkpointer.save(
                path, ocp.args.Composite(arrays=saved, about=ocp.args.JsonSave(about))
            )
        for old in older:
            _remove(old)

    def begun(self) -> list[Progress]:
        """What the last complete checkpoint of each group says, without arrays, the furthest first.

        A checkpoint that is damaged is set aside.
        """
        found = [
            progress for group in self._groups() if (progress := self._latest(group)) is not None
        ]
        return sorted(found, key=lambda progress: -progress.step)

    def restore(
        self,
        begun: Progress,
        cells: Sequence[tuple[str, float, int]],
        like: Any,
        feed: Feed | None = None,
    ) -> tuple[Progress, Any] | None:
        """Reads the last complete checkpoint of a group; one that is damaged is set aside.

        Args:
          begun: from `begun`.
          cells: those of the group that are to go on; its checkpoint stays as it is for the others.
          like: a pytree of the shapes and dtypes of their carries.
          feed: a new one, which takes up its position.

        Returns:
          The progress and the carries, `None` where they could not be read.
        """
        path = _complete(self._group(begun.cells))[-1]
        places = [list(begun.cells).index(cell) for cell in cells]
        chosen = None if len(places) == len(begun.cells) else np.asarray(places)
        try:
            leaves = _restore(path, about=ocp.args.JsonRestore())['leaves']
            target = {'carries': _numbers(jax.tree.leaves(like))}
            if leaves:
                target['snapshots'] = _numbers(leaves)
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
            arrays = _restore(path, arrays=ocp.args.PyTreeRestore(item=target, restore_args=kinds))
            carries = _unnumbered(arrays['carries'], like, chosen)
            if feed is not None:
                feed.restore(_feed_folder(path))
        except Exception as error:  # whatever orbax raises for damaged files
            _set_aside(path, error)
            return None
        snapshots = dict(zip(leaves, _in_order(arrays.get('snapshots', {})), strict=True))
        return _of_cells(begun._replace(snapshots=snapshots), chosen), carries

    def clear(self, finished: Collection[tuple[str, float, int]]) -> None:
        """Removes the checkpoints that are needed no longer.

        Args:
          finished: cells with a result.
        """
        for group in self._groups():
            progress = self._latest(group)
            if progress is None or set(progress.cells) <= set(finished):
                for path in _complete(group):
                    _remove(path)
                for killed in group.glob('*tmp*'):
                    shutil.rmtree(killed)
                _remove_stray_feeds(group)
                if not any(group.iterdir()):  # what was set aside stays
                    group.rmdir()

    def _groups(self) -> list[Path]:
        return (
            sorted(path for path in self._folder.iterdir() if path.is_dir())
            if self._folder.is_dir()
            else []
        )

    def _group(self, cells: Sequence[tuple[str, float, int]]) -> Path:
        named = ' '.join(f'{algorithm}_{sparsity}_{seed}' for algorithm, sparsity, seed in cells)
        return self._folder / f'{cells[0][0]}_{hashlib.sha256(named.encode()).hexdigest()[:8]}'

    def _latest(self, group: Path) -> Progress | None:
        while found := _complete(group):
            try:
                about = _restore(found[-1], about=ocp.args.JsonRestore())
                if about['identity'] != self._identity:
                    raise ValueError('it belongs to another recipe')
                cells = [
                    (str(algorithm), float(sparsity), int(seed))
                    for algorithm, sparsity, seed in about['cells']
                ]
                return Progress(cells, about['step'], about['seconds'], tuple(about['history']))
            except Exception as error:  # whatever orbax raises for damaged files
                _set_aside(found[-1], error)
        return None


def _of_cells(progress: Progress, places: np.ndarray | None) -> Progress:
    """Some of the cells of a group; `None` for all."""
    if places is None:
        return progress
    return Progress(
        [progress.cells[place] for place in places],
        progress.step,
        progress.seconds * len(places) / len(progress.cells),
        tuple(
            {
                name: value if name == 'step' else [value[place] for place in places]
                for name, value in entry.items()
            }
            for entry in progress.history
        ),
        {path: masks[:, places] for path, masks in progress.snapshots.items()},
    )


def _complete(group: Path) -> list[Path]:
    # Orbax writes under a longer name and renames, so that a name of digits alone is complete.
    paths = group.iterdir() if group.is_dir() else []
    return sorted(path for path in paths if path.name.isdigit())


def _feed_folder(path: Path) -> Path:
    return path.with_name(path.name + _FEED)


def _remove(path: Path) -> None:
    """Renames first: half a checkpoint would be taken for a damaged one. The feed's folder goes last."""
    going = path.with_name(f'{path.name}.tmp')
    os.replace(path, going)
    shutil.rmtree(going)
    shutil.rmtree(_feed_folder(path), ignore_errors=True)


def _remove_stray_feeds(group: Path) -> None:
    """Removes what a run left that was killed before the checkpoint was complete, or while it was removed."""
    for path in group.glob(f'*{_FEED}'):
        if path.stem.isdigit() and not path.with_suffix('').exists():
            shutil.rmtree(path)


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_name(path.name + '.corrupt')
    for there, to in ((path, aside), (_feed_folder(path), _feed_folder(aside))):
        if to.exists():
            shutil.rmtree(to)
        if there.exists():
            os.replace(there, to)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    warnings.warn(f'{path} cannot be resumed from ({reason}); it is now {aside.name}', stacklevel=3)


def _in_order(table: dict[str, Any]) -> list[Any]:
    return [table[key] for key in sorted(table)]


def _numbered(tree: Any) -> dict[str, np.ndarray]:
    """The leaves by number: independent of how a library's containers are stored. Keys become their data."""
    leaves = jax.tree.leaves(tree)
    return {f'{number:05d}': np.asarray(_plain(leaf)) for number, leaf in enumerate(leaves)}


def _numbers(leaves: Sequence[Any]) -> dict[str, int]:
    return {f'{number:05d}': 0 for number in range(len(leaves))}


def _restore(path: Path, **item: Any) -> Any:
    """One item of a checkpoint."""
    with (
        orbax_errors('orbax cannot read it', 'its cells begin anew'),
        ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer,
    ):
        return checkpointer.restore(path, ocp.args.Composite(**item))[next(iter(item))]


def _unnumbered(arrays: dict[str, np.ndarray], like: Any, chosen: np.ndarray | None) -> Any:
    """The arrays as the leaves of a tree; `chosen` are places along the axis of cells, `None` for all."""
    leaves, treedef = jax.tree.flatten(like)
    restored = []
    for leaf, stored in zip(leaves, _in_order(arrays), strict=True):
        array, plain = stored if chosen is None else stored[chosen], jax.eval_shape(_plain, leaf)
        if array.shape != plain.shape or array.dtype != plain.dtype:
            raise ValueError(
                f'an array is {array.dtype}{array.shape} where {plain.dtype}{plain.shape} belongs'
            )
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        # A copy: carries are donated, and an array that shares NumPy's memory must not be.
        restored.append(jax.random.wrap_key_data(array) if is_key else jnp.array(array, copy=True))
    return jax.tree.unflatten(treedef, restored)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
