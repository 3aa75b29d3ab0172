"""Scores, a sparsity and a sparsity type become a mask of the scores' shape.

Unstructured, block and channel masks are one thing: the type pools scores over groups of weights, the best groups are
selected, and the type spreads their verdicts back. N:M ranks inside small groups instead.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import selection, sparsity_types

MASK_DTYPE = jnp.uint8

TopkFn = Callable[[jax.Array, Any], jax.Array]


def topk_mask_calculator(scores: jax.Array, sparsity: Any) -> jax.Array:
    """Keeps the `max(1, round(size * (1 - sparsity)))` largest scores.

    Args:
      scores: float array of any shape.
      sparsity: share to remove, scalar in [0, 1]; 0 keeps everything, NaN included.

    Returns:
      uint8 array of the scores' shape, 1 = kept. Of equal scores the lower flat index is kept; NaN ranks lowest.

    >>> topk_mask_calculator(jnp.array([4.0, 1.0, 3.0, 2.0]), 0.5)
    Array([1, 0, 1, 0], dtype=uint8)
    """
    return topk_group_mask_calculator(scores, sparsity, sparsity_types.Unstructured())


@functools.partial(jax.jit, static_argnames='sparsity_type')
def topk_group_mask_calculator(
    scores: jax.Array, sparsity: Any, sparsity_type: sparsity_types.GroupedType
) -> jax.Array:
    """Keeps the best groups of weights, `max(1, round(groups * (1 - sparsity)))` of them, in one ranking.

    Args:
      scores: float array.
      sparsity: share of groups to remove, scalar in [0, 1]; 0 keeps everything.
      sparsity_type: how scores are pooled into groups; hashable.

    Returns:
      uint8 array of the scores' shape. Of equal groups that of lower flat index is kept; NaN ranks lowest.

    Raises:
      ValueError: the type does not fit the shape.

    >>> topk_group_mask_calculator(jnp.array([4.0, 1.0, 3.0]), 0.4, sparsity_types.Unstructured())
    Array([1, 0, 1], dtype=uint8)
    """
    sparsity_type.check_shape(scores.shape, 'scores')
    if not scores.size:
        return jnp.ones(scores.shape, MASK_DTYPE)
    groups = sparsity_type.group_scores(scores)
    # Sparsity 0 keeps everything as a count of all does, NaN included.
    mask = selection.keep_largest(groups, selection.number_to_keep(groups.size, sparsity))
    return sparsity_type.spread_groups(mask, scores.shape)


@functools.partial(jax.jit, static_argnames='sparsity_type')
def topk_n_by_m_mask_calculator(scores: jax.Array, sparsity: Any, sparsity_type: sparsity_types.NByM) -> jax.Array:
    """Keeps the n largest of each m consecutive scores along the type's axis.

    Args:
      scores: float array; m divides its axis, or the type allows a partial last group.
      sparsity: 0 keeps everything, any other value means n of m.
      sparsity_type: n, m and the axis.

    Returns:
      uint8 array of the scores' shape. Of equal scores the higher index is kept; NaN ranks lowest.

    Raises:
      ValueError: m does not divide the axis.

    >>> topk_n_by_m_mask_calculator(jnp.array([1.0, 2.0, 4.0, 3.0]), 0.5, sparsity_types.NByM(1, 2))
    Array([0, 1, 1, 0], dtype=uint8)
    """
    sparsity_type.check_shape(scores.shape, 'scores')
    mask = n_by_m_mask(scores, sparsity_type.n, sparsity_type.m, sparsity_type.axis)
    return mask | (jnp.asarray(sparsity) == 0).astype(MASK_DTYPE)


def topk_block_mask_calculator(
    scores: jax.Array, sparsity: Any, block_height: int, block_width: int, use_avg_pooling: bool = True
) -> jax.Array:
    """Keeps the best blocks over the last two axes, in one ranking over all blocks of the array.

    Args:
      scores: float array; one dimension counts as one row.
      sparsity: share of blocks to remove, scalar in [0, 1].
      block_height: length of a block along the axis before the last.
      block_width: length of a block along the last axis.
      use_avg_pooling: a block's score is the mean of its scores, else their maximum. Edge blocks may be partial.

    Returns:
      uint8 array of the scores' shape.

    >>> topk_block_mask_calculator(jnp.array([[1.0, 1.0, 2.0], [1.0, 1.0, 2.0]]), 0.5, 2, 2)
    Array([[0, 0, 1],
           [0, 0, 1]], dtype=uint8)
    """
    return topk_group_mask_calculator(
        scores, sparsity, sparsity_types.Block((block_height, block_width), use_avg_pooling)
    )


def topk_channel_mask_calculator(scores: jax.Array, sparsity: Any, sparsity_type: sparsity_types.Channel) -> jax.Array:
    """Keeps the channels whose scores, summed over all other axes, are largest.

    Args:
      scores: float array.
      sparsity: share of channels to remove, scalar in [0, 1].
      sparsity_type: the channels' axis.

    Returns:
      uint8 array of the scores' shape.

    Raises:
      ValueError: the array has no such axis.

    >>> topk_channel_mask_calculator(jnp.array([[1.0, 2.0], [1.0, 2.0]]), 0.5, sparsity_types.Channel(-1))
    Array([[0, 1],
           [0, 1]], dtype=uint8)
    """
    return topk_group_mask_calculator(scores, sparsity, sparsity_type)


def get_topk_fn(sparsity_type: sparsity_types.SparsityType | str) -> TopkFn:
    """The function `(scores, sparsity) -> mask` of a sparsity type.

    Args:
      sparsity_type: a type or its config string.

    Raises:
      TypeError: it is no sparsity type.

    >>> get_topk_fn(sparsity_types.Channel(0))(jnp.array([[1.0], [2.0]]), 0.5)
    Array([[0],
           [1]], dtype=uint8)
    """
    if isinstance(sparsity_type, str):
        sparsity_type = sparsity_types.parse_sparsity_type(sparsity_type)
    if isinstance(sparsity_type, sparsity_types.NByM):
        return functools.partial(topk_n_by_m_mask_calculator, sparsity_type=sparsity_type)
    if isinstance(sparsity_type, sparsity_types.GroupedType) and not isinstance(sparsity_type, type):
        return functools.partial(topk_group_mask_calculator, sparsity_type=sparsity_type)
    raise TypeError(
        f'{sparsity_type!r} is no single sparsity type; give Unstructured(), NByM, Block, Channel, or an object with '
        'the methods of sparsity_types.GroupedType'
    )


def n_by_m_mask(scores: jax.Array, n: jax.Array | int, m: int, axis: int = -1) -> jax.Array:
    """N:M masks by a tournament: each pair of a group is compared once, and a weight is kept if fewer than n beat it.

    Args:
      scores: float array.
      n: kept in each group; may be traced.
      m: the groups' length. Where it does not divide the axis, the last group is shorter and keeps min(n, its length).
      axis: the axis along which groups lie.

    Returns:
      uint8 array of the scores' shape.

    >>> n_by_m_mask(jnp.array([1.0, 2.0, 2.0, 0.0, 5.0]), 1, 4)
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
    kept = [jnp.broadcast_to(lost < n, members[0].shape).astype(MASK_DTYPE) for lost in losses]
    return jnp.stack(kept, axis + 1).reshape(scores.shape)
