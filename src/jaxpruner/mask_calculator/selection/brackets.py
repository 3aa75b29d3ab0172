"""Narrows brackets by counting at probes, many brackets at a time.

A bracket is two whole numbers between which a falling count passes a target: at least `target` are counted at `low`,
fewer at `high`. The numbers are float ranks (`Order`), or indices in flat order where the end of the ties is sought.

Probes stand where the count would pass its target if it fell evenly within the bracket. Where that narrowed a bracket
by little, the next probes divide it evenly, which bounds the number of iterations. A bracket is settled when the count
at `low` is the target, or when nothing lies between `low` and `high`.

A ranking of several arrays, its members, has one bracket. Then the counts of each member at `low` and `high` are kept,
too, so that no pass has to find them where the ties are cut.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control

# The outer probes stand this far from the middle one: some standard deviations of counts that are scattered evenly, and
# a share of the bracket, since the count does not fall along a line. The curve is flat within a bracket that is much
# shorter than the distance over which it bends (`curvature_width`). There the share is proportional to the width of the
# bracket. All three numbers were tuned on magnitudes of several distributions.
_DEVIATIONS = 1.0
_BEND = 0.2
_BEND_PER_CURVATURE_WIDTH = 2.0
# A share that is rounded up to all of the width would not convert back.
_MOST_OF_WIDTH = 1 - 2**-20


class Order(NamedTuple):
    """The order of the floats of one dtype, as whole numbers, so that a bracket can be halved exactly.

    The float rank of a value counts the floats of the dtype in their order. It depends on no array. Float ranks are
    unsigned: that of zero, which -0.0 shares, lies in the middle.
    """

    dtype: jnp.dtype  # of the floats
    bits: jnp.dtype  # signed integers as wide as the floats
    signed: jnp.dtype  # at least 32 bits, to compute in
    unsigned: jnp.dtype  # of the float ranks

    @classmethod
    def from_dtype(cls, dtype: jnp.dtype) -> 'Order':
        """Makes the order of a float dtype that has infinities."""
        width = 8 * jnp.dtype(dtype).itemsize
        wide = max(width, 32)
        return cls(
            jnp.dtype(dtype),
            bits=jnp.dtype(f'int{width}'),
            signed=jnp.dtype(f'int{wide}'),
            unsigned=jnp.dtype(f'uint{wide}'),
        )

    def float_rank(self, value: jax.Array) -> jax.Array:
        """Finds the float rank of each value; that of NaN means nothing."""
        bits = lax.bitcast_convert_type(value, self.bits).astype(self.signed)
        steps_from_zero = self._flip_negative(bits)
        return steps_from_zero.astype(self.unsigned) + self._zero

    def value(self, float_rank: jax.Array) -> jax.Array:
        """Finds the value of each float rank."""
        steps_from_zero = (float_rank - self._zero).astype(self.signed)
        bits = self._flip_negative(steps_from_zero).astype(self.bits)
        return lax.bitcast_convert_type(bits, self.dtype)

    def _flip_negative(self, numbers: jax.Array) -> jax.Array:
        """Turns bits of negative floats, which rise with the magnitude, into steps below zero, and back."""
        lowest = jnp.iinfo(self.bits).min
        return jnp.where(numbers >= 0, numbers, lowest - numbers)

    @property
    def lowest(self) -> jax.Array:
        """Float rank of -inf. The one below it stands before all numbers."""
        return self._zero - self._infinity

    @property
    def highest(self) -> jax.Array:
        """Float rank of inf. The one above it stands after all numbers."""
        return self._zero + self._infinity

    @property
    def octave(self) -> int:
        """Number of floats from one to its double."""
        return 1 << jnp.finfo(self.dtype).nmant

    @property
    def width(self) -> int:
        """Number of bits that tell all float ranks apart."""
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

    Vectors would be reshaped at each step, and XLA runs all its simplifications once for each such reshape.
    """

    low: jax.Array  # unsigned: at least `target` are counted here
    high: jax.Array  # unsigned: fewer are counted here
    count_low: jax.Array  # count dtype
    count_high: jax.Array  # count dtype
    target: jax.Array  # count dtype
    is_even: jax.Array  # bool: the next probes divide the bracket evenly
    # Count dtype `[members, 2]`, for a single bracket: what each member adds to `count_low` and `count_high`.
    member_counts: jax.Array | None = None

    @classmethod
    def between(
        cls,
        low: jax.Array,
        high: jax.Array,
        count_low: jax.Array,
        count_high: jax.Array,
        target: jax.Array,
    ) -> 'Brackets':
        """Makes brackets from vectors of bounds and counts there; the first probes divide them evenly."""
        vectors = low, high, count_low, count_high, target
        columns = [vector[:, None] for vector in vectors]
        return cls(*columns, is_even=jnp.ones_like(columns[0], bool))

    @property
    def columns(self) -> list[jax.Array]:
        """All fields but the counts of members."""
        low, high, count_low, count_high, target, is_even, _ = self
        return [low, high, count_low, count_high, target, is_even]

    @property
    def width(self) -> jax.Array:
        """The distance from `low` to `high`."""
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
    probe_count: int = 3,
    iterations: int | None = None,
    curvature_width: int | None = None,
) -> Brackets:
    """Narrows brackets until all are settled.

    Args:
      brackets: `n` of them.
      prepare: makes what `count` takes from probes, unsigned `[n, probes]`. The loop carries it, so that the programs
        of arrays of one shape are equal and compiled once.
      count: counts at the probes, `[n, probes]` of the count dtype, falling along a row; of a bracket with members
        `[members, probes]`.
      first: the first probes; by default even or likely ones, as `brackets.is_even` says.
      probe_count: how many probes in each iteration; more than three always divide evenly.
      iterations: a fixed number, so that no device is asked whether to go on. With more than three probes each of them
        divides the width by `probe_count + 1`. By default the loop ends as soon as all brackets are settled.
      curvature_width: the distance, in whole numbers, over which the count bends away from a line.
    """

    def next_probes(current: Brackets) -> jax.Array:
        even = even_probes(current, probe_count)
        if probe_count > 3:
            return even
        return jnp.where(current.is_even, even, likely_probes(current, curvature_width))

    def iterate(state: tuple) -> tuple:
        table, prepared, member_counts = state
        current, probes = _from_table(table, brackets)
        counts = count(prepared)
        if member_counts is None:
            current = narrow(current, probes, counts)
        else:
            counts = control.keep_whole(counts)
            sums = jnp.sum(counts, 0, keepdims=True, dtype=counts.dtype)
            current = narrow(current, probes, sums)
            member_counts = _member_counts_at_bounds(current, sums, member_counts, counts)
        probes = next_probes(current)
        return _as_table(current, probes), prepare(probes), member_counts

    def is_open(state: tuple) -> jax.Array:
        current, _ = _from_table(state[0], brackets)
        return jnp.any(current.is_unsettled)

    if first is None:
        first = next_probes(brackets)
    else:
        # A guess that is wrong is followed by an even division, as any other.
        brackets = brackets.without_even_probes()
    state = _as_table(brackets, first), prepare(first), brackets.member_counts
    if iterations is not None:
        state = lax.fori_loop(0, iterations, lambda _, state: iterate(state), state)
    else:
        state = lax.while_loop(is_open, iterate, state)
    table, _, member_counts = state
    settled, _ = _from_table(table, brackets)
    return settled._replace(member_counts=member_counts)


