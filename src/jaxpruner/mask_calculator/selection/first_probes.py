"""Where to look first for a threshold: near an earlier one, or where a sample of the scores has it.

A good guess saves passes and changes nothing else.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection import brackets
from jaxpruner.mask_calculator.selection.brackets import Brackets
from jaxpruner.mask_calculator.selection.counts_of_parts import (
    count_all,
    reaching,
    reduce_together,
    sum_together,
)
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores, read

# Scores in a sample of a ranking. Up to so many are compared pair by pair, which takes no loop; more of them pay where
# passes take longer, and are so few of all that their memory does not count.
_PAIRED = 128
_LARGEST_SAMPLE = 2**14
_SCORES_FOR_EACH_SAMPLED = 192
_MANY = 16
# Neighbours that are taken together of many, since the memory is read by so many.
_RUN = 8
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# How far the outer probes stand, in standard deviations of the sample's rank.
_DEVIATIONS = 2.0
# An earlier threshold is taken to be right to about this many bits.
_BITS_KEPT = 8


def over_all_numbers(order: Order, sizes: jax.Array, wanted: jax.Array) -> Brackets:
    """Brackets whose ends stand outside all floats: below -inf, where NaN is counted, too, and above inf.

    >>> order = Order.of(jnp.float32)
    >>> start = over_all_numbers(order, jnp.uint32([9]), jnp.uint32([3]))
    >>> bool(start.low < order.image(-jnp.inf)), bool(start.high > order.image(jnp.inf)), start.count_low.tolist()
    (True, True, [9])
    """
    nowhere = jnp.zeros(sizes.shape, order.unsigned)
    return Brackets.between(
        nowhere + order.lowest - 1,
        nowhere + order.highest + 1,
        sizes,
        jnp.zeros_like(sizes),
        wanted,
    )


def near(order: Order, start: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Probes around earlier thresholds.

    Args:
      order: of the scores' dtype.
      start: vector of `n` thresholds; NaN where there is none.
      otherwise: probes `[n, 3]` where there is none.

    Returns:
      Images `[n, 3]`.

    >>> order = Order.of(jnp.float32)
    >>> probes = near(order, jnp.array([2.0, jnp.nan]), order.image(jnp.array([[1.0, 2.0, 3.0]] * 2)))
    >>> [[round(float(value), 3) for value in three] for three in order.value(probes)]
    [[1.996, 2.0, 2.008], [1.0, 2.0, 3.0]]
    """
    step = jnp.array(1 << max(0, jnp.finfo(order.dtype).nmant - _BITS_KEPT), order.unsigned)
    middle = jnp.clip(order.image(start), order.lowest + step, order.highest - step)[:, None]
    return jnp.where(
        jnp.isnan(start)[:, None],
        otherwise,
        middle - step + np.arange(3, dtype=order.unsigned) * step,
    )


