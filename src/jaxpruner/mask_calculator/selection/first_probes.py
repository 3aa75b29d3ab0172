"""Where to probe first for a threshold: near an earlier one, or where a sample of the scores has it.

A good guess saves passes and changes nothing else.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import brackets
from jaxpruner.mask_calculator.selection.brackets import Brackets
from jaxpruner.mask_calculator.selection.counts_of_parts import (
    count_array,
    reaching,
    reduce_together,
    sum_together,
)
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores, read

# A sample of at most so many scores is compared pair by pair, which takes no loop. Larger samples pay where passes take
# longer, and are so few of all scores that their memory does not count.
_PAIRED = 128
_LARGEST_SAMPLE = 2**14
_SCORES_FOR_EACH_SAMPLED = 192
_SHORT_RANKING, _LONG_RANKING = 2**16, 2**19
# Large samples take so many neighbours together, as memory is read.
_RUN = 8
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# How far the outer probes stand, in standard deviations of the rank in a sample.
_DEVIATIONS = 2.0
# An earlier threshold is taken to be right to about this many bits.
_BITS_KEPT = 8


def over_all_numbers(order: Order, sizes: jax.Array, target: jax.Array) -> Brackets:
    """Makes brackets from below -inf, where NaN is counted, too, to above inf."""
    zeros = jnp.zeros(sizes.shape, order.unsigned)
    low, high = zeros + order.lowest - 1, zeros + order.highest + 1
    return Brackets.between(low, high, sizes, jnp.zeros_like(sizes), target)


def near(order: Order, start: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Makes probes `[n, 3]` around earlier thresholds `[n]`, or other probes where a threshold is NaN."""
    step = jnp.array(1 << max(0, jnp.finfo(order.dtype).nmant - _BITS_KEPT), order.unsigned)
    middle = jnp.clip(order.position(start), order.lowest + step, order.highest - step)[:, None]
    around = middle - step + np.arange(3, dtype=order.unsigned) * step
    return jnp.where(jnp.isnan(start)[:, None], otherwise, around)


def sampled_jointly(
    arrays: Sequence[jax.Array | Scores], scales: jax.Array, target: jax.Array, order: Order
) -> jax.Array | None:
    """Makes probes `[1, 3]` around the threshold of a sample of all arrays, each divided by its scale.

    `None` on several devices, where no part of an array stands for the whole.
    """
    if jax.device_count() > 1:
        return None
    size = sum(array.size for array in arrays)
    parts, array_of_part = [], []
    for i, array in enumerate(arrays):
        number = max(1, round(sample_size(size) * array.size / size))
        part = sample_of_row(number, jax.tree.map(jnp.ravel, array))
        parts.append(part.astype(order.dtype))
        array_of_part += [i] * number
    sample = jnp.concatenate(parts) / scales[np.array(array_of_part)]
    share = target.astype(jnp.float32) / float(size)
    return quantiles(order, sample[None], share)


def sample_size(size: int) -> int:
    """Chooses how many scores to sample of so many."""
    if size >= _LONG_RANKING:
        return min(size // _SCORES_FOR_EACH_SAMPLED, _LARGEST_SAMPLE)
    return _PAIRED if size >= _SHORT_RANKING else _PAIRED // 2


@functools.partial(jax.jit, static_argnums=0)
def sample_of_row(number: int, row: jax.Array | Scores) -> jax.Array:
    """Takes scores `[number]` that are spread over a row `[size]`, NaN where it has fewer."""

    def take(leaf: jax.Array) -> jax.Array:
        return _take_spread(leaf, min(number, row.size))

    sample = read(jax.tree.map(take, row))
    return jnp.pad(sample, (0, number - len(sample)), constant_values=jnp.nan)


def _take_spread(row: jax.Array, number: int) -> jax.Array:
    """Takes at most so many elements."""
    length = len(row)
    run = _RUN if number > _PAIRED else 1
    stretches = np.arange(number // run)
    stride = length // len(stretches)
    # Multiples of the golden ratio are spread evenly. So where runs stand in their stretches meets no period.
    offsets = (stretches * _GOLDEN_RATIO % 1 * (stride - run + 1)).astype(np.int64)
    begins = stretches * stride + offsets
    indices = (begins[:, None] + np.arange(run)).ravel()
    dtype = np.uint32 if length <= np.iinfo(np.uint32).max else np.uint64
    return jnp.take(
        row,
        indices.astype(dtype),
        mode='clip',
        unique_indices=True,
        indices_are_sorted=True,
    )


def quantiles(order: Order, sample: jax.Array, share: jax.Array) -> jax.Array:
    """Makes rising probes `[n, 3]` that about a share of a sample `[n, number]` reaches."""
    is_small = sample.shape[1] <= _PAIRED
    low, middle, high = (_by_pairs if is_small else _by_counts)(order, sample, share)
    above = jnp.maximum(middle, low + 1)
    column = np.arange(3)
    rising = jnp.where(column == 1, above[:, None], jnp.maximum(high, above + 1)[:, None])
    return jnp.where(column == 0, low[:, None], rising)


def _ranks(share: jax.Array, numbers: jax.Array) -> list[jax.Array]:
    """Finds how many of so many numbers are to reach each of three probes, falling, at least one."""
    rank = share * numbers
    away = _DEVIATIONS * jnp.sqrt(jnp.maximum(rank * (1 - share), 0)) + 1
    return [jnp.maximum(least, 1) for least in (rank + away, rank, rank - away)]


def _by_pairs(order: Order, sample: jax.Array, share: jax.Array) -> list[jax.Array]:
    others, own = sample[:, :, None], sample[:, None, :]
    reaches = others >= own
    # Padding is no number: it neither reaches a score nor does it not.
    is_number = reaches | (others < own)
    counts, numbers = sum_together([reaches, is_number], (1,), jnp.uint32)
    counts, numbers = counts.astype(jnp.float32), numbers.astype(jnp.float32)
    positions = order.position(sample)
    candidates = []
    for least in _ranks(share[:, None], numbers):
        candidates.append(jnp.where(counts >= least, positions, 0))
    return reduce_together(candidates, 0, lax.max, (1,))


def _by_counts(order: Order, sample: jax.Array, share: jax.Array) -> list[jax.Array]:
    """Selects in the sample, beginning where a sample of the sample has the quantiles."""
    # Gathered anew by each comparison, the sample would take longer than all that is done with it.
    sample = control.compute_apart(jnp.positive, sample)
    few = sample[:, :: sample.shape[1] // (_PAIRED // 2)]
    first = jnp.repeat(quantiles(order, few, share), 3, 0)
    numbers = jnp.sum(sample == sample, 1, dtype=jnp.uint32)
    ranks = jnp.stack(_ranks(share, numbers.astype(jnp.float32)), 1)
    target = jnp.minimum(ranks.astype(jnp.uint32), numbers[:, None]).ravel()
    start = over_all_numbers(order, jnp.repeat(numbers, 3), target)

    def count(thresholds: jax.Array) -> jax.Array:
        of_each_row = thresholds.reshape(len(sample), -1)
        counts = count_array(reaching, jnp.dtype('uint32'), sample, (of_each_row,))
        return counts.reshape(thresholds.shape)

    settled = brackets.settle(start, order.value, count, first=first, scale=order.octave)
    return list(settled.low.reshape(-1, 3).T)
