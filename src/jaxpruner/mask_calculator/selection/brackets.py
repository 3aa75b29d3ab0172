"""Narrows brackets by counting at probes, many brackets at a time.

A bracket holds a position at which a falling count passes a target: at least `target` are counted at `low`, fewer at
`high`. Positions are those of floats (`ordered_floats`), or indices in flat order where the end of the ties is sought.

Probes stand where the count would pass its target if it fell evenly within the bracket. Where that narrowed a bracket
by little, the next probes divide it evenly, which bounds the number of turns. A bracket is settled when the count at
`low` is the target, or when nothing lies between `low` and `high`.

What is counted for one bracket may have parts, arrays that are ranked together. Then the counts of each part at `low`
and `high` are kept, too, so that no pass has to find them where the ties are cut.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control

# How far the outer probes stand from the middle one: so many standard deviations of counts that are scattered evenly,
# and so much of the bracket, since the fall may bend. In brackets that are short against the scale on which it bends
# the second is proportional to their width. All three were tuned on magnitudes of several distributions.
_DEVIATIONS = 1.0
_BEND = 0.2
_BEND_IN_A_SCALE = 2.0


class Brackets(NamedTuple):
    """`n` brackets; each field is a column `[n, 1]`, beside which probes `[n, probes]` stand.

    Vectors would be reshaped at each step, and XLA takes one turn of all its simplifications for each such reshape.
    """

    low: jax.Array  # unsigned: at least `target` are counted here
    high: jax.Array  # unsigned: fewer are counted here
    count_low: jax.Array  # count dtype
    count_high: jax.Array  # count dtype
    target: jax.Array  # count dtype
    is_even: jax.Array  # bool: the next probes divide the bracket evenly
    # Count dtype `[parts, 2]`, for a single bracket: what each part adds to `count_low` and `count_high`.
    parts: jax.Array | None = None

    @classmethod
    def between(
        cls,
        low: jax.Array,
        high: jax.Array,
        count_low: jax.Array,
        count_high: jax.Array,
        target: jax.Array,
    ) -> 'Brackets':
        """Makes brackets from vectors of ends and counts there; the first probes divide them evenly."""
        columns = [field[:, None] for field in (low, high, count_low, count_high, target)]
        return cls(*columns, is_even=jnp.ones_like(columns[0], bool))

    @property
    def columns(self) -> list[jax.Array]:
        """All fields but the parts."""
        low, high, count_low, count_high, target, is_even, _ = self
        return [low, high, count_low, count_high, target, is_even]

    def without_even_probes(self) -> 'Brackets':
        """Makes the next probes stand where the count should pass its target."""
        return self._replace(is_even=jnp.zeros_like(self.is_even))


def settle(
    brackets: Brackets,
    prepare: Callable[[jax.Array], Any],
    count: Callable[[Any], jax.Array],
    *,
    first: jax.Array | None = None,
    probes: int = 3,
    turns: int | None = None,
    scale: int | None = None,
) -> Brackets:
    """Narrows brackets until all are settled.

    Args:
      brackets: `n` of them.
      prepare: makes what `count` takes from probes, unsigned `[n, probes]`. The loop carries it from turn to turn, so
        that the programs of arrays of one shape are equal and compiled once.
      count: counts at the probes, `[n, probes]` of the count dtype, falling along a row; of a bracket with parts
        `[parts, probes]`.
      first: the first probes; even ones if there are none.
      probes: how many a turn; more than three always divide evenly.
      turns: so many turns, after which no device is asked; they take `(probes + 1) ** turns` of the width.
      scale: number of positions on which the fall of the count bends.
    """

    def next_probes(current: Brackets) -> jax.Array:
        even = even_probes(current, probes)
        if probes > 3:
            return even
        return jnp.where(current.is_even, even, likely_probes(current, scale))

    def turn(state: tuple) -> tuple:
        table, prepared, parts = state
        current, positions = _from_table(table, brackets)
        counts = count(prepared)
        if parts is None:
            current = narrow(current, positions, counts)
        else:
            counts = control.keep_whole(counts)
            sums = jnp.sum(counts, 0, keepdims=True, dtype=counts.dtype)
            current = narrow(current, positions, sums)
            parts = _parts_at_ends(current, sums, parts, counts)
        positions = next_probes(current)
        return _as_table(current, positions), prepare(positions), parts

    def is_open(state: tuple) -> jax.Array:
        current, _ = _from_table(state[0], brackets)
        return jnp.any(is_unsettled(current))

    if first is None:
        first = next_probes(brackets)
    else:
        # A guess that is wrong is followed by an even division, as any other.
        brackets = brackets.without_even_probes()
    state = _as_table(brackets, first), prepare(first), brackets.parts
    if turns is not None:
        table, _, parts = lax.fori_loop(0, turns, lambda _, state: turn(state), state)
    else:
        table, _, parts = lax.while_loop(is_open, turn, state)
    settled, _ = _from_table(table, brackets)
    return settled._replace(parts=parts)


def _parts_at_ends(
    brackets: Brackets, sums: jax.Array, parts: jax.Array, counts: jax.Array
) -> jax.Array:
    """Updates the parts of the counts at `low` and `high` from a pass that counted `[parts, probes]`.

    Counts fall, part by part. So where two sums are equal, their parts are.
    """
    at_ends = jnp.concatenate([brackets.count_low, brackets.count_high], 1)
    for column in range(sums.shape[1]):
        is_at_end = sums[:, column : column + 1] == at_ends
        parts = jnp.where(is_at_end, counts[:, column : column + 1], parts)
    return parts


def is_unsettled(brackets: Brackets) -> jax.Array:
    """Tells which brackets have to be narrowed further."""
    return (brackets.count_low != brackets.target) & (brackets.high - brackets.low > 1)


def narrow(brackets: Brackets, probes: jax.Array, counts: jax.Array) -> Brackets:
    """Narrows brackets by the counts at rising probes `[n, probes]`; those outside their bracket count for nothing."""
    low, high, count_low, count_high, target, is_even = brackets.columns
    is_open = is_unsettled(brackets)
    # Counts fall. So the last of the probes with enough is the best, and the first of the others.
    for column in range(probes.shape[1]):
        probe, count = probes[:, column : column + 1], counts[:, column : column + 1]
        is_inside = is_open & (probe > brackets.low) & (probe < brackets.high)
        is_enough = is_inside & (count >= target)
        is_too_few = is_inside & (count < target)
        low = jnp.maximum(low, jnp.where(is_enough, probe, low))
        count_low = jnp.minimum(count_low, jnp.where(is_enough, count, count_low))
        high = jnp.minimum(high, jnp.where(is_too_few, probe, high))
        count_high = jnp.maximum(count_high, jnp.where(is_too_few, count, count_high))
    is_narrowed_by_little = high - low > (brackets.high - brackets.low) // 2
    is_even = is_narrowed_by_little & ~is_even
    return Brackets(low, high, count_low, count_high, target, is_even)


def even_probes(brackets: Brackets, number: int) -> jax.Array:
    """Makes probes `[n, number]` that divide brackets into parts of one length."""
    width = brackets.high - brackets.low
    parts = number + 1
    index = np.arange(1, parts, dtype=width.dtype)
    return _inside(brackets, width // parts * index + width % parts * index // parts)


def likely_probes(brackets: Brackets, scale: int | None = None) -> jax.Array:
    """Makes three probes `[n, 3]` around the position where an even fall of the count would pass the target."""
    width = brackets.high - brackets.low
    float_width = width.astype(jnp.float32)
    bend = _BEND
    if scale is not None:
        bend = jnp.minimum(_BEND, float_width * (_BEND_IN_A_SCALE / scale))
    # The expected position and its scatter, if each count falls anywhere in the bracket.
    number = (brackets.count_low - brackets.count_high).astype(jnp.float32)
    share = ((brackets.count_low - brackets.target).astype(jnp.float32) + 0.5) / (number + 1)
    share = jnp.minimum(share, 1)  # a target above the count makes the difference wrap around
    scatter = share * (1 - share)
    reach = _DEVIATIONS * jnp.sqrt(scatter / (number + 2)) + bend * scatter

    def steps(share_of_width: jax.Array) -> jax.Array:
        # A float that is rounded up to the number of all positions would not convert back.
        below_one = jnp.clip(share_of_width, 0, 1 - 2**-20)
        return (below_one * float_width).astype(width.dtype)

    # Leaves room for the outer two, where there is any.
    middle = jnp.clip(steps(share), 2, jnp.maximum(width, 4) - 2)
    away = jnp.maximum(steps(reach), 1)
    below = middle - jnp.minimum(away, middle)
    above = middle + jnp.minimum(away, width - middle)
    column = np.arange(3)
    return _inside(brackets, jnp.where(column < 1, below, jnp.where(column > 1, above, middle)))


def _inside(brackets: Brackets, steps: jax.Array) -> jax.Array:
    """Goes so many steps from `low`, or as far as the bracket allows; two probes may become one."""
    last = jnp.maximum(brackets.high - brackets.low, 2) - 1
    return brackets.low + jnp.clip(steps, 1, last)


def _as_table(brackets: Brackets, probes: jax.Array) -> jax.Array:
    """Joins the columns in one array: a turn of few programs spends less on handing them to threads."""
    dtype = jnp.result_type(brackets.low, brackets.count_low)
    return jnp.concatenate([column.astype(dtype) for column in (*brackets.columns, probes)], 1)


def _from_table(table: jax.Array, like: Brackets) -> tuple[Brackets, jax.Array]:
    number = len(like.columns)
    columns = (table[:, i : i + 1].astype(field.dtype) for i, field in enumerate(like.columns))
    return Brackets(*columns), table[:, number:].astype(like.low.dtype)
