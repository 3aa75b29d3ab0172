"""Pruning by one ranking over all selected leaves."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import mask_calculator, selection, sparsity_distributions, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners
from jaxpruner.base_updater import BaseUpdater, FromSettings
from jaxpruner.tree import PyTree, holds_weights

# A mixin calls the methods of the pruner that it is mixed into.
_Pruner = BaseUpdater if TYPE_CHECKING else object


@dataclasses.dataclass(eq=False)
class GlobalPruningMixin(_Pruner):
    """Ranks the weights of all selected leaves together, by the scores of the pruner that it is mixed into.

    With a `sparsity_distribution_fn` the total sparsity is that of its targets, weighted by size: a leaf's own target
    counts in the total alone, and `None` keeps a leaf out of the ranking.

    Attributes:
      custom_sparsity_map: leaf name or glob -> sparsity (`None` = dense). These leaves are ranked alone, at this
        sparsity from the first mask update on, and do not count in `sparsity`.
      filter_fn: `(path, leaf) -> bool`, selects the leaves that are ranked together; by default those with more than
        one dimension.
      normalization_eps: what is added to a leaf's norm before its scores are divided by it.
      use_normalization: scores are divided by their leaf's norm, so that no leaf of small weights is emptied.
      sparsity: the sparsity of all leaves together that are ranked together.

    Raises:
      ValueError: another sparsity type than unstructured, or settings that exclude each other.

    >>> @dataclasses.dataclass
    ... class Mine(GlobalPruningMixin, pruners.RandomPruning):
    ...     pass
    >>> masks = Mine(sparsity=0.75).instant_sparsify({'u': jnp.ones((2, 2)), 'v': jnp.ones((2, 2))})[1]
    >>> int(masks['u'].sum() + masks['v'].sum())
    2
    """

    ranked_together: ClassVar[str] = 'model'
    # Leaves in `custom_sparsity_map` are ranked apart from the others.
    ranks_named_leaves_alone: ClassVar[bool] = True
    fields_of_distribution = ('sparsity', 'filter_fn', 'custom_sparsity_map')

    custom_sparsity_map: Any = None
    filter_fn: sparsity_distributions.FilterFn = sparsity_distributions.NOT_DIM_ONE_FILTER
    normalization_eps: float = 1e-8
    use_normalization: bool = True
    sparsity: Any = 0.0

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(**settings)
        bases = cls.__mro__
        if BaseUpdater in bases and bases.index(GlobalPruningMixin) > bases.index(BaseUpdater):
            raise TypeError(
                f'{cls.__name__}: GlobalPruningMixin has no effect after a pruner, whose methods hide its own; write '
                f'it first, class {cls.__name__}(GlobalPruningMixin, …)'
            )

    def __post_init__(self):
        if not isinstance(self, BaseUpdater):
            return  # settings alone
        super().__post_init__()
        if mask_calculator.own_topk_fn(self.topk_fn) is not None or self.stacked:
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

    def init_state(self, params: PyTree) -> Any:
        """Makes the state as the base does; where `sparsity` is the target of every leaf, the target is one number."""
        state = super().init_state(params)
        # Scores do not tell integers from weights.
        are_weights = all(map(holds_weights, jax.tree.leaves(tree_lib.as_arrays(params))))
        is_one_number = isinstance(self.distribution(), FromSettings)
        if not is_one_number or not are_weights or self.custom_sparsity_map:
            return state
        target = 0.0 if self.sparsity is None else self.sparsity
        return state._replace(target_sparsities=jnp.asarray(target, jnp.float32))

    def instant_sparsify(self, params: PyTree, grads: PyTree | None = None, **extra_args: Any):
        """Prunes once, to the total sparsity, as `BaseUpdater.instant_sparsify`; JaxPruner's mixin has it, too."""
        return super().instant_sparsify(params, grads, **extra_args)

    @selection.says(reads_lazy_scores=True)
    def create_masks(self, scores: PyTree, target_sparsity: Any) -> PyTree:
        """Makes masks from one ranking; of equal scores the first by leaf path, then by index, is kept.

        Args:
          scores: a tree like the parameters; leaves may be `None` where dense.
          target_sparsity: the sparsity of all leaves that are ranked together, or a tree of sparsities, `None` where
            dense, of which it is the mean weighted by size. Leaves in `custom_sparsity_map` keep their own.

        Returns:
          A tree of uint8 masks, `None` where dense.
        """
        paths, arrays, treedef = selection.flatten_scores(scores)
        custom = sparsity_distributions.custom_sparsities(self.custom_sparsity_map, paths)
        # The tree of sparsities of a model that is one bare array is one number, too.
        is_number = treedef.num_nodes > 1 and tree_lib.is_number(target_sparsity)
        if is_number:
            targets: list[Any] = [
                target_sparsity
                if array is not None
                and leaf.sparsity_type is not None
                and self.filter_fn(leaf.path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
                else None
                for array, leaf in zip(arrays, self.describe_leaves(paths, arrays), strict=True)
            ]
        else:
            targets = tree_lib.leaves_like(treedef, target_sparsity)
        masks: list[Any] = [None] * len(arrays)
        together = []
        for i in sorted(range(len(paths)), key=paths.__getitem__):
            if i in custom and (is_number or targets[i] is not None):
                targets[i] = custom[i]  # no schedule delays these leaves
            if targets[i] is None or (arrays[i] is None and is_number):
                continue
            mask_calculator.check_scores(arrays[i], tree_lib.path_string(paths[i]))
            if i in custom:
                scores = selection.read(arrays[i])
                masks[i] = mask_calculator.topk_mask_calculator(scores, targets[i])
            else:
                together.append(i)
        if together:
            ranked = _keep_together(
                [arrays[i] for i in together],
                [targets[i] for i in together],
                self.normalization_eps if self.use_normalization else None,
            )
            for i, mask in zip(together, ranked, strict=True):
                masks[i] = mask
        return tree_lib.unflatten(treedef, masks, arrays)


@functools.partial(jax.jit, inline=True)
def _keep_together(arrays, targets, normalization_eps):
    """Masks arrays that are ranked together; divided by their norms, unless there is no `normalization_eps`."""
    norms = None
    if normalization_eps is not None:
        # Of what is finite, so that one NaN or inf does not spoil a leaf.
        squares = [
            jnp.sum(jnp.square(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32)))
            for x in map(selection.read, arrays)
        ]
        norms = jnp.sqrt(jnp.stack(squares)) + normalization_eps
    sizes = [array.size for array in arrays]
    count = selection.number_to_keep(sum(sizes), total_sparsity(targets, sizes))
    return selection.keep_largest_jointly(arrays, count, norms)


