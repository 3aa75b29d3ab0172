"""Scores, a sparsity and a sparsity type become a mask of the scores' shape.

Unstructured, block and channel masks are one thing: the type pools scores over groups of weights, the best groups are
selected, and the type spreads their verdicts back. N:M ranks inside small groups instead.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_types
from jaxpruner.mask_calculator import groups, n_by_m, selection

MASK_DTYPE = jnp.uint8

TopkFn = Callable[[jax.Array, Any], jax.Array]
TopkFnType = TopkFn  # its name in JaxPruner


def topk_mask_calculator(scores: Any, sparsity: Any) -> jax.Array:
    """Keeps the `max(1, round(size * (1 - sparsity)))` largest scores.

    Args:
      scores: floats of any shape: an array, or what `jnp.asarray` makes one of.
      sparsity: share to remove, scalar in [0, 1]; 0 keeps everything, NaN included.

    Returns:
      uint8 array of the scores' shape, 1 = kept. Of equal scores the lower flat index is kept; NaN ranks lowest.

    >>> topk_mask_calculator(jnp.array([4.0, 1.0, 3.0, 2.0]), 0.5)
    Array([1, 0, 1, 0], dtype=uint8)
    """
    return topk_group_mask_calculator(scores, sparsity, sparsity_types.Unstructured())


_topk_mask_calculator_internal = (
    topk_mask_calculator  # extensions of JaxPruner call it by this name
)


def topk_group_mask_calculator(
    scores: Any, sparsity: Any, sparsity_type: sparsity_types.GroupedType
) -> jax.Array:
    """Keeps the best groups of weights, `max(1, round(groups * (1 - sparsity)))` of them, in one ranking.

    Args:
      scores: float array, or nested lists.
      sparsity: share of groups to remove, scalar in [0, 1]; 0 keeps everything.
      sparsity_type: how scores are pooled into groups; hashable.

    Returns:
      uint8 array of the scores' shape. Of equal groups that of lower flat index is kept; NaN ranks lowest.

    Raises:
      ValueError: the type does not fit the shape.

    >>> topk_group_mask_calculator(jnp.array([4.0, 1.0, 3.0]), 0.4, sparsity_types.Unstructured())
    Array([1, 0, 1], dtype=uint8)
    """
    return best_groups([jnp.asarray(scores)], [sparsity], (sparsity_type,))[0].mask


def best_groups(
    scores: Sequence[jax.Array | selection.Scores],
    sparsities: Sequence[Any],
    types: Sequence[sparsity_types.GroupedType],
    starts: Sequence[jax.Array | None] | None = None,
    stacked: Sequence[bool] | None = None,
) -> list[selection.Selected]:
    """As `topk_group_mask_calculator` for many arrays, which share the passes of one selection.

    Args:
      scores: float arrays, or `selection.Scores`.
      sparsities: for each array a scalar.
      types: for each array how its scores are pooled; hashable.
      starts: for each array the threshold of an earlier selection, or `None`; see `selection.keep_largest_each`.
      stacked: for each array whether its first axis counts layers, each of which is ranked on its own.

    Returns:
      For each array its mask, and the threshold among groups: a scalar, or one a layer.

    Raises:
      ValueError: a type does not fit its shape.

    >>> types = [sparsity_types.Unstructured()] * 2
    >>> first, second = best_groups([jnp.array([4.0, 1.0]), jnp.eye(2)], [0.5, 0.75], types)
    >>> first.mask.tolist(), second.mask.tolist()
    ([1, 0], [[1, 0], [0, 0]])
    """
    stacked = tuple(stacked or [False] * len(scores))
    starts = list(starts or [None] * len(scores))
    return _best_groups(list(scores), list(sparsities), starts, types=tuple(types), stacked=stacked)


@functools.partial(jax.jit, static_argnames=('types', 'stacked'))
def _best_groups(scores, sparsities, starts, types, stacked) -> list[selection.Selected]:
    pooled, counts = [], []
    for array, sparsity, kind, in_layers in zip(scores, sparsities, types, stacked, strict=True):
        kind.check_shape(array.shape[in_layers:], 'scores')
        alone = sparsity_types.is_unstructured(kind)
        pooled.append(array if alone else groups.pool(kind, selection.read(array), in_layers))
        # Sparsity 0 keeps everything as a count of all does, NaN included.
        counts.append(selection.number_to_keep(math.prod(pooled[-1].shape[in_layers:]), sparsity))
    as_params = [sparsity_types.is_unstructured(kind) for kind in types]
    columns = zip(pooled, counts, starts, stacked, as_params, strict=True)
    selected = selection.keep_largest_each([selection.Request(*row) for row in columns])
    return [
        one._replace(mask=groups.spread(kind, one.mask, array.shape, in_layers))
        for one, kind, array, in_layers in zip(selected, types, scores, stacked, strict=True)
    ]


def topk_n_by_m_mask_calculator(
    scores: Any, sparsity: Any, sparsity_type: sparsity_types.NByM
) -> jax.Array:
    """Keeps the n largest of each m consecutive scores along the type's axis.

    Args:
      scores: float array, or nested lists; m divides its axis, or the type allows a partial last group.
      sparsity: 0 keeps everything, any other value means n of m.
      sparsity_type: n, m and the axis.

    Returns:
      uint8 array of the scores' shape. Of equal scores the higher index is kept; NaN ranks lowest.

    Raises:
      ValueError: m does not divide the axis.

    >>> topk_n_by_m_mask_calculator(jnp.array([1.0, 2.0, 4.0, 3.0]), 0.5, sparsity_types.NByM(1, 2))
    Array([0, 1, 1, 0], dtype=uint8)
    """
    return _n_by_m_mask(jnp.asarray(scores), sparsity, sparsity_type=sparsity_type)


@functools.partial(jax.jit, static_argnames='sparsity_type')
def _n_by_m_mask(scores: jax.Array, sparsity: Any, sparsity_type: sparsity_types.NByM) -> jax.Array:
    sparsity_type.check_shape(scores.shape, 'scores')
    mask = n_by_m.keep_n_of_m(scores, sparsity_type.n, sparsity_type.m, sparsity_type.axis)
    return mask | (jnp.asarray(sparsity) == 0).astype(MASK_DTYPE)


def topk_block_mask_calculator(
    scores: Any, sparsity: Any, block_height: int, block_width: int, use_avg_pooling: bool = True
) -> jax.Array:
    """Keeps the best blocks over the last two axes, in one ranking over all blocks of the array.

    Args:
      scores: float array, or nested lists; one dimension counts as one row.
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


