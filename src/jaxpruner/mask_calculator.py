"""Scores become masks: one function for each sparsity type, all leaves of a model at once, drop and grow.

Unstructured, block and channel masks are one thing: the type pools scores over groups of weights, the best groups are
selected (`selection`), and the type spreads their verdicts back. N:M ranks inside small groups instead (`n_by_m`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib
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
    (selected,) = _keep_groups([ScoredLeaf(scores, sparsity, Groups(sparsity_type))])
    assert selected.mask is not None
    return selected.mask


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
    return _keep_n_of_m(scores, sparsity, sparsity_type)


@functools.partial(jax.jit, static_argnums=2)
def _keep_n_of_m(scores, sparsity, sparsity_type):
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


class LeafMask(NamedTuple):
    """The mask of a leaf, if it has one, and its threshold among the groups, if they are ranked over the whole leaf."""

    mask: jax.Array | None = None
    threshold: jax.Array | None = None  # one a layer, where layers are stacked


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['scores', 'sparsity', 'start'],
    meta_fields=['groups'],
)
@dataclasses.dataclass(frozen=True)
class ScoredLeaf:
    """A leaf whose weights are ranked, the axis of layers first, and the share of its groups to remove.

    `start` is the threshold of an earlier selection, near which the search begins; masks do not depend on it.
    """

    scores: jax.Array | selection.LazyScores
    sparsity: Any
    groups: Groups
    start: jax.Array | None = None


def mask_leaves(
    leaves: Sequence[Leaf], scored: Sequence[ScoredLeaf | None], topk_fn: TopkFn | None = None
) -> list[LeafMask]:
    """Makes the masks of all leaves of a model.

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
    to_rank: dict[int, Any] = dict(enumerate(scored))
    tied = []
    for sparsity_type, indices in _tied(leaves, [leaf is not None for leaf in scored]):
        for groups in _tied_groups(sparsity_type, indices, leaves, scored):
            members = {path: indices[path] for path in groups.members if path in indices}
            scores = groups.pool(
                {path: selection.read(to_rank[i].scores) for path, i in members.items()}
            )
            each_alone = Groups(sparsity_types.Unstructured(), groups.is_stacked)
            leader = to_rank[indices[groups.leader]]
            to_rank[len(leaves) + len(tied)] = ScoredLeaf(scores, leader.sparsity, each_alone)
            tied.append((groups, members))
        for index in indices.values():
            to_rank[index] = None
    masked = {i: LeafMask() for i in to_rank}
    in_groups = {}
    for i, leaf in to_rank.items():
        if leaf is None:
            continue
        if topk_fn is None and not isinstance(leaf.groups.sparsity_type, sparsity_types.NByM):
            in_groups[i] = leaf
            continue
        mask_layers = leaf.groups.per_layer(
            topk_fn or get_topk_fn(leaf.groups.sparsity_type), (0, None)
        )
        masked[i] = LeafMask(mask_layers(selection.read(leaf.scores), leaf.sparsity))
    masked.update(zip(in_groups, _keep_groups(list(in_groups.values())), strict=True))
    results = [masked[i] for i in range(len(leaves))]
    for i, (groups, members) in enumerate(tied, start=len(leaves)):
        for path, index in members.items():
            own = groups.spread(masked[i].mask, path)
            mask = own if results[index].mask is None else results[index].mask * own
            results[index] = LeafMask(
                jnp.broadcast_to(mask, leaves[index].shape).astype(MASK_DTYPE)
            )
    return results


def _keep_groups(leaves):
    if tree_lib.has_traced(leaves):
        return _keep_groups_at_once(leaves)
    # Eagerly, a program of all would be compiled anew for each model; leaves of one shape share one.
    return [_keep_groups_at_once([leaf])[0] for leaf in leaves]


