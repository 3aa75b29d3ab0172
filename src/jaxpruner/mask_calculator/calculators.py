"""Scores, a sparsity and a sparsity type become a mask of the scores' shape.

Unstructured, block and channel masks are one thing: the type pools scores over groups of weights, the best groups are
selected, and the type spreads their verdicts back. N:M ranks inside small groups instead.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.mask_calculator import n_by_m, selection
from jaxpruner.sparsity_types import Groups

MASK_DTYPE = jnp.uint8

# Lengths of the buffers in which leaves are masked one by one. Few lengths take few programs; an array eight times as
# long as a leaf takes a millisecond at most. Longer leaves would take more memory, and select for longer than a program
# compiles.
_BUFFER_LENGTHS = 2**12, 2**15, 2**18, 2**19

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
    scores = jnp.asarray(scores)
    check_scores(scores, 'scores')
    leaf = ScoredLeaf(scores, sparsity, Groups(sparsity_type))
    (selected,) = _mask_by_groups([leaf])
    return selected.mask


def check_scores(scores: Any, where: str) -> None:
    """Refuses a leaf that is to be ranked and has no scores, or scores without an order; `where` is its path.

    >>> check_scores(jnp.ones(2), 'kernel')
    """
    if scores is None:
        raise ValueError(
            f'{where}: it is to be pruned, and its scores are None; score it, or leave it dense: '
            f"sparsity_type={{'{where}': None, '*': …}}"
        )
    if jnp.issubdtype(scores.dtype, jnp.complexfloating):
        raise TypeError(
            f'{where}: its scores are {scores.dtype}, which have no order; score by jnp.abs(…), or by jnp.real(…)'
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['scores', 'sparsity', 'start'],
    meta_fields=['groups'],
)
@dataclasses.dataclass(frozen=True)
class ScoredLeaf:
    """A leaf whose weights are ranked, and the share of its groups to remove.

    `start` is the threshold of an earlier selection, near which one on a CPU begins; masks do not depend on it.
    """

    scores: jax.Array | selection.Scores
    sparsity: Any
    groups: Groups
    start: jax.Array | None = None

    def scores_of_groups(self) -> jax.Array | selection.Scores:
        """Computes the scores of the leaf's groups, one a group."""
        groups = self.groups
        layer_shape = groups.layer_shape(self.scores.shape)
        groups.sparsity_type.check_shape(layer_shape, 'scores')
        if groups.is_unstructured:
            return self.scores
        return groups.pool(selection.read(self.scores))


def _requests(leaves: Sequence[ScoredLeaf]) -> list[selection.Request]:
    """Asks for the best groups of each leaf. Sparsity 0 asks for all of them, which keeps NaN, too."""
    scores, sizes, sparsities = [], [], []
    for leaf in leaves:
        array = leaf.scores_of_groups()
        layer_shape = leaf.groups.layer_shape(array.shape)
        scores.append(array)
        sizes.append(math.prod(layer_shape))
        sparsities.append(leaf.sparsity)
    counts = selection.numbers_to_keep(sizes, sparsities)
    requests = []
    for i, leaf in enumerate(leaves):
        # An array can be counted per device if it is sharded as parameters are. Pooled scores may be sharded otherwise.
        request = selection.Request(
            scores[i],
            counts[i],
            leaf.start,
            is_stacked=leaf.groups.is_stacked,
            count_per_device=leaf.groups.is_unstructured,
        )
        requests.append(request)
    return requests


@jax.jit
def _mask_in_one_program(leaves: list[ScoredLeaf]) -> list[selection.Selected]:
    """Makes the masks of many leaves in one program, each as `topk_group_mask_calculator` does.

    Thresholds are those among groups: a scalar, or one a layer.

    Raises:
      ValueError: a type does not fit its shape.
    """
    results = []
    all_selected = selection.keep_largest_each(_requests(leaves))
    for leaf, selected in zip(leaves, all_selected, strict=True):
        mask = leaf.groups.spread(selected.mask, leaf.scores.shape)
        results.append(selected._replace(mask=mask))
    return results


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
    scores = jnp.asarray(scores)
    check_scores(scores, 'scores')
    return _n_by_m_mask(scores, sparsity, sparsity_type=sparsity_type)


@functools.partial(jax.jit, static_argnames='sparsity_type')
def _n_by_m_mask(scores: jax.Array, sparsity: Any, sparsity_type: sparsity_types.NByM) -> jax.Array:
    sparsity_type.check_shape(scores.shape, 'scores')
    n, m, axis = sparsity_type.n, sparsity_type.m, sparsity_type.axis
    mask = n_by_m.keep_n_of_m(scores, n, m, axis)
    keeps_everything = jnp.asarray(sparsity) == 0
    return mask | keeps_everything.astype(MASK_DTYPE)


