"""Finds where the ties end that are kept, on one device: one pass over the arrays, then a short stretch of each.

The pass counts the ties in each of some dozens of parts, which tells the part in which the room ends. Only that part is
looked at again, and divided in the same way.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import tables
from jaxpruner.mask_calculator.selection.counts_of_parts import (
    column_of,
    reduce_together,
    sum_small,
    sum_together,
)
from jaxpruner.mask_calculator.selection.scores import Scores, read

# Rows of at most so many scores have so few parts, which one thread counts side by side: to wake another takes longer.
_FEW_SCORES = 2**14
_FEW_PARTS = 4


def of_rooms(
    arrays: Sequence[jax.Array | Scores], thresholds: Sequence[jax.Array], room: jax.Array
) -> jax.Array:
    """Finds the end in the flat order of each row before which as many ties stand as there is room for.

    Args:
      arrays: floats `[rows, …]`, or `Scores`.
      thresholds: for each array `[rows, 2 or more]` of its dtype: ties reach the first, and not the second.
      room: unsigned `[all rows]`, at most the number of ties.

    Returns:
      Unsigned `[all rows]`: the index after the last tie that there is room for, 0 where there is room for none.
    """
    counter = room.dtype.type
    flat = [jax.tree.map(lambda leaf: leaf.reshape(len(leaf), -1), array) for array in arrays]
    length = _part_length(max(array.shape[1] for array in flat))
    # What is left over at the end of a row is shorter than a part.
    numbers = [array.shape[1] // length for array in flat]
    counts, last_parts = [], []
    for array, own_thresholds, number in zip(flat, thresholds, numbers, strict=True):
        ties = _ties_in_parts(array, own_thresholds, number, length, counter)
        counts.append(_pad(ties, max(numbers)))
        last_parts.append(jnp.full(array.shape[0], number, counter))
    part, room_left = _where_room_ends(jnp.concatenate(counts), room)

    begins = jnp.minimum(part, jnp.concatenate(last_parts)) * counter(length)
    begins = tables.widen(begins, thresholds[0].shape[1])
    rows = [array.shape[0] for array in flat]
    begins = tables.split(begins, rows)
    firsts, stretches = [], []
    for array, own_thresholds, begin in zip(flat, thresholds, begins, strict=True):
        first, reached = _stretch_from(array, own_thresholds, begin[:, 0], length)
        firsts.append(first)
        stretches.append(reached)
    first, reached = jnp.concatenate(firsts), jnp.concatenate(stretches)

    short = math.isqrt(length)
    padded_length = -(-length // short) * short
    reached = _pad(reached, padded_length)
    reached = reached.reshape(len(reached), -1, short)
    reaching_low, reaching_high = sum_together([reached > 0, reached > 1], (2,), counter)
    part, room_left = _where_room_ends(reaching_low - reaching_high, room_left)
    ties = jnp.take_along_axis(reached, part[:, None, None], 1)[:, 0] == 1
    last, _ = _where_room_ends(ties.astype(counter), room_left)
    end = first + part * counter(short) + last + 1
    return jnp.where(room > 0, end, 0)


def _part_length(size: int) -> int:
    """Chooses the length of a part: few scores have few parts, and more have some dozens or hundreds."""
    if size <= _FEW_SCORES:
        return max(-(-size // _FEW_PARTS), 1)
    third = round(size ** (1 / 3))
    return max(third * third // 2, 1)


def _pad(table: jax.Array, length: int) -> jax.Array:
    return jnp.pad(table, ((0, 0), (0, length - table.shape[1])))


def _ties_in_parts(
    rows: jax.Array | Scores, thresholds: jax.Array, number: int, length: int, counter: type
) -> jax.Array:
    """Counts the ties in each part of each row, `[rows, number]`."""
    if 0 < number <= _FEW_PARTS:
        low, high = column_of(thresholds, 0, 2), column_of(thresholds, 1, 2)
        predicates = []
        for begin in range(0, number * length, length):
            part = read(_slice_rows(rows, begin, begin + length))
            predicates += [part >= low, part >= high]
        counts = sum_together(predicates, (1,), counter)
        return jnp.stack(counts[::2], 1) - jnp.stack(counts[1::2], 1)
    low, high = column_of(thresholds, 0, 3), column_of(thresholds, 1, 3)
    used = _slice_rows(rows, 0, number * length)
    parts = read(jax.tree.map(lambda leaf: leaf.reshape(len(leaf), number, length), used))
    reaching_low, reaching_high = sum_together([parts >= low, parts >= high], (2,), counter)
    return reaching_low - reaching_high


def _slice_rows(rows: jax.Array | Scores, begin: int, end: int) -> jax.Array | Scores:
    return jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, begin, end, axis=1), rows)


def _stretch_from(
    rows: jax.Array | Scores, thresholds: jax.Array, begins: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Takes a stretch of each row: its first index, and how many thresholds each score from `begins` on reaches."""
    own_length = min(length, rows.shape[1])
    first = jnp.minimum(begins, begins.dtype.type(rows.shape[1] - own_length))

    @jax.vmap
    def cut(row: jax.Array, begin: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(row, begin, own_length)

    stretch = read(jax.tree.map(lambda leaf: cut(leaf, first), rows))
    low = (stretch >= column_of(thresholds, 0, 2)).astype(jnp.uint8)
    high = (stretch >= column_of(thresholds, 1, 2)).astype(jnp.uint8)
    is_new = lax.iota(begins.dtype, own_length) >= (begins - first)[:, None]
    return first, _pad(jnp.where(is_new, low + high, 0), length)


def _where_room_ends(counts: jax.Array, room: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds where the sum of each row of counts `[rows, n]` reaches the room, and how much room is left there."""
    counts, index = control.keep_in_loop((counts, lax.iota(jnp.int32, counts.shape[1])))
    # Read `sum_up_to` as a cumulative sum, which would be many programs where this is one. `sum_before` says nothing
    # more, but XLA would materialise what a lone sum reads.
    up_to = jnp.where(index <= index[:, None], counts[:, None], 0)
    before = jnp.where(index < index[:, None], counts[:, None], 0)
    sum_up_to, sum_before = reduce_together([up_to, before], 0, lax.add, (2,))
    is_passed = sum_up_to < room[:, None]
    # Parts that are passed stand first.
    passed = sum_small(is_passed.astype(room.dtype))
    last = jnp.maximum(passed, 1) - 1
    sums = jnp.maximum(sum_up_to, sum_before)
    used = jnp.take_along_axis(sums, last[:, None], 1, mode='clip')[:, 0]
    return passed, room - jnp.where(passed > 0, used, 0)
