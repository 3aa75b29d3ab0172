"""Checkpoints of an unfinished sweep: one of orbax for each group of cells that train together.

A checkpoint replaces the one before it only when it is complete; a damaged one is set aside.
"""

import dataclasses
import hashlib
import shutil
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxpruner.baselines.task import Feed
from jaxpruner.checkpoints.orbax_folder import orbax_errors
from jaxpruner.files.atomic_files import replace_file


class CellKey(NamedTuple):
    """One training of a sweep."""

    algorithm: str
    sparsity: float
    seed: int

    @property
    def name(self) -> str:
        """As its files are called."""
        return f'{self.algorithm}_{self.sparsity}_{self.seed}'


Masks = dict[str, np.ndarray]  # by leaf path
_SHOWN_KERNELS = 2  # whose masks are kept over time


def write_logs(out: Path, name: str, progress: 'Progress', tensorboard: bool = False) -> None:
    """Writes what a cell has come to, of whose progress alone: `masks/<name>.npz`, TensorBoard's events if asked.

    The file has for each leaf uint8[1 + evaluations, …leaf shape], the first before the first step; there is none for
    a dense model.
    """
    if progress.snapshots:
        # In one layout, however cells were chosen: files of equal masks are equal.
        arrays = {path: masks[:, 0].copy() for path, masks in progress.snapshots.items()}
        steps = np.asarray([0, *(entry['step'] for entry in progress.history)], np.int64)

        def write(path: Path) -> None:
            with path.open('wb') as file:  # a name alone would get another ending
                np.savez_compressed(file, allow_pickle=False, steps=steps, **arrays)

        replace_file(out / 'masks' / f'{name}.npz', write)
    if tensorboard:
        from tensorboardX import SummaryWriter

        with SummaryWriter(str(out / 'tensorboard' / name)) as writer:
            for entry in progress.history:
                for key in entry.keys() - {'step'}:
                    writer.add_scalar(key, entry[key][0], entry['step'])


