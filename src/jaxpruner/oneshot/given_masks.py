"""Masks from elsewhere, under which the weights that stay make up for those that go."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import mask_calculator
from jaxpruner import tree as tree_lib


def check_masks(params: tree_lib.PyTree, masks: tree_lib.PyTree) -> dict[tree_lib.Path, jax.Array]:
    """Checks masks; returns them as uint8 by path, without those that are `None`.

    Raises:
      ValueError: the tree has another structure, a mask another shape, or other values than 0 and 1; or all are dense.
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    mask_leaves = tree_lib.leaves_like(treedef, masks)
    by_path = {}
    for path, leaf, mask in zip(paths, leaves, mask_leaves, strict=True):
        if mask is None:
            continue
        where = tree_lib.path_string(path)
        if jnp.shape(mask) != jnp.shape(leaf):
            raise ValueError(
                f'{where}: its mask has shape {jnp.shape(mask)}, and the parameter {jnp.shape(leaf)}; give masks '
                'unpacked, in the shapes of the parameters'
            )
        mask = jnp.asarray(mask)
        is_binary = (mask == 0) | (mask == 1)
        if not bool(jnp.all(is_binary)):
            raise ValueError(f'{where}: a mask holds 0 (pruned) and 1 (kept) alone')
        by_path[path] = mask.astype(mask_calculator.MASK_DTYPE)
    if not by_path:
        raise ValueError(
            'all masks are None, so that nothing would change; give one for each leaf that is sparse'
        )
    return by_path


def apply_masks(params: tree_lib.PyTree, masks: dict[tree_lib.Path, jax.Array]) -> tuple[Any, Any]:
    """Sets what masks prune to zero, also in parts of leaves that no weight matrix holds.

    Returns the parameters, and the masks as a tree like them.
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    for number, path in enumerate(paths):
        if path in masks:
            leaf = leaves[number]
            is_kept = masks[path] != 0
            leaves[number] = jnp.where(is_kept, leaf, jnp.zeros_like(leaf))
    of_leaves = list(map(masks.get, paths))
    return treedef.unflatten(leaves), tree_lib.unflatten(treedef, of_leaves, leaves)
