"""N:M: of each M weights along an axis, N values and where in the M they stand.

    weights     0 a b 0 | 0 0 0 c      along the axis, 2:4
    compressed    a b   |   0 c        a group of fewer weights also stores its first zeros
    indices       1 2   |   0 3        at two bits each, the first in the highest bits of a byte

2:4 takes as many bytes as the format of one bit a weight, and hardware can execute it.

A leaf [..., length, trailing ...] is seen as groups [groups, M, trailing], and stored as [groups, trailing, N].
"""

import math

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays

_GROUP_LENGTHS = (2, 4, 8, 16)
_LONGEST_GROUP = 256
_FIRST_WEIGHTS = 1 << 17  # these nearly always show if groups are too full


class NByMStorage:
    """The format for patterns such as 2:4, along any axis."""

    name = 'n_by_m'
    values_key = 'compressed'
    keys = frozenset({'compressed', 'indices', 'pattern'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the smallest of all axes and lengths of groups; the last axis of several that are equal."""
        mask = pattern.mask
        plans: list[Plan] = []
        for axis in reversed(range(mask.ndim if mask.size else 0)):
            for m in _GROUP_LENGTHS:
                if mask.shape[axis] % m == 0:
                    plan = self._plan_along(pattern, dtype, axis, m, most_bytes)
                    plans += [] if plan is None else [plan]
        return min(plans, key=lambda plan: plan.weight_bytes, default=None)

    def _plan_along(
        self, pattern: KeptPattern, dtype: np.dtype, axis: int, m: int, most_bytes: int
    ) -> Plan | None:
        mask = pattern.mask
        groups = _in_groups(mask, axis, m)
        first = -(-_FIRST_WEIGHTS // groups[0].size)
        for part in (groups[:first], groups):
            n = max(1, int(_counts(part).max()))
            if n == m:
                return None
            shape = list(mask.shape)
            shape[axis] //= m
            stored = math.prod(shape) * n
            arrays = {
                'compressed': ArraySpec((*shape, n), dtype),
                'indices': ArraySpec((-(-stored * _width(m) // 8),), np.dtype('uint8')),
                'pattern': ArraySpec((3,), np.dtype('int64')),
            }
            plan = Plan(self.name, arrays, (n, m, axis)).within(most_bytes)
            if plan is None:
                return None
        return None if pattern.is_given and stored != pattern.kept else plan

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays."""
        n, m, axis = plan.settings
        is_stored = _in_groups(mask, axis, m).copy()
        lacking = n - _counts(is_stored).astype(np.int16)
        for position in range(m if lacking.any() else 0):
            fills = ~is_stored[:, position] & (lacking > 0)
            is_stored[:, position] |= fills
            lacking -= fills
        positions = np.flatnonzero(is_stored.transpose(0, 2, 1))
        in_stored_order = _in_groups(array, axis, m).transpose(0, 2, 1).reshape(-1)
        return {
            'compressed': in_stored_order[positions].reshape(plan.arrays['compressed'].shape),
            'indices': _pack_numbers(positions % m, _width(m)),
            'pattern': np.array(plan.settings, np.int64),
        }

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the shape of the leaf, by N, M and the stored values."""
        n, m, axis = _settings(arrays)
        values = arrays['compressed']
        *shape, stored_n = values.shape or (0,)
        if axis >= len(shape) or stored_n != n:
            raise ValueError(
                f'compressed has shape {values.shape}, which is none for {n}:{m} along axis {axis}'
            )
        shape[axis] *= m
        array_checks.check_shape(shape)
        return tuple(shape)

    def check(self, arrays: StoredArrays) -> None:
        """Refuses positions at or above M, and those that are repeated in a group."""
        self.shape(arrays)
        n, m, _ = _settings(arrays)
        packed, count = arrays['indices'], arrays['compressed'].size
        array_checks.check_array('indices', packed, axes=1)
        array_checks.check_bits('indices', packed, count * _width(m))
        by_group = _unpack_numbers(packed, _width(m), count).reshape(-1, n)
        array_checks.check_below('indices', by_group, m)
        array_checks.check_ascending('indices', by_group)

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        n, m, axis = _settings(arrays)
        shape, values = self.shape(arrays), arrays['compressed']
        indices = _unpack_numbers(arrays['indices'], _width(m), values.size).reshape(-1, n)
        spread = np.zeros((len(indices), m), values.dtype)
        np.put_along_axis(spread, indices, values.reshape(-1, n), axis=1)
        trailing = math.prod(shape[axis + 1 :])
        return spread.reshape(-1, trailing, m).swapaxes(1, 2).reshape(shape)


def _in_groups(array: np.ndarray, axis: int, m: int) -> np.ndarray:
    """Returns a view [groups, M, trailing] of an array in flat order."""
    return array.reshape(-1, m, math.prod(array.shape[axis + 1 :]))


def _counts(groups: np.ndarray) -> np.ndarray:
    """Counts the flags that are set in each group; NumPy is slow to sum along so short an axis."""
    counts = np.zeros((len(groups), groups.shape[2]), np.uint8)
    for position in range(groups.shape[1]):
        counts += groups[:, position]
    return counts


def _settings(arrays: StoredArrays) -> tuple[int, int, int]:
    numbers = arrays['pattern']
    array_checks.check_array('pattern', numbers, axes=1)
    array_checks.check_length('pattern', numbers, 3)
    n, m, axis = numbers.tolist()
    if not (0 < n <= m <= _LONGEST_GROUP and axis >= 0):
        raise ValueError(
            f'pattern is {[n, m, axis]}; it must be N, M and an axis, with 0 < N <= M <= {_LONGEST_GROUP}'
        )
    return n, m, axis


def _width(m: int) -> int:
    """The bits that positions below M take."""
    return max(m - 1, 1).bit_length()


def _pack_numbers(numbers: np.ndarray, width: int) -> np.ndarray:
    """Packs whole numbers below 2^width into bytes, the first in the highest bits.

    >>> _pack_numbers(np.array([1, 0, 3, 2]), 2)
    array([78], dtype=uint8)
    """
    bits = np.unpackbits(numbers.astype(np.uint8)[:, None], axis=1)
    return np.packbits(bits[:, 8 - width :])


def _unpack_numbers(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """Returns the numbers of which `_pack_numbers` made these bytes."""
    bits = np.zeros((count, 8), np.uint8)
    bits[:, 8 - width :] = np.unpackbits(packed, count=count * width).reshape(count, width)
    return np.packbits(bits)