def sampled(
    arrays: Sequence[jax.Array | Scores], wanted: jax.Array, sizes: Sequence[int], order: Order
) -> jax.Array | None:
    """Probes around the threshold of a sample of each row.

    Args:
      arrays: floats `[rows, …]` of one dtype, or `Scores`.
      wanted: how many to keep of each row.
      sizes: of the rows.
      order: of the arrays' dtype.

    Returns:
      Images `[all rows, 3]`; `None` where arrays may be sharded, of which no part stands for the whole.

    >>> scores = jnp.arange(1000.0)[None]
    >>> low, middle, high = Order.of(jnp.float32).value(
    ...     sampled([scores], jnp.array([100]), [1000], Order.of(jnp.float32)))[0]
    >>> bool(low < 900 < high)
    True
    """
    if jax.device_count() > 1:
        return None
    number = _sample_size(sum(sizes) // len(sizes)) // (2 if len(sizes) > _MANY else 1)
    sample = jnp.concatenate([_spread(array, number) for array in arrays])
    return _quantiles(order, sample, wanted.astype(jnp.float32) / np.array(sizes, np.float32))


def sampled_jointly(
    arrays: Sequence[jax.Array | Scores], scales: jax.Array, wanted: jax.Array, order: Order
) -> jax.Array | None:
    """Probes around the threshold of a sample of all arrays, each divided by its scale; as `sampled`.

    >>> sampled_jointly([jnp.ones((1, 8))], jnp.ones(1), jnp.array([4]), Order.of(jnp.float32)).shape
    (1, 3)
    """
    if jax.device_count() > 1:
        return None
    size = sum(array.size for array in arrays)
    parts = []
    for array, scale in zip(arrays, scales, strict=True):
        number = max(1, round(_sample_size(size) * array.size / size))
        parts.append(_spread(array, number)[0].astype(order.dtype) / scale)
    return _quantiles(order, jnp.concatenate(parts)[None], wanted.astype(jnp.float32) / float(size))


def _sample_size(size: int) -> int:
    if size < 2**19:
        return _PAIRED if size >= 2**16 else _PAIRED // 2
    return min(size // _SCORES_FOR_EACH_SAMPLED, _LARGEST_SAMPLE)


def _spread(array: jax.Array | Scores, number: int) -> jax.Array:
    """`[rows, number]` scores of each row, spread over it; NaN where fewer are taken."""
    length = math.prod(array.shape[1:])
    taken = read(
        jax.tree.map(lambda own: _columns(own.reshape(len(own), -1), min(number, length)), array)
    )
    missing = number - taken.shape[1]
    return jnp.pad(taken, ((0, 0), (0, missing)), constant_values=jnp.nan) if missing else taken


def _columns(flat: jax.Array, number: int) -> jax.Array:
    """At most so many columns of a table `[rows, length]`."""
    length = flat.shape[1]
    run = _RUN if number > _PAIRED else 1
    places = np.arange(number // run)
    stride = length // len(places)
    # Where a run stands in its stretch meets no period: multiples of the golden ratio are spread evenly.
    begins = places * stride + (places * _GOLDEN_RATIO % 1 * (stride - run + 1)).astype(np.int64)
    indices = (begins[:, None] + np.arange(run)).ravel()
    dtype = np.uint32 if length <= np.iinfo(np.uint32).max else np.uint64
    return jnp.take(
        flat,
        indices.astype(dtype),
        axis=1,
        mode='clip',
        unique_indices=True,
        indices_are_sorted=True,
    )


def _quantiles(order: Order, sample: jax.Array, share: jax.Array) -> jax.Array:
    """Images `[n, 3]`, rising, that about a share of a sample `[n, number]` reaches."""
    if sample.shape[1] <= _PAIRED:
        low, middle, high = _by_pairs(order, sample, share)
    else:
        low, middle, high = _by_counts(order, sample, share)
    above = jnp.maximum(middle, low + 1)
    place = np.arange(3)
    highest = jnp.where(place == 1, above[:, None], jnp.maximum(high, above + 1)[:, None])
    return jnp.where(place == 0, low[:, None], highest)


def _ranks(share: jax.Array, numbers: jax.Array) -> list[jax.Array]:
    """How many of so many numbers are to reach each of three probes, falling; at least one is."""
    rank = share * numbers
    away = _DEVIATIONS * jnp.sqrt(jnp.maximum(rank * (1 - share), 0)) + 1
    return [jnp.maximum(least, 1) for least in (rank + away, rank, rank - away)]


def _by_pairs(order: Order, sample: jax.Array, share: jax.Array) -> list[jax.Array]:
    others, own = sample[:, :, None], sample[:, None, :]
    # For each score how many reach it, and how many do or do not: padding, which is no number, does neither.
    reached, numbers = (
        count.astype(jnp.float32)
        for count in sum_together(
            [others >= own, (others >= own) | (others < own)], (1,), jnp.uint32
        )
    )
    images = order.image(sample)
    enough = [reached >= least for least in _ranks(share[:, None], numbers)]
    return reduce_together([jnp.where(flags, images, 0) for flags in enough], 0, lax.max, (1,))


def _by_counts(order: Order, sample: jax.Array, share: jax.Array) -> list[jax.Array]:
    """A selection in the sample, which begins where a sample of the sample has the quantiles."""
    # Read from the array by each comparison, a sample takes longer than all that is done with it.
    sample = control.compute_apart(jnp.positive, sample)
    few = sample[:, :: sample.shape[1] // (_PAIRED // 2)]
    first = jnp.repeat(_quantiles(order, few, share), 3, 0)
    numbers = jnp.sum(sample == sample, 1, dtype=jnp.uint32)
    ranks = jnp.stack(_ranks(share, numbers.astype(jnp.float32)), 1)
    wanted = jnp.minimum(ranks.astype(jnp.uint32), numbers[:, None]).ravel()
    start = over_all_numbers(order, jnp.repeat(numbers, 3), wanted)

    def count(thresholds: jax.Array) -> jax.Array:
        of_each_row = thresholds.reshape(len(sample), -1)
        return count_all(reaching, jnp.dtype('uint32'), [sample], [(of_each_row,)]).reshape(
            thresholds.shape
        )

    return list(
        brackets.settle(start, order.value, count, first, scale=order.octave).low.reshape(-1, 3).T
    )
