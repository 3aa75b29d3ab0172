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
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays, shape_spec

_LONGEST_SIDE = 512
_FEWEST_WEIGHTS = 8  # of a block: smaller ones are scattered weights, for which there is CSR


class BlockStorage:
    """The format for zeros that stand together."""

    name = 'blocks'
    values_key = 'values'
    keys = frozenset({'values', 'indices', 'shape'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the smallest blocks: their sides are powers of two, or those of the blocks that the mask is made of."""
        mask = pattern.mask
        if mask.ndim < 2 or not mask.size or not pattern.kept:
            return None
        best = None
        most_values = most_bytes // dtype.itemsize
        for height, width, is_kept in _candidates(mask.reshape(-1, *mask.shape[-2:]), most_values):
            per_column = np.count_nonzero(is_kept, axis=1)
            blocks = int(per_column.sum())
            if pattern.is_given and blocks * height * width != pattern.kept:
                continue
            groups = per_column.size if np.all(per_column == per_column.flat[0]) else 1
            bound = is_kept.size // groups
            index_dtype = next(
                d for d in ('uint16', 'uint32', 'int64') if bound - 1 <= np.iinfo(d).max
            )
            arrays = {
                'values': ArraySpec((groups, blocks // groups, height, width), dtype),
                'indices': ArraySpec((groups, blocks // groups), np.dtype(index_dtype)),
                'shape': shape_spec(mask),
            }
            plan = Plan(self.name, arrays).within(most_bytes)
            if plan is not None:
                best, most_bytes = plan, plan.weight_bytes
        return best

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays."""
        values, indices = plan.arrays['values'], plan.arrays['indices']
        block = values.shape[2:]
        is_kept = in_blocks(mask, *block).any((-2, -1))
        numbers = np.flatnonzero(is_kept) % (is_kept.size // indices.shape[0])
        return {
            'values': in_blocks(array, *block)[is_kept].reshape(values.shape),
            'indices': numbers.astype(indices.dtype).reshape(indices.shape),
            'shape': np.array(array.shape, np.int64),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is stored."""
        shape, values = array_checks.shape_from(arrays['shape']), arrays['values']
        if values.ndim != 4 or 0 in values.shape[2:]:
            raise ValueError(
                f'values has shape {values.shape}; it must have 4 axes: groups, blocks, in, out'
            )
        _, _, height, width = values.shape
        is_cut = len(shape) >= 2 and shape[-2] % height == 0 and shape[-1] % width == 0
        if 0 in shape or not is_cut:
            raise ValueError(f'its shape is {shape}, which blocks {height}×{width} do not divide')
        return shape

    def check(self, arrays: StoredArrays) -> None:
        """Refuses blocks that lie outside of the leaf or are repeated."""
        shape, indices = self.shape(arrays), arrays['indices']
        array_checks.check_array('indices', indices, axes=2)
        groups, blocks, height, width = arrays['values'].shape
        if indices.shape != (groups, blocks):
            raise ValueError(
                f'indices has shape {indices.shape}, and by the values {(groups, blocks)}'
            )
        count = math.prod(shape) // (height * width)
        if not groups or count % groups:
            raise ValueError(f'values has {groups} groups, which do not divide {count} blocks')
        array_checks.check_below('indices', indices, count // groups)
        array_checks.check_ascending('indices', indices)

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        values = arrays['values']
        groups, _, height, width = values.shape
        leaf = np.zeros(self.shape(arrays), values.dtype)
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


def _candidates(mask: np.ndarray, most_values: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields height and width of blocks that store at most some number of values, and which of them are kept.

    The sides are powers of two; then there is the largest block that is all kept or all removed everywhere.
    """
    tall, height = mask, 1
    # Larger blocks store no fewer values.
    while np.count_nonzero(tall) * height <= most_values:
        wide, width = tall, 1
        while np.count_nonzero(wide) * height * width <= most_values:
            if height * width >= _FEWEST_WEIGHTS:
                yield height, width, wide
            if wide.shape[2] % 2 or width >= _LONGEST_SIDE:
                break
            # Two booleans are read as one number of 16 bits.
            wide, width = np.ascontiguousarray(wide).view(np.uint16) != 0, 2 * width
        if tall.shape[1] % 2 or height >= _LONGEST_SIDE:
            break
        tall, height = tall[:, 0::2] | tall[:, 1::2], 2 * height
    row_changes = np.any(mask[:, 1:] != mask[:, :-1], axis=(0, 2))
    column_changes = np.any(mask[..., 1:] != mask[..., :-1], axis=(0, 1))
    height, width = (
        int(np.gcd.reduce(np.flatnonzero(changes) + 1, initial=len(changes) + 1))
        for changes in (row_changes, column_changes)
    )
    if height * width >= _FEWEST_WEIGHTS:
        yield height, width, np.ascontiguousarray(mask[:, ::height, ::width])
