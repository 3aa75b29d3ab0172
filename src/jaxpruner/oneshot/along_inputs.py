"""Pruners that look at weights alone, given a model: N:M along its inputs, and only what it multiplies with data."""

import copy
import dataclasses
from typing import Any

from jaxpruner import sparsity_types, type_rules
from jaxpruner.base_updater import BaseUpdater, targets
from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot.followed_leaves import (
    check_used,
    follow_leaves,
    ignore_vectors,
    leave_alone,
    warn_of_unclear,
)
from jaxpruner.oneshot.named_leaves import names_of
from jaxpruner.uses import UnsupportedPrimitive, UseGraph, with_input_axes

_DEFAULT_AXIS = -1


def prune_along_inputs(
    updater: BaseUpdater, graph: UseGraph, params: tree_lib.PyTree
) -> tuple[tree_lib.PyTree, tree_lib.PyTree]:
    """Prunes the weight matrices of a model; N:M groups lie along the axis that the model sums over.

    An axis that was named stays as it is, -1 excepted, which is the default. Of the leaves that the updater selects
    those stay dense that no contraction reads, and lookups (embeddings), tied ones, too; a leaf that a setting names is
    pruned all the same.

    Args:
      updater: any that ranks weights by themselves.
      graph: of the model.
      params: its parameters.

    Returns:
      The pruned parameters, and the masks.

    Raises:
      ValueError: the model uses none of the leaves, or sparsities or shapes do not fit.

    >>> import functools, jax.numpy as jnp, jaxpruner
    >>> from jaxpruner import sparsity_distributions
    >>> half = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
    >>> pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=half, sparsity_type='1:2')
    >>> params = {'w': jnp.array([[4.0, 1.0], [3.0, 2.0]])}
    >>> graph = jaxpruner.param_uses(lambda params, x: x @ params['w'], params, jnp.ones((3, 2)))
    >>> prune_along_inputs(pruner, graph, params)[1]['w'].tolist()  # one of each column
    [[1, 0], [0, 1]]
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    types = type_rules.resolve(updater.sparsity_type, paths, leaves)
    followed = follow_leaves(graph, _selected(updater, params, types))
    check_used(followed, type(updater).__name__)
    dense = leave_alone(followed, names_of(updater)).union(followed.unused)
    by_path = dict(zip(paths, zip(leaves, types, strict=True), strict=True))
    axes, unclear = _input_axes(
        {path: by_path[path] for path in followed.paths if path not in dense}, graph
    )
    warn_of_unclear(unclear)
    resolved = dict(zip(paths, types, strict=True)) | axes | dict.fromkeys((*dense, *unclear))
    updater = copy.copy(updater)
    updater.sparsity_type = lambda path, leaf: resolved[path]
    with ignore_vectors():
        return updater.instant_sparsify(params)


def _selected(
    updater: BaseUpdater, params: tree_lib.PyTree, types: list[Any]
) -> list[tree_lib.Path]:
    """The leaves that an updater selects, whatever the axes of their types."""
    paths, _, treedef = tree_lib.flatten_with_paths(params)
    any_type = [None if leaf_type is None else sparsity_types.Unstructured() for leaf_type in types]
    with ignore_vectors():
        found = targets.of_leaves(
            updater.sparsity_distribution_fn, params, any_type, updater.stacked, lambda *leaf: None
        )
    pairs = zip(paths, tree_lib.leaves_like(treedef, found), strict=True)
    return [path for path, target in pairs if target is not None]


def _input_axes(
    leaves: dict[tree_lib.Path, tuple[Any, Any]], graph: UseGraph
) -> tuple[dict[tree_lib.Path, Any], dict[tree_lib.Path, str]]:
    """Types of N:M with the axes of the model, by the leaves and their types; and why that of some is not known."""
    found, unclear = {}, {}
    along_inputs = with_input_axes(
        lambda path, leaf: dataclasses.replace(leaves[path][1], axis=sparsity_types.INPUT_AXIS),
        graph,
    )
    for path, (leaf, leaf_type) in leaves.items():
        if not isinstance(leaf_type, sparsity_types.NByM):
            continue
        if leaf_type.axis not in (_DEFAULT_AXIS, sparsity_types.INPUT_AXIS):
            continue
        try:
            found[path] = along_inputs(path, leaf)
            if found[path] is None and any(use.contract for use in graph[path]):
                unclear[path] = 'a depthwise convolution sums over no channels'
            elif found[path] is None:  # it is named and in no contraction, so that it has no inputs
                found[path] = dataclasses.replace(leaf_type, axis=_DEFAULT_AXIS)
        except (UnsupportedPrimitive, ValueError) as error:
            unclear[path] = str(error).removeprefix(f'{tree_lib.path_string(path)}: ')
    return found, unclear
