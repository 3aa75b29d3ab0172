"""Scores become masks: one function for each sparsity type, all leaves of a model at once, drop and grow.

Unstructured, block and channel masks are one thing: the type pools scores over groups of weights, the best groups are
selected (`selection`), and the type spreads their verdicts back. N:M ranks inside small groups instead (`n_by_m`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparse_state import MASK_DTYPE as MASK_DTYPE
from jaxpruner.sparsity_types import Leaf

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
    return make_masks([ScoredLeaf(scores, sparsity, sparsity_type)])[0]


# JaxPruner's names for single types.
topk_n_by_m_mask_calculator = topk_channel_mask_calculator = topk_group_mask_calculator


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
    kind: Any = sparsity_types.read_type(sparsity_type)
    return functools.partial(topk_group_mask_calculator, sparsity_type=kind)


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
        raise ValueError(f'{where}: to be pruned, its scores are None; score it, or leave it dense')
    if jnp.issubdtype(scores.dtype, jnp.complexfloating):
        raise TypeError(f'{where}: its scores are {scores.dtype}, without an order; take jnp.abs')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredLeaf:
    """A leaf whose weights are ranked, and the share of its groups to remove; each layer is ranked on its own."""

    scores: jax.Array | selection.LazyScores
    sparsity: Any
    sparsity_type: Any = dataclasses.field(metadata={'static': True})
    layer_axis: int | None = dataclasses.field(default=None, metadata={'static': True})


def mask_leaves(
    leaves: Sequence[Leaf],
    scores: Sequence[Any],
    sparsities: Sequence[Any],
    topk_fn: TopkFn | None = None,
) -> list[jax.Array | None]:
    """Makes the masks of all leaves of a model, `None` where a leaf has no sparsity or no sparsity type.

    Args:
      leaves: of the model.
      scores: those of each leaf, lazy or not; `None` where it is dense.
      sparsities: the share of each leaf to remove; `None` where it is dense.
      topk_fn: a user's own ranking, used instead of those of the types.

    Raises:
      TypeError: scores have no order.
      ValueError: there are none, a type does not fit its shape, or leaves are not those that their type ties.
    """
    scored: dict[int, ScoredLeaf] = {}
    for i, leaf in enumerate(leaves):
        if leaf.sparsity_type is not None and sparsities[i] is not None:
            check_scores(scores[i], leaf.name)
            scored[i] = ScoredLeaf(scores[i], sparsities[i], leaf.sparsity_type, leaf.layer_axis)
    own_topk = own_topk_fn(topk_fn)
    rank = make_masks if own_topk is None else functools.partial(_make_own_masks, own_topk)
    masks: dict[int, jax.Array] = {}
    for sparsity_type, indices in tied_leaves(leaves, [i in scored for i in range(len(leaves))]):
        tied = sparsity_type.make_masks({path: scored.pop(i) for path, i in indices.items()}, rank)
        masks |= {i: tied[path] for path, i in indices.items()}
    masks |= zip(scored, rank(list(scored.values())), strict=True)
    return [masks.get(i) for i in range(len(leaves))]


def tied_leaves(
    leaves: Sequence[Leaf], is_included: Sequence[bool]
) -> list[tuple[Any, dict[tree_lib.Path, int]]]:
    """Lists the types that tie leaves together, each with the indices of those of its leaves that are included."""
    by_type: dict[Any, dict[tree_lib.Path, int]] = {}
    for index, leaf in enumerate(leaves):
        kind = leaf.sparsity_type
        if is_included[index] and sparsity_types.is_joint(kind):
            if leaf.layer_axis is not None:
                raise ValueError(f'{leaf.name}: {kind!r}: leave the leaf out of `stacked`')
            by_type.setdefault(kind, {})[leaf.path] = index
    return list(by_type.items())


def each_layer(function: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """Lets a function that makes the masks of leaves see one layer at a time of those that are stacks of layers."""

    @selection.leaf_by_leaf
    @functools.wraps(function)
    def call(leaves, *others):
        def mask_layers(leaf):
            layers = dataclasses.replace(leaf, layer_axis=None)
            axes = jax.tree.map(lambda array: leaf.layer_axis if array.ndim else None, layers)
            mask_layer = jax.vmap(
                lambda layer: function([layer], *others)[0], (axes,), leaf.layer_axis
            )
            return mask_layer(layers)

        whole = [leaf for leaf in leaves if leaf.layer_axis is None]
        masks = iter(function(whole, *others) if whole else ())
        return [next(masks) if leaf.layer_axis is None else mask_layers(leaf) for leaf in leaves]

    return call


@each_layer
def make_masks(leaves: Sequence[ScoredLeaf]) -> list[jax.Array]:
    """Makes the mask of each leaf by the ranking of its type."""
    masks, requests = {}, {}
    for i, leaf in enumerate(leaves):
        kind, scores = leaf.sparsity_type, leaf.scores
        kind.check_shape(scores.shape, 'scores')
        if isinstance(kind, sparsity_types.NByM):
            mask = n_by_m.keep_n_of_m(selection.read(scores), kind.n, kind.m, kind.axis)
            masks[i] = mask | (jnp.asarray(leaf.sparsity) == 0).astype(MASK_DTYPE)
            continue
        scores = _pool(kind, scores)
        requests[i] = scores, selection.number_to_keep(scores.size, leaf.sparsity)
    selected = selection.keep_largest_each(list(requests.values()))
    for i, mask in zip(requests, selected, strict=True):
        masks[i] = _spread(leaves[i].sparsity_type, mask, leaves[i].scores.shape)
    return [masks[i] for i in range(len(leaves))]


def _make_own_masks(topk_fn, leaves):
    """Makes the mask of each leaf by a user's own ranking."""
    masks = []
    for leaf in leaves:
        topk = lambda scores, sparsity=leaf.sparsity: topk_fn(scores, sparsity)  # noqa: E731
        mask = tree_lib.per_layer(topk, leaf.layer_axis)(selection.read(leaf.scores))
        if mask.shape != leaf.scores.shape:  # it would be read as packed bits
            raise ValueError(f'topk_fn must return shape {leaf.scores.shape}, got {mask.shape}')
        masks.append(mask)
    return masks


