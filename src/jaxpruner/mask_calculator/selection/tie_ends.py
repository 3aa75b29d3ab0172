"""Finds where the ties of a row end that are kept: one pass over the row, then a short stretch of it.

The pass counts the ties in each of some dozens of parts, which tells the part in which the room ends. Only that part is
looked at again, and divided in the same way.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection.counts_of_parts import reduce_together, sum_together
from jaxpruner.mask_calculator.selection.scores import Scores, read
from jaxpruner.mask_calculator.selection.turns import Turn

# Rows of at most so many scores have so few parts, which one thread counts side by side: to wake another takes longer.
_FEW_SCORES = 2**14
_FEW_PARTS = 4


def end_in_row(
    otherwise: jax.Array, turn: Turn, thresholds: jax.Array, room: jax.Array
) -> jax.Array:
    """Finds the end in the flat order of a row before which as many ties stand as there is room for.

    Args:
      otherwise: what the row has where no end is sought; not read.
      turn: the row.
      thresholds: `[2 or more]`: ties reach the first, and not the second.
      room: unsigned scalar, at most the number of ties.

    Returns:
      Unsigned scalar: the index after the last tie that there is room for, 0 where there is room for none.
    """
    del otherwise
    counter = room.dtype.type
    length = _part_length(turn.longest)
    most_parts = turn.longest // length
    counts = turn.ask(functools.partial(_ties_in_parts, length, most_parts), thresholds)
    part, room_left = _where_room_ends(counts.astype(counter), room)
    # What is left over at the end of a row is shorter than a part, and the stretch lies within the row.
    begin = jnp.minimum(part, turn.size // counter(length)) * counter(length)
    first = jnp.minimum(begin, jnp.maximum(turn.size, counter(length)) - counter(length))
    reached = turn.ask(functools.partial(_stretch_from, length), thresholds, first, begin)

    short = math.isqrt(length)
    reached = _pad(reached, -(-length // short) * short).reshape(-1, short)
    reaching_low, reaching_high = sum_together([reached > 0, reached > 1], (1,), counter)
    part, room_left = _where_room_ends(reaching_low - reaching_high, room_left)
    ties = lax.dynamic_index_in_dim(reached, part, keepdims=False) == 1
    last, _ = _where_room_ends(ties.astype(counter), room_left)
    end = first + part * counter(short) + last + 1
    return jnp.where(room > 0, end, 0)


def _part_length(size: int) -> int:
    """Chooses the length of a part: few scores have few parts, and more have some dozens or hundreds."""
    if size <= _FEW_SCORES:
        return max(-(-size // _FEW_PARTS), 1)
    third = round(size ** (1 / 3))
    return max(third * third // 2, 1)


def _pad(vector: jax.Array, length: int) -> jax.Array:
    return jnp.pad(vector, (0, length - len(vector)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ties_in_parts(
    length: int, most_parts: int, row: jax.Array | Scores, thresholds: jax.Array
) -> jax.Array:
    """Counts the ties in each part of a row, `[most_parts]`."""
    number = row.size // length
    low, high = thresholds[0].astype(row.dtype), thresholds[1].astype(row.dtype)
    if 0 < number <= _FEW_PARTS:
        predicates = []
        for begin in range(0, number * length, length):
            part = read(_slice(row, begin, begin + length))
            predicates += [part >= low, part >= high]
        counts = jnp.stack(sum_together(predicates, (0,), jnp.uint32))
        return _pad(counts[::2] - counts[1::2], most_parts)
    used = _slice(row, 0, number * length)
    parts = read(jax.tree.map(lambda leaf: leaf.reshape(number, length), used))
    reaching_low, reaching_high = sum_together([parts >= low, parts >= high], (1,), jnp.uint32)
    return _pad(reaching_low - reaching_high, most_parts)


def _slice(row: jax.Array | Scores, begin: int, end: int) -> jax.Array | Scores:
    return jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, begin, end), row)


@functools.partial(jax.jit, static_argnums=0)
def _stretch_from(
    length: int,
    row: jax.Array | Scores,
    thresholds: jax.Array,
    first: jax.Array,
    begin: jax.Array,
) -> jax.Array:
    """Tells for a stretch of a row from `first` how many thresholds each score from `begin` on reaches, `[length]`."""
    own_length = min(length, row.size)

    def cut(leaf: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(leaf, first, own_length)

    stretch = read(jax.tree.map(cut, row))
    low = (stretch >= thresholds[0].astype(row.dtype)).astype(jnp.uint8)
    high = (stretch >= thresholds[1].astype(row.dtype)).astype(jnp.uint8)
    is_new = lax.iota(begin.dtype, own_length) >= begin - first
    return _pad(jnp.where(is_new, low + high, 0), length)


def _where_room_ends(counts: jax.Array, room: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds where the sum of counts `[n]` reaches the room, and how much room is left there."""
    counts, index = control.keep_in_loop((counts, lax.iota(jnp.int32, len(counts))))
    # Read `sum_up_to` as a cumulative sum, which would be many programs where this is one. `sum_before` says nothing
    # more, but XLA would materialise what a lone sum reads.
    up_to = jnp.where(index <= index[:, None], counts, 0)
    before = jnp.where(index < index[:, None], counts, 0)
    sum_up_to, sum_before = reduce_together([up_to, before], 0, lax.add, (1,))
    is_passed = (jnp.maximum(sum_up_to, sum_before) < room).astype(room.dtype)
    # Parts that are passed stand first.
    passed, used = reduce_together([is_passed, is_passed * counts], 0, lax.add, (0,))
    return passed, room - used
