"""Finds the thresholds of all rankings together, in passes that read every array.

So it goes on accelerators, which would have to be asked about each row, on several devices, and where all arrays are
one ranking. What is ranked is each row of each array (`LeafByLeaf`), or all arrays together (`OverModel`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import brackets, counting, masks, search, whole_numbers
from jaxpruner.mask_calculator.selection.brackets import Brackets, Order
from jaxpruner.mask_calculator.selection.counts_of_parts import reduce_together
from jaxpruner.mask_calculator.selection.masks import Selected
from jaxpruner.mask_calculator.selection.scores import (
    LONGEST_BUFFER,
    RankedArray,
    Rows,
    ScoresLike,
    Turn,
    rows_of,
    sizes_of_rows,
)
from jaxpruner.mask_calculator.selection.search import Cut

# Arrays are copied in turn where ties are cut, if the largest is at most this share of the model.
_SHARE_TO_COPY = 1 / 16
# How far a float of the quotient's dtype may lie from `value * scale`: so many floats, as a first guess.
_NEAR = 8


class LeafByLeaf:
    """Each row of each array is a ranking of its own; a pass reads all arrays.

    Arrays are floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
    """

    sizes_of_parts = None

    def __init__(self, arrays: list[ScoresLike], per_device: list[bool]):
        self.arrays = []
        for i, rows in enumerate(rows_of(arrays)):
            self.arrays.append(RankedArray(arrays[i], rows, rows, per_device[i]))
        self.order = Order.of(arrays[0].dtype)
        self.sizes = sizes_of_rows(arrays)
        self.counter = whole_numbers.counter_for(max(self.sizes))

    def thresholds(self, positions: jax.Array) -> jax.Array:
        """Makes what each row has to reach from positions `[n, columns]`."""
        return self.order.value(positions)

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores that reach thresholds, `[n, columns]`."""
        return counting.count_reaching(self.arrays, thresholds, self.counter)


