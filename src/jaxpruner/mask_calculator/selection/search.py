"""The search for the thresholds of rankings, and the masks: bracket, probes, settle, ties, as in `by_counting`.

`ties` is how many scores reach `low` and not `high`, `room` how many of them may still be kept.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import brackets, counts_of_parts, first_probes, tie_ends
from jaxpruner.mask_calculator.selection.brackets import Brackets
from jaxpruner.mask_calculator.selection.counts_of_parts import column_of
from jaxpruner.mask_calculator.selection.rankings import Ranking, sizes_of_rows
from jaxpruner.mask_calculator.selection.scores import Scores, read
from jaxpruner.mask_calculator.selection.tables import split, widen

# Probes of a pass. Three settle two bits at the memory's speed on a CPU, and more make a pass slower than they save
# passes. An accelerator computes while it reads, and asking it whether to go on costs more than a pass.
_PROBES_ON_CPU = 3
_PROBES_ELSEWHERE = 15


def select(
    ranking: Ranking,
    target: jax.Array,
    probes: jax.Array | None,
    earlier: jax.Array | None = None,
) -> list[tuple[jax.Array, jax.Array]]:
    """Selects the `target` largest scores of each ranking.

    Args:
      ranking: `n` of them.
      target: `[n]` of the count dtype, which is `ranking.counter`.
      probes: first probes `[n, 3]`, even ones if there are none.
      earlier: thresholds `[n]` of an earlier selection to look near first, NaN where there is none.

    Returns:
      For each array its mask, and the threshold of each row.
    """
    bracket, probes_of_pass = _settle(ranking, target, probes, earlier)
    # Columns 0 and 1 are low and high. The rest repeats high, so that this table is as wide as those of the passes and
    # the thresholds round as they did when they were counted with.
    is_first = np.arange(probes_of_pass) == 0
    thresholds = ranking.thresholds(
        jnp.where(is_first, bracket.low[:, None], bracket.high[:, None])
    )
    ties = bracket.count_low - bracket.count_high
    has_too_many = bracket.count_low > bracket.target
    # How many ties may still be kept.
    room = jnp.where(has_too_many, bracket.target - bracket.count_high, ties)
    if jax.device_count() > 1:
        ends = _ends_by_counts(ranking, ties, room, thresholds)
        ends = ranking.ends_of_rows(ends[:, None])[:, 0]
    else:
        ends = _ends_by_parts(ranking, ties, room, thresholds)
    sizes = jnp.array(ranking.sizes, ranking.counter)
    keeps_everything = jnp.broadcast_to(target >= sizes, ends.shape).astype(ranking.counter)
    keeps_everything = widen(keeps_everything, _PROBES_ON_CPU)
    end_and_keep_all = jnp.where(np.arange(_PROBES_ON_CPU) == 0, ends[:, None], keeps_everything)
    masks = map(_mask, ranking.arrays, thresholds, split(end_and_keep_all, ranking.rows))
    lowest = [own_thresholds[:, 0] for own_thresholds in thresholds]
    return list(zip(masks, lowest, strict=True))


def _settle(
    ranking: Ranking, target: jax.Array, probes: jax.Array | None, earlier: jax.Array | None
) -> tuple[Brackets, int]:
    """Finds brackets between which only ties lie, and the number of probes of a pass."""
    order, sizes = ranking.order, jnp.array(ranking.sizes, ranking.counter)
    start = first_probes.over_all_numbers(order, sizes, target)
    number, turns = _PROBES_ON_CPU, None
    if earlier is not None:
        otherwise = brackets.even_probes(start, number) if probes is None else probes
        probes = first_probes.near(order, earlier, otherwise)
    if jax.default_backend() != 'cpu':
        number, probes = _PROBES_ELSEWHERE, None
        bits_of_turn = (number + 1).bit_length() - 1
        turns = -(-order.width // bits_of_turn)
    bracket = brackets.settle(
        start, ranking.thresholds, ranking.count_reaching, probes, number, turns, order.octave
    )
    # There are fewer scores than the target that are not NaN: all of these are kept, and no NaN.
    is_short = (bracket.low < order.lowest) & (target < sizes)
    count_low = jnp.where(is_short, target, bracket.count_low)
    low = jnp.maximum(bracket.low, order.lowest)
    return bracket._replace(low=low, count_low=count_low), number


def _ends_by_parts(
    ranking: Ranking, ties: jax.Array, room: jax.Array, thresholds: list[jax.Array]
) -> jax.Array:
    """Finds the end before which as many ties stand as there is room for, in each row of arrays on one device."""

    def cut(ends: jax.Array, room: jax.Array, thresholds: list, arrays: list) -> jax.Array:
        del ends
        return tie_ends.of_rooms(arrays, thresholds, ranking.rooms_of_rows(room, thresholds))

    behind_all = jnp.array(sizes_of_rows(ranking.arrays), ranking.counter)
    has_cut = jnp.any(room < ties)
    return control.run_once(has_cut, cut, behind_all, room, thresholds, ranking.arrays)


def _ends_by_counts(
    ranking: Ranking, ties: jax.Array, room: jax.Array, thresholds: list[jax.Array]
) -> jax.Array:
    """Finds ends as `_ends_by_parts` does, in the order of each ranking, by counts alone."""
    sizes = jnp.array(ranking.sizes, ranking.counter)
    # These brackets hold indices in flat order, not positions of floats. Counts have to fall along a bracket, so that
    # the indices are counted from the end.
    backward = Brackets.between(jnp.zeros_like(sizes), sizes, ties, jnp.zeros_like(ties), room)
    # Ties lie scattered: no even division has to come first.
    settled = brackets.settle(
        backward.without_even_probes(),
        prepare=lambda from_end: ranking.ends_of_rows(sizes[:, None] - from_end),
        count=lambda ends: ranking.count_ties(thresholds, ends),
    )
    return jnp.where(settled.target > 0, sizes - settled.low, 0)  # no room: nothing at all is kept


def _mask(
    scores: jax.Array | Scores, thresholds: jax.Array, end_and_keep_all: jax.Array
) -> jax.Array:
    """Makes the mask of scores `[rows, …]`.

    `end_and_keep_all` is `[rows, 2 or more]`. Column 0 is the end before which ties are kept, column 1 is 1 where the
    whole row is kept. There are few operations: for many XLA wakes other threads, which lasts longer than a small mask.
    """
    array = read(scores)
    ends = counts_of_parts.find_axis_ends(end_and_keep_all[:, :1], array.shape, (0,) * array.ndim)
    is_before_end = counts_of_parts.before(ends, array.shape, 0)
    low, high = (column_of(thresholds, column, array.ndim) for column in (0, 1))
    if array.dtype.itemsize < 4:
        # XLA compares these as wider floats. A select between them would be widened anew for each score; widened here,
        # lazy scores would not be rounded to their dtype as they are where they are counted.
        is_kept = (array >= low) & ((array >= high) | is_before_end)
    else:
        is_kept = array >= jnp.where(is_before_end, low, high)
    keeps_everything = column_of(end_and_keep_all, 1, array.ndim).astype(jnp.uint8)
    return jnp.where(is_kept, jnp.uint8(1), keeps_everything)
