"""Scores become masks: one function for each sparsity type, all leaves of a model at once, drop and grow.

Unstructured, block and channel masks are one thing: the type pools scores over groups of weights, the best groups are
selected (`selection`), and the type spreads their verdicts back. N:M ranks inside small groups instead (`n_by_m`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.selection import Selected
from jaxpruner.selection import keep_largest_jointly as keep_largest_jointly
from jaxpruner.selection import number_to_keep as number_to_keep
from jaxpruner.selection import number_to_keep_on_host as number_to_keep_on_host
from jaxpruner.sparse_state import MASK_DTYPE as MASK_DTYPE
from jaxpruner.sparsity_types import Groups, Leaf

# The rest serves `BaseUpdater`.
__all__ = [
    'MASK_DTYPE',
    'MaskedLeaf',
    'drop_and_grow',
    'get_topk_fn',
    'topk_block_mask_calculator',
    'topk_channel_mask_calculator',
    'topk_group_mask_calculator',
    'topk_mask_calculator',
    'topk_n_by_m_mask_calculator',
]

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


_topk_mask_calculator_internal = topk_mask_calculator  # what extensions of JaxPruner call it


def topk_group_mask_calculator(
    scores: Any, sparsity: Any, sparsity_type: sparsity_types.GroupedType | sparsity_types.NByM
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
    return _mask_each([ScoredLeaf(scores, sparsity, Groups(sparsity_type))])[0].mask


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
    return topk_group_mask_calculator(scores, sparsity, sparsity_type)


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
    is_ranked = isinstance(sparsity_type, sparsity_types.NByM | sparsity_types.GroupedType)
    if is_ranked and not isinstance(sparsity_type, type):
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

    sparsity_type: Any

    def __call__(self, scores: Any, sparsity: Any) -> jax.Array:
        return get_topk_fn(self.sparsity_type)(scores, sparsity)


def own_topk_fn(topk_fn: TopkFn | None) -> TopkFn | None:
    """Returns the ranking that a user gave; `None` where it is that of the sparsity type."""
    return None if isinstance(topk_fn, TopkOfType) else topk_fn


def check_scores(scores: Any, where: str) -> None:
    """Refuses a leaf that is to be ranked and has no scores, or scores without an order; `where` is its path.

    >>> check_scores(jnp.ones(2), 'kernel')
    """
    if scores is None:
        raise ValueError(
            f'{where}: it is to be pruned, and its scores are None; score it, or leave it dense: '
            f"sparsity_type={{'{where}': None, '*': …}}"
        )
    dtype = jax.eval_shape(selection.read, scores).dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f'{where}: its scores are {dtype}, which have no order; score by jnp.abs(…), or by jnp.real(…)'
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredLeaf:
    """A leaf whose weights are ranked, the axis of layers first, and the share of its groups to remove.

    `start` is the threshold of an earlier selection, near which the search begins; masks do not depend on it.
    """

    scores: jax.Array | selection.LazyScores
    sparsity: Any
    groups: Groups = dataclasses.field(metadata={'static': True})
    start: jax.Array | None = None


def mask_leaves(
    leaves: Sequence[Leaf], scored: Sequence[ScoredLeaf | None], topk_fn: TopkFn | None = None
) -> list[Selected]:
    """Makes the masks of all leaves of a model, and thresholds of those groups that are ranked over the whole leaf.

    Leaves that a type ties are ranked as the groups that they share. A group that has weights in several leaves has one
    score, pooled over all of them, and the sparsity of one leaf, its leader.

    Args:
      leaves: of the model.
      scored: the scores of each; `None` where it is dense.
      topk_fn: a user's own ranking, used instead of those of the types.

    Raises:
      ValueError: a type does not fit its shape, or leaves are not those that their type ties.
    """
    topk_fn = own_topk_fn(topk_fn)
    to_rank: list[ScoredLeaf | None] = list(scored)
    tied = []
    for _, indices, pruned in _tied(leaves, scored, scored):
        for groups in pruned:
            members = {path: indices[path] for path in groups.members if path in indices}
            scores = {path: selection.read(scored[i].scores) for path, i in members.items()}
            each_alone = Groups(sparsity_types.Unstructured(), groups.is_stacked)
            sparsity = scored[indices[groups.leader]].sparsity
            to_rank.append(ScoredLeaf(groups.pool(scores), sparsity, each_alone))
            tied.append((groups, members))
        for index in indices.values():
            to_rank[index] = None
    masked = [Selected(None, None)] * len(to_rank)
    ranked = {i: leaf for i, leaf in enumerate(to_rank) if leaf is not None}
    if topk_fn is None:
        of_leaves = _mask_each(list(ranked.values()))
    else:
        masks = (
            leaf.groups.per_layer(topk_fn, (0, None))(selection.read(leaf.scores), leaf.sparsity)
            for leaf in ranked.values()
        )
        of_leaves = [Selected(mask, None) for mask in masks]
    for (i, leaf), selected in zip(ranked.items(), of_leaves, strict=True):
        if selected.mask.shape != leaf.scores.shape:  # it would be read as packed bits
            raise ValueError(
                f'topk_fn must return a mask of the shape of its scores, {leaf.scores.shape}, got {selected.mask.shape}'
            )
        masked[i] = selected
    for (groups, members), selected in zip(tied, masked[len(leaves) :], strict=True):
        for path, i in members.items():
            mask = jnp.broadcast_to(groups.spread(selected.mask, path), leaves[i].shape)
            others = MASK_DTYPE(1) if masked[i].mask is None else masked[i].mask
            masked[i] = Selected(mask.astype(MASK_DTYPE) * others, None)
    return masked[: len(leaves)]


@selection.leaf_by_leaf
@jax.jit
def _mask_each(leaves):
    masked, requests = [Selected(None, None)] * len(leaves), {}
    for i, leaf in enumerate(leaves):
        groups, kind, scores = leaf.groups, leaf.groups.sparsity_type, leaf.scores
        kind.check_shape(groups.layer_shape(scores.shape), 'scores')
        if isinstance(kind, sparsity_types.NByM):
            keep = functools.partial(n_by_m.keep_n_of_m, n=kind.n, m=kind.m, axis=kind.axis)
            mask = groups.per_layer(keep)(selection.read(scores))
            keeps_all = (jnp.asarray(leaf.sparsity) == 0).astype(MASK_DTYPE)
            masked[i] = Selected(mask | keeps_all, None)
            continue
        if not groups.is_unstructured:
            scores = groups.pool(selection.read(scores))
        count = number_to_keep(math.prod(groups.layer_shape(scores.shape)), leaf.sparsity)
        requests[i] = selection.Request(scores, count, leaf.start, groups.is_stacked)
    selected = selection.keep_largest_each(list(requests.values()))
    for i, (mask, threshold) in zip(requests, selected, strict=True):
        masked[i] = Selected(leaves[i].groups.spread(mask, leaves[i].scores.shape), threshold)
    return masked


def with_targets(
    leaves: Sequence[Leaf], targets: Sequence[Any], can_be_ranked: Sequence[bool]
) -> list[Any]:
    """Gives each leaf of a pruned group of tied leaves a target, and takes it from leaves of no such group.

    Biases, which the default filter leaves out, are so removed with their channel. On their own they keep everything.

    Args:
      leaves: of a model.
      targets: the share to remove of each; `None` where dense.
      can_be_ranked: whether each holds numbers and has a type.

    Raises:
      ValueError: masks of these leaves do not remove the groups, or leaves are not those that their type ties.
    """
    tied = list(targets)
    included = [True if is_ranked else None for is_ranked in can_be_ranked]
    for sparsity_type, indices, pruned in _tied(leaves, included, targets):
        leaders = {groups.leader for groups in pruned}
        members = {path for groups in pruned for path in groups.members}
        for path in indices.keys() - leaders:
            tied[indices[path]] = 0.0 if path in members else None
        sparsity_type.check_members(pruned, [path for path in indices if path in members])
    return tied


def kept_weights(leaves: Sequence[Leaf], targets: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yields for each leaf of a pruned group of tied leaves its index, and how many of its weights are kept.

    Args:
      leaves: of a model.
      targets: of each, as `with_targets` returns them. Nothing is told of leaves whose targets are traced.
    """
    for sparsity_type, indices, pruned in _tied(leaves, targets, targets):
        own = [targets[indices[groups.leader]] for groups in pruned]
        if tree_lib.has_traced(own):
            return
        kept = [
            number_to_keep_on_host(groups.size, float(t))
            for groups, t in zip(pruned, own, strict=True)
        ]
        for path, index in indices.items():
            yield index, sparsity_type.kept_weights(list(zip(pruned, kept, strict=True)), path)


