"""Exact selection of the largest scores by counting, without sorting.

How many to keep goes in (`number_to_keep` tells it for a sparsity), a mask comes out. A threshold lies between two
floats; passes over the scores that count how many reach each of some probes narrow the bracket, and stop as soon as a
threshold is met by exactly the wanted number. Of equal scores at the threshold those before a place in flat order are
kept, which is found by the same counting. First probes come from a sample, or from the threshold of an earlier
selection; the result does not depend on them.

Order: NaN ranks lowest, -0.0 equals 0.0, of equal scores the one with the lower flat index is kept.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner import brackets, counting, first_probes, whole_numbers
from jaxpruner.brackets import Brackets
from jaxpruner.ordered_floats import Order
from jaxpruner.whole_numbers import number_to_keep as number_to_keep

# Probes of a pass. Three settle two bits at the memory's speed on a CPU, and more make a pass slower than they save
# passes; an accelerator computes while it reads, and asking it whether to go on costs more than a pass.
_PROBES_ON_CPU = 3
_PROBES_ELSEWHERE = 15


class Selected(NamedTuple):
    """What a selection found.

    >>> Selected(mask=jnp.array([1, 0]), threshold=jnp.float32(3)).threshold.shape
    ()
    """

    mask: jax.Array  # uint8, 1 = kept
    threshold: jax.Array | None  # one float for each ranking, at most the smallest score that is kept


def keep_largest(scores: jax.Array, count: jax.Array | int) -> jax.Array:
    """The mask of the `count` largest scores.

    Args:
      scores: float array of any shape.
      count: unsigned scalar; 0 keeps nothing, the size or more keeps everything, NaN included. Otherwise NaN is never
        kept, even if fewer than `count` remain.

    Returns:
      uint8 array of the scores' shape, 1 = kept.

    Raises:
      ValueError: the count is negative; or the array is too large to count in 32 bits, and 64 are not enabled.

    >>> keep_largest(jnp.array([[3.0, 1.0], [2.0, 2.0]]), 2)
    Array([[1, 0],
           [1, 0]], dtype=uint8)
    """
    return keep_largest_each([scores], [count])[0].mask


def keep_largest_each(
    scores: Sequence[jax.Array],
    counts: Sequence[jax.Array | int],
    starts: Sequence[jax.Array | None] | None = None,
    in_rows: Sequence[bool] | None = None,
    apart: Sequence[bool] | None = None,
) -> list[Selected]:
    """The `count` largest scores of each of many arrays, which share their passes.

    Args:
      scores: float arrays of any shapes.
      counts: for each array an unsigned scalar, as in `keep_largest`; for one in rows a scalar or one a row.
      starts: for each array where to look first: the threshold of an earlier selection (NaN or `None` for none). The
        result does not depend on it.
      in_rows: for each array whether each index of its first axis is a ranking of its own.
      apart: for each array whether devices that share it count their own parts, which needs it to be sharded along axes
        of the mesh as parameters are. What was pooled or reshaped is left to XLA, as everything is by default.

    Returns:
      For each array mask and threshold (a scalar, or a vector with one a row).

    Raises:
      ValueError: an array is too large to count in 32 bits, and 64 are not enabled.

    >>> first, second = keep_largest_each([jnp.array([1.0, 4.0]), jnp.array([[3.0, 2.0]])], [1, 2])
    >>> first.mask.tolist(), second.mask.tolist(), float(first.threshold) <= 4.0
    ([0, 1], [[1, 1]], True)
    """
    none = [None] * len(scores)
    flags = [tuple(map(bool, column or none)) for column in (in_rows, apart)]
    return _keep_largest_each(list(scores), [_as_count(count) for count in counts], list(starts or none), *flags)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _keep_largest_each(
    scores: list, counts: list, starts: list, in_rows: tuple[bool, ...], apart: tuple[bool, ...]
) -> list[Selected]:
    arrays = [_with_rows(array, rows) for array, rows in zip(scores, in_rows, strict=True)]
    found: dict[int, tuple[jax.Array, jax.Array]] = {
        i: (jnp.zeros(array.shape, jnp.uint8), jnp.zeros(array.shape[0], array.dtype))
        for i, array in enumerate(arrays)
        if not array.size
    }
    # Arrays of one dtype are sought in one order of floats.
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        some = [i for i, array in enumerate(arrays) if array.dtype == dtype and array.size]
        if some:
            results = _select_each(
                [arrays[i] for i in some],
                [counts[i] for i in some],
                [starts[i] for i in some],
                [apart[i] for i in some],
            )
            found.update(zip(some, results, strict=True))
    return [
        Selected(found[i][0].reshape(jnp.shape(array)), found[i][1] if rows else found[i][1][0])
        for i, (array, rows) in enumerate(zip(scores, in_rows, strict=True))
    ]


def keep_largest_jointly(
    scores: Sequence[jax.Array],
    count: jax.Array | int,
    divisors: Sequence[jax.Array] | None = None,
    apart: bool = False,
) -> list[jax.Array]:
    """The masks of the `count` largest among the scores of many arrays, which are never put together.

    Args:
      scores: float arrays of any shapes, ranked in their common dtype; ties in the order of the arrays.
      count: unsigned scalar, as in `keep_largest`.
      divisors: a positive, finite scalar for each array: they are ranked by `scores / divisor`, which is never written
        down: each pass translates its thresholds into those of each array.
      apart: as in `keep_largest_each`, for all arrays.

    Returns:
      A uint8 array for each array of scores.

    Raises:
      ValueError: the arrays are too large together to count in 32 bits, and 64 are not enabled.

    >>> keep_largest_jointly([jnp.array([1.0, 4.0]), jnp.array([3.0])], 2)
    [Array([0, 1], dtype=uint8), Array([1], dtype=uint8)]
    """
    return _keep_largest_jointly(list(scores), _as_count(count), None if divisors is None else list(divisors), apart)


@functools.partial(jax.jit, static_argnums=3)
def _keep_largest_jointly(scores: list, count: jax.Array | int, divisors: list | None, apart: bool) -> list[jax.Array]:
    masks = [jnp.zeros(jnp.shape(array), jnp.uint8) for array in scores]
    filled = [i for i, array in enumerate(scores) if array.size]
    if not filled:
        return masks
    arrays = [_with_rows(scores[i], in_rows=False) for i in filled]
    scales = divisors and [lax.stop_gradient(divisors[i]) for i in filled]
    for i, mask in zip(filled, _select_jointly(arrays, count, scales, apart), strict=True):
        masks[i] = mask.reshape(jnp.shape(scores[i]))
    return masks


def _as_count(count: jax.Array | int) -> Any:
    """A count of Python's in as many bits as there are, since JAX would take it for an int32."""
    if not isinstance(count, int):
        return count
    if count < 0:
        raise ValueError(f'count must not be negative, got {count}')
    widest = jax.dtypes.canonicalize_dtype(np.uint64)
    return np.asarray(min(count, np.iinfo(widest).max), widest)


