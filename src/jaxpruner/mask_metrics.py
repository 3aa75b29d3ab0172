"""Numbers to log about the masks in an optimizer state, and whether the weights agree with them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.tree import PyTree


def sparsity_metrics(opt_state: Any, params: PyTree | None = None) -> dict[str, jax.Array]:
    """How sparse the masks in an optimizer state are now, for logging; safe under `jit`.

    The numbers are of masks: `summarize_sparsity(params)` counts zeros of all parameters, whatever masks say. With
    `params` both are compared. What rescales updates outside the pruner, as `optax.chain(pruner.wrap_optax(adam),
    optax.scale(0.5))` does, keeps pruned weights from landing on zero: put it inside `wrap_optax`, or call
    `post_gradient_update` after each step. Straight-through methods keep dense weights: compare the parameters that
    their `pre_forward_update` returns.

    Args:
      opt_state: any optimizer state, also as `flax.nnx.split` leaves it; masks may be packed. Of states stacked by
        `vmap` the mean is returned.
      params: the parameters after the step that made the state (stacked, if it is); `None` compares nothing.

    Returns:
      `{'a/b/kernel': sparsity}` for each masked leaf (float32 scalars), and for all masked leaves together
      `'_mask_sparsity'`, `'_target_sparsity'` (the target, weighted by size) and `'_count'` (steps). Where several
      pruners share the model, the later ones' leaves follow. With `params` also `'_disagreement/a/b/kernel'` for each
      masked leaf and `'_disagreement'` for all together: of the weights that masks prune the share that is not zero.

    Raises:
      ValueError: there is no `SparseState`, or masks do not fit the parameters.

    >>> import optax, jaxpruner
    >>> tx = jaxpruner.StaticRandomSparse(sparsity_distribution_fn=lambda p: {'w': 0.75}).wrap_optax(optax.sgd(0.1))
    >>> params = {'w': jnp.ones((4, 4))}
    >>> metrics = sparsity_metrics(tx.init(params), params)
    >>> float(metrics['w']), float(metrics['_disagreement'])  # before the first step, weights are dense
    (0.75, 1.0)
    """
    states = sparse_state_lib.sparse_states(opt_state)
    if not states:
        raise ValueError(sparse_state_lib.NO_STATE)
    metrics: dict[str, jax.Array] = {}
    size = removed = to_remove = jnp.float32(0)
    for state in states:
        paths, masks, treedef = tree_lib.flatten_with_paths(state.masks)
        targets = tree_lib.leaves_like(treedef, sparse_state_lib.leaf_targets(state))
        sizes = tree_lib.leaves_like(treedef, state.sizes)
        for path, mask, target, packed in zip(paths, masks, targets, sizes, strict=True):
            weights = jnp.float32(mask.size)
            if packed is not None:
                weights = jnp.sum(packed.astype(jnp.float32))
            kept = sparse_state_lib.kept_weights(mask).astype(jnp.float32)
            sparsity = (weights - kept) / jnp.maximum(weights, 1)  # of no weights none is lost
            metrics[tree_lib.path_string(path)] = sparsity
            size += weights
            removed += sparsity * weights
            to_remove += weights * (0 if target is None else jnp.mean(target))
    metrics['_mask_sparsity'] = removed / jnp.maximum(size, 1)
    metrics['_target_sparsity'] = to_remove / jnp.maximum(size, 1)
    metrics['_count'] = jnp.int32(0) if states[0].count is None else jnp.max(states[0].count)
    if params is None:
        return metrics
    nonzeros = pruned = jnp.float32(0)
    paths, leaves, treedef = tree_lib.flatten_with_paths(params)
    for state in states:
        masks = tree_lib.leaves_like(treedef, sparse_state_lib.unpack_masks(state.masks, params))
        for path, leaf, mask in zip(paths, leaves, masks, strict=True):
            if mask is not None:
                leaf_pruned = _count(mask == 0)
                leaf_nonzeros = _count((mask == 0) & (leaf != 0))
                name = f'_disagreement/{tree_lib.path_string(path)}'
                metrics[name] = leaf_nonzeros / jnp.maximum(leaf_pruned, 1)
                nonzeros += leaf_nonzeros
                pruned += leaf_pruned
    metrics['_disagreement'] = nonzeros / jnp.maximum(pruned, 1)
    return metrics


def _count(flags):
    return jnp.sum(flags, dtype=jnp.uint32).astype(jnp.float32)
