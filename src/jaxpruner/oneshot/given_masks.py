"""Masks from elsewhere, under which the weights that stay make up for those that go."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import mask_calculator
from jaxpruner.core import tree as tree_lib


def check_masks(params: tree_lib.PyTree, masks: tree_lib.PyTree) -> dict[tree_lib.Path, jax.Array]:
    """Refuses what are no masks of the parameters.

    Args:
      params: the parameters.
      masks: 0/1 in their shapes (1 = kept), `None` where dense.

    Returns:
      The masks by path, uint8, without those that are dense.

    Raises:
      ValueError: the tree has another structure, a mask another shape, or other values than 0 and 1; or all are dense.

    >>> {path: mask.dtype for path, mask in check_masks({'w': jnp.ones(2)}, {'w': jnp.array([True, False])}).items()}
    {('w',): dtype('uint8')}
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    found = {}
    for path, leaf, mask in zip(paths, leaves, tree_lib.leaves_like(treedef, masks), strict=True):
        if mask is None:
            continue
        where = tree_lib.path_string(path)
        if jnp.shape(mask) != jnp.shape(leaf):
            raise ValueError(
                f'{where}: its mask has shape {jnp.shape(mask)}, and the parameter {jnp.shape(leaf)}; give masks '
                'unpacked, in the shapes of the parameters'
            )
        if not bool(jnp.all((jnp.asarray(mask) == 0) | (jnp.asarray(mask) == 1))):
            raise ValueError(f'{where}: a mask holds 0 (pruned) and 1 (kept) alone')
        found[path] = jnp.asarray(mask).astype(mask_calculator.MASK_DTYPE)
    if not found:
        raise ValueError(
            'all masks are None, so that nothing would change; give one for each leaf that is sparse'
        )
    return found


def apply_masks(params: tree_lib.PyTree, masks: dict[tree_lib.Path, jax.Array]) -> tuple[Any, Any]:
    """Sets what masks prune to zero, also in parts of leaves that no weight matrix holds.

    Args:
      params: the parameters.
      masks: by path.

    Returns:
      The parameters, and the masks as a tree like them.

    >>> apply_masks({'w': jnp.ones(2), 'b': jnp.ones(1)}, {('w',): jnp.array([0, 1], jnp.uint8)})[0]['w'].tolist()
    [0.0, 1.0]
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    masked = [
        jnp.where(masks[path] != 0, leaf, jnp.zeros_like(leaf)) if path in masks else leaf
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return treedef.unflatten(masked), treedef.unflatten([masks.get(path) for path in paths])
