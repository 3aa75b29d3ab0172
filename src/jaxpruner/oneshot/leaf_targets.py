"""What each leaf of a model is to reach, and which of the selected leaves calibrated pruning can prune."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import caller_warnings, checks, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import matrix_masks
from jaxpruner.oneshot.calibration import CalibratedMatrices
from jaxpruner.oneshot.followed_leaves import (
    FollowedLeaves,
    IsNamed,
    check_used,
    choose_leaves,
    warn_of_unclear,
)
from jaxpruner.oneshot.weight_matrices import WeightMatrices


class LeafTarget(NamedTuple):
    """What a leaf is to reach: a share to remove as a sparsity type says, or a mask, float32 in the leaf's shape.

    A `contradiction` is a share that was asked for, and that the type does not have.
    """

    sparsity: Any
    sparsity_type: sparsity_types.SparsityType
    mask: jax.Array | None = None
    contradiction: checks.Contradiction | None = None

    def check(self, of_leaf: Iterable[WeightMatrices]) -> None:
        """Refuses N:M of which m does not divide the inputs of a leaf's matrices."""
        for matrices in of_leaf:
            if self.mask is None:
                matrix_masks.check_matrix_type(
                    self.sparsity_type,
                    matrices.layout.matrices_shape,
                    tree_lib.path_string(matrices.path),
                )


LeafTargets = dict[tree_lib.Path, LeafTarget]


def targets_of_masks(masks: Mapping[tree_lib.Path, jax.Array]) -> LeafTargets:
    """Finds the targets of leaves whose masks come from elsewhere."""
    targets = {}
    for path, mask in masks.items():
        mask = mask.astype(jnp.float32)
        targets[path] = LeafTarget(0.0, sparsity_types.Unstructured(), mask)
    return targets


def choose_targets(
    followed: FollowedLeaves, targets: LeafTargets, is_named: IsNamed, algorithm: str
) -> LeafTargets:
    """Finds the targets of leaves that can be pruned; says of the others why they stay dense.

    Raises:
      ValueError: no leaf is left.
    """
    if any(target.mask is not None for target in targets.values()):
        check_used(followed, algorithm)
        warn_of_unclear(followed.unclear, 'are masked, and nothing makes up for what they lose')
        return _among(targets, followed.matrices)
    chosen = _among(targets, choose_leaves(followed, is_named, algorithm))
    _warn_of_contradictions(chosen)
    return chosen


def choose_calibrated(
    calibration: Mapping[tree_lib.Path, tuple[CalibratedMatrices, ...]],
    targets: LeafTargets,
    is_named: IsNamed,
    algorithm: str,
) -> LeafTargets:
    """Finds the targets of leaves that have statistics; says of the others why they stay dense."""
    followed: FollowedLeaves | None = getattr(calibration, 'followed', None)
    if followed is None:
        chosen = _among(targets, filter(calibration.__contains__, targets))
        _warn_of_contradictions(chosen)
        explained = set(chosen)
    else:
        chosen = choose_targets(followed.among(targets), targets, is_named, algorithm)
        explained = {*chosen, *followed.paths}
    missing = [tree_lib.path_string(path) for path in targets if path not in explained]
    if missing:
        caller_warnings.warn(
            f'{", ".join(missing)}: the calibration has no statistics of these leaves, which stay dense; calibrate '
            'without only=…, or leave them out of sparsity_distribution_fn'
        )
    return chosen


def _warn_of_contradictions(chosen: LeafTargets) -> None:
    contradictions = [target.contradiction for target in chosen.values()]
    checks.warn_of_contradictions([each for each in contradictions if each])


def _among(targets: LeafTargets, paths: Iterable[tree_lib.Path]) -> LeafTargets:
    return {path: targets[path] for path in paths}