def with_snapshot(snapshots: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> Masks:
    """Adds the masks of this moment: of the first kernel, and of the largest other one.

    `snapshots` maps leaf paths to uint8[moments, cells, …leaf shape] and is empty at first; the
    arrays of `masks` have no axis of moments.
    """
    first, others = list(masks)[:1], list(masks)[1:]
    largest_first = sorted(others, key=lambda path: -masks[path].size)
    shown = (first + largest_first)[:_SHOWN_KERNELS]
    longer = {}
    for path in shown:
        now = masks[path][None]
        longer[path] = np.concatenate([snapshots[path], now]) if snapshots else now
    return longer


_CORRUPT = '.corrupt'  # what the name of a checkpoint ends in that was set aside
_NAMES = ocp.path.step.standard_name_format(step_format_fixed_length=6)


class Progress(NamedTuple):
    """How far cells have been trained, besides their carries; plain values and NumPy arrays."""

    cells: Sequence[CellKey]
    step: int
    seconds: float = 0.0
    history: tuple = ()  # of each evaluation: {'step': …, metric: [a value for each cell]}
    snapshots: Any = MappingProxyType({})  # leaf path -> uint8[1 + evaluations, cells, …leaf shape]

    def advanced(
        self,
        step: int,
        seconds: float,
        metrics: Mapping[str, np.ndarray],
        masks: Mapping[str, np.ndarray],
    ) -> 'Progress':
        """The progress after another chunk: metrics float[cells], masks uint8[cells, …]."""
        entry: dict[str, Any] = {'step': step}
        for name, values in metrics.items():
            entry[name] = np.asarray(values).tolist()
        snapshots = with_snapshot(self.snapshots, masks)
        history = (*self.history, entry)
        return Progress(self.cells, step, seconds, history, snapshots)

    def of_cells(self, positions: Sequence[int]) -> 'Progress':
        """The progress of some of the cells."""
        history = []
        for entry in self.history:
            values = {name: values for name, values in entry.items() if name != 'step'}
            chosen = {name: [each[i] for i in positions] for name, each in values.items()}
            history.append({'step': entry['step'], **chosen})
        share = len(positions) / len(self.cells)
        return Progress(
            cells=[self.cells[position] for position in positions],
            step=self.step,
            seconds=self.seconds * share,
            history=tuple(history),
            snapshots={path: masks[:, positions] for path, masks in self.snapshots.items()},
        )


class Checkpoints:
    """The checkpoints of a sweep: the last one of each group of cells."""

    def __init__(self, folder: Path, identity: str):
        """Touches nothing yet; a checkpoint of a recipe with another identity is set aside."""
        self._folder = folder.absolute()
        self._identity = identity

    def save(self, progress: Progress, carries: Any, feed: Feed | None = None) -> None:
        """Writes a checkpoint and removes the one before of the same cells.

        `carries` is a pytree of arrays with a leading axis of cells, typed keys among them. Where
        the checkpoint cannot be written an `OSError` says so, and the one before stays.
        """
        about = progress._asdict()
        del about['snapshots']
        about |= {'identity': self._identity, 'leaves': sorted(progress.snapshots)}
        leaves = [
            jax.random.key_data(leaf) if _is_key(leaf) else leaf
            for leaf in jax.tree.leaves(carries)
        ]
        arrays = {'carries': _numbered(map(np.asarray, leaves))}
        if progress.snapshots:
            arrays['snapshots'] = _numbered(progress.snapshots[name] for name in about['leaves'])
        items: dict[str, Any] = {}
        if feed is not None:
            items['feed'] = _FeedItem(feed)
        items['arrays'] = ocp.args.PyTreeSave(arrays)
        items['about'] = ocp.args.JsonSave(about)
        group = self._group(progress.cells)
        what = f'{group}: the checkpoint cannot be written'
        remedy = 'free space there, or choose another --out'
        with orbax_errors(what, remedy, OSError), _manager(group) as manager:
            latest = manager.latest_step()
            number = 0 if latest is None else latest + 1
            manager.save(number, args=ocp.args.Composite(**items))

    def begun(self) -> list[Progress]:
        """The progress of each group without its arrays, the furthest first."""
        begun = filter(None, map(self._latest, self._groups()))
        return sorted(begun, key=lambda progress: -progress.step)

    def restore(
        self, begun: Progress, cells: Sequence[CellKey], like: Any, feed: Feed | None = None
    ) -> tuple[Progress, Any] | None:
        """Reads the progress and the carries of some cells; `None` where they are damaged.

        `begun` comes from the method of that name; `like` has the shapes and dtypes of the carries;
        `feed` is new and takes up its position. The checkpoint stays for the other cells.
        """
        path = _latest_path(self._group(begun.cells))
        assert path is not None, 'begun comes before restore'
        positions = [list(begun.cells).index(cell) for cell in cells]
        is_part = len(cells) < len(begun.cells)
        leaves, treedef = jax.tree.flatten(like)
        try:
            names = _read(path, 'about', ocp.args.JsonRestore())['leaves']
            numbered = {'carries': _numbered([0] * len(leaves))}
            if names:
                numbered['snapshots'] = _numbered([0] * len(names))
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), numbered)
            restore = ocp.args.PyTreeRestore(numbered, restore_args=as_numpy)
            arrays = _read(path, 'arrays', restore)
            stored = [arrays['carries'][number] for number in numbered['carries']]
            if is_part:
                stored = [array[positions] for array in stored]
            carries = treedef.unflatten(map(_as_leaf, stored, leaves))
            if feed is not None:
                _read(path, 'feed', _FeedItem(feed))
        except Exception as error:  # whatever orbax raises for damaged files
            _set_aside(path, error)
            return None
        numbers = numbered.get('snapshots', {})
        snapshots = {name: arrays['snapshots'][i] for name, i in zip(names, numbers, strict=True)}
        progress = begun._replace(snapshots=snapshots)
        return (progress.of_cells(positions) if is_part else progress), carries

    def clear(self, finished: Collection[CellKey]) -> None:
        """Removes the checkpoints of groups whose cells are all finished."""
        for group in self._groups():
            progress = self._latest(group)
            if progress is not None and not set(progress.cells) <= set(finished):
                continue
            # Not those that were set aside, nor files that somebody put there. A checkpoint is renamed first: half of
            # one would seem to be damaged.
            for path in list(group.iterdir()):
                if path.is_dir() and _CORRUPT not in path.name:
                    shutil.rmtree(path.rename(path.with_name(f'removed_{path.name}')))
            if not any(group.iterdir()):
                group.rmdir()

    def _groups(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if path.is_dir())

    def _group(self, cells: Sequence[CellKey]) -> Path:
        """The folder of cells that train together."""
        names = ' '.join(cell.name for cell in cells)
        digest = hashlib.sha256(names.encode()).hexdigest()
        return self._folder / f'{cells[0].algorithm}_{digest[:8]}'

    def _latest(self, group: Path) -> Progress | None:
        """The progress of the last readable checkpoint, without arrays; damaged ones are set aside."""
        while (path := _latest_path(group)) is not None:
            try:
                about = _read(path, 'about', ocp.args.JsonRestore())
                if about['identity'] != self._identity:
                    raise ValueError('it belongs to another recipe')
                cells = [
                    CellKey(str(name), float(sparsity), int(seed))
                    for name, sparsity, seed in about['cells']
                ]
                return Progress(cells, about['step'], about['seconds'], tuple(about['history']))
            except Exception as error:  # whatever orbax raises for damaged files
                _set_aside(path, error)
        return None


