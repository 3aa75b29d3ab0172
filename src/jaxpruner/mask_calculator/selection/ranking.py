"""Rankings, and the search for their thresholds: each over one row of an array, or over many arrays together."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import (
    brackets,
    counting,
    counts_of_parts,
    first_probes,
    tables,
    tie_ends,
    whole_numbers,
)
from jaxpruner.mask_calculator.selection.brackets import Brackets
from jaxpruner.mask_calculator.selection.counts_of_parts import of_rows
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores, read

# Probes of a pass. Three settle two bits at the memory's speed on a CPU, and more make a pass slower than they save
# passes; an accelerator computes while it reads, and asking it whether to go on costs more than a pass.
_PROBES_ON_CPU = 3
_PROBES_ELSEWHERE = 15


class _Ranking(NamedTuple):
    """Arrays in which thresholds are sought: `n` rankings, each over one row of an array or over many arrays."""

    arrays: list[jax.Array | Scores]
    order: Order  # of the values that are ranked
    sizes: list[int]  # how many scores each ranking has
    thresholds: Callable[
        [jax.Array], list[jax.Array]
    ]  # images [n, columns] -> what each array has to reach
    reaching: Callable[[list[jax.Array]], jax.Array]  # these -> how many reach them [n, columns]
    ends: Callable[
        [jax.Array], jax.Array
    ]  # places in flat order [n, columns] -> in each row of all arrays
    # thresholds of each array and ends [all rows, columns] -> scores between and before [n, columns]
    ties: Callable[[list, jax.Array], jax.Array]
    # how many ties are kept [n], and thresholds of each array -> how many are kept of each row of all arrays
    rooms: Callable[[jax.Array, list], jax.Array]
    counter: jnp.dtype


def select_each(
    arrays: list[jax.Array | Scores], counts: list, starts: list, apart: list[bool]
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects in each row of each array.

    Args:
      arrays: floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
      counts: for each array a scalar, or one a row.
      starts: for each array thresholds to begin at, or `None`.
      apart: for each array whether devices that share it count their own parts.

    Returns:
      For each array its mask and the threshold of each row.

    >>> ((mask, thresholds),) = select_each([jnp.array([[3.0, 1.0], [2.0, 4.0]])], [1], [None], [False])
    >>> mask.tolist(), thresholds.shape
    ([[1, 0], [0, 1]], (2,))
    """
    order = Order.of(arrays[0].dtype)
    rows = [array.shape[0] for array in arrays]
    sizes = [size for array in arrays for size in _row_sizes(array)]
    counter = whole_numbers.counter_for(max(sizes))

    split = functools.partial(tables.split, rows=rows)
    ranking = _Ranking(
        arrays,
        order,
        sizes,
        thresholds=lambda images: split(order.value(images)),
        reaching=lambda thresholds: counting.count_reaching(arrays, thresholds, counter, apart),
        ends=lambda ends: ends,
        ties=lambda between, ends: counting.count_between_before(
            arrays, between, split(ends), counter, apart
        ),
        rooms=lambda room, between: room,
        counter=counter,
    )
    wanted = _per_row(counts, rows, counter)
    start = None
    if any(one is not None for one in starts):
        start = _per_row([jnp.nan if one is None else one for one in starts], rows, order.dtype)
    between, ends = _search(
        ranking, wanted, first_probes.sampled(arrays, wanted, sizes, order), start
    )
    masks = map(_mask, arrays, between, ends)
    return [(mask, thresholds[:, 0]) for mask, thresholds in zip(masks, between, strict=True)]


def _row_sizes(array: jax.Array | Scores) -> list[int]:
    """How many scores each row has."""
    return [math.prod(array.shape[1:])] * array.shape[0]


def _per_row(values: list, rows: list[int], dtype: jnp.dtype) -> jax.Array:
    return jnp.concatenate(
        [
            jnp.broadcast_to(jnp.asarray(value).astype(dtype), (n,))
            for value, n in zip(values, rows, strict=True)
        ]
    )


