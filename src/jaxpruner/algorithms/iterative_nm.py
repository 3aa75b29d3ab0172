"""N:M sparsity reached step by step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import checks, mask_calculator, n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners


@dataclasses.dataclass
class IterativeNMPruning(pruners.MagnitudePruning):
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
        checks.check_no_topk_fn(self, 'selects N of M itself')

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
        share = checks.share_at_end(self.scheduler)
        types: list[Any] = [leaf.sparsity_type for leaf in plan.pruned]
        if any(round((each.m - each.n) * share) < each.m - each.n for each in types):
            checks.warn_of_shortfall(plan.algorithm, self.scheduler)

    def update_state(self, sparse_state, params, grads, **extra_args):
        """Keeps in each group the number of weights that the schedule has reached."""
        targets = sparse_state.target_sparsities
        sparsities = self.scheduler.get_sparsity_at_step(targets, sparse_state.count)
        scores = self.scores_to_rank(params, sparse_state, grads, extra_args)
        paths, arrays, treedef = selection.flatten_scores(scores)
        targets = tree_lib.leaves_like(treedef, targets)
        sparsities = tree_lib.leaves_like(treedef, sparsities)
        masks: list[Any] = [None] * len(paths)
        for i, leaf in enumerate(self.describe_leaves(paths, arrays)):
            if targets[i] is None:
                continue
            mask_calculator.check_scores(arrays[i], leaf.name)
            kind: Any = leaf.sparsity_type
            kept = self.kept_per_group(
                kind, sparsities[i] / jnp.where(targets[i] > 0, targets[i], 1)
            )
            select = functools.partial(n_by_m.keep_n_of_m, n=kept, m=kind.m, axis=kind.axis)
            masks[i] = tree_lib.per_layer(select, leaf.layer_axis)(selection.read(arrays[i]))
        return sparse_state._replace(masks=tree_lib.unflatten(treedef, masks, arrays))
