"""Pruning by one ranking over all selected leaves."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, scoring, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners


@dataclasses.dataclass
class GlobalUpdater(base_updater.BaseUpdater):
    """Ranks the weights of all selected leaves together; the total sparsity is the targets', weighted by size.

    A leaf's own target counts in the total alone: only `None` keeps a leaf out of the ranking.

    Attributes:
      normalize_scores: scores are divided by (their leaf's norm + 1e-8), so that no leaf of small weights is emptied.

    Raises:
      ValueError: another sparsity type than unstructured.

    >>> GlobalMagnitudePruning(sparsity_type='2:4')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: GlobalMagnitudePruning ranks single weights across leaves, so it needs Unstructured(), got NByM(...
    """

    normalize_scores: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.topk_fn is not None or self.stacked:
            raise ValueError(
                f'{type(self).__name__} ranks all leaves together: topk_fn and stacked have no meaning for it'
            )

    def check_type(self, sparsity_type: sparsity_types.SparsityType, where: str = '') -> None:
        """Refuses any type but unstructured."""
        if sparsity_type != sparsity_types.Unstructured():
            raise ValueError(
                f'{where}{type(self).__name__} ranks single weights across leaves, so it needs Unstructured(), got '
                f'{sparsity_type}; use a local algorithm such as MagnitudePruning for N:M, blocks and channels'
            )

    @scoring.ranks_unwritten
    def create_masks(self, scores: tree_lib.PyTree, sparsities: tree_lib.PyTree) -> tree_lib.PyTree:
        """Masks from one ranking; of equal scores the first by leaf path, then by index, is kept."""
        paths, leaves, treedef = scoring.flatten(scores)
        targets = tree_lib.leaves_like(treedef, sparsities)
        ranked = sorted((i for i in range(len(leaves)) if targets[i] is not None), key=lambda i: paths[i])
        if not ranked:
            return jax.tree.unflatten(treedef, [None] * len(leaves))
        arrays = [leaves[i] for i in ranked]
        norms = [norm + 1e-8 for norm in _finite_norms(arrays)] if self.normalize_scores else None
        total = total_sparsity([targets[i] for i in ranked], [array.size for array in arrays])
        count = selection.number_to_keep(sum(array.size for array in arrays), total)
        masks = dict(zip(ranked, selection.keep_largest_jointly(arrays, count, norms, apart=True), strict=True))
        return jax.tree.unflatten(treedef, [masks.get(i) for i in range(len(leaves))])


def total_sparsity(targets: list, sizes: list[int]) -> jax.Array:
    """The mean weighted by size; of equal targets the target itself, without rounding.

    Args:
      targets: a sparsity for each leaf, at least one.
      sizes: how many weights each leaf has.

    Returns:
      A float32 scalar.

    >>> float(total_sparsity([0.5, 1.0], [30, 10]))
    0.625
    """
    stacked = jnp.stack([jnp.asarray(target, jnp.float32) for target in targets])
    shares = jnp.asarray([size / max(sum(sizes), 1) for size in sizes], jnp.float32)
    return jnp.where(jnp.all(stacked == stacked[0]), stacked[0], jnp.sum(stacked * shares))


def _finite_norms(arrays: list[jax.Array | selection.Scores]) -> list[jax.Array]:
    """The norm of what is finite in each array, so that one NaN or inf does not spoil a leaf."""
    squares = jnp.stack([jnp.sum(jnp.square(selection.read(array).astype(jnp.float32))) for array in arrays])
    squares = jax.lax.cond(
        jnp.all(jnp.isfinite(squares)), lambda: squares, lambda: jnp.stack([_finite_squares(array) for array in arrays])
    )
    return list(jnp.sqrt(squares))


def _finite_squares(scores: jax.Array | selection.Scores) -> jax.Array:
    """Their sum. Chosen terms of one sum XLA would write down; two results of a reduction it finds in passing."""
    array = selection.read(scores)
    finite = jnp.where(jnp.isfinite(array), array, 0).astype(jnp.float32)
    sums, largest = jax.lax.reduce(
        (jnp.square(finite), jnp.abs(finite)),
        (jnp.float32(0), jnp.float32(0)),
        lambda one, other: (one[0] + other[0], jnp.maximum(one[1], other[1])),
        range(max(array.ndim - 1, 0), array.ndim),
    )
    return jnp.where(jnp.max(largest, initial=0) > 0, jnp.sum(sums), 0)


@dataclasses.dataclass
class GlobalMagnitudePruning(GlobalUpdater):
    """Removes the weights of least (normalised) magnitude in the whole model.

    >>> half = lambda params: {'a': 0.5, 'b': 0.5}
    >>> updater = GlobalMagnitudePruning(sparsity_distribution_fn=half, normalize_scores=False)
    >>> updater.instant_sparsify({'a': jnp.array([1.0, 4.0]), 'b': jnp.array([2.0, 3.0])})[1]
    {'a': Array([0, 1], dtype=uint8), 'b': Array([0, 1], dtype=uint8)}
    """

    @scoring.of_each_weight(jnp.abs)
    def calculate_scores(self, params, sparse_state=None, grads=None):
        """The magnitudes."""
        del sparse_state, grads
        return pruners.magnitudes(params)


@dataclasses.dataclass
class GlobalSaliencyPruning(GlobalUpdater):
    """Removes the weights of least (normalised) saliency in the whole model.

    >>> updater = GlobalSaliencyPruning(sparsity_distribution_fn=lambda params: {'a': 0.5})
    >>> updater.instant_sparsify({'a': jnp.array([1.0, 4.0])}, {'a': jnp.array([8.0, 1.0])})[1]
    {'a': Array([1, 0], dtype=uint8)}
    """

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """The saliencies."""
        del sparse_state
        return pruners.saliencies(params, grads)
