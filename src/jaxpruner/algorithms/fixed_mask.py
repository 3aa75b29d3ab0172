"""Continuing with masks that are there: fine-tuning of a pruned model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings, checks, sparsity_distributions
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms.sparse_trainers import StaticRandomSparse
from jaxpruner.tree import PyTree, holds_weights


@dataclasses.dataclass(init=False)
class FixedMask(StaticRandomSparse):
    """Keeps given masks: fine-tuning at constant sparsity.

    Attributes:
      masks: tree like the parameters of masks, packed or not, also of booleans; `None` where dense. The only argument
        that need not be named.

    Raises:
      ValueError: there are no masks, weights in their place, or a sparsity beside them; in `init`, a mask does not fit
        its parameter.

    >>> pruner = FixedMask({'w': jnp.array([1, 0], jnp.uint8)})
    >>> pruner.instant_sparsify({'w': jnp.array([3.0, 4.0])})[0]
    {'w': Array([3., 0.], dtype=float32)}
    """

    masks: Any = dataclasses.field(repr=False)

    def __init__(self, masks: PyTree, **settings: Any):
        if settings.get('sparsity') is not None:
            raise ValueError(
                f'sparsity={settings["sparsity"]!r} has no meaning: the masks say what is pruned; leave it out'
            )
        settings.setdefault('sparsity_distribution_fn', None)
        super().__init__(**settings)
        if masks is None:
            raise ValueError(
                'FixedMask needs masks: those of a pruner, or masks_from_zeros(params)'
            )
        for path, mask in tree_lib.zip_with_paths(masks):
            is_known = holds_weights(mask) and not tree_lib.is_traced(mask)
            if is_known and not jnp.all((mask == 0) | (mask == 1)):
                raise ValueError(
                    f'masks: {tree_lib.path_string(path)} holds other numbers than 0 and 1, as weights do; '
                    'masks_from_zeros(params) makes masks of them'
                )
        self.masks = masks

    def get_target_sparsities(self, params):
        """Returns the sparsities that the masks have."""
        return jax.tree.map(
            lambda mask: 1 - sparse_state_lib.kept_weights(mask) / max(mask.size, 1),
            self.get_initial_masks(params, None),
        )

    def get_initial_masks(self, params, target_sparsities):
        """Returns the given masks, unpacked, as zeros and ones."""
        del target_sparsities

        def unpacked(param, mask):
            if mask is None:
                return None
            mask = sparse_state_lib.unpack_like(jnp.asarray(mask), param.shape)
            return (mask != 0).astype(jnp.uint8)

        return tree_lib.map_with_missing(unpacked, tree_lib.as_arrays(params), self.masks)

    def instant_sparsify(self, params, grads=None):
        """Applies the masks."""
        del grads
        masks = self.get_initial_masks(params, None)
        checks.check_masks(self, params, masks)
        return self.apply_masks(params, masks), masks


def masks_from_zeros(
    params: PyTree,
    filter_fn: sparsity_distributions.FilterFn = sparsity_distributions.NOT_DIM_ONE_FILTER,
) -> PyTree:
    """Reads masks off a pruned model: its zeros are what was pruned.

    Args:
      params: any pytree of concrete arrays.
      filter_fn: `(path, leaf) -> bool`, selects the leaves that may have been pruned, of those with floats.

    Returns:
      A tree of uint8 masks, `None` where a leaf is not selected or has no zeros. A leaf of zeros alone was
      initialised so rather than pruned: it is left dense, with a warning.

    >>> masks_from_zeros({'bias': jnp.zeros(2), 'kernel': jnp.array([[0.0, 1.0]])})
    {'bias': None, 'kernel': Array([[0, 1]], dtype=uint8)}
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree_lib.as_arrays(params))
    checks.check_arrays(paths, leaves)
    masks = []
    for path, leaf in zip(paths, leaves, strict=True):
        is_selected = holds_weights(leaf) and filter_fn(path, leaf)
        mask = (leaf != 0).astype(jnp.uint8) if is_selected else None
        kept = leaf.size if mask is None else int(sparse_state_lib.kept_weights(mask))
        if kept == 0 and leaf.size:
            caller_warnings.warn(
                f'{tree_lib.path_string(path)} is all zeros; it is left dense, not frozen'
            )
        masks.append(mask if 0 < kept < leaf.size else None)
    return tree_lib.unflatten(treedef, masks, leaves)
