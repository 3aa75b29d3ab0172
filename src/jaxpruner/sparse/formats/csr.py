"""CSR: where the weights of each row begin, and the column of each weight. The smallest for few scattered weights.

An array of more than two axes is seen as a matrix: all axes but the last make its rows.
"""

import math

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


class CsrStorage:
    """The smallest format for scattered zeros, from about 94 % of them."""

    name = 'csr'
    values_key = 'compressed'
    keys = frozenset({'compressed', 'row_offsets', 'column_indices', 'shape'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the arrays, which fit every pattern with a row."""
        mask, kept = pattern.mask, pattern.kept
        if not mask.ndim or not mask.size:
            return None
        *_, width = mask.shape
        rows = mask.size // width
        column_dtype = 'uint16' if width <= 2**16 else 'uint32'
        offset_dtype = 'int32' if kept < 2**31 else 'int64'
        arrays = {
            'compressed': ArraySpec((kept,), dtype),
            'row_offsets': ArraySpec((rows + 1,), np.dtype(offset_dtype)),
            'column_indices': ArraySpec((kept,), np.dtype(column_dtype)),
            'shape': shape_spec(mask),
        }
        plan = Plan(self.name, arrays)
        return plan if plan.weight_bytes <= most_bytes else None

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays; columns of a row ascend."""
        *_, width = mask.shape
        rows = mask.reshape(-1, width)
        offsets_spec = plan.arrays['row_offsets']
        offsets = np.zeros(offsets_spec.shape, offsets_spec.dtype)
        counts = np.count_nonzero(rows, axis=1)
        np.cumsum(counts, out=offsets[1:])
        positions = np.flatnonzero(mask)
        columns = positions % width
        column_dtype = plan.arrays['column_indices'].dtype
        return {
            'compressed': array.reshape(-1)[positions],
            'row_offsets': offsets,
            'column_indices': columns.astype(column_dtype),
            'shape': shape_array(array),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is stored."""
        shape = array_checks.shape_from(arrays['shape'])
        if not shape or 0 in shape:
            raise ValueError(f'its shape is {shape}, which has no rows for CSR')
        return shape

    def check(self, arrays: StoredArrays) -> None:
        """Refuses row offsets that fall, and columns that lie outside of a row or are repeated in it."""
        *leading, width = self.shape(arrays)
        offsets = arrays['row_offsets']
        columns = arrays['column_indices']
        array_checks.check_array('row_offsets', offsets, axes=1)
        array_checks.check_array('column_indices', columns, axes=1)
        array_checks.check_length('row_offsets', offsets, math.prod(leading) + 1)
        array_checks.check_length('compressed', arrays['compressed'], len(columns))
        _check_offsets(offsets, len(columns))
        array_checks.check_below('column_indices', columns, width)
        _check_columns(columns, offsets)

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        shape = self.shape(arrays)
        values = arrays['compressed']
        *leading, width = shape
        matrix = np.zeros((math.prod(leading), width), values.dtype)
        row_numbers = np.arange(len(matrix))
        counts = np.diff(arrays['row_offsets'])
        rows = np.repeat(row_numbers, counts)
        columns = arrays['column_indices']
        matrix[rows, columns] = values
        return matrix.reshape(shape)


def _check_offsets(offsets: np.ndarray, weights: int) -> None:
    first, last = offsets[0], offsets[-1]
    if first != 0 or last != weights:
        raise ValueError(
            f'row_offsets run from {first} to {last}; they must run from 0 to {weights}, the number of weights'
        )
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        raise ValueError(f'row_offsets fall behind row {falls[0]}; they must never fall')


def _check_columns(columns: np.ndarray, offsets: np.ndarray) -> None:
    """Refuses columns of a row that do not ascend."""
    ascends = columns[1:] > columns[:-1]
    # The first column of a row may be smaller than the last one of the row before.
    is_inner = (offsets > 0) & (offsets < len(columns))
    ascends[offsets[is_inner] - 1] = True
    if not ascends.all():
        place = np.argmin(ascends)
        before, after = columns[place], columns[place + 1]
        raise ValueError(
            f'column_indices has {before} before {after} in one row; columns of a row must ascend, each once'
        )