class _FeedHandler(ocp.AsyncCheckpointHandler):
    """Lets a feed write and read a folder inside of the checkpoint."""

    async def async_save(self, directory: Any, args: '_FeedItem') -> None:
        self.save(directory, args)

    def save(self, directory: Any, args: '_FeedItem') -> None:
        args.feed.save(Path(directory))

    def restore(self, directory: Any, args: '_FeedItem') -> None:
        args.feed.restore(Path(directory))


@ocp.args.register_with_handler(_FeedHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _FeedItem(ocp.args.CheckpointArgs):
    feed: Feed


def _manager(group: Path) -> ocp.CheckpointManager:
    """Keeps one checkpoint, and removes what killed runs had begun to write."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1,
        step_name_format=_NAMES,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager(group, options=options)


def _latest_path(group: Path) -> Path | None:
    """The last checkpoint that was written to its end."""
    steps = [metadata.step for metadata in _NAMES.find_all(group)]
    if not steps:
        return None
    return group / _NAMES.build_name(max(steps))


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
    message = str(error) or type(error).__name__
    reason = message.splitlines()[0]
    warnings.warn(f'{path} cannot be resumed from ({reason}); it is now {aside.name}', stacklevel=3)


def _numbered(leaves: Iterable[Any]) -> dict[str, Any]:
    """Leaves by number, which do not depend on how a library's containers are stored."""
    return {f'{number:05d}': leaf for number, leaf in enumerate(leaves)}


def _as_leaf(array: np.ndarray, like: Any) -> jax.Array:
    """A stored array as a leaf like this one: an array, or a key."""
    is_key = _is_key(like)
    plain = jax.eval_shape(jax.random.key_data, like) if is_key else like
    if array.shape != plain.shape or array.dtype != plain.dtype:
        expected = f'{plain.dtype}{plain.shape}'
        raise ValueError(f'an array is {array.dtype}{array.shape} where {expected} belongs')
    # A copy: carries are donated, and an array that shares NumPy's memory must not be.
    own = jnp.array(array, copy=True)
    return jax.random.wrap_key_data(own) if is_key else own


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
