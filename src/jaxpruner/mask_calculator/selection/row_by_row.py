"""Finds the thresholds of rows one after another: each ends when its own count is right.

So it goes on one CPU device, and where an accelerator has a single row. A short row stays in the processor's cache
while it is read again and again. Short arrays are copied to one buffer, one row at a time. What is done with a row in
the buffer is in the program once for all arrays. Longer arrays, and those that few others resemble, are read in place.

The masks of short arrays are made in the buffer, too, and copied from a table of all masks: this compiles fastest.
Where each step makes new masks, they are made from the thresholds instead: this runs fastest, since XLA makes them
where they are read.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import masks, search
from jaxpruner.mask_calculator.selection.brackets import Order
from jaxpruner.mask_calculator.selection.counting import count_row
from jaxpruner.mask_calculator.selection.masks import Selected
from jaxpruner.mask_calculator.selection.scores import (
    LONGEST_BUFFER,
    RankedArray,
    RowCursor,
    ScoresLike,
    look_up,
    rows_of,
    sizes_of_rows,
)
from jaxpruner.mask_calculator.selection.search import Cut, ToKeep

# To go on to the next row takes about as long as all passes over a row of this many scores.
_SHORT_ROW = 64
_MANY_ROWS = 64
# From this many arrays on a buffer pays.
_WORTH_A_BUFFER = 6
# Rows are padded to the longest of them, if that adds at most this share to what is read.
_MOST_PADDING = 0.5
# Longest padded row / shortest padded row in one buffer: to fill the buffer takes time, too.
_MOST_OF_BUFFER = 16
# Most bytes of the table in which the masks of arrays that share a buffer are made.
LARGEST_TABLE = 2**25


def has_many_short_rows(array: ScoresLike) -> bool:
    """Tells whether an array has so many short rows that passes over all of them are faster than one after another."""
    rows = array.shape[0]
    return rows >= _MANY_ROWS and array.size <= _SHORT_ROW * rows


def select(arrays: Sequence[ScoresLike], to_keep: ToKeep) -> list[Selected]:
    """Selects the largest scores of each row of arrays that one device holds.

    Args:
      arrays: floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
      to_keep: of all rows.

    Returns:
      For each array its mask; `threshold` is that of each row.
    """
    rows_of_array = []
    row_count = 0
    for array in arrays:
        rows = np.arange(array.shape[0])
        rows_of_array.append(row_count + rows)
        row_count += len(rows)
    selected: dict[int, Selected] = {}
    for batch in batches(arrays):
        own_arrays = [arrays[i] for i in batch.indices]
        own_rows = [rows_of_array[i] for i in batch.indices]
        own_to_keep = to_keep.take(np.concatenate(own_rows))
        results = _select_batch(own_arrays, own_to_keep, batch.lengths)
        selected.update(zip(batch.indices, results, strict=True))
    return [selected[i] for i in range(len(arrays))]


class RankedRow:
    """The row at a cursor, as a ranking (`search.Ranking`) of its own."""

    member_sizes = None

    def __init__(self, cursor: RowCursor, order: Order):
        self.order = order
        self.sizes = cursor.size[None]
        self.counter = cursor.size.dtype
        self._cursor = cursor

    def thresholds(self, float_ranks: jax.Array) -> jax.Array:
        """Makes what the row has to reach from float ranks `[1, columns]`."""
        return self.order.value(float_ranks)

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores that reach thresholds, `[1, columns]`."""
        count = functools.partial(count_row, self.counter)
        return self._cursor.apply_to_row(count, thresholds)

    def sampled_probes(self, count: jax.Array) -> jax.Array:
        """Makes probes `[1, 3]` around the threshold of a sample."""
        size = search.sample_size(self._cursor.longest)
        take_sample = functools.partial(search.sample_of_row, size)
        sample = self._cursor.apply_to_row(take_sample)
        share = count.astype(jnp.float32) / self.sizes.astype(jnp.float32)
        return search.quantiles(self.order, sample[None], share)


def _settle_row(
    to_keep: ToKeep,
    cursor: RowCursor,
    row: jax.Array | int,
    order: Order,
) -> tuple[Cut, jax.Array]:
    """Finds the thresholds of the row at a cursor, and the index after the last of its ties that is kept."""
    own_to_keep = to_keep.at_row(row)
    cut = search.find_cut(RankedRow(cursor, order), own_to_keep)
    inputs = cursor, cut.thresholds[0], cut.ties_to_keep[0]
    end = control.run_once(cut.cuts_ties[0], masks.end_in_row, cursor.size, *inputs)
    return cut, end