def topk_channel_mask_calculator(
    scores: Any, sparsity: Any, sparsity_type: sparsity_types.Channel
) -> jax.Array:
    """Keeps the channels whose scores, summed over all other axes, are largest.

    Args:
      scores: float array, or nested lists.
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


def get_topk_fn(sparsity_type: Any) -> TopkFn:
    """The function `(scores, sparsity) -> mask` of a sparsity type.

    Args:
      sparsity_type: a type, its config string, or the class `Unstructured`.

    Raises:
      TypeError: it is no sparsity type.

    >>> get_topk_fn(sparsity_types.Channel(0))(jnp.array([[1.0], [2.0]]), 0.5)
    Array([[0],
           [1]], dtype=uint8)
    """
    if isinstance(sparsity_type, str):
        sparsity_type = sparsity_types.parse_sparsity_type(sparsity_type)
    if sparsity_type is sparsity_types.Unstructured:
        sparsity_type = sparsity_types.Unstructured()
    if isinstance(sparsity_type, sparsity_types.NByM):
        return functools.partial(topk_n_by_m_mask_calculator, sparsity_type=sparsity_type)
    if isinstance(sparsity_type, sparsity_types.GroupedType) and not isinstance(
        sparsity_type, type
    ):
        return functools.partial(topk_group_mask_calculator, sparsity_type=sparsity_type)
    raise TypeError(
        f'{sparsity_type!r} is no single sparsity type; give Unstructured(), NByM, Block, Channel, or an object with '
        'the methods of sparsity_types.GroupedType'
    )


@dataclasses.dataclass(frozen=True)
class TopkOfType:
    """The `topk_fn` of an updater that was given none: it ranks as the updater's sparsity type says.

    Attributes:
      sparsity_type: the updater's setting; one that names a type for each leaf has no single ranking.

    >>> TopkOfType(sparsity_types.Unstructured())(jnp.array([4.0, 1.0]), 0.5)
    Array([1, 0], dtype=uint8)
    """

    # What is shown of the updater is the sparsity type itself.
    is_derived_setting: ClassVar[bool] = True

    sparsity_type: Any

    def __call__(self, scores: Any, sparsity: Any) -> jax.Array:
        return get_topk_fn(self.sparsity_type)(scores, sparsity)


def own_topk_fn(topk_fn: TopkFn | None) -> TopkFn | None:
    """The ranking that a user gave; `None` where it is that of the sparsity type.

    Args:
      topk_fn: that of an updater.

    >>> own_topk_fn(TopkOfType(sparsity_types.Unstructured())) is None
    True
    """
    return None if isinstance(topk_fn, TopkOfType) else topk_fn


def select_leaves(
    scores: Sequence[jax.Array | selection.Scores | None],
    sparsities: Sequence[Any],
    types: Sequence[sparsity_types.SparsityType | None],
    stacked: Sequence[bool],
    starts: Sequence[Any] | None = None,
    topk_fn: TopkFn | None = None,
) -> list[selection.Selected | None]:
    """What is kept of each leaf of a model.

    Args:
      scores: for each leaf its scores.
      sparsities: for each leaf a scalar.
      types: for each leaf its type; where this, the scores or the sparsity are `None`, so is the result.
      stacked: for each leaf whether its first axis counts layers.
      starts: for each leaf the threshold of an earlier selection, or `None`.
      topk_fn: used for all leaves instead of their types', if it is a user's own.

    Returns:
      For each leaf its mask, and the threshold among its groups, `None` where nothing is ranked over the whole leaf.

    >>> types = [sparsity_types.Unstructured(), None]
    >>> kept = select_leaves([jnp.array([4.0, 1.0]), None], [0.5, None], types, [False, False])
    >>> kept[0].mask.tolist(), kept[1]
    ([1, 0], None)
    """
    topk_fn = own_topk_fn(topk_fn)
    results: list[selection.Selected | None] = [None] * len(scores)
    grouped: dict[int, tuple] = {}
    columns = zip(scores, sparsities, types, starts or [None] * len(scores), stacked, strict=True)
    for i, (leaf, sparsity, kind, start, in_layers) in enumerate(columns):
        if leaf is None or sparsity is None or kind is None:
            continue
        topk = topk_fn or get_topk_fn(kind)
        if topk_fn is None and not isinstance(kind, sparsity_types.NByM):
            grouped[i] = leaf, sparsity, kind, start, in_layers
        else:
            mask = groups.per_layer(topk, in_layers, (0, None))(selection.read(leaf), sparsity)
            results[i] = selection.Selected(mask, None)
    if grouped:
        for i, selected in zip(
            grouped, best_groups(*zip(*grouped.values(), strict=True)), strict=True
        ):
            results[i] = selected
    return results
