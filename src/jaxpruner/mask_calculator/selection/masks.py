"""The masks: scores above the ties are kept, and of the ties the first in flat order, up to the number to keep.

The end of the ties that are kept comes from `end_in_row` for a single row, or from counts of whole arrays (`passes`).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection.counting import (
    before,
    column_of,
    find_axis_ends,
    reduce_together,
    sum_together,
)
from jaxpruner.mask_calculator.selection.scores import (
    RankedArray,
    RowCursor,
    ScoresLike,
    flat_rows,
    read,
)

# Rows of few scores have few chunks, which one thread counts side by side: to wake another takes longer.
_FEW_SCORES = 2**14
_FEW_CHUNKS = 4


class Selected(NamedTuple):
    """The result of a selection.

    >>> Selected(mask=jnp.array([1, 0]), threshold=jnp.float32(3)).threshold.shape
    ()
    """

    mask: jax.Array  # uint8, 1 = kept
    # One float for each ranking, at most the smallest score that is kept.
    threshold: jax.Array


def masks_of_arrays(
    arrays: Sequence[RankedArray],
    thresholds: jax.Array,
    ends: jax.Array,
    keeps_everything: jax.Array,
) -> list[Selected]:
    """Makes the mask of each array; `Selected.threshold` is the low one of each of its rows.

    Args:
      arrays: as they were ranked.
      thresholds: table of low and high.
      ends: `[all rows]`: ties are kept before these indices.
      keeps_everything: `[all rows]`: NaN are kept, too.
    """
    selected = []
    for array in arrays:
        mask = _mask_of_array(array, thresholds, ends[:, None], keeps_everything[:, None])
        low = array.thresholds(thresholds)[:, 0]
        selected.append(Selected(mask, low))
    return selected


@jax.jit  # traced once for all arrays of one shape
def _mask_of_array(
    ranked: RankedArray,
    thresholds: jax.Array,
    ends: jax.Array,
    keeps_everything: jax.Array,
) -> jax.Array:
    """Makes the mask of an array, in few operations: for many, XLA wakes threads, which takes longer."""
    is_on_one_device = jax.device_count() == 1
    scores = read(flat_rows(ranked.scores) if is_on_one_device else ranked.scores)
    shape, ndim = scores.shape, scores.ndim
    low = column_of(ranked.thresholds(thresholds), 0, ndim)
    high = column_of(ranked.thresholds(thresholds), 1, ndim)
    own_ends = ranked.rows.take(ends)
    if is_on_one_device:
        index = lax.broadcasted_iota(ends.dtype, shape, ndim - 1)
        is_before_end = index < column_of(own_ends, 0, ndim)
    else:
        axis_ends = find_axis_ends(own_ends, shape, (0,) * ndim)
        is_before_end = before(axis_ends, shape, 0)
    keeps_rows = ranked.rows.take(keeps_everything)
    keeps_row = column_of(keeps_rows, 0, ndim).astype(jnp.uint8)
    is_kept = _is_kept(scores, low, high, is_before_end)
    mask = jnp.where(is_kept, jnp.uint8(1), keeps_row)
    return mask.reshape(ranked.scores.shape)


def mask_of_row(
    cursor: RowCursor,
    thresholds: jax.Array,
    end: jax.Array,
    keeps_everything: jax.Array,
) -> jax.Array:
    """Makes the mask of the row at a cursor, padded to the longest row.

    Args:
      cursor: the row.
      thresholds: `[2 or more]`, low and high.
      end: ties are kept before this index.
      keeps_everything: whether NaN are kept, too.
    """
    low, high = thresholds[0], thresholds[1]

    def mask_row(row: jax.Array) -> jax.Array:
        is_before_end = lax.iota(end.dtype, row.size) < end
        is_kept = _is_kept(row, low, high, is_before_end)
        mask = jnp.where(is_kept, jnp.uint8(1), keeps_everything.astype(jnp.uint8))
        return _pad(mask, cursor.longest)

    return cursor.apply_to_row(mask_row)


def _is_kept(
    scores: jax.Array,
    low: jax.Array,
    high: jax.Array,
    is_before_end: jax.Array,
) -> jax.Array:
    """Tells which scores reach `high`, or reach `low` and stand before the end of the ties that are kept."""
    if scores.dtype.itemsize < 4:
        # XLA compares these as wider floats. A select between them would be widened anew for each score; widened here,
        # lazy scores would not be rounded to their dtype as they are where they are counted.
        return (scores >= low) & ((scores >= high) | is_before_end)
    return scores >= jnp.where(is_before_end, low, high)


def end_in_row(
    otherwise: jax.Array,
    cursor: RowCursor,
    thresholds: jax.Array,
    ties_to_keep: jax.Array,
) -> jax.Array:
    """Finds the index after the last tie of a row that is kept, in flat order.

    One pass over the row counts the ties in each of some dozens of chunks, which tells the chunk that holds the last
    one. Only that chunk is read again, and divided in the same way.

    Args:
      otherwise: what the row has where no end is sought; not read.
      cursor: the row.
      thresholds: `[2 or more]`: ties reach the first, and not the second.
      ties_to_keep: unsigned scalar, at most the number of ties.

    Returns:
      Unsigned scalar; 0 where no tie is kept.
    """
    del otherwise
    counter = ties_to_keep.dtype
    # The chunk of the row that holds the last tie.
    length = _chunk_length(cursor.longest)
    most_chunks = cursor.longest // length
    count_ties = functools.partial(_ties_in_chunks, length, most_chunks)
    ties = cursor.apply_to_row(count_ties, thresholds)
    chunk, ties_left = _find_last_tie(ties.astype(counter), ties_to_keep)

    # A window of the row that holds this chunk. What is left over at the end of a row is shorter than a chunk.
    begin = jnp.minimum(chunk, cursor.size // length) * length
    last_window = jnp.maximum(cursor.size, length) - length
    window = jnp.minimum(begin, last_window)
    look_at = functools.partial(_thresholds_reached_in_window, length)
    reached = cursor.apply_to_row(look_at, thresholds, window, begin)

    # The short chunk of the window that holds the last tie, and the index in it.
    short = math.isqrt(length)
    short_chunks = -(-length // short)
    reached = _pad(reached, short_chunks * short).reshape(-1, short)
    reaching_low, reaching_high = sum_together([reached > 0, reached > 1], (1,), counter)
    chunk, ties_left = _find_last_tie(reaching_low - reaching_high, ties_left)
    is_tie = lax.dynamic_index_in_dim(reached, chunk, keepdims=False) == 1
    last, _ = _find_last_tie(is_tie.astype(counter), ties_left)
    end = window + chunk * short + last + 1
    return jnp.where(ties_to_keep > 0, end, 0)


def _chunk_length(size: int) -> int:
    """Chooses the length of a chunk: few scores have few chunks, and more have some dozens or hundreds."""
    if size <= _FEW_SCORES:
        return max(-(-size // _FEW_CHUNKS), 1)
    third = round(size ** (1 / 3))
    return max(third * third // 2, 1)


def _pad(vector: jax.Array, length: int) -> jax.Array:
    return jnp.pad(vector, (0, length - len(vector)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ties_in_chunks(
    length: int,
    most_chunks: int,
    row: ScoresLike,
    thresholds: jax.Array,
) -> jax.Array:
    """Counts the ties in each chunk of a row, `[most_chunks]`."""
    count = row.size // length
    low = thresholds[0].astype(row.dtype)
    high = thresholds[1].astype(row.dtype)
    if 0 < count <= _FEW_CHUNKS:
        predicates = []
        for begin in range(0, count * length, length):
            chunk = read(_slice(row, begin, begin + length))
            predicates += [chunk >= low, chunk >= high]
        counts = jnp.stack(sum_together(predicates, (0,), jnp.uint32))
        reaching_low, reaching_high = counts[::2], counts[1::2]
        return _pad(reaching_low - reaching_high, most_chunks)
    in_chunks = _slice(row, 0, count * length)
    chunks = read(jax.tree.map(lambda leaf: leaf.reshape(count, length), in_chunks))
    predicates = [chunks >= low, chunks >= high]
    reaching_low, reaching_high = sum_together(predicates, (1,), jnp.uint32)
    return _pad(reaching_low - reaching_high, most_chunks)


def _slice(
    row: ScoresLike,
    begin: int,
    end: int,
) -> ScoresLike:
    return jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, begin, end), row)


@functools.partial(jax.jit, static_argnums=0)
def _thresholds_reached_in_window(
    length: int,
    row: ScoresLike,
    thresholds: jax.Array,
    window: jax.Array,
    begin: jax.Array,
) -> jax.Array:
    """Tells how many thresholds each score of a window reaches, `[length]`; 0 for those before `begin`."""
    own_length = min(length, row.size)

    def cut(leaf: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(leaf, window, own_length)

    scores = read(jax.tree.map(cut, row))
    reaches_low = scores >= thresholds[0].astype(row.dtype)
    reaches_high = scores >= thresholds[1].astype(row.dtype)
    reached = reaches_low.astype(jnp.uint8) + reaches_high.astype(jnp.uint8)
    is_new = lax.iota(begin.dtype, own_length) >= begin - window
    return _pad(jnp.where(is_new, reached, 0), length)


def _find_last_tie(tie_counts: jax.Array, ties_to_keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds which of `[n]` chunks holds the last tie to keep, and how many ties are kept of that chunk."""
    index = lax.iota(jnp.int32, len(tie_counts))
    counts, index = control.keep_in_loop((tie_counts, index))
    sum_up_to, sum_before = sum_by_pairs(counts, index)
    # The maximum of the two is always `sum_up_to`. It is written so that both sums are needed (`sum_by_pairs`).
    is_passed = jnp.maximum(sum_up_to, sum_before) < ties_to_keep
    is_passed = is_passed.astype(ties_to_keep.dtype)
    # Chunks that are passed stand first.
    passed, ties_passed = reduce_together([is_passed, is_passed * counts], 0, lax.add, (0,))
    return passed, ties_to_keep - ties_passed


def sum_by_pairs(counts: jax.Array, index: Any) -> list[jax.Array]:
    """Sums few counts `[n]` up to each of them, and before each; `index` is an array of 0, 1, … n - 1.

    A `jnp.cumsum` and what follows it would be nine programs of XLA, each of which is compiled and started. Summed over
    all pairs, they are one. A lone sum would write all pairs to memory, so there are two, and callers need both. Seen
    with jaxlib 0.10.2 on CPU.
    """
    up_to = jnp.where(index <= index[:, None], counts, 0)
    before_each = jnp.where(index < index[:, None], counts, 0)
    return reduce_together([up_to, before_each], 0, lax.add, (1,))
