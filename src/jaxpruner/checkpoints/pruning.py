"""Prunes a checkpoint into another, leaf by leaf and in parts, so that memory stays low whatever the size of either."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxpruner.caller_warnings import warn
from jaxpruner.checkpoints import leaf_masks
from jaxpruner.checkpoints.base import Checkpoint, Leaf
from jaxpruner.checkpoints.optimizer_state import find_optimizer_state
from jaxpruner.checkpoints.parts import PART_SIZE, Part, parts_of
from jaxpruner.checkpoints.plan import Choice
from jaxpruner.checkpoints.safetensors_reader import SafetensorsFile, ShardedSafetensors
from jaxpruner.checkpoints.safetensors_writer import SafetensorsWriter
from jaxpruner.files import atomic_files

_NAMED = 4  # tensors that a warning names


class Kept(NamedTuple):
    """How much of a leaf has been kept.

    >>> Kept('w', 8, 2).sparsity
    0.75
    """

    name: str
    size: int
    kept: int  # weights that the mask keeps
    nans: int = 0  # weights that were NaN, which ranks lowest
    # Tensors of the optimizer's state that are not zero where weights were removed.
    stale: tuple[str, ...] = ()

    @property
    def sparsity(self) -> float:
        """The share removed."""
        return 1 - self.kept / self.size if self.size else 0.0


def prune(
    checkpoint: Checkpoint,
    out: Path,
    choices: Mapping[str, Choice],
    scores: Literal['magnitude', 'random'] = 'magnitude',
    seed: int = 8,
    masks_out: Path | None = None,
    overwrite: bool = False,
    on_leaf: Callable[[str, Leaf], None] = lambda name, leaf: None,
    part_size: int = PART_SIZE,
) -> list[Kept]:
    """Writes a checkpoint with zeros where weights are removed; other tensors, dtypes and metadata stay as they are.

    Args:
      checkpoint: what to prune. Shards become a folder of shards, all else a file.
      out: where to write; it appears when it is whole.
      choices: what happens to each leaf that is pruned, from `choose`.
      scores: `'magnitude'` or `'random'`.
      seed: of random scores.
      masks_out: a safetensors file for the masks, uint8 in the shapes of the leaves, 1 = kept.
      overwrite: replaces files that are there; a folder is never replaced.
      on_leaf: called with each tensor before it is read.
      part_size: weights held at a time; a leaf of a sparsity type of your own is held whole.

    Returns:
      What was kept of each pruned leaf. Warnings say that nothing was removed, and name the leaves that hold NaN, and
      the moments of an optimizer that are not zero where weights were removed.

    Raises:
      ValueError: the scores are unknown, or `masks_out` is `out`.
      FileExistsError: something stands where to write.
      FileNotFoundError: its folder does not exist.
      BlockingIOError: another process is writing there.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import choose, open_checkpoint, write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.array([[-3.0, 1.0]])})
    ...     dense = open_checkpoint(folder)
    ...     kept = prune(dense, Path(folder) / 'b.safetensors', choose(dense.leaves, 0.5))
    ...     open_checkpoint(Path(folder) / 'b.safetensors').read('w'), kept
    (array([[-3.,  0.]]), [Kept(name='w', size=2, kept=1, nans=0, stale=())])
    """
    if scores not in ('magnitude', 'random'):
        raise ValueError(
            f"scores: {scores!r} is unknown; use 'magnitude' or 'random'; what looks at inputs or a loss needs the "
            "model: jaxpruner.prune(params, 0.5, 'wanda', apply_fn=…, batches=…)"
        )
    leaf_masks.random_scores('', seed)  # a wrong seed is refused before anything is written
    out = Path(out)
    masks_out = None if masks_out is None else Path(masks_out)
    _check_targets(out, masks_out, overwrite, isinstance(checkpoint, ShardedSafetensors))
    with _mask_writer(masks_out, checkpoint, choices, overwrite) as masks:
        pruning = _Pruning(
            checkpoint=checkpoint,
            choices=choices,
            random_seed=seed if scores == 'random' else None,
            masks=masks,
            overwrite=overwrite,
            on_leaf=on_leaf,
            part_size=part_size,
        )
        kept = pruning.run(out)
    _warn_if_nothing_is_removed(kept)
    _warn_of_nans(kept)
    _warn_of_stale_moments(kept)
    return kept


@contextlib.contextmanager
def _mask_writer(
    path: Path | None, checkpoint: Checkpoint, choices: Mapping[str, Choice], overwrite: bool
) -> Iterator[SafetensorsWriter | None]:
    if path is None:
        yield None
        return
    masks = {name: Leaf(checkpoint.leaves[name].shape, np.dtype('uint8')) for name in choices}
    with SafetensorsWriter(path, masks, overwrite=overwrite) as writer:
        yield writer


@dataclasses.dataclass(frozen=True)
class _Pruning:
    """What is pruned and how: the same for all files of a checkpoint."""

    checkpoint: Checkpoint  # all files of it
    choices: Mapping[str, Choice]
    random_seed: int | None  # None for magnitudes
    masks: SafetensorsWriter | None
    overwrite: bool
    on_leaf: Callable[[str, Leaf], None]
    part_size: int

    def run(self, out: Path) -> list[Kept]:
        moments = _moments_by_weights(self.checkpoint)
        if not isinstance(self.checkpoint, ShardedSafetensors):
            return self._prune_file(self.checkpoint, out, moments)
        kept: list[Kept] = []
        with atomic_files.target_claimed(out), atomic_files.new_folder(out) as folder:
            for name, shard in self.checkpoint.files.items():
                kept += self._prune_file(shard, folder / name, moments)
            index = self.checkpoint.index
            (folder / index.name).write_bytes(index.read_bytes())
        return kept

    def _prune_file(
        self, file: Checkpoint, out: Path, moments: Mapping[str, list[str]]
    ) -> list[Kept]:
        kept: list[Kept] = []
        keys = list(file.header.leaves) if isinstance(file, SafetensorsFile) else None
        with SafetensorsWriter(out, file.leaves, file.metadata, keys, self.overwrite) as writer:
            for name, leaf in file.leaves.items():
                self.on_leaf(name, leaf)
                if name in self.choices:
                    kept.append(self._prune_leaf(file, name, writer, moments.get(name, [])))
                    continue
                for part in parts_of(leaf.shape, size=self.part_size):
                    writer.write(name, file.read(name, part))
        return kept

    def _prune_leaf(
        self, file: Checkpoint, name: str, writer: SafetensorsWriter, moments: list[str]
    ) -> Kept:
        choice = self.choices[name]
        score = leaf_masks.magnitude
        if self.random_seed is not None:
            score = leaf_masks.random_scores(name, self.random_seed)
        removed = _RemovedWeights()
        kept = nans = 0
        for part in leaf_masks.prune_leaf(
            file, name, choice.kind, choice.sparsity, score, self.part_size
        ):
            writer.write(name, part.weights)
            if self.masks is not None:
                self.masks.write(name, part.mask)
            if moments:
                removed.add(part.mask)
            nans += part.nans
            kept += int(np.count_nonzero(part.mask))
        stale = [moment for moment in moments if removed.has_nonzero(self.checkpoint, moment)]
        return Kept(name, file.leaves[name].size, kept, nans, tuple(stale))


def _moments_by_weights(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Maps tensors of weights to those of the optimizer's state that belong to them."""
    moments: dict[str, list[str]] = {}
    for name, tensor in find_optimizer_state(checkpoint.leaves).items():
        if tensor.weights is not None:
            moments.setdefault(tensor.weights, []).append(name)
    return moments


