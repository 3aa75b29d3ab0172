"""Prunes a checkpoint into another, leaf by leaf and in parts, so that memory stays low whatever the size of either."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxpruner.checkpoints import leaf_masks
from jaxpruner.checkpoints.base import Checkpoint, Leaf
from jaxpruner.checkpoints.optimizer_state import find_optimizer_state
from jaxpruner.checkpoints.parts import PART_SIZE, Part, parts_of
from jaxpruner.checkpoints.plan import Choice
from jaxpruner.checkpoints.safetensors_reader import SafetensorsFile, ShardedSafetensors
from jaxpruner.checkpoints.safetensors_writer import SafetensorsWriter
from jaxpruner.core import atomic_files
from jaxpruner.core.caller_warnings import warn

_NAMED = 4  # tensors in a warning


class Kept(NamedTuple):
    """How much of a leaf has been kept.

    >>> Kept('w', 8, 2).sparsity
    0.75
    """

    name: str
    size: int
    kept: int  # weights that the mask keeps
    nans: int = 0  # weights that were NaN, which ranks lowest
    stale: tuple[
        str, ...
    ] = ()  # tensors of the optimizer's state that are not zero where weights were removed

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
      out: where to; it appears when it is whole.
      choices: what happens to each leaf that is pruned, from `choose`.
      scores: `'magnitude'` or `'random'`.
      seed: of random scores.
      masks_out: a safetensors file for the masks, uint8 in the shapes of the leaves, 1 = kept.
      overwrite: replaces files that are there; a folder is never replaced.
      on_leaf: called with each tensor before its turn.
      part_size: weights held at a time.

    Returns:
      What was kept of each pruned leaf. A warning names the leaves that hold NaN, and another the moments of an
      optimizer that are not zero where weights were removed.

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
        raise ValueError(f"scores: {scores!r} is unknown; use 'magnitude' or 'random'")
    leaf_masks.random_scores('', seed)  # a wrong seed is refused before anything is written
    out = Path(out)
    masks_out = None if masks_out is None else Path(masks_out)
    sharded = isinstance(checkpoint, ShardedSafetensors)
    _check_places(out, masks_out, overwrite, sharded)
    kept: list[Kept] = []
    with contextlib.ExitStack() as stack:
        masks = None
        if masks_out is not None:
            shapes = {
                name: Leaf(checkpoint.leaves[name].shape, np.dtype('uint8')) for name in choices
            }
            masks = stack.enter_context(SafetensorsWriter(masks_out, shapes, overwrite=overwrite))
        turn = _Turn(
            checkpoint,
            _moments(checkpoint),
            choices,
            scores,
            seed,
            masks,
            overwrite,
            on_leaf,
            part_size,
        )
        if isinstance(checkpoint, ShardedSafetensors):
            with atomic_files.target_claimed(out), atomic_files.new_folder(out) as folder:
                for name, shard in checkpoint.files.items():
                    kept += turn.file(shard, folder / name)
                (folder / checkpoint.index.name).write_bytes(checkpoint.index.read_bytes())
        else:
            kept += turn.file(checkpoint, out)
    _warn_of_nans(kept)
    _warn_of_stale_moments(kept)
    return kept


class _Turn(NamedTuple):
    """The settings with which one file after another is pruned."""

    whole: Checkpoint  # all files
    moments: Mapping[str, list[str]]  # of each leaf, in the optimizer's state
    choices: Mapping[str, Choice]
    scores: str
    seed: int
    masks: SafetensorsWriter | None
    overwrite: bool
    on_leaf: Callable[[str, Leaf], None]
    part_size: int

    def file(self, checkpoint: Checkpoint, out: Path) -> Iterator[Kept]:
        keys = list(checkpoint.header.leaves) if isinstance(checkpoint, SafetensorsFile) else None
        with SafetensorsWriter(
            out, checkpoint.leaves, checkpoint.metadata, keys, self.overwrite
        ) as writer:
            for name, leaf in checkpoint.leaves.items():
                self.on_leaf(name, leaf)
                if name in self.choices:
                    yield self._pruned(checkpoint, name, writer)
                    continue
                for part in parts_of(leaf.shape, size=self.part_size):
                    writer.write(name, checkpoint.read(name, part))

    def _pruned(self, checkpoint: Checkpoint, name: str, writer: SafetensorsWriter) -> Kept:
        choice, kept, nans = self.choices[name], 0, 0
        removed = _Removed(self.whole, self.moments.get(name, []))
        score = (
            leaf_masks.random_scores(name, self.seed)
            if self.scores == 'random'
            else leaf_masks.magnitude
        )
        for part in leaf_masks.prune_leaf(
            checkpoint, name, choice.kind, choice.sparsity, score, self.part_size
        ):
            writer.write(name, part.weights)
            if self.masks is not None:
                self.masks.write(name, part.mask)
            removed.add(part.mask)
            nans += part.nans
            kept += int(np.count_nonzero(part.mask))
        return Kept(name, checkpoint.leaves[name].size, kept, nans, removed.stale_moments())


def _moments(checkpoint: Checkpoint) -> dict[str, list[str]]:
    moments: dict[str, list[str]] = {}
    for name, tensor in find_optimizer_state(checkpoint.leaves).items():
        if tensor.weights is not None:
            moments.setdefault(tensor.weights, []).append(name)
    return moments


class _Removed:
    """Which weights of a leaf were removed, as bits, for as long as its moments are looked at."""

    def __init__(self, checkpoint: Checkpoint, moments: list[str]):
        self._checkpoint, self._moments = checkpoint, moments
        self._parts: list[tuple[Part, np.ndarray]] = []
        self._end = 0

    def add(self, mask: np.ndarray) -> None:
        """Takes the next part of the mask."""
        if self._moments and mask.size:
            self._parts.append(
                (Part(self._end, (), (mask.size,)), np.packbits(mask.reshape(-1) == 0))
            )
            self._end += mask.size

    def stale_moments(self) -> tuple[str, ...]:
        """The moments that are not zero there; of each only as much is read as decides it."""
        return tuple(
            name
            for name in self._moments
            if any(self._is_stale(name, *part) for part in self._parts)
        )

    def _is_stale(self, name: str, part: Part, bits: np.ndarray) -> bool:
        removed = np.unpackbits(bits, count=part.size).view(bool)
        return bool((self._checkpoint.read(name, part)[removed] != 0).any())


def _warn_of_nans(kept: list[Kept]) -> None:
    with_nans = [leaf for leaf in kept if leaf.nans]
    if with_nans:
        words = ', '.join(
            f'{leaf.name} ({leaf.nans:,} of {leaf.size:,})' for leaf in with_nans[:_NAMED]
        )
        more = f' and {len(with_nans) - _NAMED} more' if len(with_nans) > _NAMED else ''
        warn(
            f'NaN in {words}{more}: NaN ranks lowest and is removed first; look where it comes from, or leave these '
            'tensors out with skip'
        )


def _warn_of_stale_moments(kept: list[Kept]) -> None:
    stale = [name for leaf in kept for name in leaf.stale]
    if stale:
        words = ', '.join(stale[:_NAMED])
        more = f' and {len(stale) - _NAMED} more' if len(stale) > _NAMED else ''
        warn(
            f"the optimizer's state stays as it is, and is not zero where weights were removed: {words}{more}. Its "
            'next step would bring these weights back: train on with jaxpruner.FixedMask and masks_from_zeros, '
            'or with an optimizer that begins anew'
        )


def _check_places(out: Path, masks_out: Path | None, overwrite: bool, sharded: bool) -> None:
    if masks_out is not None and os.path.realpath(masks_out) == os.path.realpath(out):
        raise ValueError(f'masks_out and out are the same file, {out}; give them different names')
    for place in (out, masks_out):
        if place is None:
            continue
        if not place.parent.is_dir():
            raise FileNotFoundError(f'{place}: there is no folder {place.parent}')
        is_folder = place.is_dir() or (sharded and place is out)
        if place.exists() and (is_folder or not overwrite):
            hint = 'choose another name' if is_folder else 'choose another name, or overwrite it'
            raise FileExistsError(f'{place} exists; {hint}')