def select_jointly(
    arrays: list[jax.Array | Scores], count: jax.Array | int, divisors: Sequence | None, apart: bool
) -> list[jax.Array]:
    """Selects among the scores of all arrays.

    Args:
      arrays: floats `[1, …]`, or `Scores`, none of them empty.
      count: a scalar.
      divisors: for each array what its scores are divided by, or `None`.
      apart: whether devices that share arrays count their own parts.

    Returns:
      A mask for each array.

    >>> [mask.tolist() for mask in select_jointly([jnp.array([[3.0, 1.0]]), jnp.array([[2.0]])], 2, None, False)]
    [[[1, 0]], [[1]]]
    """
    sizes, each_apart = [array.size for array in arrays], [apart] * len(arrays)
    counter = whole_numbers.counter_for(sum(sizes))
    dtype = jnp.result_type(*(array.dtype for array in arrays), *(divisors or ()))
    order = Order.of(dtype)
    scales = jnp.stack(
        [jnp.asarray(divisor).astype(dtype) for divisor in divisors or [1] * len(arrays)]
    )
    offsets = jnp.array([sum(sizes[:i]) for i in range(len(sizes))], counter)[:, None]
    lengths = jnp.array(sizes, counter)[:, None]
    plain = divisors is None and all(array.dtype == dtype for array in arrays)

    def own(images: jax.Array) -> list[jax.Array]:
        """Thresholds `[1, columns]` as each array has to reach them."""
        values = order.value(images)
        return [values] * len(arrays) if plain else _smallest_reaching(arrays, scales, values[0])

    def own_ends(ends: jax.Array) -> jax.Array:
        return jnp.where(ends > offsets, jnp.minimum(ends - offsets, lengths), 0)

    def own_ties(between: list[jax.Array], ends: jax.Array) -> jax.Array:
        own = tables.split(ends, [1] * len(arrays))
        return together(counting.count_between_before(arrays, between, own, counter, each_apart))

    def own_rooms(room: jax.Array, between: list[jax.Array]) -> jax.Array:
        reaching = counting.count_reaching(arrays, between, counter, each_apart)
        ties = reaching[:, :1] - reaching[:, 1:2]
        earlier = jnp.concatenate(
            [jnp.zeros_like(ties[:1]), jnp.cumsum(ties, 0, dtype=counter)[:-1]]
        )
        return jnp.where(room > earlier, jnp.minimum(room - earlier, ties), 0)[:, 0]

    def together(counts: jax.Array) -> jax.Array:
        return jnp.sum(counts, 0, keepdims=True, dtype=counter)

    ranking = _Ranking(
        arrays,
        order,
        [sum(sizes)],
        thresholds=own,
        reaching=lambda thresholds: together(
            counting.count_reaching(arrays, thresholds, counter, each_apart)
        ),
        ends=own_ends,
        ties=own_ties,
        rooms=own_rooms,
        counter=counter,
    )
    wanted = jnp.asarray(count).astype(counter)[None]
    probes = first_probes.sampled_jointly(arrays, scales, wanted, order)
    return [_mask(*found) for found in zip(arrays, *_search(ranking, wanted, probes), strict=True)]


