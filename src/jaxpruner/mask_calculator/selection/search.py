"""The search for the thresholds of rankings, and the masks: bracket, probes, settle, ties, as in `by_counting`.

`ties` is how many scores reach `low` and not `high`, `room` how many of them may still be kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import brackets, counting, first_probes, tie_ends
from jaxpruner.mask_calculator.selection.brackets import Brackets
from jaxpruner.mask_calculator.selection.counts_of_parts import (
    before,
    column_of,
    find_axis_ends,
    reduce_together,
)
from jaxpruner.mask_calculator.selection.rankings import LeafByLeaf, OverModel, Ranking
from jaxpruner.mask_calculator.selection.scores import read
from jaxpruner.mask_calculator.selection.tables import RankedArray, flat_rows
from jaxpruner.mask_calculator.selection.turns import LONGEST_BUFFER, Turn

# Probes of a pass. Three settle two bits at the memory's speed on a CPU, and more make a pass slower than they save
# passes. An accelerator computes while it reads, and asking it whether to go on costs more than a pass.
_PROBES_ON_CPU = 3
_PROBES_ELSEWHERE = 15
# Arrays are copied in turn where ties are cut, if the largest is at most this share of the model.
_SHARE_TO_COPY = 1 / 16


def probes_of_pass() -> int:
    """The number of columns of thresholds."""
    return _PROBES_ON_CPU if jax.default_backend() == 'cpu' else _PROBES_ELSEWHERE


def _turns(bits: int) -> int | None:
    """The number of passes that settle so many bits, or `None` where each pass is asked whether it was the last."""
    if jax.default_backend() == 'cpu':
        return None
    bits_of_turn = (probes_of_pass() + 1).bit_length() - 1
    return -(-bits // bits_of_turn)


class Cut(NamedTuple):
    """Where each of `n` rankings is cut."""

    # Column 0 is low, the others are high. These tables are as wide as those of the passes, so that thresholds round
    # as they did when they were counted with.
    positions: jax.Array  # of the rankings
    thresholds: jax.Array  # of their arrays
    ties: jax.Array  # [n]
    room: jax.Array  # [n]
    parts: jax.Array | None  # [parts, 2] of a single ranking: how many scores reach low, and high

    def by_part(self) -> tuple[jax.Array, jax.Array]:
        """Divides ties and room among the parts, in their order; `[n]` of each if there are no parts."""
        if self.parts is None:
            return self.ties, self.room
        ties = self.parts[:, 0] - self.parts[:, 1]
        index = np.arange(len(ties))
        ties_up_to = jnp.where(index <= index[:, None], ties, 0)
        ties_before = jnp.where(index < index[:, None], ties, 0)
        sums = reduce_together([ties_up_to, ties_before], 0, lax.add, (1,))
        used_up_to, used_before = (jnp.minimum(total, self.room) for total in sums)
        return ties, used_up_to - used_before

    @property
    def is_needed(self) -> jax.Array:
        """Whether some of the ties are kept and others are not."""
        return self.room < self.ties


def select(
    ranking: LeafByLeaf | OverModel,
    target: jax.Array,
    probes: jax.Array | None = None,
    earlier: jax.Array | None = None,
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects the `target` largest scores of each ranking, in passes over all of its arrays.

    Args:
      ranking: `n` of them.
      target: `[n]` of the count dtype, which is `ranking.counter`.
      probes: first probes `[n, 3]`, even ones if there are none.
      earlier: as in `find_cut`.

    Returns:
      For each array its mask, and the threshold of each row.
    """
    cut = find_cut(ranking, target, probes, earlier)
    if isinstance(ranking, OverModel) and jax.device_count() == 1:
        ends = _ends_by_parts(ranking, cut)
    else:
        ends = _ends_by_counts(ranking, cut)
    keeps_everything = target >= np.array(ranking.sizes, ranking.counter)
    keeps_everything = jnp.broadcast_to(keeps_everything, ends.shape)
    return masks(ranking.arrays, cut.thresholds, ends, keeps_everything)


