"""The search for the thresholds of rankings: bracket, probes, settle, as in `by_counting`.

The first probes stand near the threshold of an earlier selection, or where a sample of the scores has it. A good guess
saves passes and changes nothing else. Accelerators take no guess: their number of passes is fixed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import brackets
from jaxpruner.mask_calculator.selection.brackets import Brackets, Order
from jaxpruner.mask_calculator.selection.counting import (
    count_array,
    reaching,
    reduce_together,
    sum_together,
)
from jaxpruner.mask_calculator.selection.scores import ScoresLike, read

# Probes of a pass. Three settle two bits at the memory's speed on a CPU, and more make a pass slower than they save
# passes. An accelerator computes while it reads, and asking it whether to go on costs more than a pass.
_PROBES_ON_CPU = 3
_PROBES_ELSEWHERE = 15

# Largest sample that is compared pair by pair, which takes no loop. Larger samples pay where passes take longer. They
# are few against all scores, so that their memory does not count.
_PAIRED = 128
_LARGEST_SAMPLE = 2**14
_SCORES_FOR_EACH_SAMPLED = 192
_SHORT_RANKING, _LONG_RANKING = 2**16, 2**19
# Neighbours that large samples take together, as memory is read.
_RUN = 8
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# How far the outer probes stand, in standard deviations of the count in a sample.
_DEVIATIONS = 2.0
# An earlier threshold is taken to be right to about this many bits.
_BITS_KEPT = 8


class Ranking(Protocol):
    """`n` rankings, in tables with a row for each.

    Each row of each array is one (`passes.LeafByLeaf`), or all arrays together are (`passes.OverModel`), or it is one
    row alone (`row_by_row.RankedRow`).
    """

    order: Order
    sizes: Any  # [n], how many scores each has
    counter: Any  # unsigned dtype that holds the sizes
    # How many scores each member has, if several arrays are one ranking; else `None`.
    member_sizes: Any

    def thresholds(self, float_ranks: jax.Array) -> jax.Array:
        """Makes what arrays have to reach from float ranks `[n, columns]`."""
        ...

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores that reach thresholds, `[n, columns]`; of a ranking with members `[members, columns]`."""
        ...

    def sampled_probes(self, count: jax.Array) -> jax.Array | None:
        """Makes first probes `[n, 3]` by a sample; `None` where none is taken."""
        ...


@dataclasses.dataclass(frozen=True)
class ToKeep:
    """Says how many scores each of `n` rankings keeps, and where to look first."""

    count: jax.Array  # unsigned [n]
    # Thresholds [n] of an earlier selection, to look near first on a CPU; NaN where there is none.
    earlier: jax.Array | None

    def take(self, rows: np.ndarray) -> 'ToKeep':
        """Takes what is said of some rows."""
        earlier = None if self.earlier is None else self.earlier[rows]
        return ToKeep(self.count[rows], earlier)

    def at_row(self, row: jax.Array | int) -> 'ToKeep':
        """Takes what is said of one row."""
        count = lax.dynamic_slice_in_dim(self.count, row, 1)
        if self.earlier is None:
            return ToKeep(count, None)
        earlier = lax.dynamic_slice_in_dim(self.earlier, row, 1)
        return ToKeep(count, earlier)


class Cut(NamedTuple):
    """Where each of `n` rankings is cut."""

    # Two tables: column 0 is low, column 1 is high. All further columns repeat high. They make the tables as wide as
    # those of the passes: XLA rounds differently at other shapes, and thresholds have to round as they did in the
    # passes.
    float_ranks: jax.Array  # of the rankings
    thresholds: jax.Array  # of their arrays
    # [n]: how many scores reach low and not high. They are equal if not all of them are kept.
    ties: jax.Array
    ties_to_keep: jax.Array  # [n]: how many of them are kept
    # [members, 2] of a ranking with members: how many scores of each reach low, and high.
    member_counts: jax.Array | None

    @property
    def cuts_ties(self) -> jax.Array:
        """Tells of each ranking whether some of its ties are kept and others are not."""
        return self.ties_to_keep < self.ties


def probes_per_pass() -> int:
    """Returns the number of columns of thresholds."""
    return _PROBES_ON_CPU if jax.default_backend() == 'cpu' else _PROBES_ELSEWHERE