def _with_rows(array: jax.Array, in_rows: bool) -> jax.Array:
    array = lax.stop_gradient(jnp.asarray(array))  # masks have no derivative
    # Some floats of 8 bits have no infinity, which ends the search.
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 1:
        array = array.astype(jnp.float32)
    array = array if in_rows else array[None]
    return array if array.ndim > 1 else array[:, None]  # reductions need an axis


class _Ranking(NamedTuple):
    """Arrays in which thresholds are sought: `n` rankings, each over one row of an array or over many arrays."""

    order: Order  # of the values that are ranked
    sizes: list[int]  # how many scores each ranking has
    thresholds: Callable[[jax.Array], list[jax.Array]]  # images [n, columns] -> what each array has to reach
    reaching: Callable[[list[jax.Array]], jax.Array]  # these -> how many reach them [n, columns]
    ends: Callable[[jax.Array], list[jax.Array]]  # places in flat order [n, columns] -> places in each array
    ties: Callable[[list, list, list], jax.Array]  # low, high, ends of each array -> ties before them [n, columns]
    counter: jnp.dtype


def _select_each(
    arrays: list[jax.Array], counts: list, starts: list, apart: list[bool]
) -> list[tuple[jax.Array, jax.Array]]:
    """Mask and thresholds of each array `[rows, …]`; all have one dtype."""
    order = Order.of(arrays[0].dtype)
    rows = [array.shape[0] for array in arrays]
    sizes = [array[0].size for array in arrays for _ in range(array.shape[0])]
    counter = whole_numbers.counter_for(max(sizes))

    def split(table: jax.Array) -> list[jax.Array]:
        return [table[sum(rows[:i]) : sum(rows[: i + 1])] for i in range(len(rows))]

    ranking = _Ranking(
        order,
        sizes,
        thresholds=lambda images: split(order.value(images)),
        reaching=lambda thresholds: counting.count_reaching(arrays, thresholds, counter, apart),
        ends=split,
        ties=lambda low, high, ends: counting.count_between_before(arrays, low, high, ends, counter, apart),
        counter=counter,
    )
    wanted = _per_row(counts, rows, counter)
    probes = first_probes.sampled(arrays, wanted, sizes, order)
    if any(start is not None for start in starts):
        start = _per_row([jnp.nan if one is None else one for one in starts], rows, order.dtype)
        probes = first_probes.near(order, start, probes)
    low, high, ends = _search(ranking, wanted, probes)
    everything = split((wanted >= jnp.array(sizes, counter))[:, None])
    masks = map(_mask, arrays, low, high, ends, everything)
    return [(mask, threshold[:, 0]) for mask, threshold in zip(masks, low, strict=True)]


