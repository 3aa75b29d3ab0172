"""CSR: where the weights of each row begin, and the column of each weight. The smallest for few scattered weights.

An array of more than two axes is seen as a matrix: all axes but the last make its rows.
"""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays, shape_spec


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
        width = mask.shape[-1]
        column_dtype = 'uint16' if width <= 2**16 else 'uint32'
        offset_dtype = 'int32' if kept < 2**31 else 'int64'
        arrays = {
            'compressed': ArraySpec((kept,), dtype),
            'row_offsets': ArraySpec((mask.size // width + 1,), np.dtype(offset_dtype)),
            'column_indices': ArraySpec((kept,), np.dtype(column_dtype)),
            'shape': shape_spec(mask),
        }
        return Plan(self.name, arrays).within(most_bytes)

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays; columns of a row ascend."""
        width = mask.shape[-1]
        offsets = np.zeros(*plan.arrays['row_offsets'])
        np.cumsum(np.count_nonzero(mask.reshape(-1, width), axis=1), out=offsets[1:])
        positions = np.flatnonzero(mask)
        column_dtype = plan.arrays['column_indices'].dtype
        return {
            'compressed': array.reshape(-1)[positions],
            'row_offsets': offsets,
            'column_indices': (positions % width).astype(column_dtype),
            'shape': np.array(array.shape, np.int64),
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
        offsets, columns = arrays['row_offsets'], arrays['column_indices']
        array_checks.check_array('row_offsets', offsets, axes=1)
        array_checks.check_array('column_indices', columns, axes=1)
        array_checks.check_length('row_offsets', offsets, math.prod(leading) + 1)
        array_checks.check_length('compressed', arrays['compressed'], len(columns))
        if offsets[0] != 0 or offsets[-1] != len(columns):
            raise ValueError(
                f'row_offsets run from {offsets[0]} to {offsets[-1]}; they must run from 0 to {len(columns)}, the '
                'number of weights'
            )
        falls = np.flatnonzero(offsets[1:] < offsets[:-1])
        if falls.size:
            raise ValueError(f'row_offsets fall behind row {falls[0]}; they must never fall')
        array_checks.check_below('column_indices', columns, width)
        ascends = columns[1:] > columns[:-1]
        # The first column of a row may be smaller than the last one of the row before.
        is_inner = (offsets > 0) & (offsets < len(columns))
        ascends[offsets[is_inner] - 1] = True
        if not ascends.all():
            before, after = columns[np.argmin(ascends) :][:2]
            raise ValueError(
                f'column_indices has {before} before {after} in one row; columns of a row must ascend, each once'
            )

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        *leading, width = shape = self.shape(arrays)
        values = arrays['compressed']
        matrix = np.zeros((math.prod(leading), width), values.dtype)
        rows = np.repeat(np.arange(len(matrix)), np.diff(arrays['row_offsets']))
        matrix[rows, arrays['column_indices']] = values
        return matrix.reshape(shape)
