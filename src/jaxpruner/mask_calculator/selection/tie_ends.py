"""Where the ties end that are kept, in arrays that lie on one device: one pass over them, then a short part of each."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.mask_calculator.selection import tables
from jaxpruner.mask_calculator.selection.counts_of_parts import (
    of_rows,
    reduce_together,
    sum_small,
    sum_together,
)
from jaxpruner.mask_calculator.selection.scores import Scores, read

# Rows of at most so many scores have so few parts, which one thread counts side by side: to wake another takes longer.
_FEW_SCORES = 2**14
_FEW_PARTS = 4


def of_rooms(
    arrays: Sequence[jax.Array | Scores], between: Sequence[jax.Array], room: jax.Array
) -> jax.Array:
    """Where in the flat order of each row as many ties stand before as there is room for.

    Args:
      arrays: floats `[rows, …]`, or `Scores`.
      between: for each array `[rows, 2 or more]` of its dtype: ties reach the first bound, and not the second.
      room: unsigned `[all rows]`, at most the number of ties.

    Returns:
      Unsigned `[all rows]`: the place after the last tie that there is room for, 0 where there is room for none.

    >>> of_rooms([jnp.array([[2.0, 3.0, 2.0, 2.0]])], [jnp.array([[2.0, 3.0]])], jnp.array([2], jnp.uint32))
    Array([3], dtype=uint32)
    """
    counter = room.dtype.type
    rows = [jax.tree.map(lambda own: own.reshape(len(own), -1), array) for array in arrays]
    length = _part_length(max(row.shape[1] for row in rows))
    numbers = [
        row.shape[1] // length for row in rows
    ]  # what is left over at the end is shorter than a part
    counts = jnp.concatenate(
        [
            _padded(_ties_in_parts(row, bounds, number, length, counter), max(numbers))
            for row, bounds, number in zip(rows, between, numbers, strict=True)
        ]
    )
    part, left = _where_it_ends(counts, room)
    ends = jnp.concatenate(
        [jnp.full(row.shape[0], number, counter) for row, number in zip(rows, numbers, strict=True)]
    )
    begins = tables.wide(jnp.minimum(part, ends) * counter(length), between[0].shape[1])
    starts = [table[:, 0] for table in tables.split(begins, [row.shape[0] for row in rows])]
    found = [_ties_from(*one, length) for one in zip(rows, between, starts, strict=True)]
    first, reached = (jnp.concatenate(column) for column in zip(*found, strict=True))

    short = math.isqrt(length)
    reached = _padded(reached, -(-length // short) * short).reshape(len(reached), -1, short)
    reaching, above = sum_together([reached > 0, reached > 1], (2,), counter)
    part, left = _where_it_ends(reaching - above, left)
    ties = jnp.take_along_axis(reached, part[:, None, None], 1)[:, 0] == 1
    last, _ = _where_it_ends(ties.astype(counter), left)
    return jnp.where(room > 0, first + part * counter(short) + last + 1, 0)


def _part_length(size: int) -> int:
    """How many scores a part has, so that few scores have few parts, and more have some dozens or hundreds."""
    if size <= _FEW_SCORES:
        return max(-(-size // _FEW_PARTS), 1)
    third = round(size ** (1 / 3))
    return max(third * third // 2, 1)


def _padded(table: jax.Array, length: int) -> jax.Array:
    return jnp.pad(table, ((0, 0), (0, length - table.shape[1])))


def _ties_in_parts(
    rows: jax.Array | Scores, between: jax.Array, number: int, length: int, counter: type
) -> jax.Array:
    """How many ties each part of each row has, `[rows, number]`."""
    if 0 < number <= _FEW_PARTS:
        begins = range(0, number * length, length)
        cut = functools.partial(lax.slice_in_dim, axis=1)
        parts = [
            read(jax.tree.map(lambda own, at=at: cut(own, at, at + length), rows)) for at in begins
        ]
        bounds = [of_rows(between, column, 2) for column in (0, 1)]
        counts = sum_together([part >= bound for part in parts for bound in bounds], (1,), counter)
        return jnp.stack(counts[::2], 1) - jnp.stack(counts[1::2], 1)
    parts = read(
        jax.tree.map(lambda own: own[:, : number * length].reshape(len(own), number, length), rows)
    )
    reaching, above = sum_together(
        [parts >= of_rows(between, column, 3) for column in (0, 1)], (2,), counter
    )
    return reaching - above


def _ties_from(
    rows: jax.Array | Scores, between: jax.Array, starts: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """A stretch of each row: where it begins, and how many bounds of ties each score from `starts` on reaches there."""
    here = min(length, rows.shape[1])
    first = jnp.minimum(starts, starts.dtype.type(rows.shape[1] - here))
    cut = jax.vmap(lambda row, begin: lax.dynamic_slice_in_dim(row, begin, here))
    stretch = read(jax.tree.map(lambda own: cut(own, first), rows))
    low, high = ((stretch >= of_rows(between, column, 2)).astype(jnp.uint8) for column in (0, 1))
    is_new = lax.iota(starts.dtype, here) >= (starts - first)[:, None]
    return first, _padded(jnp.where(is_new, low + high, 0), length)


def _where_it_ends(counts: jax.Array, room: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the sum of each row of counts `[rows, n]` reaches the room, and how much of this is left there."""
    # Behind the barrier it seems to change: what is constant would be moved out of loops, and made in every step.
    counts, place = lax.optimization_barrier((counts, lax.iota(jnp.int32, counts.shape[1])))
    # One program, where a cumulative sum would be many. Two sums, both of them used though the later is never less than
    # the earlier, since what a lone one reads is written down first.
    running, before = reduce_together(
        [
            jnp.where(flags, counts[:, None], 0)
            for flags in (place <= place[:, None], place < place[:, None])
        ],
        0,
        lax.add,
        (2,),
    )
    passed = running < room[:, None]
    # Those that are passed stand first.
    parts = sum_small(passed.astype(room.dtype))
    last = jnp.maximum(parts, 1) - 1
    used = jnp.take_along_axis(jnp.maximum(running, before), last[:, None], 1, mode='clip')[:, 0]
    return parts, room - jnp.where(parts > 0, used, 0)
