"""Finds the thresholds of rows one after another: each ends when its own count is right.

A short row stays in the processor's cache while it is read again and again. Arrays of about one size are copied to one
buffer in turn, and their masks are made there, so that only two copies are in the program for each of them: of its
scores, and of its mask. Longer arrays, and those that few others resemble, are read where they are.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import first_probes, search, tie_ends
from jaxpruner.mask_calculator.selection.counts_of_parts import count_row
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores
from jaxpruner.mask_calculator.selection.search import Cut
from jaxpruner.mask_calculator.selection.tables import RankedArray, rows_of, sizes_of_rows
from jaxpruner.mask_calculator.selection.turns import LONGEST_BUFFER, Turn, look_up

# A buffer pays for so many arrays.
_WORTH_A_BUFFER = 6
# Rows are padded to the longest of them, if that adds at most this share to what is read.
_MOST_PADDING = 0.5
# The longest row of a buffer is at most so many times as long as what is looked at of it for the shortest: to fill the
# buffer takes time, too.
_MOST_OF_BUFFER = 16
# The masks of arrays that share a buffer are made in a table of at most so many bytes.
_LARGEST_TABLE = 2**25
# A turn takes about as long as all passes over a row of so many scores.
_SHORT_ROW = 64
_MANY_ROWS = 64


class RowInTurn:
    """The row whose turn it is, as a ranking (see `rankings`) of its own."""

    def __init__(self, turn: Turn, order: Order):
        self.order = order
        self.sizes = turn.size[None]
        self.counter = turn.size.dtype
        self._turn = turn

    def thresholds(self, positions: jax.Array) -> jax.Array:
        """Makes what the row has to reach from positions `[1, columns]`."""
        return self.order.value(positions)

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores that reach thresholds, `[1, columns]`."""
        return self._turn.ask(functools.partial(count_row, self.counter), thresholds)

    def probes(self, target: jax.Array) -> jax.Array:
        """Makes probes `[1, 3]` around the threshold of a sample."""
        number = first_probes.sample_size(self._turn.longest)
        sample = self._turn.ask(functools.partial(first_probes.sample_of_row, number))
        share = target.astype(jnp.float32) / self.sizes.astype(jnp.float32)
        return first_probes.quantiles(self.order, sample[None], share)