def _tied(leaves, included, values):
    """Lists the types that tie leaves: the type, its leaves by path, and those of its groups whose leader has a value.

    Leaves for which `included` has `None` are left out.
    """
    by_type: dict[int, tuple[Any, dict[tree_lib.Path, int]]] = {}
    for index, leaf in enumerate(leaves):
        if included[index] is None or not sparsity_types.is_joint(leaf.sparsity_type):
            continue
        if leaf.is_stacked:
            raise ValueError(
                f'{leaf.name}: {leaf.sparsity_type!r} knows which layers are stacked; leave the leaf out of `stacked`'
            )
        _, indices = by_type.setdefault(id(leaf.sparsity_type), (leaf.sparsity_type, {}))
        indices[leaf.path] = index
    tied = []
    for sparsity_type, indices in by_type.values():
        groups = sparsity_type.join({path: leaves[i].shape for path, i in indices.items()})
        pruned = [each for each in groups if values[indices[each.leader]] is not None]
        tied.append((sparsity_type, indices, pruned))
    return tied


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedLeaf:
    """A leaf in which weights are replaced, the axis of layers first.

    Attributes:
      mask: uint8.
      drop_scores: of its shape; of the kept weights those with the smallest are dropped.
      grow_scores: of its shape; of all that are not kept then, those with the largest are grown.
      groups: unstructured, block or channel.

    >>> MaskedLeaf(jnp.ones(2), jnp.ones(2), jnp.ones(2), Groups(sparsity_types.Unstructured())).mask.shape
    (2,)
    """

    mask: jax.Array
    drop_scores: Any
    grow_scores: Any
    groups: Groups = dataclasses.field(metadata={'static': True})


