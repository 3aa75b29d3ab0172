"""Prunes a checkpoint into another, leaf by leaf and in parts, so that memory stays low whatever the size of either."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxpruner import atomic_files
from jaxpruner.checkpoints import leaf_masks
from jaxpruner.checkpoints.base import Checkpoint, Leaf
from jaxpruner.checkpoints.parts import PART_SIZE, parts_of
from jaxpruner.checkpoints.plan import Choice
from jaxpruner.checkpoints.safetensors_reader import SafetensorsFile, ShardedSafetensors
from jaxpruner.checkpoints.safetensors_writer import SafetensorsWriter


class Kept(NamedTuple):
    """How much of a leaf has been kept.

    >>> Kept('w', 8, 2).sparsity
    0.75
    """

    name: str
    size: int
    kept: int  # weights that the mask keeps

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
      What was kept of each pruned leaf.

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
    (array([[-3.,  0.]]), [Kept(name='w', size=2, kept=1)])
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
            shapes = {name: Leaf(checkpoint.leaves[name].shape, np.dtype('uint8')) for name in choices}
            masks = stack.enter_context(SafetensorsWriter(masks_out, shapes, overwrite=overwrite))
        turn = _Turn(choices, scores, seed, masks, overwrite, on_leaf, part_size)
        if isinstance(checkpoint, ShardedSafetensors):
            with atomic_files.target_claimed(out), atomic_files.new_folder(out) as folder:
                for name, shard in checkpoint.files.items():
                    kept += turn.file(shard, folder / name)
                (folder / checkpoint.index.name).write_bytes(checkpoint.index.read_bytes())
        else:
            kept += turn.file(checkpoint, out)
    return kept


class _Turn(NamedTuple):
    """The settings with which one file after another is pruned."""

    choices: Mapping[str, Choice]
    scores: str
    seed: int
    masks: SafetensorsWriter | None
    overwrite: bool
    on_leaf: Callable[[str, Leaf], None]
    part_size: int

    def file(self, checkpoint: Checkpoint, out: Path) -> Iterator[Kept]:
        keys = list(checkpoint.header.leaves) if isinstance(checkpoint, SafetensorsFile) else None
        with SafetensorsWriter(out, checkpoint.leaves, checkpoint.metadata, keys, self.overwrite) as writer:
            for name, leaf in checkpoint.leaves.items():
                self.on_leaf(name, leaf)
                if name in self.choices:
                    yield self._pruned(checkpoint, name, writer)
                    continue
                for part in parts_of(leaf.shape, size=self.part_size):
                    writer.write(name, checkpoint.read(name, part))

    def _pruned(self, checkpoint: Checkpoint, name: str, writer: SafetensorsWriter) -> Kept:
        choice, kept = self.choices[name], 0
        score = leaf_masks.random_scores(name, self.seed) if self.scores == 'random' else leaf_masks.magnitude
        for part in leaf_masks.prune_leaf(checkpoint, name, choice.kind, choice.sparsity, score, self.part_size):
            writer.write(name, part.weights)
            if self.masks is not None:
                self.masks.write(name, part.mask)
            kept += int(np.count_nonzero(part.mask))
        return Kept(name, checkpoint.leaves[name].size, kept)


def _check_places(out: Path, masks_out: Path | None, overwrite: bool, sharded: bool) -> None:
    if masks_out is not None and masks_out.absolute() == out.absolute():
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