def select(
    arrays: Sequence[jax.Array | Scores],
    target: jax.Array,
    earlier: jax.Array | None,
    lengths: Sequence[int] | None,
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects the largest scores of each row of arrays that one device holds.

    Args:
      arrays: floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
      target: unsigned `[all rows]`, how many to keep.
      earlier: thresholds `[all rows]` of an earlier selection to look near first, NaN where there is none.
      lengths: as in `Group`.

    Returns:
      For each array its mask, and the threshold of each row.
    """
    wanted = Wanted(target, earlier)
    if lengths is None:
        return _select_where_they_are(arrays, wanted)
    return _select_in_buffer(arrays, wanted, lengths)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is asked of all rows: how many scores to keep, and where to look for the threshold first."""

    target: jax.Array
    earlier: jax.Array | None

    def settle(self, turn: Turn, row: jax.Array | int, order: Order) -> tuple[Cut, jax.Array]:
        """Finds the thresholds of the row whose turn it is, and where its ties end that are kept."""
        target = lax.dynamic_slice_in_dim(self.target, row, 1)
        earlier = None
        if self.earlier is not None:
            earlier = lax.dynamic_slice_in_dim(self.earlier, row, 1)
        ranking = RowInTurn(turn, order)
        cut = search.find_cut(ranking, target, ranking.probes(target), earlier)
        inputs = turn, cut.thresholds[0], cut.room[0]
        end = control.run_once(cut.is_needed[0], tie_ends.end_in_row, turn.size, *inputs)
        return cut, end


def _select_where_they_are(
    arrays: Sequence[jax.Array | Scores], wanted: Wanted
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects in few arrays, or long ones: turns find thresholds, and each array has a program for its mask."""
    order = Order.of(arrays[0].dtype)
    sizes = sizes_of_rows(arrays)
    counter = wanted.target.dtype

    def take_turn(row: jax.Array | int, table: jax.Array) -> jax.Array:
        turn = Turn.of(arrays, row, counter)
        cut, end = wanted.settle(turn, row, order)
        results = [cut.positions.astype(table.dtype), end.astype(table.dtype)[None, None]]
        return lax.dynamic_update_slice_in_dim(table, jnp.concatenate(results, 1), row, 0)

    # One table for positions and ends. A step of a straight-through method selects twice, once for thresholds alone.
    # XLA makes one loop of the two, unless it has dropped the ends from one of them.
    dtype = jnp.promote_types(order.unsigned, counter)
    table = jnp.zeros((len(sizes), search.probes_of_pass() + 1), dtype)
    if len(sizes) == 1:
        table = take_turn(0, table)
    else:
        table = lax.fori_loop(0, len(sizes), take_turn, table)
    thresholds, ends = order.value(table[:, :-1].astype(order.unsigned)), table[:, -1]
    ranked = []
    for array, rows in zip(arrays, rows_of(arrays), strict=True):
        ranked.append(RankedArray(array, rows, rows))
    keeps_everything = wanted.target >= np.array(sizes, counter)
    return search.masks(ranked, thresholds, ends.astype(counter), keeps_everything)


def _select_in_buffer(
    arrays: Sequence[jax.Array | Scores], wanted: Wanted, lengths: Sequence[int]
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects in many short arrays: turns make the masks, too, while the row is in the buffer."""
    order = Order.of(arrays[0].dtype)
    sizes = np.array(sizes_of_rows(arrays))
    begins = (np.cumsum(sizes) - sizes).astype(np.int32)
    numbers = [array.shape[0] for array in arrays]
    distinct_lengths = sorted(set(lengths), reverse=True)
    length_of_row = np.repeat([distinct_lengths.index(length) for length in lengths], numbers)

    def take_turn(row: jax.Array, tables: tuple) -> tuple:
        masks, thresholds = tables
        turn = Turn.of(arrays, row, wanted.target.dtype)
        own_length = look_up(length_of_row.astype(np.int32), row)
        turn = turn.copied(order.dtype, distinct_lengths, own_length)
        cut, end = wanted.settle(turn, row, order)
        target = lax.dynamic_index_in_dim(wanted.target, row, keepdims=False)
        mask = _mask_of_row(turn, cut, end, target)
        # The next row overwrites what stands behind the end of this one.
        masks = lax.dynamic_update_slice_in_dim(masks, mask, look_up(begins, row), 0)
        return masks, lax.dynamic_update_index_in_dim(thresholds, cut.thresholds[0, 0], row, 0)

    masks = jnp.zeros(sum(sizes) + max(lengths), jnp.uint8)
    tables = masks, jnp.zeros(len(sizes), order.dtype)
    # A step of a straight-through method selects twice, once for thresholds alone. XLA makes one loop of the two,
    # unless it has dropped the masks from one of them.
    masks, thresholds = control.keep_together(lax.fori_loop(0, len(sizes), take_turn, tables))
    selected = []
    for array, rows in zip(arrays, rows_of(arrays), strict=True):
        begin = lax.dynamic_index_in_dim(begins, rows.begin, keepdims=False)
        selected.append((_cut_out(array.shape, masks, begin), rows.of(thresholds)))
    return selected


def _mask_of_row(turn: Turn, cut: Cut, end: jax.Array, target: jax.Array) -> jax.Array:
    """Makes the mask of the row in the buffer, as long as the buffer."""
    keeps_everything = (target >= turn.size).astype(jnp.uint8)

    def mask(row: jax.Array) -> jax.Array:
        is_before_end = lax.iota(end.dtype, row.size) < end
        is_kept = search.is_kept(row, cut.thresholds[0, 0], cut.thresholds[0, 1], is_before_end)
        own_mask = jnp.where(is_kept, jnp.uint8(1), keeps_everything)
        return jnp.pad(own_mask, (0, turn.longest - row.size))

    return turn.ask(mask)


@functools.partial(jax.jit, static_argnums=0)  # traced once for all arrays of one shape
def _cut_out(shape: tuple[int, ...], masks: jax.Array, begin: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(masks, begin, math.prod(shape)).reshape(shape)


def takes_too_many_turns(array: jax.Array | Scores) -> bool:
    """Whether the rows of an array are so short, and so many, that turns take longer than passes over all of them."""
    rows = array.shape[0]
    return rows >= _MANY_ROWS and array.size <= _SHORT_ROW * rows


class Group(NamedTuple):
    """Arrays that take turns in one program.

    Attributes:
      indices: which arrays.
      lengths: of how many scores the beginning of the buffer is that each array's rows are padded to; `None`: rows are
        read where they are.
    """

    indices: list[int]
    lengths: list[int] | None


def groups(arrays: Sequence[jax.Array | Scores]) -> list[Group]:
    """Divides arrays into groups: few, since each is a program."""
    lengths = [array.size // array.shape[0] for array in arrays]
    others = []
    short = []
    for i, length in enumerate(lengths):
        fits = length <= LONGEST_BUFFER and arrays[i].size <= _LARGEST_TABLE
        (short if fits else others).append(i)
    short.sort(key=lambda i: -lengths[i])
    divided = []
    for together in _sharing_a_buffer(short, [array.size for array in arrays], lengths):
        if len(together) < _WORTH_A_BUFFER:
            others += together
        else:
            divided.append(Group(together, _padded_lengths([lengths[i] for i in together])))
    if others:
        divided.append(Group(others, None))
    return divided


def _sharing_a_buffer(
    falling: Sequence[int], sizes: Sequence[int], lengths: Sequence[int]
) -> list[list[int]]:
    """Divides arrays of falling lengths into those that share a buffer and a table of masks."""
    divided: list[list[int]] = []
    room = 0
    for i in falling:
        is_much_shorter = divided and _MOST_OF_BUFFER * lengths[i] < lengths[divided[-1][0]]
        if not divided or is_much_shorter or sizes[i] > room:
            divided.append([])
            room = _LARGEST_TABLE
        divided[-1].append(i)
        room -= sizes[i]
    return divided


def _padded_lengths(falling: Sequence[int]) -> list[int]:
    """Finds the lengths to which rows of falling lengths are padded: few of them, since each is compiled."""
    padded: list[int] = []
    rest = total = sum(falling)
    for i, length in enumerate(falling):
        is_first = not padded
        padding_of_rest = 0 if is_first else padded[-1] * (len(falling) - i) - rest
        padded.append(length if is_first or padding_of_rest > _MOST_PADDING * total else padded[-1])
        rest -= length
    return padded
