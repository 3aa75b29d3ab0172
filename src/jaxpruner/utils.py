"""How sparse parameters and masks are: zeros counted leaf by leaf and over a model; numbers to log in training."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import caller_warnings
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.seeds import check_seed as check_seed
from jaxpruner.seeds import prng_key as prng_key
from jaxpruner.tree import PyTree


def summarize_sparsity(
    param_tree: PyTree, only_total_sparsity: bool = False, flops: Mapping[Any, float] | None = None
) -> dict[str, Any]:
    """Counts the zeros of a pytree of parameters or unpacked masks.

    Warns where masks look packed, since bytes would be counted: uint8 values above 1. `unpack_masks` unpacks them.

    Args:
      param_tree: any pytree of arrays; `None`, random keys and numbers of Python are skipped.
      only_total_sparsity: leave the single leaves out.
      flops: leaf name or glob -> floating point operations (`UseGraph.leaf_flops`): adds those.

    Returns:
      `{'a/b/kernel': sparsity}` for each leaf, `'_total_sparsity'`, `'_nparams'` (number of parameters) and
      `'_nparams_nnz'` (those that are not zero). Counts are exact Python integers and shares Python floats; inside
      `jit` counts of non-zeros and shares are scalars. With `flops` also `'_flops'` and `'_flops_nnz'` (those with
      weights that are not zero).

    Raises:
      ValueError: a name in `flops` matches no leaf.

    >>> summarize_sparsity({'w': jnp.array([[0.0, 1.0], [0.0, 0.0]])})
    {'w': 0.75, '_total_sparsity': 0.75, '_nparams': 4, '_nparams_nnz': 1}
    """
    param_tree = jax.tree.map(array_of_numbers, param_tree)
    paths, leaves, _ = tree_lib.flatten_with_paths(param_tree)
    _warn_of_packed(param_tree)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    nonzeros = [count_nonzero(leaf) for leaf in leaves]
    summary: dict[str, Any] = {}
    if not only_total_sparsity:
        for path, size, nonzero in zip(paths, sizes, nonzeros, strict=True):
            summary[tree_lib.path_string(path)] = _ratio(size - nonzero, size)
    summary['_total_sparsity'] = _ratio(sum(sizes) - sum(nonzeros), sum(sizes))
    summary['_nparams'] = sum(sizes)
    summary['_nparams_nnz'] = sum(nonzeros)
    if flops is None:
        return summary
    summary['_flops'] = summary['_flops_nnz'] = 0
    operations_of = tree_lib.values_by_leaf(flops, paths, 'flops')
    for i, (size, nonzero) in enumerate(zip(sizes, nonzeros, strict=True)):
        operations = operations_of.get(i, 0)
        summary['_flops'] += operations
        summary['_flops_nnz'] += operations * _ratio(nonzero, size)
    return summary


def array_of_numbers(leaf: Any) -> Any:
    """The leaf, or `None` where it has no zeros to count: random keys, numbers of Python.

    >>> array_of_numbers(jnp.ones(1)), array_of_numbers(3)
    (Array([1.], dtype=float32), None)
    """
    is_array = hasattr(leaf, 'dtype') and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_array else None


def _warn_of_packed(tree):
    """Names the first leaf whose bytes are none of a mask of one byte a weight; traced values pass."""
    for path, leaf in tree_lib.zip_with_paths(tree):
        is_known = leaf.dtype == jnp.uint8 and not tree_lib.is_traced(leaf)
        if is_known and bool(jnp.any(leaf > 1)):
            caller_warnings.warn(
                f'{tree_lib.path_string(path)}: uint8 values above 1 are counted as one each; unpack packed masks with '
                'jaxpruner.unpack_masks(masks, params), or call jaxpruner.sparsity_metrics(opt_state)'
            )
            return


def packed_bytes(weights: int, kept: Any, bytes_per_weight: int) -> Any:
    """What a leaf takes as one bit a weight and its kept weights, or dense where that is less.

    Args:
      weights: number of weights.
      kept: number of those that are kept, an integer or a traced scalar.
      bytes_per_weight: of a dense one.

    Returns:
      Bytes, a scalar array where `kept` is traced.

    >>> packed_bytes(100, 10, 4), packed_bytes(100, 100, 4)
    (53, 400)
    """
    dense = weights * bytes_per_weight
    packed = -(-weights // 8) + kept * bytes_per_weight
    return jnp.minimum(dense, packed) if tree_lib.is_traced(packed) else min(dense, packed)


def summarize_intersection(
    mask_tree1: PyTree, mask_tree2: PyTree, only_total_intersection: bool = False
) -> dict[str, Any]:
    """Which share of the first tree's non-zeros is non-zero in the second, too.

    Warns where masks look packed, as `summarize_sparsity` does.

    Args:
      mask_tree1: any pytree of unpacked masks or parameters; `None` leaves are skipped.
      mask_tree2: a tree of the same structure; a leaf that is `None` in either is skipped.
      only_total_intersection: leave the single leaves out.

    Returns:
      `{'a/b/kernel': share}` for each leaf, and `'_total_intersection'` over all of them.

    Raises:
      ValueError: the trees or the shapes of their leaves differ.

    >>> summarize_intersection({'w': jnp.array([1, 1, 0])}, {'w': jnp.array([0, 1, 1])})
    {'w': 0.5, '_total_intersection': 0.5}
    """
    mask_tree1, mask_tree2 = tree_lib.as_arrays(mask_tree1), tree_lib.as_arrays(mask_tree2)
    _warn_of_packed(mask_tree1)
    summary: dict[str, Any] = {}
    both_total: Any = 0
    first_total: Any = 0
    for path, first, second in tree_lib.zip_with_paths(mask_tree1, mask_tree2):
        if second is None:
            continue
        name = tree_lib.path_string(path)
        if first.shape != second.shape:
            raise ValueError(f'{name}: shapes differ, {first.shape} and {second.shape}')
        both, ones = count_nonzero((first != 0) & (second != 0)), count_nonzero(first)
        if not only_total_intersection:
            summary[name] = _ratio(both, ones)
        both_total, first_total = both_total + both, first_total + ones
    summary['_total_intersection'] = _ratio(both_total, first_total)
    return summary


def count_nonzero(array: Any) -> Any:
    """Exact number of non-zeros, a scalar array inside `jit`; NaN counts as one.

    >>> count_nonzero(jnp.array([0.0, jnp.nan, 2.0]))
    2
    """
    rows = jnp.count_nonzero(jnp.atleast_1d(array), axis=-1)  # of which 32 bits hold each
    return rows.sum() if tree_lib.is_traced(rows) else int(np.asarray(rows).sum(dtype=np.int64))


def _ratio(part, whole):
    """The quotient, 0 of nothing."""
    if isinstance(whole, int):
        return part / whole if whole else 0.0
    return part / jnp.maximum(whole, 1)


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
        targets = sparse_state_lib.leaf_targets(state)
        for path, mask, target, packed in tree_lib.zip_with_paths(
            state.masks, targets, state.sizes
        ):
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
    for state in states:
        masks = sparse_state_lib.unpack_masks(state.masks, params)
        for path, leaf, mask in tree_lib.zip_with_paths(params, masks):
            if mask is not None:
                leaf_pruned, leaf_nonzeros = _count(mask == 0), _count((mask == 0) & (leaf != 0))
                name = f'_disagreement/{tree_lib.path_string(path)}'
                metrics[name] = leaf_nonzeros / jnp.maximum(leaf_pruned, 1)
                nonzeros += leaf_nonzeros
                pruned += leaf_pruned
    metrics['_disagreement'] = nonzeros / jnp.maximum(pruned, 1)
    return metrics


def _count(flags):
    return jnp.sum(flags, dtype=jnp.uint32).astype(jnp.float32)
