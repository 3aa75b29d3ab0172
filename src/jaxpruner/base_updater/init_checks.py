"""What `init` of a wrapped optimizer, and pruning once, warn of: a pruner that cannot do what it was asked for.

It runs to the end otherwise, and prunes nothing or too little. Each check warns once. Those of `init` read the plan of
the leaves and the schedule in Python.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import schedule_reach
from jaxpruner.base_updater.leaf_plans import PruningPlan
from jaxpruner.base_updater.pruner import PlannedPruner
from jaxpruner.core import caller_warnings, masking
from jaxpruner.mask_calculator import calculators
from jaxpruner.sparsity_types import NByM

# The drop fraction is sampled at the first 4 update steps, and at 4 spread over all of them.
_SAMPLED_STEPS = 4
_MOST_NAMED = 3
_SEE_PLAN = 'print(pruner.plan(params)) shows each leaf'
_HOST = (
    'PeriodicSchedule(update_freq=1) where your own loop decides with update_masks=…, '
    'instant_sparsify for pruning once without training'
)


def check_plan(pruner: PlannedPruner, plan: PruningPlan) -> None:
    """Warns where no leaf is pruned, masks are never updated, or the last update falls short of the target.

    Args:
      pruner: any.
      plan: its plan of the parameters.

    >>> import jaxpruner, jax.numpy as jnp
    >>> pruner = jaxpruner.StaticRandomSparse(sparsity_type='2:4')
    >>> check_plan(pruner, pruner.plan({'w': jnp.ones((2, 4))}))  # static masks need no schedule
    """
    if not plan.pruned:
        _warn_that_nothing_is_pruned(plan)
        return
    # Masks that are sparse from the start, or made in each forward pass, need no update.
    if pruner.overrides('get_initial_masks') or pruner.overrides('pre_forward_update'):
        return
    steps = schedule_reach.update_steps(pruner.scheduler)
    if steps is None:
        return
    if not steps:
        caller_warnings.warn(
            f'{plan.algorithm} never updates its masks, so that all leaves stay dense (asked for: {_targets(plan)}): '
            f'{_why_never(pruner.scheduler)}; {_SEE_PLAN}. Give a schedule that updates, such as '
            f'PolynomialSchedule(update_freq, update_start_step, update_end_step); or {_HOST}'
        )
    elif not pruner.overrides('update_state'):
        is_ranked_by_type = calculators.own_topk_fn(pruner.topk_fn) is None
        # Of N:M any sparsity above 0 means N of M.
        if not (
            is_ranked_by_type and all(isinstance(leaf.sparsity_type, NByM) for leaf in plan.pruned)
        ):
            warn_of_an_early_end(plan.algorithm, pruner.scheduler)


def check_masks(pruner: PlannedPruner, params: tree_lib.PyTree, masks: tree_lib.PyTree) -> None:
    """Warns where masks that were made once remove nothing; of masks that are being traced the plan tells.

    Args:
      pruner: made the masks.
      params: the parameters, or their shapes.
      masks: uint8, unpacked, `None` where dense.

    >>> import jaxpruner, jax.numpy as jnp
    >>> check_masks(jaxpruner.MagnitudePruning(), {'w': jnp.ones(2)}, {'w': jnp.array([1, 0], jnp.uint8)})
    """
    leaves = jax.tree.leaves(masks)
    is_traced = tree_lib.has_traced(leaves)
    if not is_traced and not all(map(masking.keeps_all, leaves)):
        return
    plan = pruner.plan(params)
    if not plan.pruned:
        _warn_that_nothing_is_pruned(plan)
    elif not is_traced:
        names = [tree_lib.path_string(leaf.path) for leaf in plan.pruned]
        caller_warnings.warn(
            f'{plan.algorithm} prunes nothing: its masks keep every weight, those of {_some_of(names)}, too, which it '
            'was to prune; look at its scores and its topk_fn'
        )


def check_replacement(
    pruner: PlannedPruner, plan: PruningPlan, drop_fraction_fn: Callable[[Any], Any]
) -> None:
    """Warns where an algorithm that drops and grows weights never does.

    Args:
      pruner: the algorithm.
      plan: its plan of the parameters.
      drop_fraction_fn: step -> share of the kept weights to replace.

    >>> import jaxpruner, jax.numpy as jnp
    >>> pruner = jaxpruner.RigL(scheduler=jaxpruner.sparsity_schedules.PeriodicSchedule(10), sparsity_type='block_1,4')
    >>> check_replacement(pruner, pruner.plan({'w': jnp.ones((2, 4))}), pruner.drop_fraction_fn)
    """
    steps = schedule_reach.update_steps(pruner.scheduler)
    if not plan.pruned or steps is None:
        return
    static = 'StaticRandomSparse for masks that stay as they are'
    if not steps:
        caller_warnings.warn(
            f'{plan.algorithm} never updates its masks, so that they stay as they were drawn: '
            f'{_why_never(pruner.scheduler)}. Give a schedule that updates, such as '
            f'PeriodicSchedule(update_freq, update_start_step, update_end_step); {static}; or PeriodicSchedule(1) '
            'where your own loop decides with update_masks=…'
        )
        return
    fractions = _fractions(drop_fraction_fn, steps)
    if fractions and not any(fractions):
        caller_warnings.warn(
            f'{plan.algorithm} replaces no weight: drop_fraction_fn is 0 at its update steps ({steps[0]} … '
            f'{steps[-1]}). Give a drop fraction above 0; or {static}'
        )


def warn_of_an_early_end(algorithm: str, schedule: Any) -> None:
    """Warns where the last mask update comes before a `PolynomialSchedule` is at its target.

    >>> from jaxpruner.sparsity_schedules import PolynomialSchedule
    >>> warn_of_an_early_end('MagnitudePruning', PolynomialSchedule(100, 0, 101))  # the update at step 100 reaches it
    """
    steps = schedule_reach.update_steps(schedule)
    reached = schedule_reach.sparsity_at(schedule, 1.0, steps[-1]) if steps else None
    if reached is not None and reached < 0.999:
        caller_warnings.warn(
            f'{algorithm} ends at {reached:.1%} of its target: the last mask update comes at step {steps[-1]} with '
            f'{schedule}; give update_end_step={steps[-1] + 1}'
        )


def _warn_that_nothing_is_pruned(plan: PruningPlan) -> None:
    if not len(plan):
        caller_warnings.warn(
            f'{plan.algorithm} prunes nothing: there are no parameters in the tree that init was given'
        )
        return
    names: dict[str, list[str]] = {}
    for leaf in plan:
        names.setdefault(str(leaf.why_dense), []).append(tree_lib.path_string(leaf.path))
    reasons = '; '.join(f'{_some_of(leaves)}: {reason}' for reason, leaves in names.items())
    caller_warnings.warn(
        f'{plan.algorithm} prunes no leaf of {len(plan)}. {reasons}. {_SEE_PLAN}. Give a sparsity '
        'above 0, such as sparsity=0.9, and a filter_fn that selects kernels; or take NoPruning() for training without '
        'pruning'
    )


def _some_of(names: Sequence[str]) -> str:
    more = f' and {len(names) - _MOST_NAMED} more' if len(names) > _MOST_NAMED else ''
    return ', '.join(names[:_MOST_NAMED]) + more


def _targets(plan: PruningPlan) -> str:
    """Lists the targets of the leaves that are to be pruned, from the least to the largest."""
    targets = [leaf.target for leaf in plan.pruned if leaf.target is not None]
    if not targets:
        return 'a sparsity that is being traced'
    least, largest = min(targets), max(targets)
    if least == largest:
        return f'sparsity {least:.4g}'
    return f'sparsities from {least:.4g} to {largest:.4g}'


def _why_never(schedule: Any) -> str:
    name = type(schedule).__name__
    if not hasattr(schedule, 'update_freq'):
        return f'{schedule!r} has no step at which it does'
    window = f'from update_start_step={schedule.update_start_step} to update_end_step={schedule.update_end_step}'
    return f'{name} has no multiple of update_freq={schedule.update_freq} {window}'


def _fractions(drop_fraction_fn: Callable[[Any], Any], steps: Sequence[int]) -> list[float]:
    """Samples the drop fraction at some update steps; returns none where it is being traced."""
    first = range(min(_SAMPLED_STEPS, len(steps)))
    stride = math.ceil(len(steps) / _SAMPLED_STEPS)
    spread = range(0, len(steps), stride)
    fractions = []
    with jax.ensure_compile_time_eval():
        for i in sorted({*first, *spread}):
            fraction = drop_fraction_fn(steps[i])
            if tree_lib.is_traced(fraction):
                return []
            fractions.append(float(fraction))
    return fractions
