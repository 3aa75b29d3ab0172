"""Blocks: those blocks of the last two axes that have weights, and where they stand.

Blocks are counted down the first column of blocks, then down the second. If all columns store the same number of
blocks, as after block-sparse training, each column is a group: `values[group, block, in, out]`, and
`indices[group, block]` is the row of blocks. Otherwise all blocks are one group, and `indices` counts through all
columns.
"""

import math
from collections.abc import Iterator

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.plans import Kept, Plan, StoredArrays

_LONGEST_SIDE = 512
_FEWEST_WEIGHTS = 8  # of a block: smaller ones are scattered weights, for which there is CSR


def plan(kept: Kept, itemsize: int, most_bytes: int) -> Plan | None:
    """Settles the sides of the fewest bytes: powers of two, or those of the blocks that the mask is made of."""
    mask, best = kept.mask, None
    if mask.ndim < 2 or not kept.count:
        return None
    matrices = mask.reshape(-1, *mask.shape[-2:])
    for height, width, is_kept in _candidates(matrices, most_bytes // itemsize):
        blocks = int(np.count_nonzero(is_kept))
        if kept.is_given and blocks * height * width != kept.count:
            continue
        _, dtype = _groups(is_kept)
        size = blocks * (height * width * itemsize + dtype.itemsize)
        if size <= most_bytes:
            best, most_bytes = Plan(size, (height, width)), size
    return best


def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
    """Returns the arrays."""
    is_kept = in_blocks(mask, *settings).any((-2, -1))
    groups, dtype = _groups(is_kept)
    numbers = np.flatnonzero(is_kept) % (is_kept.size // groups)
    return {
        'values': in_blocks(array, *settings)[is_kept].reshape(groups, -1, *settings),
        'indices': numbers.astype(dtype).reshape(groups, -1),
        'shape': np.array(array.shape, np.int64),
    }


def check(arrays: StoredArrays) -> tuple[int, ...]:
    """Refuses blocks that lie outside of the leaf or are repeated."""
    shape, values = array_checks.shape_from(arrays['shape']), arrays['values']
    if values.ndim != 4 or 0 in values.shape[2:]:
        raise ValueError(
            f'values has shape {values.shape}; it must have 4 axes: groups, blocks, in, out'
        )
    groups, blocks, height, width = values.shape
    if len(shape) < 2 or 0 in shape or shape[-2] % height or shape[-1] % width:
        raise ValueError(f'its shape is {shape}, which blocks {height}×{width} do not divide')
    array_checks.check_array('indices', arrays['indices'], axes=2)
    array_checks.check_lengths('indices', arrays['indices'], groups, blocks)
    count = math.prod(shape) // (height * width)
    if not groups or count % groups:
        raise ValueError(f'values has {groups} groups, which do not divide {count} blocks')
    array_checks.check_groups('indices', arrays['indices'], count // groups)
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
    """Returns [leading, columns of blocks, rows of blocks, in, out]: a view, unless blocks at the edges are padded."""
    *_, inputs, outputs = array.shape
    lacking = -inputs % height, -outputs % width
    if any(lacking):
        array = np.pad(array, [*[(0, 0)] * (array.ndim - 2), (0, lacking[0]), (0, lacking[1])])
    grid = array.reshape(-1, -(-inputs // height), height, -(-outputs // width), width)
    return grid.transpose(0, 3, 1, 2, 4)


def _groups(is_kept: np.ndarray) -> tuple[int, np.dtype]:
    """The number of groups of kept blocks [leading, columns, rows], and the dtype of their indices."""
    per_column = np.count_nonzero(is_kept, axis=-1)
    groups = per_column.size if np.all(per_column == per_column.flat[0]) else 1
    bound = is_kept.size // groups
    fitting = [dtype for dtype in ('uint16', 'uint32') if bound - 1 <= np.iinfo(dtype).max]
    return groups, np.dtype(fitting[0] if fitting else 'int64')


def _candidates(mask: np.ndarray, most_values: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields sides of blocks that store at most some number of values, and which blocks [leading, columns, rows] stay.

    The sides are powers of two; then there is the largest block that is all kept or all removed everywhere.
    """
    tall, height = mask, 1
    # Larger blocks store no fewer values.
    while np.count_nonzero(tall) * height <= most_values:
        wide, width = tall, 1
        while np.count_nonzero(wide) * height * width <= most_values:
            if height * width >= _FEWEST_WEIGHTS:
                yield height, width, wide.swapaxes(1, 2)
            if wide.shape[2] % 2 or width >= _LONGEST_SIDE:
                break
            # Two booleans are read as one number of 16 bits.
            wide, width = np.ascontiguousarray(wide).view(np.uint16) != 0, 2 * width
        if tall.shape[1] % 2 or height >= _LONGEST_SIDE:
            break
        tall, height = tall[:, 0::2] | tall[:, 1::2], 2 * height
    sides = []
    for axis in (1, 2):
        others = (0, 3 - axis)
        changes = np.any(np.diff(mask, axis=axis), axis=others)  # for booleans, whether they differ
        sides.append(int(np.gcd.reduce(np.flatnonzero(changes) + 1, initial=len(changes) + 1)))
    height, width = sides
    if height * width >= _FEWEST_WEIGHTS:
        yield height, width, mask[:, ::height, ::width].swapaxes(1, 2)