def iterations_for(bits: int) -> int | None:
    """Returns the number of passes that settle a number of bits; `None` where a loop asks after each pass."""
    if jax.default_backend() == 'cpu':
        return None
    intervals = probes_per_pass() + 1
    bits_per_pass = intervals.bit_length() - 1
    return -(-bits // bits_per_pass)


def find_cut(ranking: Ranking, to_keep: ToKeep) -> Cut:
    """Finds two thresholds, low and high. Scores that reach high are kept, and the first of those between the two.

    Usually the search ends with the right count at low. Then all scores between are kept, and they may differ.
    Otherwise no float lies between the thresholds, so that these scores are ties.

    Args:
      ranking: `n` of them.
      to_keep: of each; counts are of the dtype `ranking.counter`.
    """
    order = ranking.order
    iterations = iterations_for(order.width)
    # A fixed number of passes settles all brackets: a guess would save none.
    takes_a_guess = iterations is None
    probes = ranking.sampled_probes(to_keep.count) if takes_a_guess else None
    sizes = jnp.asarray(ranking.sizes, ranking.counter)
    bracket = _over_all_numbers(order, sizes, to_keep.count)
    if ranking.member_sizes is not None:
        reaching_low = np.array(ranking.member_sizes, ranking.counter)
        reaching_high = np.zeros_like(reaching_low)
        member_counts = jnp.asarray(np.stack([reaching_low, reaching_high], 1))
        bracket = bracket._replace(member_counts=member_counts)
    if takes_a_guess and to_keep.earlier is not None:
        otherwise = brackets.even_probes(bracket, 3) if probes is None else probes
        probes = _near(order, to_keep.earlier, otherwise)
    settled = brackets.settle(
        bracket,
        ranking.thresholds,
        ranking.count_reaching,
        first=probes,
        probe_count=probes_per_pass(),
        iterations=iterations,
        curvature_width=order.octave,
    )
    return _cut(ranking, settled, sizes)


def _cut(
    ranking: Ranking,
    settled: Brackets,
    sizes: jax.Array,
) -> Cut:
    """Cuts rankings where their brackets have settled."""
    target, count_high = settled.target, settled.count_high
    lowest = ranking.order.lowest
    # There are fewer scores than the target that are not NaN: all of these are kept, and no NaN. The count at low has
    # NaN in it, too. With the target in its place, `ties_to_keep` is `ties`, and nothing is cut.
    is_short = (settled.low < lowest) & (target < sizes[:, None])
    count_low = jnp.where(is_short, target, settled.count_low)
    low = jnp.maximum(settled.low, lowest)
    column = np.arange(probes_per_pass())
    float_ranks = jnp.where(column == 0, low, settled.high)
    ties = count_low - count_high
    ties_to_keep = jnp.where(count_low > target, target - count_high, ties)
    thresholds = ranking.thresholds(float_ranks)
    return Cut(
        float_ranks,
        thresholds,
        ties[:, 0],
        ties_to_keep[:, 0],
        settled.member_counts,
    )


def _over_all_numbers(
    order: Order,
    sizes: jax.Array,
    target: jax.Array,
) -> Brackets:
    """Makes brackets from below -inf, where NaN is counted, too, to above inf."""
    zeros = jnp.zeros(sizes.shape, order.unsigned)
    low = zeros + order.lowest - 1
    high = zeros + order.highest + 1
    return Brackets.between(low, high, sizes, jnp.zeros_like(sizes), target)


def _near(
    order: Order,
    earlier: jax.Array,
    otherwise: jax.Array,
) -> jax.Array:
    """Makes probes `[n, 3]` around earlier thresholds `[n]`, or other probes where a threshold is NaN."""
    bits_left = max(0, jnp.finfo(order.dtype).nmant - _BITS_KEPT)
    step = jnp.array(1 << bits_left, order.unsigned)
    middle = order.float_rank(earlier)
    inside = jnp.clip(middle, order.lowest + step, order.highest - step)
    first = inside[:, None] - step
    around = first + np.arange(3, dtype=order.unsigned) * step
    return jnp.where(jnp.isnan(earlier)[:, None], otherwise, around)


def sampled_jointly(
    arrays: Sequence[ScoresLike],
    scales: jax.Array,
    target: jax.Array,
    order: Order,
) -> jax.Array | None:
    """Makes probes `[1, 3]` around the threshold of a sample of all arrays, each divided by its scale.

    `None` on several devices, where a sample of what one of them holds would not stand for the whole.
    """
    if jax.device_count() > 1:
        return None
    size = sum(array.size for array in arrays)
    samples: list[jax.Array] = []
    array_of_sampled: list[int] = []
    for i, array in enumerate(arrays):
        share_of_all = sample_size(size) * array.size / size
        count = max(1, round(share_of_all))
        sample = sample_of_row(count, jax.tree.map(jnp.ravel, array))
        samples.append(sample.astype(order.dtype))
        array_of_sampled += [i] * count
    joined = jnp.concatenate(samples) / scales[np.array(array_of_sampled)]
    share = target.astype(jnp.float32) / float(size)
    return quantiles(order, joined[None], share)


def sample_size(size: int) -> int:
    """Chooses how many scores to sample of a row or model of this size."""
    if size >= _LONG_RANKING:
        return min(size // _SCORES_FOR_EACH_SAMPLED, _LARGEST_SAMPLE)
    return _PAIRED if size >= _SHORT_RANKING else _PAIRED // 2


@functools.partial(jax.jit, static_argnums=0)
def sample_of_row(count: int, row: ScoresLike) -> jax.Array:
    """Takes scores `[count]` that are spread over a row `[size]`, NaN where it has fewer."""

    def take(leaf: jax.Array) -> jax.Array:
        return _take_spread(leaf, min(count, row.size))

    sample = read(jax.tree.map(take, row))
    padding = (0, count - len(sample))
    return jnp.pad(sample, padding, constant_values=jnp.nan)


def _take_spread(row: jax.Array, count: int) -> jax.Array:
    """Takes at most `count` elements, spread over the row."""
    length = len(row)
    run = _RUN if count > _PAIRED else 1
    stretches = np.arange(count // run)
    stride = length // len(stretches)
    # Multiples of the golden ratio are spread evenly. So where runs stand in their stretches meets no period.
    share_of_stretch = stretches * _GOLDEN_RATIO % 1
    offsets = share_of_stretch * (stride - run + 1)
    begins = stretches * stride + offsets.astype(np.int64)
    indices = begins[:, None] + np.arange(run)
    dtype = np.uint32 if length <= np.iinfo(np.uint32).max else np.uint64
    return jnp.take(
        row,
        indices.ravel().astype(dtype),
        mode='clip',
        unique_indices=True,
        indices_are_sorted=True,
    )


def quantiles(
    order: Order,
    sample: jax.Array,
    share: jax.Array,
) -> jax.Array:
    """Makes rising probes `[n, 3]` that about a share of a sample `[n, count]` reaches."""
    is_small = sample.shape[1] <= _PAIRED
    find = _quantiles_by_pairs if is_small else _quantiles_by_counts
    low, middle, high = find(order, sample, share)
    middle = jnp.maximum(middle, low + 1)
    high = jnp.maximum(high, middle + 1)
    column = np.arange(3)
    middle_or_high = jnp.where(column == 1, middle[:, None], high[:, None])
    return jnp.where(column == 0, low[:, None], middle_or_high)


def _counts_to_reach(share: jax.Array, sizes: jax.Array) -> list[jax.Array]:
    """Finds how many scores of samples are to reach each of three probes, falling, at least one."""
    count = share * sizes
    variance = jnp.maximum(count * (1 - share), 0)
    away = _DEVIATIONS * jnp.sqrt(variance) + 1
    counts = count + away, count, count - away
    return [jnp.maximum(each, 1) for each in counts]


def _quantiles_by_pairs(
    order: Order,
    sample: jax.Array,
    share: jax.Array,
) -> list[jax.Array]:
    """Compares each score of the sample with each other one."""
    others, own = sample[:, :, None], sample[:, None, :]
    reaches = others >= own
    # Padding is no number: it neither reaches a score nor does it not.
    is_number = reaches | (others < own)
    counts, sizes = sum_together([reaches, is_number], (1,), jnp.uint32)
    counts = counts.astype(jnp.float32)
    counts_to_reach = _counts_to_reach(share[:, None], sizes.astype(jnp.float32))
    float_ranks = order.float_rank(sample)
    candidates = []
    for count in counts_to_reach:
        candidates.append(jnp.where(counts >= count, float_ranks, 0))
    return reduce_together(candidates, 0, lax.max, (1,))


def _quantiles_by_counts(
    order: Order,
    sample: jax.Array,
    share: jax.Array,
) -> list[jax.Array]:
    """Selects in the sample, beginning where a sample of the sample has the quantiles."""
    # Gathered anew by each comparison, the sample would take longer than all that is done with it.
    sample = control.compute_apart(jnp.positive, sample)
    rows, size = sample.shape
    few = sample[:, :: size // (_PAIRED // 2)]
    first = jnp.repeat(quantiles(order, few, share), 3, 0)
    is_number = sample == sample
    sizes = jnp.sum(is_number, 1, dtype=jnp.uint32)
    counts_to_reach = jnp.stack(_counts_to_reach(share, sizes.astype(jnp.float32)), 1)
    whole_counts = counts_to_reach.astype(jnp.uint32)
    target = jnp.minimum(whole_counts, sizes[:, None]).ravel()
    start = _over_all_numbers(order, jnp.repeat(sizes, 3), target)

    def count(thresholds: jax.Array) -> jax.Array:
        of_each_row = thresholds.reshape(rows, -1)
        counts = count_array(reaching, jnp.dtype('uint32'), sample, (of_each_row,))
        return counts.reshape(thresholds.shape)

    settled = brackets.settle(start, order.value, count, first=first, curvature_width=order.octave)
    by_probe = settled.low.reshape(rows, 3).T
    return list(by_probe)
