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
from jax import lax

# How far probes stand from where the count should pass, in standard deviations of a count that is scattered evenly.
_DEVIATIONS = 1.5


class Brackets(NamedTuple):
    """Some brackets; each field is a vector with an entry for each.

    >>> Brackets(*(jnp.array([n]) for n in (2, 7, 5, 0, 0))).high
    Array([7], dtype=int32)
    """

    low: jax.Array  # unsigned: the count here is at least the wanted one
    high: jax.Array  # unsigned: the count here is less
    count_low: jax.Array  # counter
    count_high: jax.Array  # counter
    evenly: jax.Array  # bool: the next probes divide the bracket evenly

    @classmethod
    def between(cls, low: jax.Array, high: jax.Array, count_low: jax.Array, count_high: jax.Array) -> 'Brackets':
        """Brackets of which the ends and their counts are known.

        >>> Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 5, 0))).evenly
        Array([ True], dtype=bool)
        """
        return cls(low, high, count_low, count_high, jnp.ones_like(low, bool))


def unsettled(brackets: Brackets, wanted: jax.Array) -> jax.Array:
    """Which brackets have to be narrowed further.

    Args:
      brackets: `n` of them.
      wanted: counter vector of `n`.

    Returns:
      Bool vector of `n`.

    >>> unsettled(Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 5, 0))), jnp.uint32(3)[None])
    Array([ True], dtype=bool)
    """
    return (brackets.count_low != wanted) & (brackets.high - brackets.low > 1)


def narrow(brackets: Brackets, wanted: jax.Array, probes: jax.Array, counts: jax.Array) -> Brackets:
    """Narrows brackets by the counts at some probes.

    Args:
      brackets: `n` of them.
      wanted: counter vector of `n`.
      probes: unsigned `[n, probes]`, rising; those outside their bracket count for nothing.
      counts: counter `[n, probes]`, falling along a row.

    Returns:
      The narrower brackets.

    >>> start = Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 9, 0)))
    >>> probes = jnp.array([[2, 5, 7]], jnp.uint32)
    >>> narrow(start, jnp.uint32(3)[None], probes, 9 - probes).low
    Array([5], dtype=uint32)
    """
    low, high, count_low, count_high, evenly = brackets
    unknown = unsettled(brackets, wanted)
    for column in range(probes.shape[1]):
        probe, here = probes[:, column], counts[:, column]
        inside = unknown & (probe > low) & (probe < high)
        enough, too_few = inside & (here >= wanted), inside & (here < wanted)
        low, count_low = jnp.where(enough, probe, low), jnp.where(enough, here, count_low)
        high, count_high = jnp.where(too_few, probe, high), jnp.where(too_few, here, count_high)
    by_little = high - low > (brackets.high - brackets.low) // (probes.shape[1] + 1)
    return Brackets(low, high, count_low, count_high, by_little & ~evenly)


def even_probes(brackets: Brackets, number: int) -> jax.Array:
    """Probes that divide brackets into `number + 1` parts of one length.

    Returns:
      Unsigned `[n, number]`.

    >>> even_probes(Brackets.between(*(jnp.uint32(n)[None] for n in (0, 8, 9, 0))), 3)
    Array([[2, 4, 6]], dtype=uint32)
    """
    width = brackets.high - brackets.low
    part, rest = width // (number + 1), width % (number + 1)
    steps = [part * i + rest * i // (number + 1) for i in range(1, number + 1)]
    return _inside(brackets, jnp.stack(steps, 1))


def likely_probes(brackets: Brackets, wanted: jax.Array) -> jax.Array:
    """Three probes around the place where an even fall of the count would pass the wanted number.

    Returns:
      Unsigned `[n, 3]`.

    >>> even = Brackets.between(*(jnp.uint32(n)[None] for n in (0, 4000, 1000, 0)))
    >>> likely_probes(even, jnp.uint32(500)[None])
    Array([[1905, 2000, 2094]], dtype=uint32)
    """
    width = brackets.high - brackets.low
    inside = (brackets.count_low - brackets.count_high).astype(jnp.float32)
    share = (brackets.count_low - wanted).astype(jnp.float32) / jnp.maximum(inside, 1)
    # At least half a weight's way, or the probes of a nearly empty bracket would be one.
    reach = _DEVIATIONS * jnp.sqrt(inside * share * (1 - share) + 0.25) / jnp.maximum(inside, 1)
    shares = jnp.stack([share - reach, share, share + reach], 1)
    # Rounded up to the width of all numbers, a float would not convert back.
    steps = (jnp.clip(shares, 0, 1 - 2**-20) * width.astype(jnp.float32)[:, None]).astype(width.dtype)
    return _inside(brackets, steps)


def _inside(brackets: Brackets, steps: jax.Array) -> jax.Array:
    """Steps from `low`, moved so far that they rise and lie inside."""
    last = jnp.maximum(brackets.high - brackets.low, 2) - 1
    moved, least = [], jnp.ones_like(last)
    for column in range(steps.shape[1]):
        behind = steps.shape[1] - 1 - column  # further probes, which need a place, too
        most = jnp.maximum(jnp.maximum(last, behind) - behind, least)
        moved.append(jnp.minimum(jnp.clip(steps[:, column], least, most), last))
        least = moved[-1] + 1
    return brackets.low[:, None] + jnp.stack(moved, 1)


def settle(
    brackets: Brackets,
    wanted: jax.Array,
    spread: Callable[[jax.Array], Any],
    count: Callable[[Any], jax.Array],
    first: jax.Array | None = None,
    probes: int = 3,
    turns: int | None = None,
) -> Brackets:
    """Narrows brackets until all are settled.

    Args:
      brackets: `n` of them.
      wanted: counter vector of `n`.
      spread: probes, unsigned `[n, probes]`, to what `count` takes. It is handed from turn to turn, so that the
        programs of arrays of one shape are the same and are compiled once.
      count: what `spread` returned to the counts at the probes, counter `[n, probes]`, falling along a row.
      first: the first probes; even ones if there are none.
      probes: how many a turn; more than three always divide evenly.
      turns: so many, and no device is asked whether that is enough; it takes `(probes + 1) ** turns` of the width.

    Returns:
      The settled brackets.

    >>> start = Brackets.between(*(jnp.uint32(n)[None] for n in (0, 9, 9, 0)))
    >>> settle(start, jnp.uint32(3)[None], spread=lambda probes: probes, count=lambda probes: 9 - probes).low
    Array([6], dtype=uint32)
    """

    def following(current: Brackets) -> jax.Array:
        even = even_probes(current, probes)
        return even if probes > 3 else jnp.where(current.evenly[:, None], even, likely_probes(current, wanted))

    def turn(state: tuple) -> tuple:
        table, placed = state
        current, positions = _from_table(table, brackets)
        current = narrow(current, wanted, positions, count(placed))
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
            lambda current: jnp.any(unsettled(_from_table(current[0], brackets)[0], wanted)), turn, state
        )
    return _from_table(table, brackets)[0]


def _as_table(brackets: Brackets, probes: jax.Array) -> jax.Array:
    """One array, so that a turn is few programs: handing many from thread to thread costs more than they do."""
    dtype = jnp.result_type(brackets.low, brackets.count_low)
    return jnp.concatenate([jnp.stack([field.astype(dtype) for field in brackets], 1), probes.astype(dtype)], 1)


def _from_table(table: jax.Array, like: Brackets) -> tuple[Brackets, jax.Array]:
    columns = [table[:, i].astype(field.dtype) for i, field in enumerate(like)]
    return Brackets(*columns), table[:, len(like) :].astype(like.low.dtype)
