"""Where to look first for a threshold: near an earlier one, or where a sample of the scores has it.

A good guess saves passes and changes nothing else.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.ordered_floats import Order

# Scores in a sample of a ranking, which are compared pair by pair; more of them pay where passes take longer.
_LARGEST_SAMPLE = 256
_MANY = 16
# How far the outer probes stand, in standard deviations of the sample's rank.
_DEVIATIONS = 2.0
# An earlier threshold is taken to be right to about this many bits.
_BITS_KEPT = 8
_MOST_ARRAYS = 32


def near(order: Order, start: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
    """Probes around earlier thresholds.

    Args:
      order: of the scores' dtype.
      start: vector of `n` thresholds; NaN where there is none.
      otherwise: probes `[n, 3]` where there is none; by default some that divide all numbers evenly.

    Returns:
      Images `[n, 3]`.

    >>> probes = near(Order.of(jnp.float32), jnp.array([2.0]))
    >>> [round(float(value), 3) for value in Order.of(jnp.float32).value(probes)[0]]
    [1.996, 2.0, 2.008]
    """
    step = jnp.array(1 << max(0, jnp.finfo(order.dtype).nmant - _BITS_KEPT), order.unsigned)
    middle = jnp.clip(order.image(start), order.lowest + step, order.highest - step)
    if otherwise is None:
        quarter = (order.highest - order.lowest) // 4
        otherwise = jnp.stack([order.lowest + quarter * i for i in (1, 2, 3)])[None]
    return jnp.where(jnp.isnan(start)[:, None], otherwise, jnp.stack([middle - step, middle, middle + step], 1))


def sampled(arrays: Sequence[jax.Array], wanted: jax.Array, sizes: Sequence[int], order: Order) -> jax.Array | None:
    """Probes around the threshold of a sample of each row.

    Args:
      arrays: floats `[rows, …]` of one dtype.
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
    number = _sample_size(max(sizes)) // (2 if len(sizes) > _MANY else 1)
    sample = jnp.concatenate([_strided(array, number) for array in arrays])
    return _quantiles(order, sample, wanted.astype(jnp.float32) / np.array(sizes, np.float32))


def sampled_jointly(
    arrays: Sequence[jax.Array], scales: jax.Array, wanted: jax.Array, order: Order
) -> jax.Array | None:
    """Probes around the threshold of a sample of all arrays, each divided by its scale; as `sampled`.

    >>> sampled_jointly([jnp.ones((1, 8))], jnp.ones(1), jnp.array([4]), Order.of(jnp.float32)).shape
    (1, 3)
    """
    if jax.device_count() > 1:
        return None
    size = sum(array.size for array in arrays)
    # The largest arrays stand for the others.
    largest = sorted(range(len(arrays)), key=lambda i: -arrays[i].size)[:_MOST_ARRAYS]
    parts = []
    for i in largest:
        number = max(1, round(_sample_size(size) * arrays[i].size / size))
        parts.append(_strided(arrays[i], number)[0].astype(order.dtype) / scales[i])
    return _quantiles(order, jnp.concatenate(parts)[None], wanted.astype(jnp.float32) / float(size))


def _sample_size(size: int) -> int:
    return _LARGEST_SAMPLE if size >= 2**19 else _LARGEST_SAMPLE // 2 if size >= 2**16 else _LARGEST_SAMPLE // 4


def _strided(array: jax.Array, number: int) -> jax.Array:
    """`[rows, number]` scores of each row, spread over it; NaN where a row has fewer."""
    flat = array.reshape(array.shape[0], -1)
    stride = max(1, flat.shape[1] // number)
    # An odd stride meets every column of a matrix whose rows have an even length.
    stride = stride if stride % 2 else max(1, stride - 1)
    taken = lax.slice_in_dim(flat, 0, min(flat.shape[1], stride * number), stride, 1)
    missing = number - taken.shape[1]
    return jnp.pad(taken, ((0, 0), (0, missing)), constant_values=jnp.nan) if missing else taken


def _quantiles(order: Order, sample: jax.Array, share: jax.Array) -> jax.Array:
    """Images `[n, 3]` of the scores of a sample `[n, number]` that about a share of it reaches."""
    number = sample.shape[1]
    reached = _ranks(sample)
    room = number - jnp.sum(jnp.isnan(sample), 1)  # padding reaches nothing
    middle = share * room
    away = _DEVIATIONS * jnp.sqrt(jnp.maximum(middle * (1 - share), 0)) + 1
    images = order.image(sample)
    probes = []
    for rank in (middle + away, middle, middle - away):
        enough = reached >= jnp.maximum(rank, 1)[:, None]
        probes.append(jnp.max(jnp.where(enough, images, 0), 1))
        if len(probes) > 1:
            probes[-1] = jnp.maximum(probes[-1], probes[-2] + 1)
    return jnp.stack(probes, 1)


def _ranks(sample: jax.Array) -> jax.Array:
    """How many of a sample reach each of its scores."""
    others, own = sample[:, :, None], sample[:, None, :]
    # Two different sums together: the CPU would write the pairs of a lone one down.
    operands = ((others >= own).astype(jnp.uint32), (others > own).astype(jnp.uint32))
    zero = jnp.zeros((), jnp.uint32)

    def add(left, right):
        return left[0] + right[0], left[1] + right[1]

    return lax.reduce(operands, (zero, zero), add, (1,))[0].astype(jnp.float32)
