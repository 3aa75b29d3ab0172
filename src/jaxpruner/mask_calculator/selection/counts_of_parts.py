"""How one device counts: a pass over arrays or parts of them, in a view that threads can share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.mask_calculator.selection.scores import Scores, read

# An array of fewer scores is read by one thread, in one piece.
_WORTH_SHARING = 2**17
_SHARES = 64

# (array, function that finds ends in flat order in it, bounds of its rows) -> a predicate for each column of counts
Predicates = Callable[
    [jax.Array, Callable[[jax.Array], list], Sequence[jax.Array]], list[jax.Array]
]
# For each axis but that of rows: where ends lie in a part, and whether they are not before it.
Coordinates = list[tuple[jax.Array, jax.Array]]


def count_all(
    predicates: Predicates,
    counter: jnp.dtype,
    arrays: Sequence[jax.Array | Scores],
    bounds: Sequence[Sequence[jax.Array]],
    may_split: bool = True,
) -> jax.Array:
    """Counts of whole arrays.

    Args:
      predicates: what is counted.
      counter: unsigned dtype that holds the counts.
      arrays: floats `[rows, …]`, or `Scores`.
      bounds: for each array what its predicates compare with.
      may_split: whether an axis may be viewed in shares.

    Returns:
      Counts `[all rows, columns]`.

    >>> def positive(array, place, bounds):
    ...     return [array > 0]
    >>> count_all(positive, jnp.uint32, [jnp.array([[1.0, -1.0, 2.0]])], [()])
    Array([[2]], dtype=uint32)
    """
    # What does not change from turn to turn of a loop would be moved out of it and written down: wider copies of 16-bit
    # scores. Behind a barrier everything seems to change.
    arrays, bounds = lax.optimization_barrier((tuple(arrays), tuple(bounds)))
    parts = [
        count_part(predicates, counter, array, bound, (0,) * array.ndim, array.shape, may_split)
        for array, bound in zip(arrays, bounds, strict=True)
    ]
    # Put together once: a table of each array would be one more program for each.
    return jnp.stack([jnp.concatenate(column) for column in zip(*parts, strict=True)], 1)


def reaching(
    array: jax.Array, place: Callable[[jax.Array], list], bounds: Sequence[jax.Array]
) -> list[jax.Array]:
    """Which scores reach each threshold of their row; the predicates of a count.

    Args:
      array: floats `[rows, …]`.
      place: is not needed.
      bounds: thresholds `[rows, columns]`, alone.

    >>> reaching(jnp.array([[1.0, 2.0]]), lambda ends: [], [jnp.array([[2.0]])])
    [Array([[False,  True]], dtype=bool)]
    """
    del place
    (thresholds,) = bounds
    return [
        array >= of_rows(thresholds, column, array.ndim) for column in range(thresholds.shape[1])
    ]


def count_part(
    predicates: Predicates,
    counter: jnp.dtype,
    part: jax.Array | Scores,
    bounds: Sequence[jax.Array],
    origin: Sequence[Any],
    whole: Sequence[int],
    may_split: bool,
) -> list[jax.Array]:
    """Counts of a part of an array.

    Args:
      predicates: what is counted.
      counter: unsigned dtype that holds the counts.
      part: floats `[rows, …]`, or `Scores`.
      bounds: of its rows.
      origin: where it begins in the whole array.
      whole: the shape of the whole array.
      may_split: whether an axis may be viewed in shares.

    Returns:
      The columns of counts, each of them `[rows]`.

    >>> def positive(array, place, bounds):
    ...     return [array > 0]
    >>> count_part(positive, jnp.uint32, jnp.array([[1.0, 2.0]]), (), (0, 2), (1, 4), may_split=True)
    [Array([2], dtype=uint32)]
    """
    view, kept, split = _in_shares(part.shape) if may_split else (part.shape, 1, None)

    def place(ends: jax.Array) -> Coordinates:
        found = coordinates(ends, whole, origin)
        if split is not None:
            end, reached = found[split - 1]
            length = jnp.array(view[split + 1], end.dtype)
            found[split - 1 : split] = [
                (end // length, reached),
                (end % length, jnp.ones_like(reached)),
            ]
        return found

    columns = predicates(read(jax.tree.map(lambda own: own.reshape(view), part)), place, bounds)
    counts = sum_together(columns, tuple(range(kept, len(view))), counter)
    return list(sum_small(jnp.stack(counts), kept - 1)) if kept > 1 else counts


def count_true(flags: jax.Array, axes: tuple[int, ...], counter: Any) -> jax.Array:
    """How many of some flags are set.

    Args:
      flags: booleans of any shape.
      axes: over which they are counted.
      counter: unsigned dtype that holds the counts.

    >>> count_true(jnp.array([[True, False], [True, True]]), (1,), jnp.uint32).tolist()
    [1, 2]
    """
    size = math.prod(flags.shape[axis] for axis in axes)
    if not axes or jax.device_count() > 1:
        return jnp.sum(flags, axes, dtype=counter)
    # A lone sum is of numbers that are written down first, four bytes for each flag: both of two are used, which agree.
    set_flags, others = sum_together([flags, ~flags], axes, counter)
    return jnp.minimum(set_flags, jnp.array(size, counter) - others)


def sum_together(
    predicates: Sequence[jax.Array], axes: tuple[int, ...], counter: Any
) -> list[jax.Array]:
    """Sums of several predicates in one pass.

    Args:
      predicates: at least two different ones, booleans of one shape.
      axes: over which each is summed.
      counter: dtype of the sums.

    >>> x = jnp.arange(4)
    >>> [int(count) for count in sum_together([x > 0, x > 2], (0,), jnp.uint32)]
    [3, 1]
    """
    return reduce_together(
        [predicate.astype(counter) for predicate in predicates], 0, lax.add, axes
    )


def reduce_together(
    operands: Sequence[jax.Array],
    initial: Any,
    combine: Callable[..., jax.Array],
    axes: tuple[int, ...],
) -> list[jax.Array]:
    """Reduces several arrays in one pass: what a lone reduction reads is written down first on the CPU.

    Args:
      operands: at least two different arrays of one shape and dtype.
      initial: the number that `combine` leaves as it is.
      combine: of two scalars.
      axes: over which each is reduced.

    >>> x = jnp.arange(4)
    >>> [int(largest) for largest in reduce_together([x, -x], -9, jax.lax.max, (0,))]
    [3, 0]
    """
    start = jnp.array(initial, operands[0].dtype)
    return list(
        lax.reduce(
            tuple(operands),
            (start,) * len(operands),
            lambda *pairs: tuple(map(combine, *pairs)),
            axes,
        )
    )


def sum_small(table: jax.Array, axes: int = 1) -> jax.Array:
    """Sums over the last axes of what is so small that it may be written down first.

    On the CPU XLA takes memory for the arguments and results of each scalar function that reduces something, whenever
    it calls a program, and also where that does not get there. A product with ones has no such function.

    Args:
      table: numbers of any shape.
      axes: how many axes are summed over.

    >>> sum_small(jnp.array([[1, 2], [3, 4]], jnp.uint32)).tolist()
    [3, 7]
    """
    if jax.default_backend() != 'cpu':
        return jnp.sum(table, tuple(range(-axes, 0)), dtype=table.dtype)
    # The precision that users set for products is of floats: whole numbers would be refused.
    return jnp.tensordot(
        table, jnp.ones(table.shape[-axes:], table.dtype), axes, precision=lax.Precision.DEFAULT
    )


def coordinates(ends: jax.Array, whole: Sequence[int], origin: Sequence[Any]) -> Coordinates:
    """Where ends in the flat order of the rows of a whole array lie in a part of it.

    Args:
      ends: unsigned `[rows, columns]`.
      whole: shape `[rows, …]`.
      origin: where the part begins.

    >>> (row, _), (column, _) = coordinates(jnp.array([[5]], jnp.uint32), (1, 2, 3), (0, 0, 0))
    >>> int(row[0, 0]), int(column[0, 0])
    (1, 2)
    """
    found, rest = [], ends
    for axis in range(1, len(whole)):
        stride = jnp.array(math.prod(whole[axis + 1 :]), ends.dtype)
        coordinate, rest = rest // stride, rest % stride
        begin = jnp.asarray(origin[axis]).astype(ends.dtype)
        found.append((coordinate - begin, coordinate >= begin))
    return found


def before(found: Coordinates, shape: Sequence[int], column: int) -> jax.Array:
    """Which scores of a part stand before the ends of a column.

    It is told axis by axis: an index would be one more array to write down.

    Args:
      found: as `coordinates` returns it.
      shape: of the part, `[rows, …]`.
      column: which ends.

    Returns:
      Booleans of the shape.

    >>> ends = coordinates(jnp.array([[4]], jnp.uint32), (1, 2, 3), (0, 0, 0))
    >>> before(ends, (1, 2, 3), 0).astype(int)
    Array([[[1, 1, 1],
            [1, 0, 0]]], dtype=int32)
    """
    earlier, level = False, True  # whether the axes so far stand before the end, or at it
    for axis in range(1, len(shape) - 1):
        end, reached, here = _along(found, shape, axis, column)
        earlier |= level & reached & (here < end)
        level &= reached & (here == end)
    end, reached, here = _along(found, shape, len(shape) - 1, column)
    # One comparison for each score: the rest has but the shape of the other axes.
    return here < jnp.where(earlier, end.dtype.type(shape[-1]), jnp.where(level & reached, end, 0))


def _along(
    found: Coordinates, shape: Sequence[int], axis: int, column: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The end of each row along an axis, whether it is not before the part, and the places along the axis."""
    end, reached = (of_rows(table, column, len(shape)) for table in found[axis - 1])
    own = [1] * len(shape)
    own[axis] = shape[axis]
    return end, reached, lax.broadcasted_iota(end.dtype, own, axis)


def of_rows(table: jax.Array, column: int, rank: int) -> jax.Array:
    """A column of a table `[rows, columns]`, to be compared with an array `[rows, …]` of some rank.

    >>> of_rows(jnp.eye(2), 1, 3).shape
    (2, 1, 1)
    """
    return table[:, column].reshape(-1, *(1,) * (rank - 1))


def _in_shares(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int | None]:
    """A shape to read an array by, how many of its first axes are counted apart, and which axis it splits, if any.

    There are enough parts to share among threads. None are joined, since what ends inside an axis reads slowly.
    """
    if math.prod(shape) < _WORTH_SHARING:
        return shape, 1, None
    shares = shape[0]
    for axis in range(1, len(shape)):
        if shares >= _SHARES:
            return shape, axis, None
        length = shape[axis]
        if shares * length > _SHARES:
            most = 2 * _SHARES // shares
            split = next(
                divisor for divisor in range(min(most, length), 0, -1) if length % divisor == 0
            )
            return (*shape[:axis], split, length // split, *shape[axis + 1 :]), axis + 1, axis
        shares *= length
    return shape, len(shape) - 1, None
