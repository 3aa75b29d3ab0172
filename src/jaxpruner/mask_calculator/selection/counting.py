"""Counts on one device: one pass over an array, or a shard of it, in a view that threads can share.

Scores are `[rows, …]` here, and each row is counted for itself: a row is a layer of a stacked leaf, or the whole leaf.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection.scores import ScoresLike, read

# An array of fewer scores is read by one thread, in one piece.
_WORTH_SHARING = 2**17
_SHARES = 64


class AxisEnd(NamedTuple):
    """Where ends in flat order lie along one axis of a shard; each field is `[rows, columns]`."""

    index: jax.Array  # unsigned: counted from the beginning of the shard
    is_reached: jax.Array  # bool: does not lie before the shard


# From ends in flat order, `[rows, columns]`, to where they lie along each axis of a shard.
FindEnds = Callable[[jax.Array], list[AxisEnd]]
# (scores, function that finds ends in them, bounds of the rows) -> booleans for each column of counts
Predicates = Callable[[jax.Array, FindEnds, Sequence[jax.Array]], list[jax.Array]]


def reaching(
    scores: jax.Array,
    find_ends: FindEnds,
    bounds: Sequence[jax.Array],
) -> list[jax.Array]:
    """Tells which scores reach each threshold `[rows, columns]` of their row."""
    del find_ends
    (thresholds,) = bounds
    reached = []
    for column in range(thresholds.shape[1]):
        threshold = column_of(thresholds, column, scores.ndim)
        reached.append(scores >= threshold)
    return reached


def between_before(
    scores: jax.Array,
    find_ends: FindEnds,
    bounds: Sequence[jax.Array],
) -> list[jax.Array]:
    """Tells which scores reach the first threshold and not the second, and stand before each end."""
    thresholds, ends = bounds
    low = column_of(thresholds, 0, scores.ndim)
    high = column_of(thresholds, 1, scores.ndim)
    is_between = (scores >= low) & ~(scores >= high)
    axis_ends = find_ends(ends)
    counted = []
    for column in range(ends.shape[1]):
        is_before_end = before(axis_ends, scores.shape, column)
        counted.append(is_between & is_before_end)
    return counted


def count_array(
    predicates: Predicates,
    counter: jnp.dtype,
    array: ScoresLike,
    bounds: Sequence[jax.Array],
    may_split: bool = True,
) -> jax.Array:
    """Counts a whole array; returns `[rows, columns]`."""
    # Outside the loop of passes 16-bit scores would be materialised as wider copies.
    array, bounds = control.keep_in_loop((array, bounds))
    origin = (0,) * array.ndim
    shard = Shard(array, bounds, origin, array.shape)
    return count_shard(predicates, counter, shard, may_split)


@functools.partial(jax.jit, static_argnums=0)  # traced once for all rows of one size
def count_row(
    counter: jnp.dtype,
    row: ScoresLike,
    thresholds: jax.Array,
) -> jax.Array:
    """Counts how many scores of a row `[size]` reach each threshold `[1, columns]`; returns `[1, columns]`."""
    row, thresholds = control.keep_in_loop((row, thresholds))
    shares = 1
    if row.size >= _WORTH_SHARING:
        shares = _largest_divisor(row.size, 2 * _SHARES)
    is_shared = shares > 1
    scores = _viewed(row, (shares, -1) if is_shared else (-1,))
    reached = [scores >= threshold for threshold in thresholds[0]]
    last = scores.ndim - 1
    counts = sum_together(reached, (last,), counter)
    if is_shared:
        counts = sum_together(counts, (0,), counter)
    return jnp.stack(counts)[None]


def _viewed(scores: ScoresLike, shape: tuple[int, ...]) -> jax.Array:
    """Reads scores in another shape."""
    return read(jax.tree.map(lambda leaf: leaf.reshape(shape), scores))


class Shard(NamedTuple):
    """What a device holds of an array, or a whole array on one device."""

    scores: ScoresLike  # floats [rows, …]
    bounds: Sequence[jax.Array]  # of these rows
    origin: Sequence[Any]  # where the shard begins in the whole array
    whole_shape: Sequence[int]


def count_shard(
    predicates: Predicates,
    counter: jnp.dtype,
    shard: Shard,
    may_split: bool,
) -> jax.Array:
    """Counts a shard, an axis of which may be viewed in shares; returns `[rows, columns]`."""
    shape = shard.scores.shape
    view = _in_shares(shape) if may_split else _View(shape, counted_apart=1)

    def find_ends(ends: jax.Array) -> list[AxisEnd]:
        axis_ends = find_axis_ends(ends, shard.whole_shape, shard.origin)
        split = view.split_axis
        if split is None:
            return axis_ends
        in_two = _split_end(axis_ends[split - 1], view.shape[split + 1])
        return [*axis_ends[: split - 1], *in_two, *axis_ends[split:]]

    scores = _viewed(shard.scores, view.shape)
    columns = predicates(scores, find_ends, shard.bounds)
    shares = range(1, view.counted_apart)
    inside_shares = range(view.counted_apart, len(view.shape))
    counts = sum_together(columns, tuple(inside_shares), counter)
    if shares:
        counts = sum_together(counts, tuple(shares), counter)
    return jnp.stack(counts, 1)


def _split_end(end: AxisEnd, length: int) -> list[AxisEnd]:
    """Finds an end along the two axes into which its axis is split: shares, and a share of some length."""
    in_share = jnp.array(length, end.index.dtype)
    return [
        AxisEnd(end.index // in_share, end.is_reached),
        AxisEnd(end.index % in_share, jnp.ones_like(end.is_reached)),
    ]


class _View(NamedTuple):
    """Another shape for scores, whose first axes threads share."""

    shape: tuple[int, ...]
    counted_apart: int  # how many of the first axes are counted each by itself
    split_axis: int | None = None  # the axis of the scores that the view splits in two


def _in_shares(shape: tuple[int, ...]) -> _View:
    """Finds a view with enough shares. No axes are joined: a share that ends inside an axis reads slowly."""
    if math.prod(shape) < _WORTH_SHARING:
        return _View(shape, counted_apart=1)
    shares = shape[0]
    for axis in range(1, len(shape)):
        if shares >= _SHARES:
            return _View(shape, counted_apart=axis)
        length = shape[axis]
        if shares * length > _SHARES:
            split = _largest_divisor(length, 2 * _SHARES // shares)
            before_axis, after_axis = shape[:axis], shape[axis + 1 :]
            split_shape = *before_axis, split, length // split, *after_axis
            return _View(split_shape, counted_apart=axis + 1, split_axis=axis)
        shares *= length
    return _View(shape, counted_apart=len(shape) - 1)


def _largest_divisor(length: int, limit: int) -> int:
    divisor = min(limit, length)
    while length % divisor:
        divisor -= 1
    return divisor


def count_true(
    flags: jax.Array,
    axes: tuple[int, ...],
    counter: Any,
) -> jax.Array:
    """Counts the flags that are set.

    Args:
      flags: booleans of any shape.
      axes: over which they are counted.
      counter: unsigned dtype that holds the counts.

    >>> count_true(jnp.array([[True, False], [True, True]]), (1,), jnp.uint32).tolist()
    [1, 2]
    """
    if not axes or jax.device_count() > 1:
        return jnp.sum(flags, axes, dtype=counter)
    # XLA materialises what a lone sum reads, four bytes for each flag. So there are two sums, which agree.
    set_flags, others = sum_together([flags, ~flags], axes, counter)
    size = math.prod(flags.shape[axis] for axis in axes)
    return jnp.minimum(set_flags, jnp.array(size, counter) - others)


def sum_together(
    predicates: Sequence[jax.Array],
    axes: tuple[int, ...],
    counter: Any,
) -> list[jax.Array]:
    """Counts several booleans of one shape in one pass; at least two of them must differ."""
    operands = [predicate.astype(counter) for predicate in predicates]
    return reduce_together(operands, 0, lax.add, axes)


def reduce_together(
    operands: Sequence[jax.Array],
    initial: Any,
    combine: Callable[..., jax.Array],
    axes: tuple[int, ...],
) -> list[jax.Array]:
    """Reduces several arrays of one shape and dtype in one pass, from the neutral number of `combine`.

    At least two operands must differ: XLA materialises what a lone reduction reads on a CPU.
    """
    start = jnp.array(initial, operands[0].dtype)
    starts = (start,) * len(operands)

    def combine_all(first: tuple, second: tuple) -> tuple:
        return tuple(map(combine, first, second))

    return list(lax.reduce(tuple(operands), starts, combine_all, axes))


def find_axis_ends(
    ends: jax.Array,
    whole_shape: Sequence[int],
    origin: Sequence[Any],
) -> list[AxisEnd]:
    """Finds ends `[rows, columns]` in the flat order of the rows of a whole array in a shard of it, axis by axis."""
    axis_ends = []
    remainder = ends
    for axis in range(1, len(whole_shape)):
        stride = jnp.array(math.prod(whole_shape[axis + 1 :]), ends.dtype)
        index = remainder // stride
        remainder = remainder % stride
        begin = jnp.asarray(origin[axis]).astype(ends.dtype)
        axis_ends.append(AxisEnd(index - begin, index >= begin))
    return axis_ends


def before(
    axis_ends: list[AxisEnd],
    shape: Sequence[int],
    column: int,
) -> jax.Array:
    """Tells which scores of a shard `[rows, …]` stand before the ends of a column.

    It compares axis by axis. A flat index would be one more array to materialise.
    """
    # Along the axes so far, a score stands before the end, or at it.
    is_earlier, is_level = False, True
    last = len(shape) - 1
    for axis in range(1, last):
        end, index = _along(axis_ends, shape, axis, column)
        is_earlier |= is_level & end.is_reached & (index < end.index)
        is_level &= end.is_reached & (index == end.index)
    end, index = _along(axis_ends, shape, last, column)
    # One comparison for each score: all else has length 1 along the last axis.
    whole_axis = end.index.dtype.type(shape[last])
    up_to_end = jnp.where(is_level & end.is_reached, end.index, 0)
    return index < jnp.where(is_earlier, whole_axis, up_to_end)


def _along(
    axis_ends: list[AxisEnd],
    shape: Sequence[int],
    axis: int,
    column: int,
) -> tuple[AxisEnd, jax.Array]:
    """Finds the ends of a column along an axis, and the indices along it, as they compare with scores."""
    table = axis_ends[axis - 1]
    rank = len(shape)
    end = AxisEnd(
        column_of(table.index, column, rank),
        column_of(table.is_reached, column, rank),
    )
    lengths = [1] * rank
    lengths[axis] = shape[axis]
    index = lax.broadcasted_iota(end.index.dtype, lengths, axis)
    return end, index


def column_of(
    table: jax.Array,
    column: int,
    ndim: int,
) -> jax.Array:
    """Takes a column of a table `[rows, columns]`, to be compared with an array `[rows, …]` of `ndim` axes."""
    other_axes = (1,) * (ndim - 1)
    return table[:, column].reshape(-1, *other_axes)