# Gives the fields of the classes below JaxPruner's order, for code that passes them by position. A dataclass collects
# the fields of its bases from the last base to the first; a field stays at the place where it came first, and has the
# default that came last. So this class, as the last base, decides the order alone: `sparsity` comes after these.
_ORDER = [field.name for field in dataclasses.fields(BaseUpdater) if not field.kw_only]
_ORDER += ['custom_sparsity_map', 'filter_fn', 'normalization_eps', 'use_normalization']
_PublishedOrder = dataclasses.make_dataclass('_PublishedOrder', [(n, Any, None) for n in _ORDER])


def total_sparsity(targets: list, sizes: list[int]) -> jax.Array:
    """Computes the mean weighted by size; of equal targets it is the target itself, without rounding.

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


@dataclasses.dataclass
class GlobalMagnitudePruning(GlobalPruningMixin, pruners.MagnitudePruning, _PublishedOrder):
    """Removes the weights of least (normalised) magnitude in the whole model.

    >>> pruner = GlobalMagnitudePruning(sparsity=0.5, use_normalization=False)
    >>> pruner.instant_sparsify({'u': jnp.array([[1.0, 4.0]]), 'v': jnp.array([[2.0, 3.0]])})[1]
    {'u': Array([[0, 1]], dtype=uint8), 'v': Array([[0, 1]], dtype=uint8)}
    """


@dataclasses.dataclass
class GlobalSaliencyPruning(GlobalPruningMixin, pruners.SaliencyPruning, _PublishedOrder):
    """Removes the weights of least (normalised) saliency in the whole model.

    >>> pruner = GlobalSaliencyPruning(sparsity_distribution_fn=lambda params: {'a': 0.5})
    >>> pruner.instant_sparsify({'a': jnp.array([1.0, 4.0])}, {'a': jnp.array([8.0, 1.0])})[1]
    {'a': Array([1, 0], dtype=uint8)}
    """
