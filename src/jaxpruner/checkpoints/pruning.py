"""Prunes a checkpoint into another, tensor by tensor, so that neither is ever held in memory."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator
from jaxpruner.caller_warnings import warn
from jaxpruner.checkpoints.choosing import OPTIMIZER_STATE, Choice
from jaxpruner.checkpoints.reading import Checkpoint, ShardedSafetensors
from jaxpruner.checkpoints.writing import write_tensors
from jaxpruner.files import atomic_files


def prune(
    checkpoint: Checkpoint, out: Path, choices: Mapping[str, Choice | str], overwrite: bool = False
) -> dict[str, int]:
    """Writes a checkpoint with zeros where weights are removed; other tensors, dtypes and metadata stay as they are.

    The weights of least magnitude go. Any other score needs the model: `jaxpruner.prune`.

    Args:
      checkpoint: what to prune. Shards become a folder of shards, all else a file.
      out: where to write; it appears when it is whole.
      choices: what happens to each leaf, from `choose`.
      overwrite: replaces a file that is there; a folder is never replaced.

    Returns:
      How many weights were kept of each pruned leaf, by name. Warnings name the leaves that hold NaN, and tell of an
      optimizer's state, which stays as it is.

    Raises:
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
    (array([[-3.,  0.]]), {'w': 1})
    """
    out = Path(out)
    kept: dict[str, int] = {}
    with_nan: list[str] = []

    def read_pruned(name: str) -> np.ndarray:
        weights = checkpoint.read(name)
        choice = choices.get(name, '')
        if isinstance(choice, str):
            return weights
        mask = _mask(weights, choice)
        kept[name] = int(np.count_nonzero(mask))
        if np.isnan(weights).any():
            with_nan.append(name)
        np.copyto(weights, np.zeros((), weights.dtype), where=mask == 0)
        return weights

    if isinstance(checkpoint, ShardedSafetensors):
        atomic_files.check_target(out, overwrite, is_folder=True)
        with (
            atomic_files.target_claimed(out),
            atomic_files.replacing(out, is_folder=True) as folder,
        ):
            for file_name, shard in checkpoint.files.items():
                file = folder / file_name
                write_tensors(file, shard.leaves, read_pruned, shard.metadata, progress=True)
            (folder / checkpoint.index.name).write_bytes(checkpoint.index.read_bytes())
    else:
        leaves, metadata = checkpoint.leaves, checkpoint.metadata
        write_tensors(out, leaves, read_pruned, metadata, overwrite, progress=True)
    if with_nan:
        warn(
            f'NaN in {", ".join(with_nan)}: NaN ranks lowest and is removed first; look where it comes from, or make '
            'these tensors dense'
        )
    if OPTIMIZER_STATE in choices.values():
        warn(
            "the optimizer's state stays as it is, and its next step would bring removed weights back: train on with "
            'jaxpruner.FixedMask and masks_from_zeros, or with a new state of the optimizer'
        )
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