def _per_row(values: list, rows: list[int], dtype: jnp.dtype) -> jax.Array:
    return jnp.concatenate(
        [jnp.broadcast_to(jnp.asarray(value).astype(dtype), (n,)) for value, n in zip(values, rows, strict=True)]
    )


def _select_jointly(
    arrays: list[jax.Array], count: jax.Array | int, divisors: Sequence | None, apart: bool
) -> list[jax.Array]:
    """A mask for each array `[1, …]`, of one ranking."""
    sizes, each_apart = [array.size for array in arrays], [apart] * len(arrays)
    counter = whole_numbers.counter_for(sum(sizes))
    dtype = jnp.result_type(*arrays, *(divisors or ()))
    order = Order.of(dtype)
    scales = jnp.stack([jnp.asarray(divisor).astype(dtype) for divisor in divisors or [1] * len(arrays)])
    offsets = jnp.array([sum(sizes[:i]) for i in range(len(sizes))], counter)[:, None]
    lengths = jnp.array(sizes, counter)[:, None]
    plain = divisors is None and all(array.dtype == dtype for array in arrays)

    def own(images: jax.Array) -> list[jax.Array]:
        """Thresholds `[1, columns]` as each array has to reach them."""
        values = order.value(images)
        return [values] * len(arrays) if plain else _smallest_reaching(arrays, scales, values[0])

    def own_ends(ends: jax.Array) -> list[jax.Array]:
        inside = jnp.where(ends > offsets, jnp.minimum(ends - offsets, lengths), 0)
        return [inside[i : i + 1] for i in range(len(arrays))]

    def together(counts: jax.Array) -> jax.Array:
        return jnp.sum(counts, 0, keepdims=True, dtype=counter)

    ranking = _Ranking(
        order,
        [sum(sizes)],
        thresholds=own,
        reaching=lambda thresholds: together(counting.count_reaching(arrays, thresholds, counter, each_apart)),
        ends=own_ends,
        ties=lambda low, high, ends: together(
            counting.count_between_before(arrays, low, high, ends, counter, each_apart)
        ),
        counter=counter,
    )
    wanted = jnp.asarray(count).astype(counter)[None]
    probes = first_probes.sampled_jointly(arrays, scales, wanted, order)
    low, high, ends = _search(ranking, wanted, probes)
    everything = (wanted >= jnp.array(sum(sizes), counter))[:, None]
    return [_mask(*found, everything) for found in zip(arrays, low, high, ends, strict=True)]


def _smallest_reaching(arrays: list, scales: jax.Array, values: jax.Array) -> list[jax.Array]:
    """For each array the smallest floats of its own dtype that reach some values when they are divided by its scale."""
    found: list[jax.Array] = [values] * len(arrays)
    for own_dtype in dict.fromkeys(array.dtype for array in arrays):
        some = [i for i, array in enumerate(arrays) if array.dtype == own_dtype]
        scale = jnp.stack([scales[i] for i in some])[:, None]
        table = _smallest_quotients_reaching(
            Order.of(own_dtype), jnp.broadcast_to(scale, (len(some), len(values))), values
        )
        for row, i in enumerate(some):
            found[i] = table[row : row + 1]
    return found