def _smallest_reaching(arrays: list, scales: jax.Array, values: jax.Array) -> list[jax.Array]:
    """For each array the smallest floats of its own dtype that reach some values when they are divided by its scale."""
    found: list[jax.Array] = [values] * len(arrays)
    for own_dtype in dict.fromkeys(array.dtype for array in arrays):
        some = [i for i, array in enumerate(arrays) if array.dtype == own_dtype]
        scale = jnp.stack([scales[i] for i in some])[:, None]
        table = _smallest_quotients_reaching(
            Order.of(own_dtype), jnp.broadcast_to(scale, (len(some), len(values))), values
        )
        for i, thresholds in zip(some, tables.split(table, [1] * len(some)), strict=True):
            found[i] = thresholds
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
        guess = jnp.where(
            turn == 0, near + 8, jnp.where(turn == 1, near - 8, low + (high - low) // 2)
        )
        probe = jnp.where((guess > low) & (guess < high), guess, low + (high - low) // 2)
        inside, enough = high - low > 1, order.value(probe).astype(values.dtype) / scale >= values
        return (
            turn + 1,
            jnp.where(inside & ~enough, probe, low),
            jnp.where(inside & enough, probe, high),
        )

    found = lax.while_loop(
        lambda state: jnp.any(state[2] - state[1] > 1), halve, (jnp.int32(0), low, high)
    )
    return order.value(found[2])


def _search(
    ranking: _Ranking, wanted: jax.Array, probes: jax.Array | None, earlier: jax.Array | None = None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """For each array the thresholds between which ties lie, and a table `[rows, 2 or more]`.

    Its first column says before which place ties are kept, the second is not 0 where everything is.
    """
    order, sizes = ranking.order, jnp.array(ranking.sizes, ranking.counter)
    start = first_probes.over_all_numbers(order, sizes, wanted)
    columns, turns = _PROBES_ON_CPU, None
    if earlier is not None:
        probes = first_probes.near(
            order, earlier, brackets.even_probes(start, columns) if probes is None else probes
        )
    if jax.default_backend() != 'cpu':
        columns, probes = _PROBES_ELSEWHERE, None
        turns = -(-order.width // ((columns + 1).bit_length() - 1))
    bracket = brackets.settle(
        start, ranking.thresholds, ranking.reaching, probes, columns, turns, order.octave
    )
    # Fewer numbers than wanted: all of them are kept, and no NaN.
    short = (bracket.low < order.lowest) & (wanted < sizes)
    bracket = bracket._replace(
        low=jnp.maximum(bracket.low, order.lowest),
        count_low=jnp.where(short, wanted, bracket.count_low),
    )
    # As many columns as the passes had: what is computed alike rounds alike.
    images = jnp.where(np.arange(columns) == 0, bracket.low[:, None], bracket.high[:, None])
    between = ranking.thresholds(images)
    ties = bracket.count_low - bracket.count_high
    room = jnp.where(bracket.count_low > bracket.wanted, bracket.wanted - bracket.count_high, ties)
    if jax.device_count() > 1:
        ends = ranking.ends(_ends_by_probes(ranking, ties, room, between)[:, None])[:, 0]
    else:
        ends = _ends_by_parts(ranking, ties, room, between)
    everything = tables.wide(jnp.broadcast_to(wanted >= sizes, ends.shape), _PROBES_ON_CPU)
    verdicts = jnp.where(
        np.arange(_PROBES_ON_CPU) == 0, ends[:, None], everything.astype(ranking.counter)
    )
    return between, tables.split(verdicts, [array.shape[0] for array in ranking.arrays])


def _ends_by_parts(
    ranking: _Ranking, ties: jax.Array, room: jax.Array, between: list[jax.Array]
) -> jax.Array:
    """Where as many ties stand before as there is room for, in each row of all arrays, which lie on one device."""

    def cut(ends: jax.Array, room: jax.Array, between: list, arrays: list) -> jax.Array:
        del ends
        return tie_ends.of_rooms(arrays, between, ranking.rooms(room, between))

    everywhere = jnp.array(
        [size for array in ranking.arrays for size in _row_sizes(array)], ranking.counter
    )
    return control.run_once(jnp.any(room < ties), cut, everywhere, room, between, ranking.arrays)


def _ends_by_probes(
    ranking: _Ranking, ties: jax.Array, room: jax.Array, between: list[jax.Array]
) -> jax.Array:
    """As `_ends_by_parts`, by counts alone, and in the order of each ranking."""
    sizes = jnp.array(ranking.sizes, ranking.counter)
    # Counts have to fall, so that places are counted from the end.
    backward = Brackets.between(jnp.zeros_like(sizes), sizes, ties, jnp.zeros_like(ties), room)
    # Ties lie scattered: no even division has to come first.
    backward = backward._replace(evenly=jnp.zeros_like(backward.evenly))
    found = brackets.settle(
        backward,
        spread=lambda places: ranking.ends(sizes[:, None] - places),
        count=lambda ends: ranking.ties(between, ends),
    )
    return jnp.where(found.wanted > 0, sizes - found.low, 0)  # no room: nothing at all is kept


def _mask(scores: jax.Array | Scores, between: jax.Array, ends: jax.Array) -> jax.Array:
    """The mask of scores `[rows, …]`; the others are tables of their rows, as `_search` returns them.

    It takes few operations: for many XLA wakes other threads, which lasts longer than a small mask.
    """
    array = read(scores)
    places = counts_of_parts.coordinates(ends[:, :1], array.shape, (0,) * array.ndim)
    first = counts_of_parts.before(places, array.shape, 0)
    low, high = (of_rows(between, column, array.ndim) for column in (0, 1))
    if array.dtype.itemsize < 4:
        # XLA compares these as wider floats. A select between them would be widened anew for each score; widened here,
        # scores that are computed would not be rounded to their dtype as they are where they are counted.
        kept = (array >= low) & ((array >= high) | first)
    else:
        kept = array >= jnp.where(first, low, high)
    return jnp.where(kept, jnp.uint8(1), of_rows(ends, 1, array.ndim).astype(jnp.uint8))
