"""Blocks: those blocks of the last two axes that have weights, and where they stand.

Blocks are counted down the first column of blocks, then down the second. If all columns store the same number of
blocks, as after block-sparse training, each column is a group: `values[group, block, in, out]`, and
`indices[group, block]` is the row of blocks. Otherwise all blocks are one group, and `indices` counts through all
columns.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import (
    ArraySpec,
    KeptPattern,
    Plan,
    StoredArrays,
    shape_array,
    shape_spec,
)

_LONGEST_SIDE = 512
_FEWEST_WEIGHTS = 8  # of a block: smaller ones are scattered weights, for which there is CSR
_CHUNK = 1 << 20


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
        *_, inputs, outputs = mask.shape
        matrices = mask.reshape(-1, inputs, outputs)
        most_values = most_bytes // dtype.itemsize
        best, best_bytes = None, most_bytes
        for candidate in _candidates(matrices, most_values):
            if pattern.is_given and candidate.values != pattern.kept:
                continue
            plan = _plan_for(mask, dtype, candidate)
            if plan.weight_bytes <= best_bytes:
                best, best_bytes = plan, plan.weight_bytes
        return best

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays."""
        values_spec = plan.arrays['values']
        indices_spec = plan.arrays['indices']
        *_, height, width = values_spec.shape
        mask_blocks = _in_blocks(mask, height, width)
        is_kept = np.any(mask_blocks, axis=(-2, -1))
        blocks = _in_blocks(array, height, width)
        values = blocks[is_kept]
        groups, _ = indices_spec.shape
        blocks_in_group = is_kept.size // groups
        indices = np.flatnonzero(is_kept) % blocks_in_group
        indices = indices.astype(indices_spec.dtype)
        return {
            'values': values.reshape(values_spec.shape),
            'indices': indices.reshape(indices_spec.shape),
            'shape': shape_array(array),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is stored."""
        shape = array_checks.shape_from(arrays['shape'])
        values = arrays['values']
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
        shape = self.shape(arrays)
        values = arrays['values']
        indices = arrays['indices']
        array_checks.check_array('indices', indices, axes=2)
        groups, blocks, height, width = values.shape
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
        shape = self.shape(arrays)
        values = arrays['values']
        groups, _, height, width = values.shape
        leaf = np.zeros(shape, values.dtype)
        places = _in_blocks(leaf, height, width)
        *grid, _, _ = places.shape
        blocks_in_group = math.prod(grid) // groups
        first_of_group = blocks_in_group * np.arange(groups)
        positions = first_of_group[:, None] + arrays['indices']
        positions = positions.reshape(-1)
        blocks = values.reshape(-1, height, width)
        step = max(_CHUNK // (height * width), 1)
        for start in range(0, len(positions), step):
            chunk = slice(start, start + step)
            place = np.unravel_index(positions[chunk], tuple(grid))
            places[place] = blocks[chunk]
        return leaf


def _in_blocks(array: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns a view [leading, columns of blocks, rows of blocks, in, out]."""
    *_, inputs, outputs = array.shape
    rows = inputs // height
    columns = outputs // width
    grid = array.reshape(-1, rows, height, columns, width)
    return grid.transpose(0, 3, 1, 2, 4)


class _Candidate(NamedTuple):
    """Blocks of a shape.

    Attributes:
      height: rows of a block.
      width: columns of a block.
      kept: which of them are kept, [leading, rows, columns] of blocks.
    """

    height: int
    width: int
    kept: np.ndarray

    @property
    def values(self) -> int:
        """How many numbers these blocks store."""
        blocks = int(np.count_nonzero(self.kept))
        return blocks * self.height * self.width

    def doubled_height(self) -> '_Candidate | None':
        """Blocks of two neighbours, one above the other; `None` if the number of rows is odd, or they are too tall."""
        _, rows, _ = self.kept.shape
        if rows % 2 or self.height >= _LONGEST_SIDE:
            return None
        upper = self.kept[:, 0::2]
        lower = self.kept[:, 1::2]
        return _Candidate(2 * self.height, self.width, upper | lower)

    def doubled_width(self) -> '_Candidate | None':
        """Blocks of two neighbours, side by side; `None` if the number of columns is odd, or they are too wide."""
        *_, columns = self.kept.shape
        if columns % 2 or self.width >= _LONGEST_SIDE:
            return None
        # Two booleans are read as one number of 16 bits.
        pairs = np.ascontiguousarray(self.kept).view(np.uint16)
        return _Candidate(self.height, 2 * self.width, pairs != 0)


def _plan_for(mask: np.ndarray, dtype: np.dtype, candidate: _Candidate) -> Plan:
    per_column = np.count_nonzero(candidate.kept, axis=1)
    is_uniform = np.all(per_column == per_column.flat[0])
    groups = per_column.size if is_uniform else 1
    count = int(per_column.sum()) // groups
    index_dtype = _index_dtype(candidate.kept.size // groups)
    values_shape = groups, count, candidate.height, candidate.width
    arrays = {
        'values': ArraySpec(values_shape, dtype),
        'indices': ArraySpec((groups, count), index_dtype),
        'shape': shape_spec(mask),
    }
    return Plan(BlockStorage.name, arrays)


def _index_dtype(bound: int) -> np.dtype:
    """The smallest type for numbers below a bound."""
    if bound <= 2**16:
        return np.dtype('uint16')
    return np.dtype('uint32' if bound <= 2**32 else 'int64')


def _candidates(mask: np.ndarray, most_values: int) -> list[_Candidate]:
    """Lists blocks that store at most some number of values: sides of powers of two, and the exact block."""
    found: list[_Candidate] = []
    tall = _Candidate(1, 1, mask)
    while tall is not None:
        found += _wider(tall, most_values)
        # Taller blocks store no fewer values.
        tall = tall.doubled_height() if tall.values <= most_values else None
    exact = _exact_block(mask)
    shapes = [(each.height, each.width) for each in found]
    if exact is not None and exact not in shapes:
        height, width = exact
        corners = np.ascontiguousarray(mask[:, ::height, ::width])
        found.append(_Candidate(height, width, corners))
    return found


def _wider(tall: _Candidate, most_values: int) -> Iterator[_Candidate]:
    """Blocks of one height that are large enough, as long as they store few values: wider ones store no fewer."""
    wide = tall
    while wide is not None and wide.values <= most_values:
        if wide.height * wide.width >= _FEWEST_WEIGHTS:
            yield wide
        wide = wide.doubled_width()


def _exact_block(mask: np.ndarray) -> tuple[int, int] | None:
    """Returns the largest block that is all kept or all removed everywhere; `None` if that is small."""
    _, height, width = mask.shape
    row_step, column_step = height, width
    rows = mask.reshape(-1, width)
    rows_at_once = max(_CHUNK // width, 2)
    for start in range(0, len(rows), rows_at_once):
        first = max(start - 1, 0)
        part = rows[first : start + rows_at_once]
        row_changes = _changes(part) + first
        row_step = int(np.gcd.reduce(row_changes % height, initial=row_step))
        column_changes = _changes(part.T)
        column_step = int(np.gcd.reduce(column_changes, initial=column_step))
        if row_step * column_step < _FEWEST_WEIGHTS:
            return None
    return row_step, column_step


def _changes(rows: np.ndarray) -> np.ndarray:
    """The numbers of the rows that differ from the row before."""
    differs = np.any(rows[1:] != rows[:-1], axis=1)
    return np.flatnonzero(differs) + 1
