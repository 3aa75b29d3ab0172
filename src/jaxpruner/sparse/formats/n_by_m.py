"""N:M: of each M weights along an axis, N values and where in the M they stand.

    weights     0 a b 0 | c 0 0 d      along the axis, 2:4
    compressed    a b   |   c d        a group of fewer weights has no such format
    indices       1 2   |   0 3        at two bits each, the first in the highest bits of a byte

2:4 takes as many bytes as the format of one bit a weight, and hardware can execute it.

A leaf [..., length, trailing ...] is seen as groups [groups, M, trailing], and stored as [groups, trailing, N].
"""

import math

import numpy as np

from jaxpruner.sparse.formats import leaf_arrays
from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays

KEYS = ('compressed', 'indices', 'pattern')
_GROUP_LENGTHS = (2, 4, 8, 16)
_LONGEST_GROUP = 256


def plan(kept: Kept, itemsize: int) -> Plan | None:
    """Settles N, M and the axis of the fewest bytes; the last axis of several that are equal."""
    mask, best = kept.mask, None
    for axis in reversed(range(mask.ndim if kept.count else 0)):
        for m in _GROUP_LENGTHS:
            if mask.shape[axis] % m:
                break
            groups = _in_groups(mask, axis, m)
            counts = np.zeros((len(groups), groups.shape[2]), np.uint8)
            for position in range(m):  # NumPy is slow to sum along so short an axis
                counts += groups[:, position]
            n = int(counts.max())
            size = kept.count * itemsize + -(-kept.count * _width(m) // 8)
            if counts.min() == n and (best is None or size < best.bytes):
                best = Plan(size, (n, m, axis))
    return best


def pack(array: np.ndarray, mask: np.ndarray, settings: tuple[int, ...]) -> StoredArrays:
    """All groups have N weights."""
    n, m, axis = settings
    positions = np.flatnonzero(_in_groups(mask, axis, m).transpose(0, 2, 1))
    in_stored_order = _in_groups(array, axis, m).transpose(0, 2, 1).reshape(-1)
    shape = list(array.shape)
    shape[axis] //= m
    bits = np.unpackbits((positions % m).astype(np.uint8)[:, None], axis=1)
    return {
        'compressed': in_stored_order[positions].reshape(*shape, n),
        'indices': np.packbits(bits[:, 8 - _width(m) :]),
        'pattern': np.array(settings, np.int64),
    }


def check(arrays: StoredArrays) -> tuple[int, ...]:
    """Refuses positions at or above M, and those that are repeated in a group."""
    values, pattern = arrays['compressed'], arrays['pattern']
    leaf_arrays.check_array('pattern', pattern, axes=1)
    leaf_arrays.check_lengths('pattern', pattern, 3)
    n, m, axis = pattern.tolist()
    if not (0 < n <= m <= _LONGEST_GROUP and axis >= 0):
        raise ValueError(
            f'pattern is {[n, m, axis]}; it must be N, M and an axis, with 0 < N <= M <= {_LONGEST_GROUP}'
        )
    if axis >= values.ndim - 1 or values.shape[-1] != n:
        raise ValueError(
            f'compressed has shape {values.shape}, which is none for {n}:{m} along axis {axis}'
        )
    leaf_arrays.check_bits('indices', arrays['indices'], values.size * _width(m))
    leaf_arrays.check_groups('indices', _positions(arrays), m)
    shape = list(values.shape[:-1])
    shape[axis] *= m
    return tuple(shape)


def unpack(arrays: StoredArrays) -> np.ndarray:
    """Returns the leaf."""
    values, (n, m, axis) = arrays['compressed'], arrays['pattern'].tolist()
    indices = _positions(arrays)
    spread = np.zeros((len(indices), m), values.dtype)
    np.put_along_axis(spread, indices, values.reshape(-1, n), axis=1)
    shape = list(values.shape[:-1])
    shape[axis] *= m
    return spread.reshape(-1, math.prod(shape[axis + 1 :]), m).swapaxes(1, 2).reshape(shape)


def _in_groups(array: np.ndarray, axis: int, m: int) -> np.ndarray:
    """Returns a view [groups, M, trailing] of an array in flat order."""
    return array.reshape(-1, m, math.prod(array.shape[axis + 1 :]))


def _width(m: int) -> int:
    """The bits that positions below M take."""
    return max(m - 1, 1).bit_length()


def _positions(arrays: StoredArrays) -> np.ndarray:
    """The positions `[groups, N]` that are stored as bits."""
    count, (n, m, _) = arrays['compressed'].size, arrays['pattern'].tolist()
    width = _width(m)
    bits = np.zeros((count, 8), np.uint8)
    bits[:, 8 - width :] = np.unpackbits(arrays['indices'], count=count * width).reshape(-1, width)
    return np.packbits(bits).reshape(-1, n)
