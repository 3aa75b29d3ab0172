"""Blocks: those blocks of the last two axes that have weights, and where they stand.

Blocks are counted down the first column of blocks, then down the second. If each column has as many blocks, as block
sparse training makes them, it is a group: `values[group, block, in, out]` and `indices[group, block]`, the row of
blocks. Otherwise all blocks are one group, and `indices` counts through all columns.
"""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import Arrays, ArraySpec, Pattern, Plan

_LONGEST_SIDE = 512
_FEWEST_WEIGHTS = 8  # of a block: smaller ones are scattered weights, for which there is CSR
_CHUNK = 1 << 20


class Blocks:
    """The format of zeros that stand together."""

    name = 'blocks'
    values_key = 'values'
    keys = frozenset({'values', 'indices', 'shape'})

    def plan(self, pattern: Pattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the smallest of blocks whose sides are powers of two, and of those into which the mask falls."""
        mask = pattern.mask
        if mask.ndim < 2 or not mask.size or not pattern.kept:
            return None
        best, best_bytes = None, most_bytes
        matrices = mask.reshape(-1, *mask.shape[-2:])
        for block, kept in _candidates(matrices, best_bytes // dtype.itemsize):
            is_exact = np.count_nonzero(kept) * math.prod(block) == pattern.kept
            if pattern.is_given and not is_exact:
                continue
            plan = _plan_for(mask.shape, dtype, block, kept)
            if plan.weight_bytes <= best_bytes:
                best, best_bytes = plan, plan.weight_bytes
        return best

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
        """Returns the arrays."""
        values_spec, indices_spec = plan.arrays['values'], plan.arrays['indices']
        block = values_spec.shape[-2:]
        is_kept = _in_blocks(mask, block).any((-2, -1))
        positions = np.flatnonzero(is_kept) % (is_kept.size // indices_spec.shape[0])
        return {
            'values': _in_blocks(array, block)[is_kept].reshape(values_spec.shape),
            'indices': positions.astype(indices_spec.dtype).reshape(indices_spec.shape),
            'shape': np.array(array.shape, np.int64),
        }

    def shape(self, arrays: Arrays) -> tuple[int, ...]:
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

    def check(self, arrays: Arrays) -> None:
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

    def unpack(self, arrays: Arrays) -> np.ndarray:
        """Returns the leaf."""
        shape = self.shape(arrays)
        values, indices = arrays['values'], arrays['indices']
        leaf = np.zeros(shape, values.dtype)
        places = _in_blocks(leaf, values.shape[-2:])
        run = math.prod(places.shape[:-2]) // len(values)
        positions = (np.arange(len(values))[:, None] * run + indices).reshape(-1)
        blocks = values.reshape(-1, *values.shape[2:])
        step = max(_CHUNK // math.prod(values.shape[2:]), 1)
        for start in range(0, len(positions), step):
            chunk = slice(start, start + step)
            places[np.unravel_index(positions[chunk], places.shape[:-2])] = blocks[chunk]
        return leaf


def _in_blocks(array: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """Returns a view [leading, columns of blocks, rows of blocks, in, out]."""
    height, width = block
    *_, inputs, outputs = array.shape
    grid = array.reshape(-1, inputs // height, height, outputs // width, width)
    return grid.transpose(0, 3, 1, 2, 4)


def _plan_for(
    shape: tuple[int, ...], dtype: np.dtype, block: tuple[int, int], kept: np.ndarray
) -> Plan:
    """Plans blocks of a shape; `kept` is [leading, rows, columns] of blocks."""
    per_column = np.count_nonzero(kept, axis=1)
    is_uniform = bool((per_column == per_column.flat[0]).all())
    groups = per_column.size if is_uniform else 1
    run = kept.size // groups
    count = int(per_column.sum()) // groups
    index_dtype = np.dtype('uint16' if run <= 2**16 else 'uint32' if run <= 2**32 else 'int64')
    arrays = {
        'values': ArraySpec((groups, count, *block), dtype),
        'indices': ArraySpec((groups, count), index_dtype),
        'shape': ArraySpec((len(shape),), np.dtype('int64')),
    }
    return Plan(Blocks.name, arrays)


def _candidates(mask: np.ndarray, most_values: int) -> list[tuple[tuple[int, int], np.ndarray]]:
    """Lists blocks that store no more values than that, with the blocks that are kept [leading, rows, columns]."""
    found = []
    tall, height = mask, 1
    while True:
        wide, width = tall, 1
        # Blocks that hold smaller ones store at least as many values.
        while np.count_nonzero(wide) * height * width <= most_values:
            if height * width >= _FEWEST_WEIGHTS:
                found.append(((height, width), wide))
            if wide.shape[2] % 2 or width >= _LONGEST_SIDE:
                break
            wide, width = _paired_columns(wide), width * 2
        if np.count_nonzero(tall) * height > most_values:
            break
        if tall.shape[1] % 2 or height >= _LONGEST_SIDE:
            break
        tall, height = tall[:, 0::2] | tall[:, 1::2], height * 2
    block = _exact_block(mask)
    if block is not None and block not in [other for other, _ in found]:
        height, width = block
        found.append((block, np.ascontiguousarray(mask[:, ::height, ::width])))
    return found


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
