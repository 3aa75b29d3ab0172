"""Finds the thresholds of rows one after another: each ends when its own count is right.

So it goes on one CPU device. A short row stays in the processor's cache while it is read again and again. Short arrays
are copied to one buffer in turn, where their masks are made, too. Longer arrays, and those that few others resemble,
are read where they are.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import masks, search
from jaxpruner.mask_calculator.selection.brackets import Order
from jaxpruner.mask_calculator.selection.buffers import LARGEST_TABLE, Buffer
from jaxpruner.mask_calculator.selection.counts_of_parts import count_row
from jaxpruner.mask_calculator.selection.masks import Selected
from jaxpruner.mask_calculator.selection.scores import (
    LONGEST_BUFFER,
    RankedArray,
    ScoresLike,
    Turn,
    rows_of,
    sizes_of_rows,
)
from jaxpruner.mask_calculator.selection.search import Cut

# A turn takes about as long as all passes over a row of so many scores.
_SHORT_ROW = 64
_MANY_ROWS = 64
# A buffer pays for so many arrays.
_WORTH_A_BUFFER = 6
# Rows are padded to the longest of them, if that adds at most this share to what is read.
_MOST_PADDING = 0.5
# The longest row of a buffer is at most so many times as long as what is looked at of it for the shortest: to fill the
# buffer takes time, too.
_MOST_OF_BUFFER = 16


def takes_too_many_turns(array: ScoresLike) -> bool:
    """Whether the rows of an array are so short, and so many, that turns take longer than passes over all of them."""
    rows = array.shape[0]
    return rows >= _MANY_ROWS and array.size <= _SHORT_ROW * rows


@dataclasses.dataclass(frozen=True)
class Targets:
    """What is asked of all rows."""

    target: jax.Array  # unsigned [all rows]: how many scores to keep
    # Thresholds [all rows] of an earlier selection to look near first, NaN where there is none.
    earlier: jax.Array | None

    def of(self, rows: np.ndarray) -> 'Targets':
        """Takes what is asked of some rows."""
        earlier = None if self.earlier is None else self.earlier[rows]
        return Targets(self.target[rows], earlier)

    def settle(self, turn: Turn, row: jax.Array | int, order: Order) -> tuple[Cut, jax.Array]:
        """Finds the thresholds of the row whose turn it is, and where its ties end that are kept."""
        target = lax.dynamic_slice_in_dim(self.target, row, 1)
        earlier = None
        if self.earlier is not None:
            earlier = lax.dynamic_slice_in_dim(self.earlier, row, 1)
        ranking = RowInTurn(turn, order)
        cut = search.find_cut(ranking, target, ranking.probes(target), earlier)
        inputs = turn, cut.thresholds[0], cut.room[0]
        end = control.run_once(cut.is_needed[0], masks.end_in_row, turn.size, *inputs)
        return cut, end


class RowInTurn:
    """The row whose turn it is, as a ranking (`search.Ranking`) of its own."""

    sizes_of_parts = None

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
        number = search.sample_size(self._turn.longest)
        sample = self._turn.ask(functools.partial(search.sample_of_row, number))
        share = target.astype(jnp.float32) / self.sizes.astype(jnp.float32)
        return search.quantiles(self.order, sample[None], share)


def select(arrays: Sequence[ScoresLike], targets: Targets) -> list[Selected]:
    """Selects the largest scores of each row of arrays that one device holds.

    Args:
      arrays: floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
      targets: of all rows.

    Returns:
      For each array its mask; `threshold` is that of each row.
    """
    rows_of_array = []
    number_of_rows = 0
    for array in arrays:
        rows = np.arange(array.shape[0])
        rows_of_array.append(number_of_rows + rows)
        number_of_rows += len(rows)
    selected: dict[int, Selected] = {}
    for group in groups(arrays):
        own_arrays = [arrays[i] for i in group.indices]
        own_rows = np.concatenate([rows_of_array[i] for i in group.indices])
        own_targets = targets.of(own_rows)
        if group.lengths is None:
            results = _select_where_they_are(own_arrays, own_targets)
        else:
            results = _select_in_buffer(own_arrays, own_targets, group.lengths)
        selected.update(zip(group.indices, results, strict=True))
    return [selected[i] for i in range(len(arrays))]


def _select_where_they_are(arrays: Sequence[ScoresLike], targets: Targets) -> list[Selected]:
    """Selects in few arrays, or long ones: turns find thresholds, and each array has a program for its mask."""
    order = Order.of(arrays[0].dtype)
    sizes = sizes_of_rows(arrays)
    counter = targets.target.dtype

    def take_turn(row: jax.Array | int, table: jax.Array) -> jax.Array:
        turn = Turn.of(arrays, row, counter)
        cut, end = targets.settle(turn, row, order)
        positions = cut.positions.astype(table.dtype)
        end = end.astype(table.dtype)
        entry = jnp.concatenate([positions, end[None, None]], 1)
        return lax.dynamic_update_slice_in_dim(table, entry, row, 0)

    # One table for positions and ends. A step of a straight-through method selects twice, once for thresholds alone.
    # XLA makes one loop of the two, unless it has dropped the ends from one of them.
    dtype = jnp.promote_types(order.unsigned, counter)
    table = jnp.zeros((len(sizes), search.probes_of_pass() + 1), dtype)
    if len(sizes) == 1:
        table = take_turn(0, table)
    else:
        table = lax.fori_loop(0, len(sizes), take_turn, table)
    positions = table[:, :-1].astype(order.unsigned)
    ends = table[:, -1].astype(counter)
    thresholds = order.value(positions)
    ranked = []
    for i, rows in enumerate(rows_of(arrays)):
        ranked.append(RankedArray(arrays[i], rows, rows))
    keeps_everything = targets.target >= np.array(sizes, counter)
    return masks.masks_of_arrays(ranked, thresholds, ends, keeps_everything)


def _select_in_buffer(
    arrays: Sequence[ScoresLike], targets: Targets, lengths: Sequence[int]
) -> list[Selected]:
    """Selects in many short arrays: turns make the masks, too, while the row is in the buffer."""
    order = Order.of(arrays[0].dtype)
    buffer = Buffer(arrays, lengths, targets.target.dtype)

    def take_turn(row: jax.Array, table: jax.Array) -> jax.Array:
        turn = buffer.turn(row)
        cut, end = targets.settle(turn, row, order)
        thresholds = cut.thresholds[0]
        target = lax.dynamic_index_in_dim(targets.target, row, keepdims=False)
        mask = masks.mask_of_turn(turn, thresholds, end, target >= turn.size)
        table = buffer.with_threshold(table, row, thresholds[0])
        return buffer.with_mask(table, row, mask)

    table = lax.fori_loop(0, buffer.number_of_rows, take_turn, buffer.empty_table())
    thresholds = buffer.thresholds(table)
    masks_of_arrays = buffer.masks_of_arrays(table)
    selected = []
    for i, rows in enumerate(rows_of(arrays)):
        selected.append(Selected(masks_of_arrays[i], rows.of(thresholds)))
    return selected


class Group(NamedTuple):
    """Arrays that take turns in one program."""

    indices: list[int]  # which arrays
    # Of how many scores the beginning of the buffer is that each array's rows are padded to; `None`: they are read
    # where they are.
    lengths: list[int] | None


def groups(arrays: Sequence[ScoresLike]) -> list[Group]:
    """Divides arrays into groups: few, since each is a program."""
    lengths = [array.size // array.shape[0] for array in arrays]
    sizes = [array.size for array in arrays]
    others, short = [], []
    for i, size in enumerate(sizes):
        fits = lengths[i] <= LONGEST_BUFFER and size <= LARGEST_TABLE
        (short if fits else others).append(i)
    falling = sorted(short, key=lambda i: -lengths[i])
    divided = []
    for indices in _sharing_a_buffer(falling, sizes, lengths):
        if len(indices) < _WORTH_A_BUFFER:
            others += indices
        else:
            padded = _padded_lengths([lengths[i] for i in indices])
            divided.append(Group(indices, padded))
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
            room = LARGEST_TABLE
        divided[-1].append(i)
        room -= sizes[i]
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
