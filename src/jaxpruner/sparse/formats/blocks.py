"""Blocks: those blocks of the last two axes that have weights, and where they stand.

Blocks are counted down the first column of blocks, then down the second. If each column has the same number of blocks,
as block sparse training makes them, it is a group: `values[group, block, in, out]` and `indices[group, block]`, the row
of blocks. Otherwise all blocks are one group, and `indices` counts through all columns.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays

_LONGEST_SIDE = 512
_FEWEST_WEIGHTS = 8  # of a block: smaller ones are scattered weights, for which there is CSR
_CHUNK = 1 << 20


class BlockStorage:
    """The format of zeros that stand together."""

    name = 'blocks'
    values_key = 'values'
    keys = frozenset({'values', 'indices', 'shape'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the smallest of blocks whose sides are powers of two, and of those into which the mask falls."""
        mask = pattern.mask
        if mask.ndim < 2 or not mask.size or not pattern.kept:
            return None
        best, best_bytes = None, most_bytes
        matrices = mask.reshape(-1, *mask.shape[-2:])
        most_values = most_bytes // dtype.itemsize
        for candidate in _candidates(matrices, most_values):
            if pattern.is_given and candidate.values != pattern.kept:
                continue
            plan = _plan_for(mask.shape, dtype, candidate)
            if plan.weight_bytes <= best_bytes:
                best, best_bytes = plan, plan.weight_bytes
        return best

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
        """Returns the arrays."""
        values_spec, indices_spec = plan.arrays['values'], plan.arrays['indices']
        *_, height, width = values_spec.shape
        is_kept = _in_blocks(mask, (height, width)).any((-2, -1))
        values = _in_blocks(array, (height, width))[is_kept]
        groups, _ = indices_spec.shape
        blocks_in_group = is_kept.size // groups
        indices = np.flatnonzero(is_kept) % blocks_in_group
        return {
            'values': values.reshape(values_spec.shape),
            'indices': indices.astype(indices_spec.dtype).reshape(indices_spec.shape),
            'shape': np.array(array.shape, np.int64),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is spelt out."""
        shape = array_checks.shape_from(arrays['shape'])
        values = arrays['values']
        if values.ndim != 4 or 0 in values.shape[2:]:
            raise ValueError(
                f'values has shape {values.shape}; it must have 4 axes: groups, blocks, in, out'
            )
        height, width = values.shape[2:]
        if len(shape) < 2 or 0 in shape or shape[-2] % height or shape[-1] % width:
            raise ValueError(f'its shape is {shape}, which blocks {height}×{width} do not divide')
        return shape

    def check(self, arrays: StoredArrays) -> None:
        """Refuses blocks outside of the leaf, or twice in it."""
        shape = self.shape(arrays)
        values, indices = arrays['values'], arrays['indices']
        array_checks.check_array('indices', indices, axes=2)
        groups = len(values)
        if indices.shape != values.shape[:2]:
            raise ValueError(
                f'indices has shape {indices.shape}, and by the values {values.shape[:2]}'
            )
        count = math.prod(shape) // math.prod(values.shape[2:])
        if not groups or count % groups:
            raise ValueError(f'values has {groups} groups, which do not divide {count} blocks')
        array_checks.check_below('indices', indices, count // groups)
        if (indices[:, 1:] <= indices[:, :-1]).any():
            raise ValueError('indices of a group do not ascend; they must ascend, each once')

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        shape = self.shape(arrays)
        values, indices = arrays['values'], arrays['indices']
        groups, _, height, width = values.shape
        leaf = np.zeros(shape, values.dtype)
        places = _in_blocks(leaf, (height, width))
        grid = places.shape[:-2]
        blocks_in_group = math.prod(grid) // groups
        first_of_group = blocks_in_group * np.arange(groups)
        positions = (first_of_group[:, None] + indices).reshape(-1)
        blocks = values.reshape(-1, height, width)
        step = max(_CHUNK // (height * width), 1)
        for start in range(0, len(positions), step):
            chunk = slice(start, start + step)
            place = np.unravel_index(positions[chunk], grid)
            places[place] = blocks[chunk]
        return leaf


def _in_blocks(array: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """Returns a view [leading, columns of blocks, rows of blocks, in, out]."""
    height, width = block
    *_, inputs, outputs = array.shape
    grid = array.reshape(-1, inputs // height, height, outputs // width, width)
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
        return int(np.count_nonzero(self.kept)) * self.height * self.width


def _plan_for(shape: tuple[int, ...], dtype: np.dtype, candidate: _Candidate) -> Plan:
    per_column = np.count_nonzero(candidate.kept, axis=1)
    is_uniform = bool((per_column == per_column.flat[0]).all())
    groups = per_column.size if is_uniform else 1
    count = int(per_column.sum()) // groups
    index_dtype = _index_dtype(candidate.kept.size // groups)
    arrays = {
        'values': ArraySpec((groups, count, candidate.height, candidate.width), dtype),
        'indices': ArraySpec((groups, count), index_dtype),
        'shape': ArraySpec((len(shape),), np.dtype('int64')),
    }
    return Plan(BlockStorage.name, arrays)


def _index_dtype(bound: int) -> np.dtype:
    """The smallest type for numbers below a bound."""
    if bound <= 2**16:
        return np.dtype('uint16')
    return np.dtype('uint32' if bound <= 2**32 else 'int64')


def _candidates(mask: np.ndarray, most_values: int) -> list[_Candidate]:
    """Lists blocks that store no more values than that: sides of powers of two, and the exact block."""
    found: list[_Candidate] = []
    tall = _Candidate(1, 1, mask)
    while True:
        found += _wider(tall, most_values)
        if tall.values > most_values or not _can_double(tall.height, tall.kept.shape[1]):
            break
        upper, lower = tall.kept[:, 0::2], tall.kept[:, 1::2]
        tall = _Candidate(2 * tall.height, 1, upper | lower)
    exact = _exact_block(mask)
    if exact is not None:
        height, width = exact
        shapes = [(each.height, each.width) for each in found]
        if exact not in shapes:
            corners = np.ascontiguousarray(mask[:, ::height, ::width])
            found.append(_Candidate(height, width, corners))
    return found


def _wider(tall: _Candidate, most_values: int) -> Iterator[_Candidate]:
    """Blocks of one height that are large enough, as long as they store few values: wider ones store no fewer."""
    wide = tall
    while wide.values <= most_values:
        if wide.height * wide.width >= _FEWEST_WEIGHTS:
            yield wide
        if not _can_double(wide.width, wide.kept.shape[2]):
            return
        wide = _Candidate(wide.height, 2 * wide.width, _paired_columns(wide.kept))


def _can_double(side: int, number: int) -> bool:
    """Whether `number` blocks of length `side` can be joined in pairs."""
    return number % 2 == 0 and side < _LONGEST_SIDE


def _paired_columns(mask: np.ndarray) -> np.ndarray:
    """Whether either of two neighbouring columns is set; two booleans are read as one number of 16 bits."""
    return np.ascontiguousarray(mask).view(np.uint16) != 0


def _exact_block(mask: np.ndarray) -> tuple[int, int] | None:
    """Returns the largest block that is all kept or all removed everywhere, if it is no small one."""
    _, height, width = mask.shape
    row_step, column_step = height, width
    rows = mask.reshape(-1, width)
    rows_at_once = max(_CHUNK // width, 2)
    for start in range(0, len(rows), rows_at_once):
        first = max(start - 1, 0)
        part = rows[first : start + rows_at_once]
        changes = np.flatnonzero((part[1:] != part[:-1]).any(1)) + first + 1
        row_step = int(np.gcd.reduce(changes % height, initial=row_step))
        changes = np.flatnonzero((part[:, 1:] != part[:, :-1]).any(0)) + 1
        column_step = int(np.gcd.reduce(changes, initial=column_step))
        if row_step * column_step < _FEWEST_WEIGHTS:
            return None
    return row_step, column_step