@jax.jit
def _keep_groups_at_once(leaves):
    requests = []
    for leaf in leaves:
        groups, scores = leaf.groups, leaf.scores
        groups.sparsity_type.check_shape(groups.layer_shape(scores.shape), 'scores')
        if not groups.is_unstructured:
            scores = groups.pool(selection.read(scores))
        count = number_to_keep(math.prod(groups.layer_shape(scores.shape)), leaf.sparsity)
        requests.append(selection.Request(scores, count, leaf.start, groups.is_stacked))
    masks = []
    for leaf, selected in zip(leaves, selection.keep_largest_each(requests), strict=True):
        mask = leaf.groups.spread(selected.mask, leaf.scores.shape)
        masks.append(LeafMask(mask, selected.threshold))
    return masks


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
    for sparsity_type, indices in _tied(leaves, can_be_ranked):
        pruned = _tied_groups(sparsity_type, indices, leaves, targets)
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
    for sparsity_type, indices in _tied(leaves, [target is not None for target in targets]):
        counts = []
        for groups in _tied_groups(sparsity_type, indices, leaves, targets):
            target = targets[indices[groups.leader]]
            if tree_lib.is_traced(target):
                return
            counts.append((groups, number_to_keep_on_host(groups.size, float(target))))
        for path, index in indices.items():
            yield index, sparsity_type.kept_weights(counts, path)


def _tied(leaves, is_included):
    """Lists the types that tie leaves, each with the indices of those that are included, by their paths."""
    by_type: dict[int, tuple[Any, dict[tree_lib.Path, int]]] = {}
    for index, leaf in enumerate(leaves):
        if not is_included[index] or not sparsity_types.is_joint(leaf.sparsity_type):
            continue
        if leaf.is_stacked:
            raise ValueError(
                f'{leaf.name}: {leaf.sparsity_type!r} knows which layers are stacked; leave the leaf out of `stacked`'
            )
        _, indices = by_type.setdefault(id(leaf.sparsity_type), (leaf.sparsity_type, {}))
        indices[leaf.path] = index
    return list(by_type.values())


def _tied_groups(sparsity_type, indices, leaves, values):
    """Lists the groups whose leader has a value."""
    groups = sparsity_type.join({path: leaves[i].shape for path, i in indices.items()})
    return [each for each in groups if values[indices[each.leader]] is not None]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['mask', 'drop_scores', 'grow_scores'],
    meta_fields=['groups'],
)
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
    groups: Groups


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
    fraction = jnp.asarray(fraction, jnp.float32)
    if tree_lib.has_traced((leaves, fraction)):
        return _drop_and_grow(list(leaves), fraction)
    # Eagerly, a program of all would be compiled anew for each model; leaves of one shape share one.
    return [_drop_and_grow([leaf], fraction)[0] for leaf in leaves]


@selection.with_automatic_axes
def _drop_and_grow(leaves, fraction):
    was_kept, scores, kept, dropped = [], [], [], []
    for leaf in leaves:
        mask, *both = leaf.mask, leaf.drop_scores, leaf.grow_scores
        if not leaf.groups.is_unstructured:
            pooled = (mask.astype(jnp.float32), *map(selection.read, both))
            mask, *both = map(leaf.groups.pool, pooled)
        was_kept.append(mask > 0)
        scores.append(tuple(both))
        axes = tuple(range(int(leaf.groups.is_stacked), mask.ndim))
        kept.append(selection.count_true(mask > 0, axes))
        dropped.append(selection.share_of(kept[-1], fraction, most=mask.size))

    def choose(phase, stays):
        """Chooses first among the kept what stays, then among all others what is grown beside it."""
        barred = jax.lax.optimization_barrier((stays, was_kept, scores))
        is_growing = phase == 1
        requests = []
        for i, (before, kept_before, both) in enumerate(zip(*barred, strict=True)):
            ranked = selection.LazyScores((*both, before, kept_before, is_growing), _score_by_phase)
            count = jnp.where(is_growing, dropped[i], kept[i] - dropped[i])
            requests.append(selection.Request(ranked, count, None, leaves[i].groups.is_stacked))
        chosen = selection.keep_largest_each(requests)
        return [
            (is_growing & before) | (own.mask != 0)
            for before, own in zip(barred[0], chosen, strict=True)
        ]

    # One selection, compiled once, runs twice.
    nothing = [jnp.zeros_like(flags) for flags in was_kept]
    stays = jax.lax.fori_loop(0, 2, choose, nothing)
    spread = zip(stays, leaves, strict=True)
    return [leaf.groups.spread(flags.astype(MASK_DTYPE), leaf.mask.shape) for flags, leaf in spread]


def _score_by_phase(arrays):
    """Scores what may stay, or may grow, by finite numbers, so that all else, which is -inf, is never chosen."""
    drop, grow, stays, was_kept, is_growing = arrays
    candidates = jnp.where(is_growing, ~stays, was_kept)
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
    return jnp.where(candidates, ranked, jnp.array(-jnp.inf, dtype))