def find_cut(
    ranking: Ranking, target: jax.Array, probes: jax.Array | None, earlier: jax.Array | None
) -> Cut:
    """Finds thresholds between which only ties lie.

    Args:
      ranking: `n` of them; see `rankings` for what it is asked.
      target: `[n]` of the count dtype.
      probes: first probes `[n, 3]`, even ones if there are none.
      earlier: thresholds `[n]` of an earlier selection to look near first, NaN where there is none.
    """
    order, sizes = ranking.order, jnp.asarray(ranking.sizes, ranking.counter)
    start = first_probes.over_all_numbers(order, sizes, target)
    if ranking.sizes_of_parts is not None:
        sizes_of_parts = np.array(ranking.sizes_of_parts, ranking.counter)
        parts = np.stack([sizes_of_parts, np.zeros_like(sizes_of_parts)], 1)
        start = start._replace(parts=jnp.asarray(parts))
    number, turns = probes_of_pass(), _turns(order.width)
    if earlier is not None:
        otherwise = brackets.even_probes(start, 3) if probes is None else probes
        probes = first_probes.near(order, earlier, otherwise)
    if turns is not None:
        probes = None
    bracket = brackets.settle(
        start,
        ranking.thresholds,
        ranking.count_reaching,
        first=probes,
        probes=number,
        turns=turns,
        scale=order.octave,
    )
    # There are fewer scores than the target that are not NaN: all of these are kept, and no NaN.
    is_short = (bracket.low < order.lowest) & (bracket.target < sizes[:, None])
    count_low = jnp.where(is_short, bracket.target, bracket.count_low)
    low = jnp.maximum(bracket.low, order.lowest)
    positions = jnp.where(np.arange(number) == 0, low, bracket.high)
    ties = count_low - bracket.count_high
    room = jnp.where(count_low > bracket.target, bracket.target - bracket.count_high, ties)
    thresholds = ranking.thresholds(positions)
    return Cut(positions, thresholds, ties[:, 0], room[:, 0], bracket.parts)


def _ends_by_parts(ranking: OverModel, cut: Cut) -> jax.Array:
    """Finds the end in each array before which as many ties stand as there is room for, on one device.

    Earlier arrays fill up first, so that at most one array is cut. Only that one is read.
    """
    arrays = [array.scores for array in ranking.arrays]
    sizes = jnp.array(ranking.sizes_of_parts, ranking.counter)

    def find(ends: jax.Array, arrays: list, cut: Cut) -> jax.Array:
        ties, room = cut.by_part()
        thresholds = jnp.broadcast_to(cut.thresholds, (len(arrays), cut.thresholds.shape[1]))

        def cut_array(row: jax.Array, ends: jax.Array) -> jax.Array:
            turn = Turn.of(arrays, row, ranking.counter)
            if turn.longest <= min(LONGEST_BUFFER, _SHARE_TO_COPY * ranking.sizes[0]):
                turn = turn.copied(ranking.order.dtype, [turn.longest], jnp.int32(0))
            end = tie_ends.end_in_row(ends, turn, thresholds[row], room[row])
            return lax.dynamic_update_index_in_dim(ends, end, row, 0)

        def take_turn(row: jax.Array, ends: jax.Array) -> jax.Array:
            is_cut = (room[row] > 0) & (room[row] < ties[row])
            return lax.cond(is_cut, cut_array, lambda _, ends: ends, row, ends)

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
        ties, room = cut.by_part()
        # These brackets hold indices in flat order, not positions of floats. Counts have to fall along a bracket, so
        # that the indices are counted from the end.
        zeros = jnp.zeros_like(sizes)
        backward = Brackets.between(zeros, sizes, ties, zeros, room)

        def count(ends: jax.Array) -> jax.Array:
            thresholds = cut.thresholds
            return counting.count_between_before(ranking.arrays, thresholds, ends, ranking.counter)

        # Ties lie scattered: no even division has to come first.
        settled = brackets.settle(
            backward.without_even_probes(),
            prepare=lambda from_end: sizes[:, None] - from_end,
            count=count,
            probes=probes_of_pass(),
            turns=_turns(max(sizes_of_rows).bit_length()),
        )
        # No room: nothing at all is kept.
        return jnp.where(room > 0, sizes - settled.low[:, 0], 0)

    return control.run_once(jnp.any(cut.is_needed), find, sizes, cut)


