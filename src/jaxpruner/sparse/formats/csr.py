"""CSR: for each row where its weights begin, for each weight its column. The smallest for few scattered weights.

An array of more than two axes is a matrix whose rows are all but its last axis.
"""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays


class CsrStorage:
    """The smallest format for scattered zeros, from about 94 % of them."""

    name = 'csr'
    values_key = 'compressed'
    keys = frozenset({'compressed', 'row_offsets', 'column_indices', 'shape'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the arrays, which fit every pattern with a row."""
        shape, kept = pattern.mask.shape, pattern.kept
        if not shape or not pattern.mask.size:
            return None
        columns = np.dtype('uint16' if shape[-1] <= 2**16 else 'uint32')
        offsets = np.dtype('int32' if kept < 2**31 else 'int64')
        arrays = {
            'compressed': ArraySpec((kept,), dtype),
            'row_offsets': ArraySpec((math.prod(shape[:-1]) + 1,), offsets),
            'column_indices': ArraySpec((kept,), columns),
            'shape': ArraySpec((len(shape),), np.dtype('int64')),
        }
        plan = Plan(self.name, arrays)
        return plan if plan.weight_bytes <= most_bytes else None

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
        """Returns the arrays; columns of a row ascend."""
        rows = mask.reshape(-1, mask.shape[-1])
        offsets = np.zeros(len(rows) + 1, plan.arrays['row_offsets'].dtype)
        np.cumsum(np.count_nonzero(rows, axis=1), out=offsets[1:])
        positions = np.flatnonzero(mask)
        columns = positions % mask.shape[-1]
        return {
            'compressed': array.reshape(-1)[positions],
            'row_offsets': offsets,
            'column_indices': columns.astype(plan.arrays['column_indices'].dtype),
            'shape': np.array(array.shape, np.int64),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape that is spelt out."""
        shape = array_checks.shape_from(arrays['shape'])
        if not shape or 0 in shape:
            raise ValueError(f'its shape is {shape}, which has no rows for CSR')
        return shape

    def check(self, arrays: StoredArrays) -> None:
        """Refuses row offsets that fall, and columns outside of a row or twice in it."""
        shape = self.shape(arrays)
        values, offsets, columns = (
            arrays[key] for key in ('compressed', 'row_offsets', 'column_indices')
        )
        array_checks.check_array('row_offsets', offsets, axes=1)
        array_checks.check_array('column_indices', columns, axes=1)
        array_checks.check_length('row_offsets', offsets, math.prod(shape[:-1]) + 1)
        array_checks.check_length('compressed', values, len(columns))
        if offsets[0] != 0 or offsets[-1] != len(columns):
            raise ValueError(
                f'row_offsets run from {offsets[0]} to {offsets[-1]}; they must run from 0 to {len(columns)}, the '
                'number of weights'
            )
        falls = np.flatnonzero(offsets[1:] < offsets[:-1])
        if falls.size:
            raise ValueError(f'row_offsets fall behind row {falls[0]}; they must never fall')
        array_checks.check_below('column_indices', columns, shape[-1])
        ascends = columns[1:] > columns[:-1]
        inner = offsets[(offsets > 0) & (offsets < len(columns))]
        ascends[inner - 1] = True  # a new row begins
        if not ascends.all():
            place = int(np.flatnonzero(~ascends)[0])
            raise ValueError(
                f'column_indices has {columns[place]} before {columns[place + 1]} in one row; columns of a row must '
                'ascend, each once'
            )

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        shape = self.shape(arrays)
        values, offsets, columns = (
            arrays[key] for key in ('compressed', 'row_offsets', 'column_indices')
        )
        leaf = np.zeros((math.prod(shape[:-1]), shape[-1]), values.dtype)
        rows = np.repeat(np.arange(len(leaf)), np.diff(offsets))
        leaf[rows, columns] = values
        return leaf.reshape(shape)
