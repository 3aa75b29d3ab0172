"""N:M sparsity reached step by step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners
from jaxpruner.base_updater import init_checks
from jaxpruner.mask_calculator import calculators, lazy_scores, n_by_m
from jaxpruner.sparsity_types import Groups


@dataclasses.dataclass
class IterativeNMPruning(base_updater.BaseUpdater):
    """Keeps M of M, then M-1, ... then N: the decaying mask of Kao et al., "Training recipe for N:M sparsity", 2022.

    Of the M - N weights to remove in each group, the share removed at a step is the scheduled sparsity over its target,
    rounded. With a schedule that stays at its target it is N:M at once.

    Raises:
      ValueError: a sparsity type other than N:M, or a `topk_fn`.

    >>> pruner = IterativeNMPruning(sparsity_type='1:4')
    >>> [int(pruner.kept_per_group(pruner.sparsity_type, progress)) for progress in (0.0, 0.4, 1.0)]
    [4, 3, 1]
    """

    sparsity_type: Any = sparsity_types.NByM(2, 4)

    def __post_init__(self):
        super().__post_init__()
        if calculators.own_topk_fn(self.topk_fn) is not None:
            raise ValueError(
                'IterativeNMPruning selects N of M itself: topk_fn has no meaning for it'
            )

    def kept_per_group(self, sparsity_type: sparsity_types.NByM, progress: Any) -> jax.Array:
        """Computes how many weights of a group are kept when a share `progress` of the way is done: int32 scalar."""
        removed = jnp.round((sparsity_type.m - sparsity_type.n) * jnp.clip(progress, 0.0, 1.0))
        return sparsity_type.m - removed.astype(jnp.int32)

    def check_type(self, sparsity_type, where=''):
        """Refuses any type but N:M."""
        if not isinstance(sparsity_type, sparsity_types.NByM):
            raise ValueError(
                f'{where}iterative_nm reaches N:M sparsity step by step, so it needs NByM, got {sparsity_type}; write '
                "'2:4'"
            )

    def check_plan(self, plan):
        """Also warns where the last update leaves more than N of M."""
        super().check_plan(plan)
        init_checks.warn_of_an_early_end(plan.algorithm, self.scheduler)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        """Scores weights by magnitude."""
        del sparse_state, grads
        return pruners.magnitudes(params)

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Keeps in each group the number of weights that the schedule has reached."""
        targets = sparse_state.target_sparsities
        sparsities = self.scheduler.get_sparsity_at_step(targets, sparse_state.count)
        scores = self.scores_now(params, sparse_state, grads, extra_args)
        paths, score_of, treedef = lazy_scores.flatten(scores)
        target_of = tree_lib.leaves_like(treedef, targets)
        sparsity_of = tree_lib.leaves_like(treedef, sparsities)
        masks: list[Any] = [None] * len(paths)
        for i, leaf in enumerate(self._leaves(paths, score_of)):
            if target_of[i] is not None:
                calculators.check_scores(score_of[i], leaf.name)
                progress = sparsity_of[i] / jnp.where(target_of[i] > 0, target_of[i], 1)
                mask = self._mask(leaf.layers_first(score_of[i]), leaf.groups, progress)
                masks[i] = leaf.layers_back(mask)
        return sparse_state._replace(masks=tree_lib.unflatten(treedef, masks, score_of))

    def _mask(self, scores: jax.Array, groups: Groups, progress: jax.Array) -> jax.Array:
        sparsity_type = groups.sparsity_type
        kept = self.kept_per_group(sparsity_type, progress)

        def select(layer: jax.Array) -> jax.Array:
            return n_by_m.keep_n_of_m(layer, kept, sparsity_type.m, sparsity_type.axis)

        return groups.per_layer(select)(scores)
