"""N:M masks by a tournament inside each group."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.jit, static_argnames=('m', 'axis'))
def keep_n_of_m(scores: Any, n: Any, m: int, axis: int | tuple[int, ...] = -1) -> jax.Array:
    """Keeps the best n of each m scores along an axis, or along several as one; returns a uint8 mask.

    Each pair of a group is compared once, and a score is kept if fewer than n others beat it. Of equal scores the later
    is the better, and NaN is the worst. Where m does not divide the axis, the last group is shorter, and keeps n, too,
    if it has as many.

    Args:
      scores: of any shape.
      n: how many are kept of each group; may be traced.
      m: scores of a group.
      axis: along which groups lie; the last of several is the innermost.

    >>> keep_n_of_m(jnp.array([1.0, 2.0, 2.0, 0.0, 5.0]), 1, 4)
    Array([0, 0, 1, 0, 1], dtype=uint8)
    """
    if isinstance(axis, tuple):
        first = min(each % scores.ndim for each in axis)
        beside = tuple(range(first, first + len(axis)))
        moved = jnp.moveaxis(scores, axis, beside)
        length = math.prod(scores.shape[each] for each in axis)
        one_axis = moved.reshape(*moved.shape[:first], length, *moved.shape[first + len(axis) :])
        mask = keep_n_of_m(one_axis, n, m, first)
        return jnp.moveaxis(mask.reshape(moved.shape), beside, axis)
    along = axis % scores.ndim
    length = scores.shape[along]
    rest = length % m
    if rest:
        full, last = jnp.split(scores, [length - rest], along)
        masks = keep_n_of_m(full, n, m, along), keep_n_of_m(last, n, rest, along)
        return jnp.concatenate(masks, along)
    groups = scores.reshape(*scores.shape[:along], length // m, m, *scores.shape[along + 1 :])
    members = [lax.index_in_dim(groups, i, along + 1, keepdims=False) for i in range(m)]
    counter = jnp.uint8 if m <= 256 else jnp.uint32
    beaten = [jnp.zeros(members[0].shape, counter)] * m
    for earlier, later in itertools.combinations(range(m), 2):
        is_later_better = (members[later] >= members[earlier]) | jnp.isnan(members[earlier])
        beaten[earlier] += is_later_better.astype(counter)
        beaten[later] += (~is_later_better).astype(counter)
    kept = [(times < n).astype(jnp.uint8) for times in beaten]
    return jnp.stack(kept, along + 1).reshape(scores.shape)
