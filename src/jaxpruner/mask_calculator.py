"""Scores, a sparsity and a sparsity type become a mask of the scores' shape.

Unstructured, block and channel masks are one thing: scores are pooled over groups of weights, the best groups are
selected, and each weight gets its group's verdict. N:M ranks inside small groups instead.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import selection, sparsity_types

MASK_DTYPE = jnp.uint8

TopkFn = Callable[[jax.Array, Any], jax.Array]


@jax.jit
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
    return _topk_groups(scores, sparsity, sparsity_types.Unstructured())


@functools.partial(jax.jit, static_argnames='sparsity_type')
def topk_n_by_m_mask_calculator(scores: jax.Array, sparsity: Any, sparsity_type: sparsity_types.NByM) -> jax.Array:
    """Keeps the n largest of each m consecutive scores along the type's axis.

    Args:
      scores: float array whose axis m divides.
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


@functools.partial(jax.jit, static_argnames=('block_height', 'block_width', 'use_avg_pooling'))
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
    return _topk_groups(scores, sparsity, sparsity_types.Block((block_height, block_width), use_avg_pooling))


@functools.partial(jax.jit, static_argnames='sparsity_type')
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
    sparsity_type.check_shape(scores.shape, 'scores')
    return _topk_groups(scores, sparsity, sparsity_type)


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
    match sparsity_types.normalize_setting(sparsity_type):
        case sparsity_types.Unstructured():
            return topk_mask_calculator
        case sparsity_types.NByM() as n_by_m:
            return functools.partial(topk_n_by_m_mask_calculator, sparsity_type=n_by_m)
        case sparsity_types.Block((height, width), use_avg_pooling):
            return functools.partial(
                topk_block_mask_calculator,
                block_height=height,
                block_width=width,
                use_avg_pooling=use_avg_pooling,
            )
        case sparsity_types.Channel() as channel:
            return functools.partial(topk_channel_mask_calculator, sparsity_type=channel)
    raise TypeError(f'{sparsity_type!r} is no single sparsity type')


def n_by_m_mask(scores: jax.Array, n: jax.Array | int, m: int, axis: int = -1) -> jax.Array:
    """N:M masks by a tournament: each pair of a group is compared once, and a weight is kept if fewer than n beat it.

    Args:
      scores: float array whose axis m divides.
      n: kept in each group; may be traced.
      m: the groups' length.
      axis: the axis along which groups lie.

    Returns:
      uint8 array of the scores' shape.

    >>> n_by_m_mask(jnp.array([1.0, 2.0, 2.0, 0.0]), 1, 4)
    Array([0, 0, 1, 0], dtype=uint8)
    """
    axis %= scores.ndim
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


def group_scores(scores: jax.Array, sparsity_type: sparsity_types.SparsityType) -> jax.Array:
    """Scores of the groups of weights that are kept or removed together.

    Args:
      scores: float array.
      sparsity_type: unstructured (each weight is a group), block or channel.

    Returns:
      An array with one score for each group.

    Raises:
      TypeError: N:M, which ranks inside its groups.

    >>> group_scores(jnp.array([[1.0, 2.0], [3.0, 4.0]]), sparsity_types.Channel(-1))
    Array([4., 6.], dtype=float32)
    """
    match sparsity_type:
        case sparsity_types.Unstructured():
            return scores
        case sparsity_types.Channel(axis):
            return jnp.sum(scores, axis=tuple(i for i in range(scores.ndim) if i != axis % scores.ndim))
        case sparsity_types.Block(block_shape, use_avg_pooling):
            return _pool_blocks(scores, block_shape, use_avg_pooling)
    raise TypeError(f'{sparsity_type!r} has no groups that are kept or removed whole')


def spread_groups(
    group_mask: jax.Array, sparsity_type: sparsity_types.SparsityType, shape: tuple[int, ...]
) -> jax.Array:
    """Gives each weight the verdict of its group: the way back from `group_scores`.

    Args:
      group_mask: uint8 array, one entry for each group.
      sparsity_type: unstructured, block or channel.
      shape: the parameter's shape.

    Returns:
      uint8 array of the given shape.

    >>> spread_groups(jnp.array([0, 1], jnp.uint8), sparsity_types.Channel(-1), (2, 2))
    Array([[0, 1],
           [0, 1]], dtype=uint8)
    """
    match sparsity_type:
        case sparsity_types.Channel(axis):
            others = tuple(i for i in range(len(shape)) if i != axis % len(shape))
            return jnp.broadcast_to(jnp.expand_dims(group_mask, others), shape)
        case sparsity_types.Block(block_shape):
            rank = len(shape)
            for axis, length in _block_axes(rank, block_shape):
                group_mask = jnp.repeat(group_mask, length, axis, total_repeat_length=group_mask.shape[axis] * length)
                group_mask = jax.lax.slice_in_dim(group_mask, 0, shape[axis], axis=axis)
    return group_mask


def _topk_groups(scores: jax.Array, sparsity: Any, sparsity_type: sparsity_types.SparsityType) -> jax.Array:
    if not scores.size:
        return jnp.ones(scores.shape, MASK_DTYPE)
    groups = group_scores(scores, sparsity_type)
    count = selection.number_to_keep(groups.size, sparsity)
    # Sparsity 0 keeps everything as a count of all does, NaN included.
    return spread_groups(selection.keep_largest(groups, count), sparsity_type, scores.shape)


def _block_axes(rank: int, block_shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Axis and block length for each blocked axis; a 1-D array is one row, a scalar one weight."""
    return [(axis, length) for axis, length in zip((rank - 2, rank - 1), block_shape, strict=True) if axis >= 0]


def _pool_blocks(scores: jax.Array, block_shape: tuple[int, int], use_avg_pooling: bool) -> jax.Array:
    # Sums of 16-bit scores would lose what tells blocks apart.
    pooled = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) if use_avg_pooling else scores
    for axis, length in _block_axes(scores.ndim, block_shape):
        size = scores.shape[axis]
        blocks = -(-size // length)
        padding = [(0, 0)] * scores.ndim
        padding[axis] = (0, blocks * length - size)
        padded = jnp.pad(pooled, padding, constant_values=0 if use_avg_pooling else -jnp.inf)
        split = padded.reshape(*pooled.shape[:axis], blocks, length, *pooled.shape[axis + 1 :])
        pooled = split.sum(axis + 1) if use_avg_pooling else split.max(axis + 1)
    return pooled / _block_sizes(scores.shape, block_shape) if use_avg_pooling else pooled


def _block_sizes(shape: tuple[int, ...], block_shape: tuple[int, int]) -> jax.Array:
    """Number of weights in each block, smaller at the edges, in a shape that broadcasts over all blocks."""
    sizes = jnp.float32(1)
    for axis, length in _block_axes(len(shape), block_shape):
        blocks = -(-shape[axis] // length)
        along = jnp.minimum(length, shape[axis] - length * jnp.arange(blocks)).astype(jnp.float32)
        sizes = sizes * along.reshape((blocks,) + (1,) * (len(shape) - 1 - axis))
    return sizes
