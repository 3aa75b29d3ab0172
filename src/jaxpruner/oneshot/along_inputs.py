"""Pruners that look at weights alone, given a model: N:M along its inputs, and only what it multiplies with data."""

import copy
import dataclasses
from typing import Any

from jaxpruner import checks, mask_calculator, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.oneshot.followed_leaves import (
    check_used,
    follow_leaves,
    ignore_vectors,
    leave_alone,
    warn_of_unclear,
    why_left_dense,
)
from jaxpruner.oneshot.named_leaves import names_of
from jaxpruner.plan import PruningPlan
from jaxpruner.sparsity_types import (
    check_groups,
    normalize_setting,
    resolve_leaves,
    resolve_types,
)
from jaxpruner.trace import UnsupportedPrimitive, UseGraph, with_input_axes

_DEFAULT_AXIS = -1  # of `NByM`; whether a user has written it does not show


def along_inputs(pruner: BaseUpdater, graph: UseGraph, params: tree_lib.PyTree) -> BaseUpdater:
    """Makes a pruner that looks at weights alone prune the weight matrices of a model; its plan tells why others stay.

    N:M groups lie along the axis that the model sums over. An axis that was named stays: `NByM(2, 4, axis=1)`. But
    `NByM(2, 4, axis=-1)` equals `NByM(2, 4)`, so that the last axis can only be named by its positive number. Of the
    leaves that the pruner selects, those that no contraction reads stay dense, and lookups (embeddings), tied ones,
    too, unless a setting names them.

    Raises:
      ValueError: the model uses none of the leaves, or sparsities or shapes do not fit.
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    resolved = resolve_types(pruner.sparsity_type, paths, leaves)
    types = dict(zip(paths, resolved, strict=True))
    selected = _selected(pruner, params, list(types.values()))
    followed = follow_leaves(graph, selected)
    check_used(followed, type(pruner).__name__)
    dense = leave_alone(followed, names_of(pruner))
    why_dense = {path: why_left_dense(path, followed) for path in (*dense, *followed.unused)}
    unclear = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if path in followed.paths and path not in why_dense:
            try:
                types[path] = _along_inputs(types[path], path, leaf, graph)
            except (UnsupportedPrimitive, ValueError) as error:
                name = tree_lib.path_string(path)
                unclear[path] = str(error).removeprefix(f'{name}: ')
    warn_of_unclear(unclear)
    why_dense |= unclear
    types.update(dict.fromkeys(why_dense))
    if mask_calculator.own_topk_fn(pruner.topk_fn) is None:
        # Below the pruner has another setting than the one that its user wrote, which an error should name.
        of_leaves = resolve_leaves(paths, leaves, list(types.values()), pruner.stacked)
        checks = {leaf.path: leaf.check_shape for leaf in of_leaves if leaf.path in selected}
        check_groups(checks, normalize_setting(pruner.sparsity_type), paths)
    pruner = copy.copy(pruner)
    pruner.sparsity_type = lambda path, leaf: types[path]
    plan_of_types = pruner.plan

    def plan(params: tree_lib.PyTree) -> PruningPlan:
        planned = plan_of_types(params)
        leaves = []
        for leaf in planned:
            reason = why_dense.get(leaf.path, leaf.why_dense)
            leaves.append(dataclasses.replace(leaf, why_dense=reason))
        return dataclasses.replace(planned, leaves=tuple(leaves))

    vars(pruner)['plan'] = plan
    return pruner


def _selected(
    pruner: BaseUpdater, params: tree_lib.PyTree, types: list[Any]
) -> list[tree_lib.Path]:
    """Finds the leaves that a pruner selects, whatever the axes of their types."""
    paths, arrays, _ = tree_lib.flatten_with_paths(params)
    any_type = sparsity_types.Unstructured()
    types = [None if sparsity_type is None else any_type for sparsity_type in types]
    leaves = resolve_leaves(paths, arrays, types, pruner.stacked)
    with ignore_vectors():
        sparsities, _ = checks.targets_of_leaves(
            pruner.sparsity_distribution_fn, params, leaves, pruner.stacked
        )
    selected = []
    for path, sparsity in zip(paths, sparsities, strict=True):
        if sparsity is not None:
            selected.append(path)
    return selected


def _along_inputs(sparsity_type: Any, path: tree_lib.Path, leaf: Any, graph: UseGraph) -> Any:
    """Returns the type of a leaf; N:M without an axis of its own gets the one that the model sums over.

    Raises:
      UnsupportedPrimitive, ValueError: that axis is unknown.
    """
    if not isinstance(sparsity_type, sparsity_types.NByM):
        return sparsity_type
    if sparsity_type.axis not in (_DEFAULT_AXIS, sparsity_types.INPUT_AXIS):
        return sparsity_type
    asked = dataclasses.replace(sparsity_type, axis=sparsity_types.INPUT_AXIS)
    type_along_inputs = with_input_axes(lambda path, leaf: asked, graph)
    along_inputs = type_along_inputs(path, leaf)
    if along_inputs is not None:
        return along_inputs
    if any(use.contract for use in graph[path]):
        raise ValueError('a depthwise convolution sums over no channels')
    # A leaf that is named and in no contraction has no inputs.
    return dataclasses.replace(sparsity_type, axis=_DEFAULT_AXIS)
