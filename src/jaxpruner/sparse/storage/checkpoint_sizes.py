"""The bytes that each leaf of a checkpoint would take in each format; the checkpoint may be packed already."""

from pathlib import Path

import numpy as np

from jaxpruner.checkpoints import Checkpoint, open_checkpoint
from jaxpruner.checkpoints.parts import parts_of
from jaxpruner.sparse.formats import element_types, table
from jaxpruner.sparse.formats.base import KeptPattern
from jaxpruner.sparse.storage import manifest
from jaxpruner.sparse.storage.packed_file import PackedFile


def open_packed_or_dense(path: Path) -> Checkpoint:
    """Opens a checkpoint; the leaves of a packed file are those that it was made of."""
    checkpoint = open_checkpoint(path)
    if manifest.MANIFEST_KEY in checkpoint.metadata:
        return PackedFile(checkpoint.path)
    return checkpoint


def format_bytes(checkpoint: Checkpoint, name: str) -> tuple[dict[str, int | None], str]:
    """Returns the bytes of a leaf in each format and the smallest of them.

    Formats that the leaf's zeros do not fit, or whose arrays are no smaller than the leaf, have `None`.
    """
    leaf = checkpoint.leaves[name]
    mask = np.empty(leaf.shape, bool)
    for part in parts_of(leaf.shape):
        is_nonzero = element_types.is_not_plus_zero(checkpoint.read(name, part))
        part.of(mask)[...] = is_nonzero
    pattern = KeptPattern.of(mask)
    plans = table.plans_of(pattern, leaf.dtype, all_sizes=True)
    best = table.smallest(plans, leaf.bytes)
    sizes: dict[str, int | None] = {}
    for format_name, plan in plans.items():
        sizes[format_name] = None
        if plan is None:
            continue
        if plan.weight_bytes < leaf.bytes or format_name == 'dense':
            sizes[format_name] = plan.weight_bytes
    return sizes, best.format_name
