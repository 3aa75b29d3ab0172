"""N:M: of each M weights along an axis, N values and where in the M they stand.

    weights     0 a b 0 | 0 0 0 c      along the axis, 2:4
    compressed    a b   |   0 c        a group of fewer weights also stores its first zeros
    indices       1 2   |   0 3        at two bits each

2:4 takes as many bytes as the format of one bit a weight, and hardware can execute it.

A leaf [..., length, trailing ...] is seen as [groups, M, trailing], and stored as [groups, trailing, N]. Neighbouring
groups are neighbours in both, so the work is done in chunks of groups.
"""

import math
from collections.abc import Iterator

import numpy as np

from jaxpruner.sparse.formats import array_checks
from jaxpruner.sparse.formats.base import ArraySpec, KeptPattern, Plan, StoredArrays
from jaxpruner.sparse.formats.gathering import CHUNK
from jaxpruner.sparse.formats.number_bits import (
    bits_below,
    pack_numbers,
    packed_length,
    unpack_numbers,
)

_GROUP_LENGTHS = (2, 4, 8, 16)
_LONGEST_GROUP = 256


class NByMStorage:
    """The format for patterns such as 2:4, along any axis."""

    name = 'n_by_m'
    values_key = 'compressed'
    keys = frozenset({'compressed', 'indices', 'pattern'})

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the smallest of all axes and lengths of groups; the last axis of several that are equal."""
        mask = pattern.mask
        if not mask.size:
            return None
        plans: list[Plan] = []
        for axis in reversed(range(mask.ndim)):
            for m in _GROUP_LENGTHS:
                if mask.shape[axis] % m:
                    continue
                plan = _plan_along(pattern, dtype, axis, m, most_bytes)
                if plan is not None:
                    plans.append(plan)
        return min(plans, key=lambda plan: plan.weight_bytes, default=None)

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the arrays."""
        n, m, axis = plan.settings
        values = np.empty(plan.arrays['compressed'].shape, array.dtype)
        indices = np.empty(values.size, np.uint8)
        flat_values = values.reshape(-1)
        weights = _in_groups(array, axis, m)
        kept = _in_groups(mask, axis, m)
        first = 0
        for chunk in _chunks(weights.shape):
            is_stored = _filled(kept[chunk], n)
            positions = np.flatnonzero(_in_stored_order(is_stored))
            flat_weights = _in_stored_order(weights[chunk])
            last = first + len(positions)
            flat_values[first:last] = flat_weights[positions]
            indices[first:last] = positions & (m - 1)  # M is a power of two here
            first = last
        return {
            'compressed': values,
            'indices': pack_numbers(indices, bits_below(m)),
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
        packed = arrays['indices']
        count = arrays['compressed'].size
        width = bits_below(m)
        array_checks.check_array('indices', packed, axes=1)
        array_checks.check_bits('indices', packed, count * width)
        indices = unpack_numbers(packed, width, count)
        by_group = indices.reshape(-1, n)
        array_checks.check_below('indices', by_group, m)
        array_checks.check_ascending('indices', by_group)

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf."""
        n, m, axis = _settings(arrays)
        values = arrays['compressed']
        leaf = np.empty(self.shape(arrays), values.dtype)
        groups = _in_groups(leaf, axis, m)
        indices = unpack_numbers(arrays['indices'], bits_below(m), values.size)
        number, _, trailing = groups.shape
        indices = indices.reshape(number, trailing, n)
        values = values.reshape(number, trailing, n)
        for chunk in _chunks(groups.shape):
            in_chunk = len(values[chunk])
            spread = np.zeros((in_chunk, trailing, m), values.dtype)
            firsts = np.arange(0, spread.size, m)
            firsts = firsts.reshape(in_chunk, trailing, 1)
            places = firsts + indices[chunk]
            flat = spread.reshape(-1)
            flat[places] = values[chunk]
            groups[chunk] = spread.transpose(0, 2, 1)
        return leaf


def _plan_along(
    pattern: KeptPattern, dtype: np.dtype, axis: int, m: int, most_bytes: int
) -> Plan | None:
    mask = pattern.mask
    stored_shape = list(mask.shape)
    stored_shape[axis] //= m
    number_of_groups = mask.size // m
    width = bits_below(m)

    def plan_for(n: int) -> Plan:
        bytes_of_indices = packed_length(number_of_groups * n, width)
        arrays = {
            'compressed': ArraySpec((*stored_shape, n), dtype),
            'indices': ArraySpec((bytes_of_indices,), np.dtype('uint8')),
            'pattern': ArraySpec((3,), np.dtype('int64')),
        }
        return Plan(NByMStorage.name, arrays, (n, m, axis))

    n = 1
    groups = _in_groups(mask, axis, m)
    # The first chunk nearly always shows if groups are too full.
    for chunk in _chunks(groups.shape):
        counts = _counts(groups[chunk])
        n = max(n, int(counts.max(initial=0)))
        if n == m or plan_for(n).weight_bytes > most_bytes:
            return None
    is_exact = n * number_of_groups == pattern.kept
    return plan_for(n) if is_exact or not pattern.is_given else None


def _in_groups(array: np.ndarray, axis: int, m: int) -> np.ndarray:
    """Returns a view [groups, M, trailing] of an array in flat order."""
    trailing = math.prod(array.shape[axis + 1 :])
    if not array.size:  # NumPy cannot infer the number of groups
        return np.empty((0, m, trailing), array.dtype)
    return array.reshape(-1, m, trailing)


def _in_stored_order(groups: np.ndarray) -> np.ndarray:
    """Flattens groups [groups, M, trailing] in the order [groups, trailing, M]."""
    return groups.transpose(0, 2, 1).reshape(-1)


def _chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yields runs of groups that stay in the processor's cache."""
    groups, m, trailing = shape
    size = max(m * trailing, 1)
    step = max(CHUNK // size, 1)
    for start in range(0, groups, step):
        yield slice(start, start + step)


def _counts(groups: np.ndarray) -> np.ndarray:
    """Counts the flags that are set in each group; NumPy is slow to sum along so short an axis."""
    number, m, trailing = groups.shape
    counts = np.zeros((number, trailing), np.uint8)
    for position in range(m):
        counts += groups[:, position]
    return counts


def _filled(groups: np.ndarray, n: int) -> np.ndarray:
    """Returns the mask of what is stored: the kept weights, and in groups of fewer than N the first others, too."""
    counts = _counts(groups)
    lacking = n - counts.astype(np.int16)
    if not lacking.any():
        return groups
    stored = groups.copy()
    _, m, _ = groups.shape
    for position in range(m):
        is_stored = stored[:, position]
        fills = ~is_stored & (lacking > 0)
        is_stored |= fills
        lacking -= fills
    return stored


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