def narrow(
    brackets: Brackets,
    probes: jax.Array,
    counts: jax.Array,
) -> Brackets:
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


def _member_counts_at_bounds(
    brackets: Brackets,
    sums: jax.Array,
    member_counts: jax.Array,
    counts: jax.Array,
) -> jax.Array:
    """Updates the counts of members at `low` and `high` from a pass that counted `[members, probes]`.

    The counts of each member fall. So where two sums are equal, the counts of each member are equal.
    """
    at_bounds = jnp.concatenate([brackets.count_low, brackets.count_high], 1)
    for i in range(sums.shape[1]):
        is_at_bound = _column(sums, i) == at_bounds
        member_counts = jnp.where(is_at_bound, _column(counts, i), member_counts)
    return member_counts


def even_probes(brackets: Brackets, count: int) -> jax.Array:
    """Makes probes `[n, count]` that divide brackets into intervals of one length."""
    width = brackets.width
    intervals = count + 1
    index = np.arange(1, intervals, dtype=width.dtype)
    steps = width // intervals * index
    steps += width % intervals * index // intervals
    return _inside(brackets, steps)


def likely_probes(brackets: Brackets, curvature_width: int | None = None) -> jax.Array:
    """Makes three probes `[n, 3]` around the place where an even fall of the count would pass the target."""
    width = brackets.width
    float_width = width.astype(jnp.float32)
    bend = _BEND
    if curvature_width is not None:
        bend = jnp.minimum(_BEND, float_width * (_BEND_PER_CURVATURE_WIDTH / curvature_width))
    # The expected place and its scatter, if each count falls anywhere in the bracket.
    inside = (brackets.count_low - brackets.count_high).astype(jnp.float32)
    surplus = (brackets.count_low - brackets.target).astype(jnp.float32)
    share = (surplus + 0.5) / (inside + 1)
    share = jnp.minimum(share, 1)  # a target above the count makes the difference wrap around
    scatter = share * (1 - share)
    reach = _DEVIATIONS * jnp.sqrt(scatter / (inside + 2)) + bend * scatter

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
    """Goes these numbers of steps from `low`, or as far as the bracket allows; two probes may become one."""
    last = jnp.maximum(brackets.width, 2) - 1
    return brackets.low + jnp.clip(steps, 1, last)


def _as_table(brackets: Brackets, probes: jax.Array) -> jax.Array:
    """Joins the columns in one array: an iteration of few programs spends less on handing them to threads."""
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
