"""Blocks: those blocks of the last two axes that have weights, and where they stand.

Blocks are counted down the first column of blocks, then down the second. `values[group, block, in, out]` stands at
`indices[group, block]` of its group. All blocks are one group; files of earlier versions have a group for each column.
"""

import math
from collections.abc import Iterator

import numpy as np

from jaxpruner.sparse.formats import leaf_arrays
from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays

KEYS = ('values', 'indices', 'shape')
_LONGEST_SIDE = 512
_FEWEST_WEIGHTS = 8  # of a block: smaller ones are scattered weights, for which there is CSR


def plan(kept: Kept, itemsize: int) -> Plan | None:
    """Settles the sides of the fewest bytes, powers of two; `None` if blocks take more than the leaf."""
    mask, best = kept.mask, None
    if mask.ndim < 2 or not kept.count:
        return None
    for height, width, is_kept in _candidates(mask.reshape(-1, *mask.shape[-2:])):
        blocks = int(np.count_nonzero(is_kept))
        if kept.is_given and blocks * height * width != kept.count:
            continue
        index_size = leaf_arrays.index_dtype(is_kept.size).itemsize
        size = blocks * (height * width * itemsize + index_size)
        if best is None or size <= best.bytes:
            best = Plan(size, (height, width))
    return best


def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
    """Returns the arrays."""
    is_kept = in_blocks(mask, *settings).any((-2, -1))
    indices = np.flatnonzero(is_kept).astype(leaf_arrays.index_dtype(is_kept.size))
    return {
        'values': in_blocks(array, *settings)[is_kept][None],
        'indices': indices[None],
        'shape': np.array(array.shape, np.int64),
    }


def check(arrays: StoredArrays) -> tuple[int, ...]:
    """Refuses blocks that lie outside of the leaf or are repeated."""
    shape, values = leaf_arrays.shape_from(arrays['shape']), arrays['values']
    if values.ndim != 4 or 0 in values.shape[2:]:
        raise ValueError(
            f'values has shape {values.shape}; it must have 4 axes: groups, blocks, in, out'
        )
    groups, blocks, height, width = values.shape
    if len(shape) < 2 or 0 in shape or shape[-2] % height or shape[-1] % width:
        raise ValueError(f'its shape is {shape}, which blocks {height}×{width} do not divide')
    leaf_arrays.check_array('indices', arrays['indices'], axes=2)
    leaf_arrays.check_lengths('indices', arrays['indices'], groups, blocks)
    count = math.prod(shape) // (height * width)
    if not groups or count % groups:
        raise ValueError(f'values has {groups} groups, which do not divide {count} blocks')
    leaf_arrays.check_groups('indices', arrays['indices'], count // groups)
    return shape


def unpack(arrays: StoredArrays) -> np.ndarray:
    """Returns the leaf."""
    values = arrays['values']
    groups, _, height, width = values.shape
    leaf = np.zeros(arrays['shape'].tolist(), values.dtype)
    places = in_blocks(leaf, height, width)
    grid = places.shape[:3]
    first_of_groups = math.prod(grid) // groups * np.arange(groups)
    positions = first_of_groups[:, None] + arrays['indices']
    places[np.unravel_index(positions, grid)] = values
    return leaf


def in_blocks(array: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns a view [leading, columns of blocks, rows of blocks, in, out]."""
    *_, inputs, outputs = array.shape
    grid = array.reshape(-1, inputs // height, height, outputs // width, width)
    return grid.transpose(0, 3, 1, 2, 4)


def _candidates(mask: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields sides of blocks that store less than everything, and which blocks [leading, columns, rows] stay."""
    tall, height = mask, 1
    # Larger blocks store no fewer values.
    while np.count_nonzero(tall) * height < mask.size:
        wide, width = tall, 1
        while np.count_nonzero(wide) * height * width < mask.size:
            if height * width >= _FEWEST_WEIGHTS:
                yield height, width, wide.swapaxes(1, 2)
            if wide.shape[2] % 2 or width >= _LONGEST_SIDE:
                break
            wide, width = wide[:, :, 0::2] | wide[:, :, 1::2], 2 * width
        if tall.shape[1] % 2 or height >= _LONGEST_SIDE:
            break
        tall, height = tall[:, 0::2] | tall[:, 1::2], 2 * height