class _RemovedWeights:
    """Which weights of a leaf were removed, as one bit each."""

    def __init__(self):
        self._parts: list[tuple[Part, np.ndarray]] = []
        self._end = 0

    def add(self, mask: np.ndarray) -> None:
        """Takes the next part of the mask."""
        if mask.size:
            part = Part(self._end, (), (mask.size,))
            self._parts.append((part, np.packbits(mask.reshape(-1) == 0)))
            self._end += mask.size

    def has_nonzero(self, checkpoint: Checkpoint, name: str) -> bool:
        """Whether a tensor of the same shape is nonzero at any of them; reads no more than decides it."""
        for part, bits in self._parts:
            is_removed = np.unpackbits(bits, count=part.size).view(bool)
            if (checkpoint.read(name, part)[is_removed] != 0).any():
                return True
        return False


def _warn_if_nothing_is_removed(kept: list[Kept]) -> None:
    if all(leaf.kept == leaf.size for leaf in kept):
        names = _first_few([leaf.name for leaf in kept]) or 'any tensor'
        warn(f'no weight of {names} was removed; give a larger sparsity, such as 0.9')


def _warn_of_nans(kept: list[Kept]) -> None:
    with_nans = [f'{leaf.name} ({leaf.nans:,} of {leaf.size:,})' for leaf in kept if leaf.nans]
    if with_nans:
        warn(
            f'NaN in {_first_few(with_nans)}: NaN ranks lowest and is removed first; look where it comes from, or '
            'leave these tensors out with skip'
        )


def _warn_of_stale_moments(kept: list[Kept]) -> None:
    stale: list[str] = []
    for leaf in kept:
        stale += leaf.stale
    if stale:
        warn(
            "the optimizer's state stays as it is, and is not zero where weights were removed: "
            f'{_first_few(stale)}. Its next step would bring these weights back: train on with jaxpruner.FixedMask '
            'and masks_from_zeros, or with a new state of the optimizer'
        )


def _first_few(names: list[str]) -> str:
    more = f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''
    return ', '.join(names[:_NAMED]) + more


def _check_targets(out: Path, masks_out: Path | None, overwrite: bool, is_sharded: bool) -> None:
    if masks_out is not None and os.path.realpath(masks_out) == os.path.realpath(out):
        raise ValueError(f'masks_out and out are the same file, {out}; give them different names')
    check_target(out, overwrite, out.is_dir() or is_sharded)
    if masks_out is not None:
        check_target(masks_out, overwrite, masks_out.is_dir())


def check_target(path: Path, overwrite: bool, is_folder: bool = False) -> None:
    """Refuses what cannot be written, or must not be replaced, before any work is done."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f'{path}: there is no folder {path.parent}')
    if path.exists() and (is_folder or not overwrite):
        hint = 'choose another name' if is_folder else 'choose another name, or overwrite it'
        raise FileExistsError(f'{path} exists; {hint}')