class OverModel:
    """All arrays are one ranking, by their scores over a scale; ties in the order of the arrays.

    Arrays are floats `[1, …]` or `Scores`, none of them empty; they are the parts of the ranking. Quotients are never
    materialised: each pass translates its thresholds to those of each array.
    """

    def __init__(self, arrays: list[ScoresLike], divisors: jax.Array | None, per_device: bool):
        dtypes = [array.dtype for array in arrays]
        if divisors is None:
            dtype = jnp.result_type(*dtypes)
            self.scales = jnp.ones(len(arrays), dtype)
        else:
            dtype = jnp.result_type(*dtypes, divisors)
            self.scales = divisors.astype(dtype)
        has_one_dtype = set(dtypes) == {dtype}
        self._has_one_threshold = divisors is None and has_one_dtype
        self.arrays = []
        for i, rows in enumerate(rows_of(arrays)):
            threshold_rows = Rows(None, 1) if self._has_one_threshold else rows
            self.arrays.append(RankedArray(arrays[i], rows, threshold_rows, per_device))
        self.order = Order.of(dtype)
        self.sizes_of_parts = sizes_of_rows(arrays)
        self.sizes = [sum(self.sizes_of_parts)]
        self.counter = whole_numbers.counter_for(self.sizes[0])

    def thresholds(self, positions: jax.Array) -> jax.Array:
        """Makes what arrays have to reach from positions `[1, columns]`: `[1 or arrays, columns]`."""
        values = self.order.value(positions)
        if self._has_one_threshold:
            return values
        dtypes = [array.scores.dtype for array in self.arrays]
        return _smallest_reaching(dtypes, self.scales, values[0])

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores of each array that reach thresholds, `[arrays, columns]`."""
        return counting.count_reaching(self.arrays, thresholds, self.counter)


def select(
    ranking: LeafByLeaf | OverModel,
    target: jax.Array,
    probes: jax.Array | None = None,
    earlier: jax.Array | None = None,
) -> list[Selected]:
    """Selects the `target` largest scores of each ranking.

    Args:
      ranking: `n` of them.
      target: `[n]` of the count dtype, which is `ranking.counter`.
      probes: as in `search.find_cut`.
      earlier: as there.

    Returns:
      For each array its mask; `threshold` is that of each row.
    """
    cut = search.find_cut(ranking, target, probes, earlier)
    if isinstance(ranking, OverModel) and jax.device_count() == 1:
        ends = _ends_by_parts(ranking, cut)
    else:
        ends = _ends_by_counts(ranking, cut)
    keeps_everything = target >= np.array(ranking.sizes, ranking.counter)
    keeps_everything = jnp.broadcast_to(keeps_everything, ends.shape)
    return masks.masks_of_arrays(ranking.arrays, cut.thresholds, ends, keeps_everything)


def _ends_by_parts(ranking: OverModel, cut: Cut) -> jax.Array:
    """Finds the end in each array before which as many ties stand as there is room for, on one device.

    Earlier arrays fill up first, so that at most one array is cut. Only that one is read.
    """
    arrays = [array.scores for array in ranking.arrays]
    sizes = jnp.array(ranking.sizes_of_parts, ranking.counter)
    longest_to_copy = min(LONGEST_BUFFER, _SHARE_TO_COPY * ranking.sizes[0])

    def find(ends: jax.Array, arrays: list, cut: Cut) -> jax.Array:
        ties, room = _by_part(cut)
        columns = cut.thresholds.shape[1]
        thresholds = jnp.broadcast_to(cut.thresholds, (len(arrays), columns))

        def cut_array(row: jax.Array, ends: jax.Array) -> jax.Array:
            turn = Turn.of(arrays, row, ranking.counter)
            if turn.longest <= longest_to_copy:
                turn = turn.copied(ranking.order.dtype, [turn.longest], jnp.int32(0))
            end = masks.end_in_row(ends, turn, thresholds[row], room[row])
            return lax.dynamic_update_index_in_dim(ends, end, row, 0)

        def leave_array(row: jax.Array, ends: jax.Array) -> jax.Array:
            del row
            return ends

        def take_turn(row: jax.Array, ends: jax.Array) -> jax.Array:
            is_cut = (room[row] > 0) & (room[row] < ties[row])
            return lax.cond(is_cut, cut_array, leave_array, row, ends)

        # No room: none is kept. Room for all: the end is that of the array. Under `vmap`, models are cut in different
        # arrays, so that all of them have a turn.
        ends = jnp.where(room > 0, ends, 0)
        return lax.fori_loop(0, len(arrays), take_turn, ends)

    return control.run_once(cut.is_needed[0], find, sizes, arrays, cut)


def _ends_by_counts(ranking: LeafByLeaf | OverModel, cut: Cut) -> jax.Array:
    """Finds the end in each row of all arrays as `_ends_by_parts` does, by counts alone."""
    sizes_of_rows = ranking.sizes_of_parts or ranking.sizes
    sizes = jnp.array(sizes_of_rows, ranking.counter)

    def find(ends: jax.Array, cut: Cut) -> jax.Array:
        del ends
        ties, room = _by_part(cut)
        # These brackets hold indices in flat order, not positions of floats. Counts have to fall along a bracket, so
        # that the indices are counted from the end.
        zeros = jnp.zeros_like(sizes)
        backward = Brackets.between(zeros, sizes, ties, zeros, room)

        def as_ends(from_end: jax.Array) -> jax.Array:
            return sizes[:, None] - from_end

        def count(ends: jax.Array) -> jax.Array:
            thresholds = cut.thresholds
            return counting.count_between_before(ranking.arrays, thresholds, ends, ranking.counter)

        # Ties lie scattered: no even division has to come first.
        settled = brackets.settle(
            backward.without_even_probes(),
            as_ends,
            count,
            probes=search.probes_of_pass(),
            turns=search.turns_for(max(sizes_of_rows).bit_length()),
        )
        # No room: nothing at all is kept.
        return jnp.where(room > 0, sizes - settled.low[:, 0], 0)

    return control.run_once(jnp.any(cut.is_needed), find, sizes, cut)


def _by_part(cut: Cut) -> tuple[jax.Array, jax.Array]:
    """Divides ties and room among the parts, in their order; `[n]` of each if there are no parts."""
    if cut.parts is None:
        return cut.ties, cut.room
    ties = cut.parts[:, 0] - cut.parts[:, 1]
    index = np.arange(len(ties))
    ties_up_to = jnp.where(index <= index[:, None], ties, 0)
    ties_before = jnp.where(index < index[:, None], ties, 0)
    sum_up_to, sum_before = reduce_together([ties_up_to, ties_before], 0, lax.add, (1,))
    used_up_to = jnp.minimum(sum_up_to, cut.room)
    used_before = jnp.minimum(sum_before, cut.room)
    return ties, used_up_to - used_before


def _smallest_reaching(
    dtypes: Sequence[jnp.dtype], scales: jax.Array, values: jax.Array
) -> jax.Array:
    """Finds the smallest floats of each dtype that reach some values when they are divided by the scale beside it.

    Returns `[arrays, values]` in the dtype of the values, which holds each of them exactly.
    """
    thresholds = jnp.broadcast_to(values, (len(dtypes), len(values)))
    for dtype in dict.fromkeys(dtypes):
        indices = np.array([i for i in range(len(dtypes)) if dtypes[i] == dtype])
        of_each_array = scales[indices][:, None]
        scale = jnp.broadcast_to(of_each_array, (len(indices), len(values)))
        smallest = _smallest_quotients_reaching(Order.of(dtype), scale, values)
        thresholds = thresholds.at[indices].set(smallest.astype(values.dtype))
    return thresholds


def _smallest_quotients_reaching(order: Order, scale: jax.Array, values: jax.Array) -> jax.Array:
    """Finds floats `[arrays, values]`. Division rounds, so that value times scale is only near; a search begins there.

    All divisions stand in the loop. Elsewhere XLA may multiply by a reciprocal instead, which rounds in another way,
    and a threshold that was counted with would not be found again.
    """
    near = order.position((values * scale).astype(order.dtype))
    # `low` does not reach the value; `high` does, or stands after all numbers.
    low = jnp.full_like(near, order.lowest - 1)
    high = jnp.full_like(near, order.highest + 1)

    def halve(state):
        turn, low, high = state
        middle = low + (high - low) // 2
        below_or_middle = jnp.where(turn == 1, near - _NEAR, middle)
        guess = jnp.where(turn == 0, near + _NEAR, below_or_middle)
        is_inside = (guess > low) & (guess < high)
        probe = jnp.where(is_inside, guess, middle)
        is_open = high - low > 1
        quotient = order.value(probe).astype(values.dtype) / scale
        is_enough = quotient >= values
        low = jnp.where(is_open & ~is_enough, probe, low)
        high = jnp.where(is_open & is_enough, probe, high)
        return turn + 1, low, high

    def is_any_open(state):
        _, low, high = state
        return jnp.any(high - low > 1)

    _, _, high = lax.while_loop(is_any_open, halve, (jnp.int32(0), low, high))
    return order.value(high)
