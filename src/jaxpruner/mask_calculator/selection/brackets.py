"""Narrows brackets by counting at probes, many brackets at a time.

A bracket holds a position at which a falling count passes a target: at least `target` are counted at `low`, fewer at
`high`. Positions are those of floats (`Order`), or indices in flat order where the end of the ties is sought.

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
# A float that is rounded up to the number of all positions would not convert back.
_MOST_OF_WIDTH = 1 - 2**-20


class Order(NamedTuple):
    """Floats of one dtype as whole numbers in the same order, so that a bracket can be halved exactly.

    The position of a float is its rank among all floats of the dtype, and says nothing of where it stands in an array.
    Positions are unsigned; -0.0 and 0.0 share one.
    """

    dtype: jnp.dtype  # of the floats
    bits: jnp.dtype  # signed integers as wide as the floats
    signed: jnp.dtype  # at least 32 bits, to compute in
    unsigned: jnp.dtype  # of the positions

    @classmethod
    def of(cls, dtype: jnp.dtype) -> 'Order':
        """Makes the order of a float dtype that has infinities."""
        width = 8 * jnp.dtype(dtype).itemsize
        wide = max(width, 32)
        return cls(
            jnp.dtype(dtype),
            bits=jnp.dtype(f'int{width}'),
            signed=jnp.dtype(f'int{wide}'),
            unsigned=jnp.dtype(f'uint{wide}'),
        )

    def position(self, value: jax.Array) -> jax.Array:
        """Finds the position of each value; that of NaN means nothing."""
        bits = lax.bitcast_convert_type(value, self.bits).astype(self.signed)
        steps_from_zero = self._flip_negative(bits)
        return steps_from_zero.astype(self.unsigned) + self._zero

    def value(self, position: jax.Array) -> jax.Array:
        """Finds the value at each position."""
        steps_from_zero = (position - self._zero).astype(self.signed)
        bits = self._flip_negative(steps_from_zero).astype(self.bits)
        return lax.bitcast_convert_type(bits, self.dtype)

    def _flip_negative(self, numbers: jax.Array) -> jax.Array:
        """Turns bits of negative floats, which rise with the magnitude, into steps below zero, and back."""
        lowest = jnp.iinfo(self.bits).min
        return jnp.where(numbers >= 0, numbers, lowest - numbers)

    @property
    def lowest(self) -> jax.Array:
        """Position of -inf. The position below it stands before all numbers."""
        return self._zero - self._infinity

    @property
    def highest(self) -> jax.Array:
        """Position of inf. The position above it stands after all numbers."""
        return self._zero + self._infinity

    @property
    def octave(self) -> int:
        """Number of positions from a float to its double."""
        return 1 << jnp.finfo(self.dtype).nmant

    @property
    def width(self) -> int:
        """Number of bits that tell all positions apart."""
        return 8 * self.dtype.itemsize

    @property
    def _zero(self) -> jax.Array:
        return jnp.array(1 << (8 * self.unsigned.itemsize - 1), self.unsigned)

    @property
    def _infinity(self) -> jax.Array:
        infinity = jnp.array(jnp.inf, self.dtype)
        bits = lax.bitcast_convert_type(infinity, self.bits)
        return bits.astype(self.signed).astype(self.unsigned)


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
        vectors = low, high, count_low, count_high, target
        columns = [vector[:, None] for vector in vectors]
        return cls(*columns, is_even=jnp.ones_like(columns[0], bool))

    @property
    def columns(self) -> list[jax.Array]:
        """All fields but the parts."""
        low, high, count_low, count_high, target, is_even, _ = self
        return [low, high, count_low, count_high, target, is_even]

    @property
    def width(self) -> jax.Array:
        """How far `high` lies above `low`."""
        return self.high - self.low

    @property
    def is_unsettled(self) -> jax.Array:
        """Tells which brackets have to be narrowed further."""
        return (self.count_low != self.target) & (self.width > 1)

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
        return jnp.any(current.is_unsettled)

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


def narrow(brackets: Brackets, probes: jax.Array, counts: jax.Array) -> Brackets:
    """Narrows brackets by the counts at rising probes `[n, probes]`; those outside their bracket count for nothing."""
    low, high, count_low, count_high, target, is_even = brackets.columns
    is_open = brackets.is_unsettled
    # Counts fall. So the last of the probes with enough is the best, and the first of the others.
    for i in range(probes.shape[1]):
        probe = _column(probes, i)
        count = _column(counts, i)
        is_inside = is_open & (probe > brackets.low) & (probe < brackets.high)
        is_enough = is_inside & (count >= target)
        is_too_few = is_inside & (count < target)
        low = jnp.maximum(low, jnp.where(is_enough, probe, low))
        count_low = jnp.minimum(count_low, jnp.where(is_enough, count, count_low))
        high = jnp.minimum(high, jnp.where(is_too_few, probe, high))
        count_high = jnp.maximum(count_high, jnp.where(is_too_few, count, count_high))
    is_narrowed_by_little = high - low > brackets.width // 2
    is_even = is_narrowed_by_little & ~is_even
    return Brackets(low, high, count_low, count_high, target, is_even)


def _parts_at_ends(
    brackets: Brackets, sums: jax.Array, parts: jax.Array, counts: jax.Array
) -> jax.Array:
    """Updates the parts of the counts at `low` and `high` from a pass that counted `[parts, probes]`.

    Counts fall, part by part. So where two sums are equal, their parts are.
    """
    at_ends = jnp.concatenate([brackets.count_low, brackets.count_high], 1)
    for i in range(sums.shape[1]):
        is_at_end = _column(sums, i) == at_ends
        parts = jnp.where(is_at_end, _column(counts, i), parts)
    return parts


def even_probes(brackets: Brackets, number: int) -> jax.Array:
    """Makes probes `[n, number]` that divide brackets into parts of one length."""
    width = brackets.width
    parts = number + 1
    index = np.arange(1, parts, dtype=width.dtype)
    steps = width // parts * index + width % parts * index // parts
    return _inside(brackets, steps)


def likely_probes(brackets: Brackets, scale: int | None = None) -> jax.Array:
    """Makes three probes `[n, 3]` around the position where an even fall of the count would pass the target."""
    width = brackets.width
    float_width = width.astype(jnp.float32)
    bend = _BEND
    if scale is not None:
        bend = jnp.minimum(_BEND, float_width * (_BEND_IN_A_SCALE / scale))
    # The expected position and its scatter, if each count falls anywhere in the bracket.
    number = (brackets.count_low - brackets.count_high).astype(jnp.float32)
    surplus = (brackets.count_low - brackets.target).astype(jnp.float32)
    share = (surplus + 0.5) / (number + 1)
    share = jnp.minimum(share, 1)  # a target above the count makes the difference wrap around
    scatter = share * (1 - share)
    reach = _DEVIATIONS * jnp.sqrt(scatter / (number + 2)) + bend * scatter

    def steps(share_of_width: jax.Array) -> jax.Array:
        below_all = jnp.clip(share_of_width, 0, _MOST_OF_WIDTH)
        return (below_all * float_width).astype(width.dtype)

    # Leaves room for the outer two, where there is any.
    middle = jnp.clip(steps(share), 2, jnp.maximum(width, 4) - 2)
    away = jnp.maximum(steps(reach), 1)
    below = middle - jnp.minimum(away, middle)
    above = middle + jnp.minimum(away, width - middle)
    column = np.arange(3)
    middle_or_above = jnp.where(column > 1, above, middle)
    return _inside(brackets, jnp.where(column < 1, below, middle_or_above))


def _inside(brackets: Brackets, steps: jax.Array) -> jax.Array:
    """Goes so many steps from `low`, or as far as the bracket allows; two probes may become one."""
    last = jnp.maximum(brackets.width, 2) - 1
    return brackets.low + jnp.clip(steps, 1, last)


def _as_table(brackets: Brackets, probes: jax.Array) -> jax.Array:
    """Joins the columns in one array: a turn of few programs spends less on handing them to threads."""
    dtype = jnp.result_type(brackets.low, brackets.count_low)
    columns = [column.astype(dtype) for column in (*brackets.columns, probes)]
    return jnp.concatenate(columns, 1)


def _from_table(table: jax.Array, like: Brackets) -> tuple[Brackets, jax.Array]:
    columns = []
    for i, field in enumerate(like.columns):
        columns.append(_column(table, i).astype(field.dtype))
    probes = table[:, len(columns) :]
    return Brackets(*columns), probes.astype(like.low.dtype)


def _column(table: jax.Array, i: int) -> jax.Array:
    """Takes a column of a table as a table `[rows, 1]`."""
    return table[:, i : i + 1]
