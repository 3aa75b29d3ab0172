"""N:M: of each M weights along an axis N values, and where in the M they stand.

    weights   0 a b 0 | 0 0 0 c        along the axis, 2:4
    compressed  a b | 0 c              a group of fewer weights stores zeros, too: the first that it has
    indices     1 2 | 0 3              at two bits each

2:4 takes as many bytes as one bit a weight, and hardware can execute it.
"""

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import Arrays, ArraySpec, Pattern, Plan
from jaxpruner.sparse.formats.number_bits import (
    bits_below,
    pack_numbers,
    packed_length,
    unpack_numbers,
)

_GROUP_LENGTHS = (2, 4, 8, 16)
_LONGEST_GROUP = 256
_SAMPLE = 1 << 16  # weights that are looked at first
_CHUNK = 1 << 21


class NByM:
    """The format of patterns such as 2:4, along any axis."""

    name = 'n_by_m'
    values_key = 'compressed'
    keys = frozenset({'compressed', 'indices', 'pattern'})

    def plan(self, pattern: Pattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the smallest of all axes and lengths of groups; the last axis of several that are equal."""
        plans = []
        for axis in reversed(range(pattern.mask.ndim)):
            for m in _GROUP_LENGTHS:
                if pattern.mask.size and pattern.mask.shape[axis] % m == 0:
                    plans.append(_plan_along(pattern, dtype, axis, m, most_bytes))
        found = [plan for plan in plans if plan is not None]
        return min(found, key=lambda plan: plan.weight_bytes, default=None)

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
        """Returns the arrays."""
        n, m, axis = plan.settings
        values = np.empty(plan.arrays['compressed'].shape, array.dtype)
        indices = np.empty(values.shape, np.uint8)
        groups = _in_groups(array, axis, m)
        stored = _filled(_in_groups(mask, axis, m), n)
        values.reshape(-1)[:] = groups[stored]
        indices.reshape(-1)[:] = _positions_in_groups(stored)
        return {
            'compressed': values,
            'indices': pack_numbers(indices.reshape(-1), bits_below(m)),
            'pattern': np.array(plan.settings, np.int64),
        }

    def shape(self, arrays: Arrays) -> tuple[int, ...]:
        """Returns the shape that N, M and the stored values have together."""
        n, m, axis = _settings(arrays)
        stored_shape = arrays['compressed'].shape
        if len(stored_shape) < 2 or stored_shape[-1] != n or axis >= len(stored_shape) - 1:
            raise ValueError(
                f'compressed has shape {stored_shape}, which is none for {n}:{m} along axis {axis}'
            )
        shape = list(stored_shape[:-2])
        shape.insert(axis, stored_shape[-2] * m)
        array_checks.check_shape(shape)
        return tuple(shape)

    def check(self, arrays: Arrays) -> None:
        """Refuses positions at or above M, and such as stand twice in a group."""
        self.shape(arrays)
        n, m, _ = _settings(arrays)
        packed, count = arrays['indices'], arrays['compressed'].size
        array_checks.check_array('indices', packed, axes=1)
        if packed.dtype != np.uint8:
            raise ValueError(f'indices has dtype {packed.dtype}; it must have uint8')
        width = bits_below(m)
        array_checks.check_length('indices', packed, packed_length(count, width))
        array_checks.check_padding('indices', packed, count * width)
        indices = unpack_numbers(packed, width, count).reshape(-1, n)
        array_checks.check_below('indices', indices, m)
        if (indices[:, 1:] <= indices[:, :-1]).any():
            raise ValueError(
                'indices of a group do not ascend; they must ascend, each once in a group'
            )

    def unpack(self, arrays: Arrays) -> np.ndarray:
        """Returns the leaf."""
        n, m, axis = _settings(arrays)
        values = arrays['compressed']
        leaf = np.zeros(self.shape(arrays), values.dtype)
        indices = unpack_numbers(arrays['indices'], bits_below(m), values.size)
        groups = np.zeros((*values.shape[:-1], m), values.dtype)
        rows = groups.reshape(-1, m)
        step = max(_CHUNK // m, 1)
        by_group, values_by_group = indices.reshape(-1, n), values.reshape(-1, n)
        for start in range(0, len(rows), step):
            chunk = slice(start, start + step)
            np.put_along_axis(
                rows[chunk], by_group[chunk].astype(np.int64), values_by_group[chunk], 1
            )
        np.moveaxis(leaf, axis, -1)[...] = groups.reshape(*values.shape[:-2], -1)
        return leaf


def _plan_along(
    pattern: Pattern, dtype: np.dtype, axis: int, m: int, most_bytes: int
) -> Plan | None:
    groups = _in_groups(pattern.mask, axis, m)
    width = bits_below(m)

    def plan_for(n: int) -> Plan:
        stored = (*groups.shape[:-1], n)
        count = pattern.mask.size // m * n
        arrays = {
            'compressed': ArraySpec(stored, dtype),
            'indices': ArraySpec((packed_length(count, width),), np.dtype('uint8')),
            'pattern': ArraySpec((3,), np.dtype('int64')),
        }
        return Plan(NByM.name, arrays, (n, m, axis))

    # A sample shows nearly always that a group is too full, and a part is looked at before all.
    n = 1
    for part in _parts(groups):
        n = max(n, int(_counts(part).max(initial=0)))
        if n == m or plan_for(n).weight_bytes > most_bytes:
            return None
    is_exact = n * (pattern.mask.size // m) == pattern.kept
    return plan_for(n) if is_exact or not pattern.is_given else None


def _parts(groups: np.ndarray) -> list[np.ndarray]:
    """Cuts an array along its longest axis but the last: a small part first."""
    axis = int(np.argmax(groups.shape[:-1]))
    along = np.moveaxis(groups, axis, 0)
    row_size = max(along[0].size, 1)
    ends = [max(_SAMPLE // row_size, 1)]
    while ends[-1] < len(along):
        ends.append(ends[-1] + max(_CHUNK // row_size, 1))
    starts = [0, *ends[:-1]]
    return [along[start:end] for start, end in zip(starts, ends, strict=True)]


def _in_groups(array: np.ndarray, axis: int, m: int) -> np.ndarray:
    """Returns a view or copy whose last two axes are groups of M along an axis."""
    moved = np.moveaxis(array, axis, -1)
    return moved.reshape(*moved.shape[:-1], -1, m)


def _counts(groups: np.ndarray) -> np.ndarray:
    """Counts what is set in each group; NumPy sums along so short an axis slowly."""
    counts = np.zeros(groups.shape[:-1], np.uint8)
    for position in range(groups.shape[-1]):
        counts += groups[..., position]
    return counts


def _filled(groups: np.ndarray, n: int) -> np.ndarray:
    """Returns the mask of what is stored: the kept weights, and the first others of groups that have fewer than N."""
    lacking = n - _counts(groups).astype(np.int16)
    if not lacking.any():
        return groups
    stored = groups.copy()
    for position in range(groups.shape[-1]):
        fills = ~stored[..., position] & (lacking > 0)
        stored[..., position] |= fills
        lacking -= fills
    return stored


def _positions_in_groups(stored: np.ndarray) -> np.ndarray:
    """Returns for each weight that is stored where in its group it stands."""
    m = stored.shape[-1]
    positions = np.broadcast_to(np.arange(m, dtype=np.uint8), stored.shape)
    return positions[stored]


def _settings(arrays: Arrays) -> tuple[int, int, int]:
    numbers = arrays['pattern']
    array_checks.check_array('pattern', numbers, axes=1)
    array_checks.check_length('pattern', numbers, 3)
    n, m, axis = numbers.tolist()
    if not (0 < n <= m <= _LONGEST_GROUP and axis >= 0):
        raise ValueError(
            f'pattern is {[n, m, axis]}; it must be N, M and an axis, with 0 < N <= M <= {_LONGEST_GROUP}'
        )
    return n, m, axis
