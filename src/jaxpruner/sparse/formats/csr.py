"""CSR: where the weights of each row begin, and the column of each weight. The smallest for few scattered weights.

An array of more than two axes is seen as a matrix: all axes but the last make its rows.
"""

import math

import numpy as np

from jaxpruner.sparse.formats import leaf_arrays
from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays

KEYS = ('compressed', 'row_offsets', 'column_indices', 'shape')


def plan(kept: Kept, itemsize: int) -> Plan | None:
    """Every pattern with a row fits."""
    mask = kept.mask
    if not mask.ndim or not mask.size:
        return None
    width = mask.shape[-1]
    columns, offsets = leaf_arrays.index_dtype(width), _offset_dtype(kept.count)
    rows = mask.size // width
    return Plan(kept.count * (itemsize + columns.itemsize) + (rows + 1) * offsets.itemsize)


def _offset_dtype(kept: int) -> np.dtype:
    return np.dtype('int32' if kept < 2**31 else 'int64')


def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
    """Columns of a row ascend."""
    del settings
    width = mask.shape[-1]
    positions = np.flatnonzero(mask)
    kept_of_rows = np.count_nonzero(mask.reshape(-1, width), axis=1)
    return {
        'compressed': array.reshape(-1)[positions],
        'row_offsets': np.concatenate([[0], kept_of_rows.cumsum()]).astype(
            _offset_dtype(len(positions))
        ),
        'column_indices': (positions % width).astype(leaf_arrays.index_dtype(width)),
        'shape': np.array(array.shape, np.int64),
    }


def check(arrays: StoredArrays) -> tuple[int, ...]:
    """Refuses row offsets that fall, and columns that lie outside of a row or are repeated in it."""
    shape = leaf_arrays.shape_from(arrays['shape'])
    if not shape or 0 in shape:
        raise ValueError(f'its shape is {shape}, which has no rows for CSR')
    *leading, width = shape
    offsets, columns = arrays['row_offsets'], arrays['column_indices']
    leaf_arrays.check_array('row_offsets', offsets, axes=1)
    leaf_arrays.check_array('column_indices', columns, axes=1)
    leaf_arrays.check_lengths('row_offsets', offsets, math.prod(leading) + 1)
    leaf_arrays.check_lengths('compressed', arrays['compressed'], len(columns))
    if offsets[0] != 0 or offsets[-1] != len(columns):
        raise ValueError(
            f'row_offsets run from {offsets[0]} to {offsets[-1]}; they must run from 0 to {len(columns)}, the '
            'number of weights'
        )
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        raise ValueError(f'row_offsets fall behind row {falls[0]}; they must never fall')
    leaf_arrays.check_groups('column_indices', columns[:, None], width)
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    wrong = np.flatnonzero((rows[1:] == rows[:-1]) & (columns[1:] <= columns[:-1]))
    if wrong.size:
        before, after = columns[wrong[0] :][:2]
        raise ValueError(
            f'column_indices has {before} before {after} in one row; columns of a row must ascend, each once'
        )
    return shape


def unpack(arrays: StoredArrays) -> np.ndarray:
    """Returns the leaf."""
    *leading, width = shape = arrays['shape'].tolist()
    values = arrays['compressed']
    matrix = np.zeros((math.prod(leading), width), values.dtype)
    rows = np.repeat(np.arange(len(matrix)), np.diff(arrays['row_offsets']))
    matrix[rows, arrays['column_indices']] = values
    return matrix.reshape(shape)
