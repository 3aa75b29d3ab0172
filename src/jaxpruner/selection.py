"""Exact selection of the largest scores by counting, without sorting.

How many to keep goes in, a mask comes out. A bracket of two thresholds is narrowed by passes that count, for three
thresholds at once, how many scores reach them; thresholds are probed in the order-preserving integer image of the
floats, so that two bits are settled by a pass. Passes stop as soon as a threshold is met by exactly the wanted number.
Arrays are read in their own shape: nothing is reshaped or gathered, so that sharded scores stay where they are.

Order: NaN ranks lowest, -0.0 equals 0.0, of equal scores the one with the lower flat index is kept. Many arrays are
ranked as one, ties in the order of the arrays.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import control

# Thresholds in one pass. Three settle two bits at the memory's speed; more make a pass slower than they save passes.
_PROBES = 3
_COUNT = jnp.uint32
MAX_SIZE = 2**32 - 1
# Up to here a float32 holds every whole number.
_EXACT_IN_FLOAT32 = 2**24
_FIXED_POINT_BITS = 31


def number_to_keep(size: int, sparsity: jax.Array | float) -> jax.Array:
    """How many of `size` scores a sparsity keeps: `max(1, round(size * (1 - sparsity)))`.

    The product is rounded half to even, in float32 up to 2^24 scores (as JaxPruner does) and in whole numbers above,
    where float32 would miss the count.

    Args:
      size: number of scores, below 2^32.
      sparsity: share to remove, a scalar in [0, 1]; taken as float32.

    Returns:
      uint32 scalar.

    >>> [int(number_to_keep(10, sparsity)) for sparsity in (0.0, 0.25, 1.0)]
    [10, 8, 1]
    """
    sparsity = jnp.asarray(sparsity, jnp.float32)
    if size <= _EXACT_IN_FLOAT32:
        kept = jnp.round(size * (1 - sparsity)).astype(_COUNT)
    else:
        removed_share = _fixed_point(sparsity)
        kept = _multiply_round(_COUNT(size), _COUNT(1 << _FIXED_POINT_BITS) - removed_share)
    return jnp.maximum(kept, _COUNT(min(size, 1)))


def share_of(count: jax.Array, share: jax.Array | float) -> jax.Array:
    """`round(count * share)`, half to even: in float32 up to a count of 2^24, in whole numbers above.

    Args:
      count: uint32 scalar.
      share: scalar in [0, 1]; taken as float32.

    Returns:
      uint32 scalar.

    >>> int(share_of(jnp.uint32(192), 0.3))
    58
    """
    share = jnp.asarray(share, jnp.float32)
    small = jnp.round(count.astype(jnp.float32) * share).astype(_COUNT)
    return jnp.where(count <= _EXACT_IN_FLOAT32, small, _multiply_round(count, _fixed_point(share)))


def _fixed_point(share: jax.Array) -> jax.Array:
    """A share in [0, 1] as a whole number of 2^-31: exact for every float32 from 2^-7 up, else to 2^-32."""
    return jnp.round(share * float(1 << _FIXED_POINT_BITS)).astype(_COUNT)


def _multiply_round(count: jax.Array, share: jax.Array) -> jax.Array:
    """`round(count * share / 2^31)` half to even, the 64-bit product made of 16-bit halves."""
    low, high = (lambda x: x & 0xFFFF), (lambda x: x >> 16)
    cross_a, cross_b = high(count) * low(share), low(count) * high(share)
    lowest = low(count) * low(share)
    middle = high(lowest) + low(cross_a) + low(cross_b)
    upper = high(count) * high(share) + high(cross_a) + high(cross_b) + high(middle)
    lower = (low(middle) << 16) | low(lowest)
    whole = (upper << 1) | (lower >> _FIXED_POINT_BITS)
    rest, half = lower & _COUNT((1 << _FIXED_POINT_BITS) - 1), _COUNT(1 << (_FIXED_POINT_BITS - 1))
    round_up = (rest > half) | ((rest == half) & (whole % 2 == 1))
    return whole + round_up.astype(_COUNT)


def keep_largest(scores: jax.Array, count: jax.Array | int) -> jax.Array:
    """The mask of the `count` largest scores.

    Args:
      scores: float array of any shape, below 2^32 elements.
      count: uint32 scalar; 0 keeps nothing, the size or more keeps everything, NaN included. Otherwise NaN is never
        kept, even if fewer than `count` remain.

    Returns:
      uint8 array of the scores' shape, 1 = kept.

    Raises:
      ValueError: the array is too large.

    >>> keep_largest(jnp.array([[3.0, 1.0], [2.0, 2.0]]), 2)
    Array([[1, 0],
           [1, 0]], dtype=uint8)
    """
    return keep_largest_jointly([scores], count)[0]


def keep_largest_jointly(
    scores: Sequence[jax.Array], count: jax.Array | int, divisors: Sequence[jax.Array] | None = None
) -> list[jax.Array]:
    """The masks of the `count` largest among the scores of many arrays, which are never put together.

    Args:
      scores: float arrays of any shapes, together below 2^32 elements; ranked in their common dtype.
      count: uint32 scalar, as in `keep_largest`.
      divisors: one scalar an array: the arrays are ranked by `scores / divisor`, of which no copy is kept.

    Returns:
      A uint8 array for each array of scores.

    Raises:
      ValueError: the arrays are too large together.

    >>> keep_largest_jointly([jnp.array([1.0, 4.0]), jnp.array([3.0])], 2)
    [Array([0, 1], dtype=uint8), Array([1], dtype=uint8)]
    """
    size = sum(array.size for array in scores)
    if size > MAX_SIZE:
        raise ValueError(
            f'{size} scores cannot be ranked together; at most {MAX_SIZE} can: split the leaf or rank per layer'
        )
    masks = [jnp.zeros(array.shape, jnp.uint8) for array in scores]
    filled = [i for i, array in enumerate(scores) if array.size]
    if not filled:
        return masks
    ranked = _ranked_arrays([scores[i] for i in filled], divisors and [divisors[i] for i in filled])
    count = jnp.asarray(count).astype(_COUNT)
    # A bracket of one point would do for "everything", but NaN reaches no threshold.
    everything = count >= size
    bracket = _narrow_to(ranked, count, size)
    for i, mask in zip(filled, _masks(ranked, bracket, count, everything), strict=True):
        masks[i] = mask.reshape(scores[i].shape)
    return masks


def _ranked_arrays(scores: Sequence[jax.Array], divisors: Sequence[jax.Array] | None) -> list[jax.Array]:
    dtype = jnp.result_type(*scores, *(divisors or ()))
    # Some floats of 8 bits have no infinity, which ends the search.
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize == 1:
        dtype = jnp.float32
    # Scalars become vectors: reductions need an axis.
    arrays = [jnp.atleast_1d(array).astype(dtype) for array in scores]
    return arrays if divisors is None else [array / scale for array, scale in zip(arrays, divisors, strict=True)]


class _Bracket(NamedTuple):
    """Thresholds as ordered integers, between which the count passes the wanted one."""

    low: jax.Array  # integer scalar: at least `count` scores reach this threshold
    high: jax.Array  # integer scalar: fewer do
    reach_low: jax.Array  # uint32 scalar: how many reach `low`
    reach_high: jax.Array  # uint32 scalar: how many reach `high`


class _Order(NamedTuple):
    """The order-preserving map between floats of one dtype and integers; -0.0 and 0.0 share an image."""

    dtype: jnp.dtype
    bits: jnp.dtype  # integers as wide as the float
    signed: jnp.dtype  # integers to compute in
    unsigned: jnp.dtype  # for distances, which may exceed the signed range

    @classmethod
    def of(cls, dtype: jnp.dtype) -> '_Order':
        width = jnp.dtype(dtype).itemsize
        wide = max(width, 4)
        return cls(
            jnp.dtype(dtype),
            *(jnp.dtype(f'{kind}{8 * n}') for kind, n in (('int', width), ('int', wide), ('uint', wide))),
        )

    def image(self, value: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(value, self.bits).astype(self.signed)
        return jnp.where(bits >= 0, bits, jnp.iinfo(self.bits).min - bits)

    def value(self, image: jax.Array) -> jax.Array:
        bits = jnp.where(image >= 0, image, jnp.iinfo(self.bits).min - image)
        return lax.bitcast_convert_type(bits.astype(self.bits), self.dtype)


def _narrow_to(ranked: list[jax.Array], count: jax.Array, size: int) -> _Bracket:
    order = _Order.of(ranked[0].dtype)
    top = order.image(jnp.array(jnp.inf, order.dtype))

    def narrowed(bracket: _Bracket, probes: list[jax.Array]) -> _Bracket:
        reach = _count_reaching(ranked, [order.value(probe) for probe in probes])
        low, high, reach_low, reach_high = bracket
        for probe, reaching in zip(probes, reach, strict=True):
            inside = (probe > low) & (probe < high)
            enough = inside & (reaching >= count)
            too_few = inside & (reaching < count)
            low, reach_low = jnp.where(enough, probe, low), jnp.where(enough, reaching, reach_low)
            high, reach_high = jnp.where(too_few, probe, high), jnp.where(too_few, reaching, reach_high)
        return _Bracket(low, high, reach_low, reach_high)

    def distance(bracket: _Bracket) -> jax.Array:
        return bracket.high.astype(order.unsigned) - bracket.low.astype(order.unsigned)

    def unsettled(bracket: _Bracket) -> jax.Array:
        return (bracket.reach_low != count) & (distance(bracket) > 1)

    def body(bracket: _Bracket) -> _Bracket:
        width = distance(bracket)
        part, rest = width // (_PROBES + 1), width % (_PROBES + 1)
        steps = [jnp.clip(part * i + rest * i // (_PROBES + 1), 1, width - 1) for i in range(1, _PROBES + 1)]
        return narrowed(bracket, [(bracket.low.astype(order.unsigned) + step).astype(order.signed) for step in steps])

    # The ends stand outside all numbers: below -inf (where NaN is counted, too) and above +inf.
    start = _Bracket(-top - 1, top + 1, _COUNT(size), _COUNT(0))
    # Removed weights score 0, so that the wanted threshold often is 0 or just above.
    # Behind a barrier: XLA takes `abs(x) >= 0` for true where it knows the 0, of NaN, too.
    zero = lax.optimization_barrier(jnp.zeros_like(top))
    bracket = narrowed(start, [-top, zero, zero + 1])
    bracket = bracket._replace(reach_low=jnp.where(bracket.low < -top, count, bracket.reach_low))
    bracket = lax.while_loop(unsettled, body, bracket)
    return bracket._replace(low=jnp.maximum(bracket.low, -top))


def _count_reaching(ranked: list[jax.Array], thresholds: list[jax.Array]) -> list[jax.Array]:
    """How many scores of all arrays reach each threshold; NaN reaches none."""
    totals = [_COUNT(0)] * len(thresholds)
    for array in ranked:
        counts = _count_along([array >= threshold for threshold in thresholds], tuple(range(1, array.ndim)) or (0,))
        totals = [total + jnp.sum(one, dtype=_COUNT) for total, one in zip(totals, counts, strict=True)]
    return totals


def _count_along(predicates: list[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    """Counts of several predicates in one pass: a lone sum of a predicate writes an array of integers on the CPU."""
    zeros = (_COUNT(0),) * len(predicates)

    def add(left, right):
        return tuple(a + b for a, b in zip(left, right, strict=True))

    return list(lax.reduce(tuple(predicate.astype(_COUNT) for predicate in predicates), zeros, add, axes))


def _masks(ranked: list[jax.Array], bracket: _Bracket, count: jax.Array, everything: jax.Array) -> list[jax.Array]:
    threshold = _Order.of(ranked[0].dtype).value(bracket.low)
    # Where the threshold is not met exactly, the bracket has closed and `reach_high` counts what is above it.
    whole = [(jnp.bool_(True), tuple(jnp.int32(length) for length in array.shape)) for array in ranked]
    cuts = control.run_once(
        bracket.reach_low > count,
        lambda _, arrays, at, wanted: _tie_cuts(arrays, at, wanted),
        whole,
        ranked,
        threshold,
        count - bracket.reach_high,
    )
    masks = []
    for array, (any_tie, cut) in zip(ranked, cuts, strict=True):
        kept = (array > threshold) | ((array == threshold) & _up_to(array.shape, cut, any_tie)) | everything
        masks.append(kept.astype(jnp.uint8))
    return masks


def _tie_cuts(
    ranked: list[jax.Array], threshold: jax.Array, wanted: jax.Array
) -> list[tuple[jax.Array, tuple[jax.Array, ...]]]:
    """For each array whether any tie is kept, and the index of the last one that is."""
    cuts = []
    for array in ranked:
        tie, index, rest, ties = array == threshold, [], wanted, wanted
        for axis in range(array.ndim):
            others = tuple(i for i in range(array.ndim) if i != axis)
            reach, above = _count_along([tie | (array > threshold), array > threshold], others)
            counts = jnp.cumsum(reach - above, dtype=_COUNT)
            if axis == 0:
                ties = counts[-1]
            here = jnp.sum(counts < rest, dtype=jnp.int32)
            rest = rest - jnp.where(here > 0, counts[jnp.maximum(here - 1, 0)], 0)
            tie &= lax.broadcasted_iota(jnp.int32, array.shape, axis) == here
            index.append(here)
        cuts.append((wanted > 0, tuple(index)))
        wanted = wanted - jnp.minimum(wanted, ties)
    return cuts


def _up_to(shape: tuple[int, ...], cut: tuple[jax.Array, ...], included: jax.Array) -> jax.Array:
    """Whether an index does not come after `cut` in flat order; `cut` itself if `included`."""
    upto = included
    for axis in reversed(range(len(shape))):
        index = lax.broadcasted_iota(jnp.int32, shape, axis)
        upto = (index < cut[axis]) | ((index == cut[axis]) & upto)
    return jnp.broadcast_to(upto, shape)