def _select_batch(
    arrays: Sequence[ScoresLike],
    to_keep: ToKeep,
    lengths: Sequence[int] | None,
) -> list[Selected]:
    """Selects in arrays whose rows are read in place, or from a buffer for rows of these padded lengths."""
    counter = to_keep.count.dtype
    if lengths is None:
        point_at = functools.partial(RowCursor.at_row, arrays, counter=counter)
        return _select_then_mask(arrays, to_keep, point_at)
    buffer = Buffer(arrays, lengths, counter)
    # A selection that has the thresholds of an earlier step runs in every step.
    if to_keep.earlier is not None:
        return _select_then_mask(arrays, to_keep, buffer.copy_row)
    return _select_with_masks(arrays, to_keep, buffer.copy_row, MaskTable(arrays, max(lengths)))


def _select_then_mask(
    arrays: Sequence[ScoresLike],
    to_keep: ToKeep,
    point_at: Callable[[jax.Array | int], RowCursor],
) -> list[Selected]:
    """Selects in a loop that finds thresholds; each array has a program of its own for its mask."""
    order = Order.from_dtype(arrays[0].dtype)
    sizes = sizes_of_rows(arrays)
    counter = to_keep.count.dtype

    def settle_next(row: jax.Array | int, table: jax.Array) -> jax.Array:
        cursor = point_at(row)
        cut, end = _settle_row(to_keep, cursor, row, order)
        float_ranks = cut.float_ranks.astype(table.dtype)
        end = end.astype(table.dtype)
        entry = jnp.concatenate([float_ranks, end[None, None]], 1)
        return lax.dynamic_update_slice_in_dim(table, entry, row, 0)

    # One table for float ranks and ends. A step of a straight-through method selects twice, once for thresholds alone.
    # XLA makes one loop of the two, unless it has dropped the ends from one of them.
    dtype = jnp.promote_types(order.unsigned, counter)
    table = jnp.zeros((len(sizes), search.probes_per_pass() + 1), dtype)
    if len(sizes) == 1:
        table = settle_next(0, table)
    else:
        table = lax.fori_loop(0, len(sizes), settle_next, table)
    float_ranks = table[:, :-1].astype(order.unsigned)
    ends = table[:, -1].astype(counter)
    thresholds = order.value(float_ranks)
    ranked = []
    for i, rows in enumerate(rows_of(arrays)):
        ranked.append(RankedArray(arrays[i], rows, rows))
    keeps_everything = to_keep.count >= np.array(sizes, counter)
    return masks.masks_of_arrays(ranked, thresholds, ends, keeps_everything)


def _select_with_masks(
    arrays: Sequence[ScoresLike],
    to_keep: ToKeep,
    point_at: Callable[[jax.Array | int], RowCursor],
    masks_of_rows: 'MaskTable',
) -> list[Selected]:
    """Selects in a loop that makes the masks, too, while the row is in the buffer."""
    order = Order.from_dtype(arrays[0].dtype)

    def select_next(row: jax.Array, tables: tuple) -> tuple:
        all_thresholds, table = tables
        cursor = point_at(row)
        cut, end = _settle_row(to_keep, cursor, row, order)
        thresholds = cut.thresholds[0]
        target = lax.dynamic_index_in_dim(to_keep.count, row, keepdims=False)
        keeps_everything = target >= cursor.size
        mask = masks.mask_of_row(cursor, thresholds, end, keeps_everything)
        all_thresholds = lax.dynamic_update_index_in_dim(all_thresholds, thresholds[0], row, 0)
        return all_thresholds, masks_of_rows.with_mask(table, row, mask)

    row_count = len(sizes_of_rows(arrays))
    tables = jnp.zeros(row_count, order.dtype), masks_of_rows.empty()
    all_thresholds, table = lax.fori_loop(0, row_count, select_next, tables)
    masks_of_arrays = masks_of_rows.of_arrays(table)
    selected = []
    for i, rows in enumerate(rows_of(arrays)):
        selected.append(Selected(masks_of_arrays[i], rows.take(all_thresholds)))
    return selected


class Batch(NamedTuple):
    """Arrays whose rows go through one program."""

    indices: list[int]  # which arrays
    lengths: list[int] | None  # padded row length of each array; `None`: rows are read in place


