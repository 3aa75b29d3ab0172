"""What calibrated pruning will do with each leaf; the model says which leaves, and along which axes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner import sparsity_types
from jaxpruner.oneshot.followed_leaves import FollowedLeaves, why_left_dense
from jaxpruner.oneshot.leaf_targets import LeafTargets
from jaxpruner.oneshot.weight_matrices import WeightMatrices
from jaxpruner.plan import LeafPlan, PruningPlan
from jaxpruner.trace import UseGraph, with_input_axes

_NOTE = (
    'The model decides which of them: leaves that no contraction reads stay dense, and N:M lies along the inputs. '
    'plan(params, apply_fn=…, batches=…) shows both.'
)


class FollowedModel(NamedTuple):
    """How a model uses the leaves that are selected, and the targets of those that can be pruned."""

    graph: UseGraph
    followed: FollowedLeaves
    targets: LeafTargets


def with_reasons(plan: PruningPlan, reasons: Sequence[str]) -> PruningPlan:
    """Plans leaves so that those without a target say why the distribution gives them none."""
    leaves = []
    for leaf, reason in zip(plan, reasons, strict=True):
        if leaf.why_dense == f'{plan.algorithm} gives it no target':
            leaf = dataclasses.replace(leaf, why_dense=reason)
        leaves.append(leaf)
    return dataclasses.replace(plan, leaves=tuple(leaves))


def without_model(plan: PruningPlan) -> PruningPlan:
    """Plans from shapes alone, where N:M has no axis yet; the plan's note says what is unknown.

    >>> import jaxpruner, jax.numpy as jnp
    >>> plan = jaxpruner.oneshot.Wanda(sparsity_type='2:4').plan({'w': jnp.ones((8, 8))})
    >>> plan['w'].sparsity_type.axis
    'input'
    """
    leaves = [_along_inputs(leaf) if leaf.is_pruned else leaf for leaf in plan]
    note = _NOTE if plan.pruned else ''
    return dataclasses.replace(plan, leaves=tuple(leaves), note=note)


def with_model(plan: PruningPlan, model: FollowedModel, arrays: Sequence[Any]) -> PruningPlan:
    """Plans with a model: leaves that calibrated pruning leaves dense say why, and N:M has the axis of the inputs."""
    leaves = []
    for leaf, array in zip(plan, arrays, strict=True):
        if leaf.path in model.targets and leaf.is_pruned:
            leaves.append(_with_axis(leaf, array, model))
        elif leaf.is_pruned:
            why_dense = why_left_dense(leaf.path, model.followed)
            leaf = dataclasses.replace(leaf, target=None, kept=leaf.size, why_dense=why_dense)
            leaves.append(leaf)
        else:
            leaves.append(leaf)
    counts = [leaf.kept for leaf in leaves]
    kept = None if None in counts else sum(counts)
    return dataclasses.replace(plan, leaves=tuple(leaves), kept=kept)


def _along_inputs(leaf: LeafPlan) -> LeafPlan:
    if not isinstance(leaf.sparsity_type, sparsity_types.NByM):
        return leaf
    along_inputs = dataclasses.replace(leaf.sparsity_type, axis=sparsity_types.INPUT_AXIS)
    return dataclasses.replace(leaf, sparsity_type=along_inputs)


def _with_axis(leaf: LeafPlan, array: Any, model: FollowedModel) -> LeafPlan:
    leaf = _along_inputs(leaf)
    if not isinstance(leaf.sparsity_type, sparsity_types.NByM):
        return leaf
    along_inputs = leaf.sparsity_type
    try:
        axis_of = with_input_axes(lambda path, leaf: along_inputs, model.graph)
        sparsity_type = axis_of(leaf.path, array) or along_inputs
    except ValueError:  # inputs of several readings lie along several axes
        sparsity_type = along_inputs
    kept = leaf.size
    for matrices in model.followed.matrices[leaf.path]:
        kept -= _removed(matrices, along_inputs)
    return dataclasses.replace(leaf, sparsity_type=sparsity_type, kept=kept)


def _removed(matrices: WeightMatrices, n_by_m: sparsity_types.NByM) -> int:
    """Counts the weights that N:M removes from some matrices."""
    *_, inputs, _ = matrices.shape
    lines = math.prod(matrices.shape) // max(inputs, 1)
    return lines * (inputs - n_by_m.kept_in_line(inputs))
