"""Where a falling count passes a wanted number: brackets that probes narrow, many at a time.

The position that is sought lies between two whole numbers, `low` and `high`. A probe between them counts, and replaces
one of the two. Within a bracket the count is taken to fall evenly, so that probes stand close around the place where it
should pass the wanted number; where that narrowed a bracket by little, the next probes divide it evenly, which bounds
the number of turns. A bracket is settled when the count at `low` is the wanted one, or when nothing is left between.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# How far probes stand from where the count should pass: in standard deviations of a count that is scattered evenly, and
# in shares of the bracket, over which the fall may bend (more than so much of it in no bracket, and in short ones in
# proportion to their width). All were tried out on magnitudes of several distributions.
_DEVIATIONS = 1.0
_BEND = 0.2
_BEND_IN_A_SCALE = 2.0


class Brackets(NamedTuple):
    """Some brackets; each field is a vector with an entry for each.

    >>> Brackets(*(jnp.array([n]) for n in (2, 7, 5, 0, 3, 0))).high
    Array([7], dtype=int32)
    """

    low: jax.Array  # unsigned: the count here is at least the wanted one
    high: jax.Array  # unsigned: the count here is less
    count_low: jax.Array  # counter
    count_high: jax.Array  # counter
    wanted: jax.Array  # counter: the count that is sought
    evenly: jax.Array  # bool: the next probes divide the bracket evenly

    @classmethod
    def between(
        cls,
        low: jax.Array,
        high: jax.Array,
        count_low: jax.Array,
        count_high: jax.Array,
        wanted: jax.Array,
    ) -> 'Brackets':
        """Brackets of which the ends and their counts are known.

        >>> Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 5, 0, 3))).evenly
        Array([ True], dtype=bool)
        """
        return cls(low, high, count_low, count_high, wanted, jnp.ones_like(low, bool))


def unsettled(brackets: Brackets) -> jax.Array:
    """Which brackets have to be narrowed further: a bool for each.

    >>> unsettled(Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 5, 0, 3))))
    Array([ True], dtype=bool)
    """
    return (brackets.count_low != brackets.wanted) & (brackets.high - brackets.low > 1)


def narrow(brackets: Brackets, probes: jax.Array, counts: jax.Array) -> Brackets:
    """Narrows brackets by the counts at some probes.

    Args:
      brackets: `n` of them.
      probes: unsigned `[n, probes]`, rising; those outside their bracket count for nothing.
      counts: counter `[n, probes]`, falling along a row.

    Returns:
      The narrower brackets.

    >>> start = Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 9, 0, 3)))
    >>> probes = jnp.array([[2, 5, 7]], jnp.uint32)
    >>> narrow(start, probes, 9 - probes).low
    Array([5], dtype=uint32)
    """
    low, high, count_low, count_high, wanted, evenly = brackets
    unknown = unsettled(brackets)
    # Counts fall, so that of the probes with enough the last is the best, and of the others the first.
    for column in range(probes.shape[1]):
        probe, here = probes[:, column], counts[:, column]
        inside = unknown & (probe > brackets.low) & (probe < brackets.high)
        enough, too_few = inside & (here >= wanted), inside & (here < wanted)
        low, count_low = (
            _where(enough, jnp.maximum, low, probe),
            _where(enough, jnp.minimum, count_low, here),
        )
        high, count_high = (
            _where(too_few, jnp.minimum, high, probe),
            _where(too_few, jnp.maximum, count_high, here),
        )
    by_little = high - low > (brackets.high - brackets.low) // 2
    return Brackets(low, high, count_low, count_high, wanted, by_little & ~evenly)


def _where(
    flags: jax.Array, better: Callable[..., jax.Array], old: jax.Array, new: jax.Array
) -> jax.Array:
    return better(old, jnp.where(flags, new, old))


def even_probes(brackets: Brackets, number: int) -> jax.Array:
    """Probes that divide brackets into `number + 1` parts of one length.

    Returns:
      Unsigned `[n, number]`.

    >>> even_probes(Brackets.between(*(jnp.uint32(n)[None] for n in (0, 8, 9, 0, 3))), 3)
    Array([[2, 4, 6]], dtype=uint32)
    """
    width = (brackets.high - brackets.low)[:, None]
    place = np.arange(1, number + 1, dtype=width.dtype)
    return _inside(
        brackets, width // (number + 1) * place + width % (number + 1) * place // (number + 1)
    )


def likely_probes(brackets: Brackets, scale: int | None = None) -> jax.Array:
    """Three probes around the place where an even fall of the count would pass the wanted number.

    Args:
      brackets: `n` of them.
      scale: of the positions over which the fall bends: shorter brackets bend less.

    Returns:
      Unsigned `[n, 3]`.

    >>> even = Brackets.between(*(jnp.uint32(n)[None] for n in (0, 4000, 1000, 0, 500)))
    >>> [[round(int(probe), -1) for probe in likely_probes(even, scale)[0]] for scale in (None, 10**6)]
    [[1740, 2000, 2260], [1930, 2000, 2070]]
    """
    width = brackets.high - brackets.low
    bend = (
        _BEND
        if scale is None
        else jnp.minimum(_BEND, width.astype(jnp.float32) * (_BEND_IN_A_SCALE / scale))
    )
    # Where the wanted number is expected and how it scatters, if each count falls anywhere in the bracket.
    number = (brackets.count_low - brackets.count_high).astype(jnp.float32)
    share = ((brackets.count_low - brackets.wanted).astype(jnp.float32) + 0.5) / (number + 1)
    share = jnp.minimum(
        share, 1
    )  # where more are wanted than there are, the difference is no number
    scatter = share * (1 - share)
    reach = _DEVIATIONS * jnp.sqrt(scatter / (number + 2)) + bend * scatter

    def steps(part: jax.Array) -> jax.Array:
        # Rounded up to the width of all numbers, a float would not convert back.
        return (jnp.clip(part, 0, 1 - 2**-20) * width.astype(jnp.float32)).astype(width.dtype)[
            :, None
        ]

    # The outer two have places, too, where there is room.
    middle = jnp.clip(steps(share), 2, jnp.maximum(width, 4)[:, None] - 2)
    away = jnp.maximum(steps(reach), 1)
    side = np.array([-1, 0, 1])
    below, above = (
        middle - jnp.minimum(away, middle),
        middle + jnp.minimum(away, width[:, None] - middle),
    )
    return _inside(brackets, jnp.where(side < 0, below, jnp.where(side > 0, above, middle)))


def _inside(brackets: Brackets, steps: jax.Array) -> jax.Array:
    """Where steps from `low` lead, or as near inside the brackets; two probes may become one."""
    last = jnp.maximum(brackets.high - brackets.low, 2) - 1
    return brackets.low[:, None] + jnp.clip(steps, 1, last[:, None])


def settle(
    brackets: Brackets,
    spread: Callable[[jax.Array], Any],
    count: Callable[[Any], jax.Array],
    first: jax.Array | None = None,
    probes: int = 3,
    turns: int | None = None,
    scale: int | None = None,
) -> Brackets:
    """Narrows brackets until all are settled.

    Args:
      brackets: `n` of them.
      spread: probes, unsigned `[n, probes]`, to what `count` takes. It is handed from turn to turn, so that the
        programs of arrays of one shape are the same and are compiled once.
      count: what `spread` returned to the counts at the probes, counter `[n, probes]`, falling along a row.
      first: the first probes; even ones if there are none.
      probes: how many a turn; more than three always divide evenly.
      turns: so many, and no device is asked whether that is enough; it takes `(probes + 1) ** turns` of the width.
      scale: as in `likely_probes`.

    Returns:
      The settled brackets.

    >>> start = Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 9, 0, 3)))
    >>> settle(start, spread=lambda probes: probes, count=lambda probes: 9 - probes).low
    Array([6], dtype=uint32)
    """

    def following(current: Brackets) -> jax.Array:
        even = even_probes(current, probes)
        return (
            even
            if probes > 3
            else jnp.where(current.evenly[:, None], even, likely_probes(current, scale))
        )

    def turn(state: tuple) -> tuple:
        table, placed = state
        current, positions = _from_table(table, brackets)
        current = narrow(current, positions, count(placed))
        positions = following(current)
        return _as_table(current, positions), spread(positions)

    if first is None:
        first = following(brackets)
    else:
        # A guess that is wrong is followed by an even division, as any other.
        brackets = brackets._replace(evenly=jnp.zeros_like(brackets.evenly))
    state = _as_table(brackets, first), spread(first)
    if turns is not None:
        table, _ = lax.fori_loop(0, turns, lambda _, current: turn(current), state)
    else:
        table, _ = lax.while_loop(
            lambda current: jnp.any(unsettled(_from_table(current[0], brackets)[0])), turn, state
        )
    return _from_table(table, brackets)[0]


def _as_table(brackets: Brackets, probes: jax.Array) -> jax.Array:
    """One array, so that a turn is few programs: handing many from thread to thread costs more than they do."""
    dtype = jnp.result_type(brackets.low, brackets.count_low)
    return jnp.concatenate(
        [jnp.stack([field.astype(dtype) for field in brackets], 1), probes.astype(dtype)], 1
    )


def _from_table(table: jax.Array, like: Brackets) -> tuple[Brackets, jax.Array]:
    columns = [table[:, i].astype(field.dtype) for i, field in enumerate(like)]
    return Brackets(*columns), table[:, len(like) :].astype(like.low.dtype)
