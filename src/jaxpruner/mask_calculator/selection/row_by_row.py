"""Finds the thresholds of rows one after another: each ends when its own count is right.

A short row stays in the processor's cache while it is read again and again. Short arrays are copied to one buffer in
turn, where their masks are made, too. Longer arrays, and those that few others resemble, are read where they are.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import first_probes, search, tie_ends
from jaxpruner.mask_calculator.selection.buffers import Buffer
from jaxpruner.mask_calculator.selection.counts_of_parts import count_row
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores
from jaxpruner.mask_calculator.selection.search import Cut
from jaxpruner.mask_calculator.selection.tables import RankedArray, rows_of, sizes_of_rows
from jaxpruner.mask_calculator.selection.turns import Turn

# A turn takes about as long as all passes over a row of so many scores.
_SHORT_ROW = 64
_MANY_ROWS = 64


class RowInTurn:
    """The row whose turn it is, as a ranking (see `rankings`) of its own."""

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
      lengths: as in `buffers.Group`.

    Returns:
      For each array its mask, and the threshold of each row.
    """
    targets = Targets(target, earlier)
    if lengths is None:
        return _select_where_they_are(arrays, targets)
    return _select_in_buffer(arrays, targets, lengths)


@dataclasses.dataclass(frozen=True)
class Targets:
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
    arrays: Sequence[jax.Array | Scores], targets: Targets
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects in few arrays, or long ones: turns find thresholds, and each array has a program for its mask."""
    order = Order.of(arrays[0].dtype)
    sizes = sizes_of_rows(arrays)
    counter = targets.target.dtype

    def take_turn(row: jax.Array | int, table: jax.Array) -> jax.Array:
        turn = Turn.of(arrays, row, counter)
        cut, end = targets.settle(turn, row, order)
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
    keeps_everything = targets.target >= np.array(sizes, counter)
    return search.masks(ranked, thresholds, ends.astype(counter), keeps_everything)


def _select_in_buffer(
    arrays: Sequence[jax.Array | Scores], targets: Targets, lengths: Sequence[int]
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects in many short arrays: turns make the masks, too, while the row is in the buffer."""
    order = Order.of(arrays[0].dtype)
    buffer = Buffer(arrays, lengths, targets.target.dtype)

    def take_turn(row: jax.Array, table: jax.Array) -> jax.Array:
        turn = buffer.turn(row)
        cut, end = targets.settle(turn, row, order)
        target = lax.dynamic_index_in_dim(targets.target, row, keepdims=False)
        mask = search.mask_of_turn(turn, cut.thresholds[0], end, target >= turn.size)
        table = buffer.with_threshold(table, row, cut.thresholds[0, 0])
        return buffer.with_mask(table, row, mask)

    masks = lax.fori_loop(0, buffer.number_of_rows, take_turn, buffer.no_masks())
    thresholds = buffer.thresholds(masks)
    selected = []
    for mask, rows in zip(buffer.masks_of_arrays(masks), rows_of(arrays), strict=True):
        selected.append((mask, rows.of(thresholds)))
    return selected


def takes_too_many_turns(array: jax.Array | Scores) -> bool:
    """Whether the rows of an array are so short, and so many, that turns take longer than passes over all of them."""
    rows = array.shape[0]
    return rows >= _MANY_ROWS and array.size <= _SHORT_ROW * rows