def _pool(kind, scores):
    """Scores groups by the scores of their weights; no weights make no groups, whatever the type can pool."""
    if sparsity_types.is_unstructured(kind) or not scores.size:
        return scores
    return kind.group_scores(selection.read(scores))


def _spread(kind, verdicts, shape):
    """Gives each weight of a leaf of this shape the verdict of its group."""
    mask = kind.spread_groups(verdicts, shape) if verdicts.size else verdicts
    if mask.shape != shape:  # it would be read as packed bits
        raise ValueError(f'{kind!r}.spread_groups must return shape {shape}, got {mask.shape}')
    return mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedLeaf:
    """A leaf in which weights are replaced, in each layer as many.

    Attributes:
      mask: uint8.
      drop_scores: of its shape; of the kept weights those with the smallest are dropped.
      grow_scores: of its shape; of all that are not kept then, those with the largest are grown.
      sparsity_type: unstructured, block or channel.
      layer_axis: the axis that counts layers; `None` where there is none.

    >>> MaskedLeaf(jnp.ones(2), jnp.ones(2), jnp.ones(2), sparsity_types.Unstructured()).mask.shape
    (2,)
    """

    mask: jax.Array
    drop_scores: Any
    grow_scores: Any
    sparsity_type: Any = dataclasses.field(metadata={'static': True})
    layer_axis: int | None = dataclasses.field(default=None, metadata={'static': True})


@each_layer
def drop_and_grow(leaves: Sequence[MaskedLeaf], fraction: jax.Array | float) -> list[jax.Array]:
    """Replaces a share of the kept weights (or blocks, channels) of each leaf, and returns the new masks.

    `round(kept * fraction)` groups of each leaf, or of each layer, are dropped, and as many are grown.

    >>> mask, scores = jnp.array([1, 1, 0, 0], jnp.uint8), jnp.array([3.0, 1.0, 0.0, 0.0])
    >>> kind = sparsity_types.Unstructured()
    >>> drop_and_grow([MaskedLeaf(mask, scores, jnp.array([0.0, 0.0, 1.0, 2.0]), kind)], 0.5)
    [Array([1, 0, 0, 1], dtype=uint8)]
    """
    masks, scores, kept, dropped = [], [], [], []
    for leaf in leaves:
        pool = functools.partial(_pool, leaf.sparsity_type)
        masks.append(pool(leaf.mask.astype(jnp.float32)) > 0)
        scores.append((pool(leaf.drop_scores), pool(leaf.grow_scores)))
        kept.append(selection.count_true(masks[-1]))
        share = jnp.asarray(fraction, jnp.float32)
        dropped.append(selection.share_of(kept[-1], share, most=leaf.mask.size))

    def choose(phase, masks):
        """Chooses first among the kept what stays, then among all others what is grown beside it."""
        barred = jax.lax.optimization_barrier((masks, scores))
        is_growing = phase == 1
        requests = []
        for i, (mask, both) in enumerate(zip(*barred, strict=True)):
            ranked = selection.LazyScores((*both, mask, is_growing), _score_by_phase)
            requests.append((ranked, jnp.where(is_growing, dropped[i], kept[i] - dropped[i])))
        chosen = selection.keep_largest_each(requests)
        return [
            (is_growing & mask) | (own != 0) for mask, own in zip(barred[0], chosen, strict=True)
        ]

    masks = jax.lax.fori_loop(0, 2, choose, masks)  # one selection, compiled once, runs twice
    return [
        _spread(leaf.sparsity_type, mask.astype(MASK_DTYPE), leaf.mask.shape)
        for leaf, mask in zip(leaves, masks, strict=True)
    ]


def _score_by_phase(arrays):
    """Scores what may stay, or may grow, by finite numbers, so that all else, which is -inf, is never chosen."""
    drop, grow, mask, is_growing = arrays
    drop, grow = selection.read(drop), selection.read(grow)
    dtype = drop.dtype
    if drop.dtype != grow.dtype or not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.dtype('float64' if 'float64' in (drop.dtype, grow.dtype) else 'float32')
    scores = jnp.where(is_growing, grow.astype(dtype), drop.astype(dtype))
    lowest = jnp.finfo(dtype).min.astype(dtype)
    finite = jnp.where(scores >= lowest, scores, lowest)
    return jnp.where(mask != is_growing, finite, jnp.array(-jnp.inf, dtype))
