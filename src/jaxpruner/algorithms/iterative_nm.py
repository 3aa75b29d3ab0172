"""N:M sparsity reached step by step."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jaxpruner import checks, mask_calculator, n_by_m, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.algorithms import pruners


@dataclasses.dataclass
class IterativeNMPruning(pruners.MagnitudePruning):
    """Keeps M of M, then M-1, ... then N: the decaying mask of Kao et al., "Training recipe for N:M sparsity", 2022.

    Of each M weights the scheduled sparsity is removed, rounded: M - N at the target. With a schedule that stays at its
    target it is N:M at once.

    Raises:
      ValueError: a sparsity type other than N:M, or a `topk_fn`.

    >>> pruner, scores = IterativeNMPruning(sparsity_type='1:4'), {'w': jnp.ones((1, 4))}
    >>> [int(pruner.create_masks(scores, {'w': sparsity})['w'].sum()) for sparsity in (0.0, 0.3, 0.75)]
    [4, 3, 1]
    """

    sparsity_type: Any = sparsity_types.NByM(2, 4)

    def __post_init__(self):
        super().__post_init__()
        checks.check_no_topk_fn(self, 'selects N of M itself')

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

    def create_masks(self, scores, sparsities):
        """Keeps in each group the number of weights that a share of the type's own sparsity leaves."""
        paths, arrays, treedef = selection.flatten_scores(scores)
        masks = tree_lib.leaves_like(treedef, sparsities)
        for i, leaf in enumerate(self.describe_leaves(paths, arrays)):
            if masks[i] is not None:
                mask_calculator.check_scores(arrays[i], leaf.name)
                kind: Any = leaf.sparsity_type
                kept = kind.m - jnp.round(kind.m * masks[i]).astype(jnp.int32)
                select = functools.partial(n_by_m.keep_n_of_m, n=kept, m=kind.m, axis=kind.axis)
                masks[i] = tree_lib.per_layer(select, leaf.layer_axis)(arrays[i])
        return tree_lib.unflatten(treedef, masks, arrays)
