"""Where an unfinished sweep is: the carries of the cells that are being trained, in one orbax checkpoint.

A checkpoint replaces the one before it only when it is complete; one that cannot be read is set aside.
"""

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxpruner.baselines.feeds import Feed

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
    """The checkpoint of a sweep in a folder of its own; at most one, but for the moment in which the next replaces it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Checkpoints(Path(folder), 'a recipe').latest() is None
    True
    """

    def __init__(self, folder: Path, identity: str):
        """Touches nothing yet.

        Args:
          folder: made when it is needed.
          identity: of the recipe; a checkpoint of another one is set aside.
        """
        self._folder, self._identity = folder.absolute(), identity

    def save(self, progress: Progress, carries: Any, feed: Feed | None = None) -> None:
        """Writes a checkpoint and removes the one before.

        Args:
          progress: what belongs to the carries.
          carries: a pytree of arrays, typed keys among them.
          feed: where batches come from, if not from the program.
        """
        about = {**progress._asdict(), 'identity': self._identity, 'leaves': sorted(progress.snapshots)}
        del about['snapshots']
        arrays = {'carries': _numbered(carries), 'snapshots': _numbered(_in_order(progress.snapshots))}
        older = self._found()
        for killed in self._folder.glob('*tmp*'):  # what a run that was killed had begun to write
            shutil.rmtree(killed)
        path = self._folder / f'{int(older[-1].name) + 1 if older else 0:06d}'
        self._remove_stray_feeds()
        if feed is not None:  # before the checkpoint, whose own folder says that all is there
            _feed_folder(path).mkdir(parents=True)
            feed.save(_feed_folder(path))
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            saved = ocp.args.PyTreeSave({name: tree for name, tree in arrays.items() if tree})
            checkpointer.save(path, ocp.args.Composite(arrays=saved, about=ocp.args.JsonSave(about)))
        for old in older:
            _remove(old)

    def latest(self) -> Progress | None:
        """What the last complete checkpoint says of its cells, without snapshots; `None` where there is none."""
        while found := self._found():
            try:
                about = _restore(found[-1], about=ocp.args.JsonRestore())
                if about['identity'] != self._identity:
                    raise ValueError('it belongs to another recipe')
                cells = [(str(algorithm), float(sparsity), int(seed)) for algorithm, sparsity, seed in about['cells']]
                return Progress(cells, about['step'], about['seconds'], tuple(about['history']))
            except Exception as error:  # whatever orbax raises for damaged files
                self._set_aside(found[-1], error)
        return None

    def restore(self, like: Any, feed: Feed | None = None) -> tuple[Progress, Any] | None:
        """Reads the last complete checkpoint; one that is damaged is set aside.

        Args:
          like: a pytree of the carries' shapes and dtypes.
          feed: a new one, which takes up its position.

        Returns:
          The progress and the carries, `None` where there is nothing (left) to restore.
        """
        progress = self.latest()
        if progress is None:
            return None
        path = self._found()[-1]
        try:
            leaves = _restore(path, about=ocp.args.JsonRestore())['leaves']
            target = {'carries': _numbers(jax.tree.leaves(like))}
            if leaves:
                target['snapshots'] = _numbers(leaves)
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
            arrays = _restore(path, arrays=ocp.args.PyTreeRestore(item=target, restore_args=kinds))
            carries = _unnumbered(arrays['carries'], like)
            if feed is not None:
                feed.restore(_feed_folder(path))
        except Exception as error:  # whatever orbax raises for damaged files
            self._set_aside(path, error)
            return None
        snapshots = dict(zip(leaves, _in_order(arrays.get('snapshots', {})), strict=True))
        return progress._replace(snapshots=snapshots), carries

    def clear(self) -> None:
        """Removes the checkpoint: its cells are finished."""
        for path in self._found():
            _remove(path)
        self._remove_stray_feeds()

    def _found(self) -> list[Path]:
        # Orbax writes under a longer name and renames, so that a name of digits alone is complete.
        paths = self._folder.iterdir() if self._folder.is_dir() else []
        return sorted(path for path in paths if path.name.isdigit())

    def _remove_stray_feeds(self) -> None:
        """Removes what a run left that was killed before the checkpoint was complete, or while it was removed."""
        for path in self._folder.glob(f'*{_FEED}'):
            if path.stem.isdigit() and not path.with_suffix('').exists():
                shutil.rmtree(path)

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_name(path.name + '.corrupt')
        for there, to in ((path, aside), (_feed_folder(path), _feed_folder(aside))):
            if to.exists():
                shutil.rmtree(to)
            if there.exists():
                os.replace(there, to)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f'{path} cannot be resumed from ({reason}); it is now {aside.name}', stacklevel=3)


def _feed_folder(path: Path) -> Path:
    return path.with_name(path.name + _FEED)


def _remove(path: Path) -> None:
    """The feed's folder last: where the checkpoint is, it is whole."""
    shutil.rmtree(path)
    shutil.rmtree(_feed_folder(path), ignore_errors=True)


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
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, ocp.args.Composite(**item))[next(iter(item))]


def _unnumbered(arrays: dict[str, np.ndarray], like: Any) -> Any:
    leaves, treedef = jax.tree.flatten(like)
    restored = []
    for leaf, array in zip(leaves, _in_order(arrays), strict=True):
        plain = jax.eval_shape(_plain, leaf)
        if array.shape != plain.shape or array.dtype != plain.dtype:
            raise ValueError(f'an array is {array.dtype}{array.shape} where {plain.dtype}{plain.shape} belongs')
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        # A copy: carries are donated, and an array that shares NumPy's memory must not be.
        restored.append(jax.random.wrap_key_data(array) if is_key else jnp.array(array, copy=True))
    return jax.tree.unflatten(treedef, restored)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
