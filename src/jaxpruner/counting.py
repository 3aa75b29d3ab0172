"""Counts of scores, taken where the scores are.

A pass reads every array once, in its own shape, and counts for several bounds at a time. On one device the array may be
viewed in shares for threads. Where there are more devices, each counts its own part of an array and the sums are
made of these counts: scores are never sent, and no axis that they share is reshaped.

An array has a first axis of rows that are counted each for itself (of length 1 where there is one ranking). Only arrays
that lie on devices as parameters do are counted in parts: what was pooled or reshaped may be divided in ways that no
axis of the mesh names, which JAX cannot tell a partitioned function, and where each device has whole rows, there is
nothing to sum. Those XLA is left to divide.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

# An array of fewer scores is read by one thread, in one piece.
_WORTH_SHARING = 2**17
_SHARES = 64

# (array, function that finds ends in flat order in it, bounds of its rows) -> a predicate for each column of counts
Predicates = Callable[[jax.Array, Callable[[jax.Array], list], Sequence[jax.Array]], list[jax.Array]]


def count_reaching(
    arrays: Sequence[jax.Array],
    thresholds: Sequence[jax.Array],
    counter: jnp.dtype,
    apart: Sequence[bool] | None = None,
) -> jax.Array:
    """How many scores of each row reach each threshold; NaN reaches none.

    Args:
      arrays: floats `[rows, …]`.
      thresholds: for each array `[rows, columns]` of its dtype.
      counter: unsigned dtype that holds the counts.
      apart: for each array whether devices that share it count their own parts; none by default.

    Returns:
      Counts `[all rows, columns]`.

    >>> count_reaching([jnp.array([[1.0, 2.0, 3.0]])], [jnp.array([[2.0, 3.0]])], jnp.uint32)
    Array([[2, 1]], dtype=uint32)
    """
    return _counts(_reaching, arrays, [(bounds,) for bounds in thresholds], counter, apart)


def count_between_before(
    arrays: Sequence[jax.Array],
    low: Sequence[jax.Array],
    high: Sequence[jax.Array],
    ends: Sequence[jax.Array],
    counter: jnp.dtype,
    apart: Sequence[bool] | None = None,
) -> jax.Array:
    """How many scores of each row reach `low`, not `high`, and stand before each end in flat order.

    Args:
      arrays: floats `[rows, …]`.
      low: for each array `[rows, 1]` of its dtype.
      high: likewise.
      ends: for each array `[rows, columns]` of the counter's dtype.
      counter: unsigned dtype that holds the counts.
      apart: as in `count_reaching`.

    Returns:
      Counts `[all rows, columns]`.

    >>> low, high = jnp.array([[2.0]]), jnp.array([[3.0]])
    >>> ends = jnp.array([[1, 2]], jnp.uint32)
    >>> count_between_before([jnp.array([[2.0, 2.0, 3.0]])], [low], [high], [ends], jnp.uint32)
    Array([[1, 2]], dtype=uint32)
    """
    return _counts(_between_before, arrays, list(zip(low, high, ends, strict=True)), counter, apart)


def before(shape: Sequence[int], ends: jax.Array) -> jax.Array:
    """Which scores stand before an end in the flat order of their row.

    Args:
      shape: of the array, `[rows, …]`.
      ends: unsigned `[rows]`.

    Returns:
      Booleans of the array's shape.

    >>> before((1, 2, 3), jnp.array([4], jnp.uint32)).astype(int)
    Array([[[1, 1, 1],
            [1, 0, 0]]], dtype=int32)
    """
    return _before(_coordinates(ends[:, None], shape, (0,) * len(shape)), shape, 0)


def _reaching(array, place, bounds):
    del place
    (thresholds,) = bounds
    return [array >= _column(thresholds, column, array.ndim) for column in range(thresholds.shape[1])]


def _between_before(array, place, bounds):
    low, high, ends = bounds
    between = (array >= _column(low, 0, array.ndim)) & ~(array >= _column(high, 0, array.ndim))
    coordinates = place(ends)
    return [between & _before(coordinates, array.shape, column) for column in range(ends.shape[1])]


def _column(bounds: jax.Array, column: int, rank: int) -> jax.Array:
    return bounds[:, column].reshape(-1, *(1,) * (rank - 1))


def _coordinates(ends: jax.Array, whole: Sequence[int], origin: Sequence[Any]) -> list[tuple[jax.Array, jax.Array]]:
    """Where ends `[rows, columns]` in the flat order of rows of a whole array lie in a part that begins at `origin`.

    For each axis after that of rows: the coordinate in the part, and whether it is not before the part.
    """
    found, rest = [], ends
    for axis in range(1, len(whole)):
        stride = jnp.array(math.prod(whole[axis + 1 :]), ends.dtype)
        coordinate, rest = rest // stride, rest % stride
        begin = jnp.asarray(origin[axis]).astype(ends.dtype)
        found.append((coordinate - begin, coordinate >= begin))
    return found


def _before(coordinates: list[tuple[jax.Array, jax.Array]], shape: Sequence[int], column: int) -> jax.Array:
    """Which scores stand before the ends of a column, axis by axis: an index would be one more array to write down."""
    is_before: Any = False
    for axis in range(len(shape) - 1, 0, -1):
        end, reached = (_column(table, column, len(shape)) for table in coordinates[axis - 1])
        here = lax.broadcasted_iota(end.dtype, (1, *shape[1:]), axis)
        is_before = reached & ((here < end) | ((here == end) & is_before))
    return is_before


# How it is counted.


def _counts(
    predicates: Predicates,
    arrays: Sequence[jax.Array],
    bounds: Sequence[tuple],
    counter: Any,
    apart: Sequence[bool] | None,
) -> jax.Array:
    if jax.device_count() == 1:
        return _counts_here(predicates, counter, tuple(arrays), tuple(bounds))
    apart = apart or [False] * len(arrays)
    tables: dict[int, jax.Array] = {}
    for in_parts, count in ((True, _counts_apart), (False, _counts_by_xla)):
        some = [i for i, flag in enumerate(apart) if bool(flag) is in_parts]
        if some:
            table = count(
                predicates, jnp.dtype(counter), *(tuple(column[i] for i in some) for column in (arrays, bounds))
            )
            ends = np.cumsum([arrays[i].shape[0] for i in some])
            tables.update(zip(some, jnp.split(table, ends[:-1]), strict=True))
    return jnp.concatenate([tables[i] for i in range(len(arrays))])


def _counts_here(predicates, counter, arrays, bounds, may_split=True) -> jax.Array:
    # What does not change from turn to turn of a loop would be moved out of it and written down: wider copies of 16-bit
    # scores. Behind a barrier everything seems to change.
    arrays, bounds = lax.optimization_barrier((arrays, bounds))
    return jnp.concatenate(
        [
            _count_part(predicates, counter, array, bound, (0,) * array.ndim, array.shape, may_split)
            for array, bound in zip(arrays, bounds, strict=True)
        ]
    )


def _count_part(predicates, counter, part, bounds, origin, whole, may_split) -> jax.Array:
    """Counts `[rows, columns]` of a part of an array that begins at `origin`."""
    view, kept, split = _in_shares(part.shape) if may_split else (part.shape, 1, None)

    def place(ends):
        coordinates = _coordinates(ends, whole, origin)
        if split is not None:
            end, reached = coordinates[split - 1]
            length = jnp.array(view[split + 1], end.dtype)
            coordinates[split - 1 : split] = [(end // length, reached), (end % length, jnp.ones_like(reached))]
        return coordinates

    columns = predicates(part.reshape(view), place, bounds)
    counts = _sum_together(columns, tuple(range(kept, len(view))), counter)
    return jnp.stack([jnp.sum(count.reshape(view[0], -1), 1, dtype=counter) for count in counts], 1)


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
            split = next(divisor for divisor in range(min(most, length), 0, -1) if length % divisor == 0)
            return (*shape[:axis], split, length // split, *shape[axis + 1 :]), axis + 1, axis
        shares *= length
    return shape, len(shape) - 1, None


def _sum_together(predicates: list[jax.Array], axes: tuple[int, ...], counter: jnp.dtype) -> list[jax.Array]:
    """Counts of several predicates in one pass: a lone sum of a predicate writes an array of integers on the CPU."""
    zeros = (jnp.zeros((), counter),) * len(predicates)

    def add(left, right):
        return tuple(a + b for a, b in zip(left, right, strict=True))

    return list(lax.reduce(tuple(predicate.astype(counter) for predicate in predicates), zeros, add, axes))


# Each device its own part.


def _counts_apart(predicates: Predicates, counter: jnp.dtype, arrays: tuple, bounds: tuple) -> jax.Array:
    """As `_counts_here`; each device counts what it holds, and the counts are summed."""
    flat, treedef = jax.tree.flatten((arrays, bounds))
    count = _partitioned(predicates, counter, treedef, tuple(array.ndim for array in flat), len(arrays))

    def by_xla(*leaves):
        return _counts_by_xla(predicates, counter, *jax.tree.unflatten(treedef, leaves))

    @jax.custom_batching.custom_vmap
    def counted(*leaves):
        return count(*leaves)

    @counted.def_vmap
    def batched(axis_size, in_batched, *leaves):
        # A partitioned function knows no batches.
        del axis_size
        in_axes = tuple(0 if is_batched else None for is_batched in in_batched)
        return jax.vmap(by_xla, in_axes)(*leaves), True

    return counted(*flat)


def _counts_by_xla(predicates: Predicates, counter: jnp.dtype, arrays: tuple, bounds: tuple) -> jax.Array:
    """As `_counts_here`, of arrays that may be sharded in ways that are not known."""
    return _counts_here(predicates, counter, arrays, bounds, may_split=False)


@functools.cache
def _partitioned(predicates: Predicates, counter: jnp.dtype, treedef: Any, ranks: tuple[int, ...], number: int) -> Any:
    """The function that XLA asks how to count when it knows how the arrays (the first `number`) are sharded."""

    @custom_partitioning
    def function(*leaves):
        return _counts_by_xla(predicates, counter, *jax.tree.unflatten(treedef, leaves))

    def partition(mesh, arguments, result):
        del result
        whole = NamedSharding(mesh, PartitionSpec())
        specs = [_even_spec(mesh, argument) for argument in arguments[:number]]
        shapes = [argument.shape for argument in arguments[:number]]
        shardings = [NamedSharding(mesh, spec) for spec in specs] + [whole] * (len(arguments) - number)

        def count_part_of_all(*leaves):
            return _count_on_device(
                predicates, counter, mesh, specs, shapes, leaves[:number], *jax.tree.unflatten(treedef, leaves)[1:]
            )

        return mesh, count_part_of_all, whole, tuple(shardings)

    # Each dimension is its own: nothing is sharded because something else is.
    names = [' '.join(f'd{i}x{axis}' for axis in range(rank)) for i, rank in enumerate(ranks)]
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, arguments, result: NamedSharding(mesh, PartitionSpec()),
        sharding_rule=f'{", ".join(names)} -> rows columns',
    )
    return function


def _even_spec(mesh: Any, argument: Any) -> PartitionSpec:
    """How an array is sharded, along axes that the devices share evenly; elsewhere parts would be padded."""
    spec = tuple(argument.sharding.spec) + (None,) * (len(argument.shape) - len(argument.sharding.spec))
    return PartitionSpec(
        *[
            entry if length % math.prod(mesh.shape[name] for name in _names(entry)) == 0 else None
            for entry, length in zip(spec, argument.shape, strict=True)
        ]
    )


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _count_on_device(predicates, counter, mesh, specs, shapes, parts, bounds):
    """The counts of all rows, from the parts that this device holds; one sum over the mesh for all arrays."""
    used = {name for spec in specs for entry in spec for name in _names(entry)}
    totals = []
    for spec, shape, part, bound in zip(specs, shapes, parts, bounds, strict=True):
        origin = [_place(mesh, entry, counter) * length for entry, length in zip(spec, part.shape, strict=True)]
        mine = [lax.dynamic_slice_in_dim(rows, origin[0], part.shape[0]) for rows in bound]
        counts = _count_part(predicates, counter, part, mine, origin, shape, may_split=True)
        # Of devices that hold the same part one counts.
        for name in sorted(used - {name for entry in spec for name in _names(entry)}):
            counts = jnp.where(lax.axis_index(name) == 0, counts, 0)
        if part.shape[0] != shape[0]:
            everywhere = jnp.zeros((shape[0], counts.shape[1]), counter)
            counts = lax.dynamic_update_slice_in_dim(everywhere, counts, origin[0], 0)
        totals.append(counts)
    total = jnp.concatenate(totals)
    return lax.psum(total, tuple(sorted(used))) if used else total


def _place(mesh: Any, entry: Any, counter: jnp.dtype) -> jax.Array:
    """The number of this device's part along an axis."""
    place = jnp.zeros((), counter)
    for name in _names(entry):
        place = place * mesh.shape[name] + lax.axis_index(name).astype(counter)
    return place