def batches(arrays: Sequence[ScoresLike]) -> list[Batch]:
    """Divides arrays into batches: few, since each is a program."""
    lengths = [array.size // array.shape[0] for array in arrays]
    sizes = [array.size for array in arrays]
    in_place, short = [], []
    for i, size in enumerate(sizes):
        if lengths[i] <= LONGEST_BUFFER and size <= LARGEST_TABLE:
            short.append(i)
        else:
            in_place.append(i)
    falling = sorted(short, key=lambda i: -lengths[i])
    divided = []
    for indices in _sharing_a_buffer(falling, sizes, lengths):
        if len(indices) < _WORTH_A_BUFFER:
            in_place += indices
        else:
            padded = _padded_lengths([lengths[i] for i in indices])
            divided.append(Batch(indices, padded))
    if in_place:
        divided.append(Batch(in_place, None))
    return divided


def _sharing_a_buffer(
    falling: Sequence[int],
    sizes: Sequence[int],
    lengths: Sequence[int],
) -> list[list[int]]:
    """Divides arrays of falling lengths into those that share a buffer and a table of masks."""
    divided: list[list[int]] = []
    bytes_left = 0
    for i in falling:
        is_much_shorter = divided and _MOST_OF_BUFFER * lengths[i] < lengths[divided[-1][0]]
        if not divided or is_much_shorter or sizes[i] > bytes_left:
            divided.append([])
            bytes_left = LARGEST_TABLE
        divided[-1].append(i)
        bytes_left -= sizes[i]
    return divided


def _padded_lengths(falling: Sequence[int]) -> list[int]:
    """Finds the lengths to which rows of falling lengths are padded: few of them, since each is compiled."""
    padded: list[int] = []
    rest = total = sum(falling)
    current = falling[0]
    for i, length in enumerate(falling):
        padding_of_rest = current * (len(falling) - i) - rest
        if i > 0 and padding_of_rest > _MOST_PADDING * total:
            current = length
        padded.append(current)
        rest -= length
    return padded


class Buffer:
    """The buffer that holds one row at a time of some arrays `[rows, …]` of one dtype.

    Args:
      arrays: floats, or `Scores`, none of them empty.
      lengths: padded row length of each array.
      counter: unsigned dtype that holds the sizes of rows.
    """

    def __init__(
        self,
        arrays: Sequence[ScoresLike],
        lengths: Sequence[int],
        counter: jnp.dtype,
    ):
        self._arrays = arrays
        self._counter = counter
        self._lengths = sorted(set(lengths), reverse=True)
        length_of_row: list[int] = []
        for i, array in enumerate(arrays):
            length_of_row += [self._lengths.index(lengths[i])] * array.shape[0]
        self._length_of_row = np.array(length_of_row, np.int32)

    def copy_row(self, row: jax.Array | int) -> RowCursor:
        """Copies the row with this index among the rows of all arrays to the buffer."""
        cursor = RowCursor.at_row(self._arrays, row, self._counter)
        length = look_up(self._length_of_row, row)
        return cursor.copied(self._arrays[0].dtype, self._lengths, length)


class MaskTable:
    """How the masks of all rows of some arrays `[rows, …]` lie in a table of bytes, one row behind the other.

    Args:
      arrays: floats, or `Scores`, none of them empty.
      longest: how long a mask is that is written; what stands behind its row, the next one overwrites.
    """

    def __init__(self, arrays: Sequence[ScoresLike], longest: int):
        sizes = sizes_of_rows(arrays)
        ends = np.cumsum(sizes)
        self._arrays = arrays
        self._begins = (ends - sizes).astype(np.int32)
        self._size = int(ends[-1]) + longest

    def empty(self) -> jax.Array:
        """Makes a table without masks."""
        return jnp.zeros(self._size, jnp.uint8)

    def with_mask(
        self,
        table: jax.Array,
        row: jax.Array,
        mask: jax.Array,
    ) -> jax.Array:
        """Writes the padded mask of a row to the table; rows come in their order."""
        begin = look_up(self._begins, row)
        return lax.dynamic_update_slice_in_dim(table, mask, begin, 0)

    def of_arrays(self, table: jax.Array) -> list[jax.Array]:
        """Takes the mask of each array from the table."""
        masks_of_arrays = []
        for i, rows in enumerate(rows_of(self._arrays)):
            begin = lax.dynamic_index_in_dim(self._begins, rows.begin, keepdims=False)
            masks_of_arrays.append(_cut_out(self._arrays[i].shape, table, begin))
        return masks_of_arrays


@functools.partial(jax.jit, static_argnums=0)  # traced once for all arrays of one shape
def _cut_out(
    shape: tuple[int, ...],
    table: jax.Array,
    begin: jax.Array,
) -> jax.Array:
    mask = lax.dynamic_slice_in_dim(table, begin, math.prod(shape))
    return mask.reshape(shape)
