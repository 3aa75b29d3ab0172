"""Finds the thresholds of rows one after another: each ends when its own count is right.

A short row stays in the processor's cache while it is read again and again. Arrays of about one size are copied to one
buffer in turn, so that only the copy and the mask are in the program once for each of them. Longer arrays, and those
that few others resemble, are read where they are.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import first_probes, search, tie_ends
from jaxpruner.mask_calculator.selection.counts_of_parts import count_row
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores
from jaxpruner.mask_calculator.selection.tables import RankedArray, rows_of, sizes_of_rows
from jaxpruner.mask_calculator.selection.turns import LONGEST_BUFFER, Turn

# A buffer pays for so many arrays, and if padding adds at most this share to what is read.
_WORTH_A_BUFFER = 6
_MOST_PADDING = 0.5
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
    has_buffer: bool,
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects the largest scores of each row of arrays that one device holds.

    Args:
      arrays: floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
      target: unsigned `[all rows]`, how many to keep.
      earlier: thresholds `[all rows]` of an earlier selection to look near first, NaN where there is none.
      has_buffer: whether rows are copied to a buffer, as `groups` says.

    Returns:
      For each array its mask, and the threshold of each row.
    """
    order = Order.of(arrays[0].dtype)
    sizes = sizes_of_rows(arrays)

    def take_turn(row: jax.Array | int, table: jax.Array) -> jax.Array:
        turn = Turn.of(arrays, row, target.dtype)
        turn = turn.copied(order.dtype) if has_buffer else turn
        ranking = RowInTurn(turn, order)
        own_target = lax.dynamic_slice_in_dim(target, row, 1)
        own_earlier = None
        if earlier is not None:
            own_earlier = lax.dynamic_slice_in_dim(earlier, row, 1)
        cut = search.find_cut(ranking, own_target, ranking.probes(own_target), own_earlier)
        end = control.run_once(
            cut.is_needed[0], tie_ends.end_in_row, turn.size, turn, cut.thresholds[0], cut.room[0]
        )
        results = [cut.positions.astype(table.dtype), end.astype(table.dtype)[None, None]]
        return lax.dynamic_update_slice_in_dim(table, jnp.concatenate(results, 1), row, 0)

    # One table for positions and ends. A step of a straight-through method selects twice, once for thresholds alone.
    # XLA makes one loop of the two, unless it has dropped the ends from one of them.
    dtype = jnp.promote_types(order.unsigned, target.dtype)
    table = jnp.zeros((len(sizes), search.probes_of_pass() + 1), dtype)
    if len(sizes) == 1:
        table = take_turn(0, table)
    else:
        table = lax.fori_loop(0, len(sizes), take_turn, table)
    thresholds, ends = order.value(table[:, :-1].astype(order.unsigned)), table[:, -1]
    ranked = []
    for array, rows in zip(arrays, rows_of(arrays), strict=True):
        ranked.append(RankedArray(array, rows, rows))
    keeps_everything = target >= np.array(sizes, target.dtype)
    return search.masks(ranked, thresholds, ends.astype(target.dtype), keeps_everything)


def takes_too_many_turns(array: jax.Array | Scores) -> bool:
    """Whether the rows of an array are so short, and so many, that turns take longer than passes over all of them."""
    rows = array.shape[0]
    return rows >= _MANY_ROWS and array.size <= _SHORT_ROW * rows


def groups(arrays: Sequence[jax.Array | Scores]) -> list[tuple[list[int], bool]]:
    """Divides arrays into groups, each of which takes one program; says which of them have a buffer."""
    lengths = [array.size // array.shape[0] for array in arrays]
    others = [i for i, length in enumerate(lengths) if length > LONGEST_BUFFER]
    short = [i for i, length in enumerate(lengths) if length <= LONGEST_BUFFER]
    short.sort(key=lambda i: -lengths[i])
    divided = []
    while short:
        number = _number_in_one_buffer([lengths[i] for i in short])
        together, short = short[:number], short[number:]
        if number < _WORTH_A_BUFFER:
            others += together
        else:
            divided.append((together, True))
    if others:
        divided.append((others, False))
    return divided


def _number_in_one_buffer(lengths: Sequence[int]) -> int:
    """Counts how many of some falling lengths may be padded to the first."""
    read = 0
    for number, length in enumerate(lengths):
        read += length
        if lengths[0] * (number + 1) > (1 + _MOST_PADDING) * read:
            return number
    return len(lengths)
