"""Prunes a checkpoint into another, tensor by tensor, so that neither is ever held in memory."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator
from jaxpruner.caller_warnings import warn
from jaxpruner.checkpoints.choosing import Choice
from jaxpruner.checkpoints.optimizer_state import find_optimizer_state
from jaxpruner.checkpoints.reading import Checkpoint, Leaf, ShardedSafetensors
from jaxpruner.checkpoints.writing import write_tensors
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
    masks_out: Path | None = None,
    overwrite: bool = False,
    on_leaf: Callable[[str, Leaf], None] = lambda name, leaf: None,
) -> list[Kept]:
    """Writes a checkpoint with zeros where weights are removed; other tensors, dtypes and metadata stay as they are.

    The weights of least magnitude go. Any other score needs the model: `jaxpruner.prune`.

    Args:
      checkpoint: what to prune. Shards become a folder of shards, all else a file.
      out: where to write; it appears when it is whole.
      choices: what happens to each leaf that is pruned, from `choose`.
      masks_out: a safetensors file for the masks, uint8 in the shapes of the leaves, 1 = kept. Until it is written they
        are held, at a bit a weight.
      overwrite: replaces files that are there; a folder is never replaced.
      on_leaf: called with each tensor before it is read.

    Returns:
      What was kept of each pruned leaf. Warnings say that nothing was removed, and name the leaves that hold NaN, and
      the moments of an optimizer that are not zero where weights were removed.

    Raises:
      ValueError: `masks_out` is `out`.
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
    out = Path(out)
    is_sharded = isinstance(checkpoint, ShardedSafetensors)
    atomic_files.check_target(out, overwrite, is_folder=is_sharded)
    if masks_out is not None:
        masks_out = Path(masks_out)
        if os.path.realpath(masks_out) == os.path.realpath(out):
            raise ValueError(
                f'masks_out and out are the same file, {out}; give them different names'
            )
        atomic_files.check_target(masks_out, overwrite)
    moments: dict[str, list[str]] = {}
    for name, tensor in find_optimizer_state(checkpoint.leaves).items():
        if tensor.weights is not None:
            moments.setdefault(tensor.weights, []).append(name)
    kept: list[Kept] = []
    masks: dict[str, np.ndarray] = {}  # as bits

    def read_pruned(name: str) -> np.ndarray:
        leaf = checkpoint.leaves[name]
        on_leaf(name, leaf)
        weights = checkpoint.read(name)
        if name not in choices:
            return weights
        mask = _mask(weights, choices[name])
        is_removed = mask == 0
        stale = [each for each in moments.get(name, ()) if checkpoint.read(each)[is_removed].any()]
        nans = int(np.count_nonzero(np.isnan(weights)))
        kept.append(Kept(name, leaf.size, int(np.count_nonzero(mask)), nans, tuple(stale)))
        if masks_out is not None:
            masks[name] = np.packbits(mask)
        np.copyto(weights, np.zeros((), weights.dtype), where=is_removed)
        return weights

    if isinstance(checkpoint, ShardedSafetensors):
        with (
            atomic_files.target_claimed(out),
            atomic_files.replacing(out, is_folder=True) as folder,
        ):
            for file_name, shard in checkpoint.files.items():
                write_tensors(folder / file_name, shard.leaves, read_pruned, shard.metadata)
            (folder / checkpoint.index.name).write_bytes(checkpoint.index.read_bytes())
    else:
        write_tensors(out, checkpoint.leaves, read_pruned, checkpoint.metadata, overwrite)
    if masks_out is not None:
        uint8 = np.dtype('uint8')
        mask_leaves = {name: Leaf(checkpoint.leaves[name].shape, uint8) for name in masks}

        def read_mask(name: str) -> np.ndarray:
            leaf = mask_leaves[name]
            return np.unpackbits(masks[name], count=leaf.size).reshape(leaf.shape)

        write_tensors(masks_out, mask_leaves, read_mask, overwrite=overwrite)
    _warn(kept)
    return kept


def _mask(weights: np.ndarray, choice: Choice) -> np.ndarray:
    """Returns the mask of a leaf, uint8."""
    if not weights.size:
        return np.ones(weights.shape, np.uint8)
    precision = contextlib.nullcontext()
    if weights.dtype == np.float64:
        new = hasattr(jax, 'enable_x64')
        precision = jax.enable_x64(True) if new else jax.experimental.enable_x64()  # pyright: ignore
    with precision:
        mask_fn = mask_calculator.get_topk_fn(choice.kind)
        return np.asarray(mask_fn(jnp.abs(weights), choice.sparsity))


def _warn(kept: list[Kept]) -> None:
    if all(leaf.kept == leaf.size for leaf in kept):
        names = _first_few([leaf.name for leaf in kept]) or 'any tensor'
        warn(f'no weight of {names} was removed; give a larger sparsity, such as 0.9')
    with_nans = [f'{leaf.name} ({leaf.nans:,} of {leaf.size:,})' for leaf in kept if leaf.nans]
    if with_nans:
        warn(
            f'NaN in {_first_few(with_nans)}: NaN ranks lowest and is removed first; look where it comes from, or '
            'leave these tensors out with skip'
        )
    stale = [moment for leaf in kept for moment in leaf.stale]
    if stale:
        warn(
            "the optimizer's state stays as it is, and is not zero where weights were removed: "
            f'{_first_few(stale)}. Its next step would bring these weights back: train on with jaxpruner.FixedMask '
            'and masks_from_zeros, or with a new state of the optimizer'
        )


def _first_few(names: list[str]) -> str:
    more = f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''
    return ', '.join(names[:_NAMED]) + more