def topk_block_mask_calculator(
    scores: Any,
    sparsity: Any,
    block_height: int,
    block_width: int,
    use_avg_pooling: bool = True,
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
    block = sparsity_types.Block((block_height, block_width), use_avg_pooling)
    return topk_group_mask_calculator(scores, sparsity, block)


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
    """Returns the function `(scores, sparsity) -> mask` of a sparsity type.

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
    """The `topk_fn` of a pruner that was given none: it ranks as the pruner's sparsity type says.

    A setting that names a type for each leaf has no single ranking.

    >>> TopkOfType(sparsity_types.Unstructured())(jnp.array([4.0, 1.0]), 0.5)
    Array([1, 0], dtype=uint8)
    """

    # What is shown of the pruner is the sparsity type itself.
    is_derived_setting: ClassVar[bool] = True

    sparsity_type: Any

    def __call__(self, scores: Any, sparsity: Any) -> jax.Array:
        return get_topk_fn(self.sparsity_type)(scores, sparsity)


def own_topk_fn(topk_fn: TopkFn | None) -> TopkFn | None:
    """Returns the ranking that a user gave; `None` where it is that of the sparsity type."""
    return None if isinstance(topk_fn, TopkOfType) else topk_fn


class LeafMask(NamedTuple):
    """The mask of a leaf, if it has one.

    `selection.Selected` is the result of one ranking, and has both. A leaf that stays dense has neither.
    """

    mask: jax.Array | None = None
    # Among the leaf's groups. None, too, where nothing is ranked over the whole leaf.
    threshold: jax.Array | None = None


def mask_leaves(
    leaves: Sequence[ScoredLeaf | None], topk_fn: TopkFn | None = None
) -> list[LeafMask]:
    """Makes the masks of all leaves of a model; a user's own `topk_fn` is used instead of their types' rankings."""
    topk_fn = own_topk_fn(topk_fn)
    results = [LeafMask()] * len(leaves)
    ranked_in_groups: dict[int, ScoredLeaf] = {}
    for i, leaf in enumerate(leaves):
        if leaf is None:
            continue
        sparsity_type = leaf.groups.sparsity_type
        if topk_fn is None and not isinstance(sparsity_type, sparsity_types.NByM):
            ranked_in_groups[i] = leaf
            continue
        own_or_of_type = topk_fn or get_topk_fn(sparsity_type)
        mask_layers = leaf.groups.per_layer(own_or_of_type, (0, None))
        scores = selection.read(leaf.scores)
        results[i] = LeafMask(mask_layers(scores, leaf.sparsity))
    if ranked_in_groups:
        all_selected = _mask_by_groups(list(ranked_in_groups.values()))
        for i, selected in zip(ranked_in_groups, all_selected, strict=True):
            results[i] = LeafMask(selected.mask, selected.threshold)
    return results


def _mask_by_groups(leaves: Sequence[ScoredLeaf]) -> list[selection.Selected]:
    """Makes the masks of leaves whose types rank groups.

    Inside a traced program all leaves share one selection. Called eagerly, that would be compiled anew for each model.
    So leaves are then masked one by one.
    """
    if tree_lib.has_traced(leaves):
        return _mask_in_one_program(leaves)
    return [_mask_alone(leaf) for leaf in leaves]


def _mask_alone(leaf: ScoredLeaf) -> selection.Selected:
    """Makes the mask of one leaf, in a buffer of one of few lengths if it fits.

    What takes longest to compile is then compiled for a length, and not for each shape.
    """
    length = _buffer_length(leaf)
    if length is None:
        (selected,) = _mask_in_one_program([leaf])
        return selected
    buffer, count = _to_buffer(leaf, length)
    request = selection.Request(buffer, count, leaf.start)
    (selected,) = selection.keep_largest_each([request])
    mask = _from_buffer(selected.mask, count, leaf.scores.shape)
    return selected._replace(mask=mask)


def _buffer_length(leaf: ScoredLeaf) -> int | None:
    """Finds the first buffer length that is enough; `None` for what is masked in place."""
    scores, groups = leaf.scores, leaf.groups
    is_one_row = groups.is_unstructured and not groups.is_stacked
    # Others become float32 where they are ranked.
    is_ranked_as_it_is = jnp.issubdtype(scores.dtype, jnp.floating) and scores.dtype.itemsize > 1
    # Flat, an array that devices share would have to be gathered.
    if not (is_one_row and is_ranked_as_it_is) or jax.device_count() > 1:
        return None
    for length in _BUFFER_LENGTHS:
        if 0 < scores.size <= length:
            return length
    return None


@functools.partial(jax.jit, static_argnames='length')
def _to_buffer(leaf: ScoredLeaf, length: int) -> tuple[jax.Array, jax.Array]:
    """Pads the scores with NaN, which rank lowest, and counts how many of them to keep."""
    (request,) = _requests([leaf])
    scores = selection.read(request.scores).ravel()
    padding = (0, length - scores.size)
    buffer = jnp.pad(scores, padding, constant_values=jnp.nan)
    return buffer, jnp.asarray(request.count)


@functools.partial(jax.jit, static_argnames='shape')
def _from_buffer(mask: jax.Array, count: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Takes the mask of a leaf from that of its buffer."""
    size = math.prod(shape)
    # The padding hides from the selection that everything is to be kept, NaN included.
    keeps_everything = (count >= size).astype(MASK_DTYPE)
    return mask[:size].reshape(shape) | keeps_everything