def masks(
    arrays: Sequence[RankedArray],
    thresholds: jax.Array,
    ends: jax.Array,
    keeps_everything: jax.Array,
) -> list[tuple[jax.Array, jax.Array]]:
    """Makes the mask of each array, and lists the lower threshold of each of its rows.

    Args:
      arrays: as they were ranked.
      thresholds: table of low and high.
      ends: `[all rows]`: ties are kept before these indices.
      keeps_everything: `[all rows]`: NaN are kept, too.
    """
    selected = []
    for array in arrays:
        mask = _mask(array, thresholds, ends[:, None], keeps_everything[:, None])
        selected.append((mask, array.thresholds(thresholds)[:, 0]))
    return selected


@jax.jit  # traced once for all arrays of one shape
def _mask(
    ranked: RankedArray, thresholds: jax.Array, ends: jax.Array, keeps_everything: jax.Array
) -> jax.Array:
    """Makes the mask of an array, in few operations: for many, XLA wakes threads, which takes longer."""
    is_on_one_device = jax.device_count() == 1
    array = read(flat_rows(ranked.scores) if is_on_one_device else ranked.scores)
    low, high = (column_of(ranked.thresholds(thresholds), i, array.ndim) for i in (0, 1))
    own_ends = ranked.rows.of(ends)
    if is_on_one_device:
        index = lax.broadcasted_iota(ends.dtype, array.shape, array.ndim - 1)
        is_before_end = index < column_of(own_ends, 0, array.ndim)
    else:
        axis_ends = find_axis_ends(own_ends, array.shape, (0,) * array.ndim)
        is_before_end = before(axis_ends, array.shape, 0)
    keeps_row = column_of(ranked.rows.of(keeps_everything), 0, array.ndim).astype(jnp.uint8)
    mask = jnp.where(_is_kept(array, low, high, is_before_end), jnp.uint8(1), keeps_row)
    return mask.reshape(ranked.scores.shape)


def mask_of_turn(
    turn: Turn, thresholds: jax.Array, end: jax.Array, keeps_everything: jax.Array
) -> jax.Array:
    """Makes the mask of the row whose turn it is, padded to the longest row.

    Args:
      turn: the row.
      thresholds: `[2 or more]`, low and high.
      end: ties are kept before this index.
      keeps_everything: whether NaN are kept, too.
    """

    def mask(row: jax.Array) -> jax.Array:
        is_before_end = lax.iota(end.dtype, row.size) < end
        is_in = _is_kept(row, thresholds[0], thresholds[1], is_before_end)
        own_mask = jnp.where(is_in, jnp.uint8(1), keeps_everything.astype(jnp.uint8))
        return jnp.pad(own_mask, (0, turn.longest - row.size))

    return turn.ask(mask)


def _is_kept(
    scores: jax.Array, low: jax.Array, high: jax.Array, is_before_end: jax.Array
) -> jax.Array:
    """Tells which scores reach `high`, or reach `low` and stand before the end of the ties that are kept."""
    if scores.dtype.itemsize < 4:
        # XLA compares these as wider floats. A select between them would be widened anew for each score; widened here,
        # lazy scores would not be rounded to their dtype as they are where they are counted.
        return (scores >= low) & ((scores >= high) | is_before_end)
    return scores >= jnp.where(is_before_end, low, high)