def _smallest_quotients_reaching(order: Order, scale: jax.Array, values: jax.Array) -> jax.Array:
    """`[arrays, values]` floats. Division rounds, so that value times scale is but near; from there it is searched.

    All divisions stand in the loop: elsewhere XLA may multiply by a reciprocal instead, which rounds in another way,
    and a threshold that was counted with would not be found again.
    """
    near = order.image((values * scale).astype(order.dtype))
    # `low` does not reach the value; `high` does, or stands after all numbers.
    low, high = jnp.full_like(near, order.lowest - 1), jnp.full_like(near, order.highest + 1)

    def halve(state):
        turn, low, high = state
        guess = jnp.where(turn == 0, near + 8, jnp.where(turn == 1, near - 8, low + (high - low) // 2))
        probe = jnp.where((guess > low) & (guess < high), guess, low + (high - low) // 2)
        inside, enough = high - low > 1, order.value(probe).astype(values.dtype) / scale >= values
        return turn + 1, jnp.where(inside & ~enough, probe, low), jnp.where(inside & enough, probe, high)

    found = lax.while_loop(lambda state: jnp.any(state[2] - state[1] > 1), halve, (jnp.int32(0), low, high))
    return order.value(found[2])


def _search(ranking: _Ranking, wanted: jax.Array, probes: jax.Array | None) -> tuple[list, list, list]:
    """For each array the thresholds between which ties lie, and the place before which these are kept."""
    order, sizes = ranking.order, jnp.array(ranking.sizes, ranking.counter)
    everywhere = jnp.zeros(len(ranking.sizes), order.unsigned)
    # The ends stand outside all numbers: below -inf, where NaN is counted, too, and above inf.
    start = Brackets.between(
        everywhere + order.lowest - 1, everywhere + order.highest + 1, sizes, jnp.zeros_like(sizes)
    )
    columns, turns = _PROBES_ON_CPU, None
    if jax.default_backend() != 'cpu':
        columns, probes = _PROBES_ELSEWHERE, None
        turns = -(-order.width // ((columns + 1).bit_length() - 1))
    bracket = brackets.settle(start, wanted, ranking.thresholds, ranking.reaching, probes, columns, turns)
    # Fewer numbers than wanted: all of them are kept, and no NaN.
    short = (bracket.low < order.lowest) & (wanted < sizes)
    bracket = bracket._replace(
        low=jnp.maximum(bracket.low, order.lowest), count_low=jnp.where(short, wanted, bracket.count_low)
    )
    # As many columns as the passes had: what is computed alike rounds alike.
    found = ranking.thresholds(jnp.stack([bracket.low] + [bracket.high] * (columns - 1), 1))
    low, high = [table[:, :1] for table in found], [table[:, 1:2] for table in found]
    return low, high, ranking.ends(_ends_of_ties(ranking, wanted, bracket, low, high)[:, None])


def _ends_of_ties(ranking: _Ranking, wanted: jax.Array, bracket: Brackets, low: list, high: list) -> jax.Array:
    """Where as many ties stand before as there is room for; the size where all of them are kept."""
    sizes = jnp.array(ranking.sizes, ranking.counter)
    ties = bracket.count_low - bracket.count_high
    room = jnp.where(bracket.count_low > wanted, wanted - bracket.count_high, ties)
    # Counts have to fall, so that places are counted from the end.
    backward = Brackets.between(jnp.zeros_like(sizes), sizes, ties, jnp.zeros_like(ties))
    found = brackets.settle(
        backward,
        room,
        spread=lambda places: (low, high, ranking.ends(sizes[:, None] - places)),
        count=lambda bounds: ranking.ties(*bounds),
    )
    return jnp.where(room > 0, sizes - found.low, 0)  # no room: nothing at all is kept


def _mask(array: jax.Array, low: jax.Array, high: jax.Array, end: jax.Array, everything: jax.Array) -> jax.Array:
    """The mask of an array `[rows, …]`; the others are `[rows, 1]`."""

    def column(values: jax.Array) -> jax.Array:
        return values.reshape(-1, *(1,) * (array.ndim - 1))

    first = counting.before(array.shape, end[:, 0])
    kept = (array >= column(low)) & ((array >= column(high)) | first)
    return (kept | column(everything)).astype(jnp.uint8)