def drop_and_grow(leaves: Sequence[MaskedLeaf], fraction: jax.Array | float) -> list[jax.Array]:
    """Replaces a share of the kept weights (or blocks, channels) of each leaf, and returns the new masks.

    `round(kept * fraction)` groups of each leaf, or of each layer, are dropped, and as many are grown.

    Raises:
      ValueError: scores have another shape than their mask.

    >>> mask, scores = jnp.array([1, 1, 0, 0], jnp.uint8), jnp.array([3.0, 1.0, 0.0, 0.0])
    >>> groups = Groups(sparsity_types.Unstructured())
    >>> drop_and_grow([MaskedLeaf(mask, scores, jnp.array([0.0, 0.0, 1.0, 2.0]), groups)], 0.5)
    [Array([1, 0, 0, 1], dtype=uint8)]
    """
    for leaf in leaves:
        for scores in (leaf.drop_scores, leaf.grow_scores):
            if scores.shape != leaf.mask.shape:
                raise ValueError(
                    f'scores of shape {scores.shape} do not fit a mask of shape {leaf.mask.shape}; give one score for '
                    'each weight'
                )
    return _drop_and_grow(list(leaves), jnp.asarray(fraction, jnp.float32))


@selection.leaf_by_leaf
@selection.with_automatic_axes
def _drop_and_grow(leaves, fraction):
    masks, scores, kept, dropped = [], [], [], []
    for leaf in leaves:
        mask, *both = leaf.mask, leaf.drop_scores, leaf.grow_scores
        if not leaf.groups.is_unstructured:
            pooled = (mask.astype(jnp.float32), *map(selection.read, both))
            mask, *both = map(leaf.groups.pool, pooled)
        masks.append(mask > 0)
        scores.append(both)
        axes = tuple(range(int(leaf.groups.is_stacked), mask.ndim))
        kept.append(selection.count_true(mask > 0, axes))
        dropped.append(selection.share_of(kept[-1], fraction, most=mask.size))

    def choose(phase, masks):
        """Chooses first among the kept what stays, then among all others what is grown beside it."""
        barred = jax.lax.optimization_barrier((masks, scores))
        is_growing = phase == 1
        requests = []
        for i, (mask, both) in enumerate(zip(*barred, strict=True)):
            ranked = selection.LazyScores((*both, mask, is_growing), _score_by_phase)
            count = jnp.where(is_growing, dropped[i], kept[i] - dropped[i])
            requests.append(selection.Request(ranked, count, None, leaves[i].groups.is_stacked))
        chosen = selection.keep_largest_each(requests)
        return [
            (is_growing & mask) | (own.mask != 0)
            for mask, own in zip(barred[0], chosen, strict=True)
        ]

    masks = jax.lax.fori_loop(0, 2, choose, masks)  # one selection, compiled once, runs twice
    return [
        leaf.groups.spread(mask.astype(MASK_DTYPE), leaf.mask.shape)
        for leaf, mask in zip(leaves, masks, strict=True)
    ]


def _score_by_phase(arrays):
    """Scores what may stay, or may grow, by finite numbers, so that all else, which is -inf, is never chosen."""
    drop, grow, mask, is_growing = arrays
    drop, grow = selection.read(drop), selection.read(grow)
    dtype = drop.dtype
    if drop.dtype != grow.dtype or not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.dtype('float64' if 'float64' in (drop.dtype, grow.dtype) else 'float32')

    def finite(scores):
        is_float = jnp.issubdtype(scores.dtype, jnp.floating)
        lowest = jnp.array(jnp.finfo(scores.dtype if is_float else dtype).min, dtype)
        scores = scores.astype(dtype)
        return jnp.where(scores >= lowest, scores, lowest)

    ranked = jnp.where(is_growing, finite(grow), finite(drop))
    return jnp.where(mask != is_growing, ranked, jnp.array(-jnp.inf, dtype))
