"""N:M masks by a tournament inside each group."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import control

_MOST_BITS = 32  # of the numbers that stand for groups


def keep_n_of_m(scores: jax.Array, n: jax.Array | int, m: int, axis: int = -1) -> jax.Array:
    """N:M masks by a tournament: each pair of a group is compared once, and a weight is kept if fewer than n beat it.

    Args:
      scores: float array.
      n: kept in each group; may be traced.
      m: the groups' length. Where it does not divide the axis, the last group is shorter and keeps min(n, its length).
      axis: the axis along which groups lie.

    Returns:
      uint8 array of the scores' shape.

    >>> keep_n_of_m(jnp.array([1.0, 2.0, 2.0, 0.0, 5.0]), 1, 4)
    Array([0, 0, 1, 0, 1], dtype=uint8)
    """
    axis %= scores.ndim
    length = scores.shape[axis]
    whole = length - length % m
    if whole == length:
        return _whole_groups_mask(scores, n, m, axis)
    first = jax.lax.slice_in_dim(scores, 0, whole, axis=axis)
    last = jax.lax.slice_in_dim(scores, whole, length, axis=axis)
    parts = [_whole_groups_mask(first, n, m, axis), _whole_groups_mask(last, n, length - whole, axis)]
    return jnp.concatenate(parts, axis)


def _whole_groups_mask(scores: jax.Array, n: jax.Array | int, m: int, axis: int) -> jax.Array:
    grouped = scores.reshape(*scores.shape[:axis], scores.shape[axis] // m, m, *scores.shape[axis + 1 :])
    members = [jax.lax.index_in_dim(grouped, i, axis + 1, keepdims=False) for i in range(m)]
    losses: list[Any] = [jnp.int32(0)] * m
    for earlier in range(m):
        for later in range(earlier + 1, m):
            # Ties go to the later one, and so does a NaN before it.
            later_wins = (members[later] >= members[earlier]) | jnp.isnan(members[earlier])
            losses[earlier] += later_wins
            losses[later] += ~later_wins
    kept = [jnp.broadcast_to(lost < n, members[0].shape) for lost in losses]
    if jax.default_backend() != 'cpu' or m > _MOST_BITS:
        return jnp.stack(kept, axis + 1).astype(jnp.uint8).reshape(scores.shape)
    # Stacked, they would be found by a loop over all groups for each place, which reads all scores.
    dtype = next(dtype for dtype in (jnp.uint8, jnp.uint16, jnp.uint32) if m <= jnp.iinfo(dtype).bits)
    bits = functools.reduce(jnp.bitwise_or, [one.astype(dtype) << place for place, one in enumerate(kept)])
    return control.apart(functools.partial(_spread, m=m, axis=axis), bits).reshape(scores.shape)


def _spread(bits: jax.Array, m: int, axis: int) -> jax.Array:
    """The mask of groups of which each has a number whose bit `i` says whether the i-th of `m` is kept."""
    places = jnp.arange(m, dtype=bits.dtype).reshape(m, *[1] * (bits.ndim - axis - 1))
    return (jnp.expand_dims(bits, axis + 1) >> places & 1).astype(jnp.uint8)
