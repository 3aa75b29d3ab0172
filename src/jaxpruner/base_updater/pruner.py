"""What the library asks of a pruner: to plan a model before training, and to take a training step.

`BaseUpdater` has every member. The functions of this package name these contracts rather than the class, so that
imports point one way.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import optax

from jaxpruner import mask_calculator, sparsity_schedules
from jaxpruner import tree as tree_lib
from jaxpruner.core.sparse_state import SparseState
from jaxpruner.sparsity_types import Leaf


class PlannedPruner(Protocol):
    """What is read before training: which leaves are pruned, how far, and when."""

    ranked_together: ClassVar[str]  # what one ranking holds: 'leaf', 'model' or 'other'
    scheduler: sparsity_schedules.BaseSchedule  # when masks are updated, and at which sparsity
    sparsity: Any  # one number for every selected leaf, or None
    sparsity_distribution_fn: Any  # params -> tree of sparsities
    stacked: tree_lib.Stacked  # which leaves are stacks of layers
    topk_fn: mask_calculator.TopkFn | None  # (scores, sparsity) -> mask

    def distribution(self) -> Any:
        """Returns what `sparsity` and `sparsity_distribution_fn` mean together."""
        ...

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """Returns the target of each leaf, `None` where dense."""
        ...

    def plan(self, params: tree_lib.PyTree) -> Any:
        """Tells what will happen to each leaf."""
        ...

    def overrides(self, method: str) -> bool:
        """Whether the algorithm, or this object, defines a method of `BaseUpdater` itself."""
        ...

    def _leaves(self, paths: Sequence[tree_lib.Path], arrays: Sequence[Any]) -> list[Leaf]:
        """Tells what is known of each leaf, given its array or shape."""
        ...


class Pruner(Protocol):
    """What a wrapped optimizer reads and calls: methods down to `check_plan` in `init`, the others in steps.

    `init` calls `packs_masks`, too. Steps call `update_state` and `moments_to_reset` where masks are due.
    """

    regrows_from_zero: ClassVar[bool]  # regrown weights start at zero
    ranks_next_params: ClassVar[bool]  # a mask update ranks the parameters after the step
    scheduler: sparsity_schedules.BaseSchedule  # says at which steps masks are updated
    skip_gradients: bool  # no optimizer step where masks are updated
    is_sparse_gradients: bool  # the optimizer sees masked gradients

    def check_optimizer(self, inner: optax.GradientTransformation, params: tree_lib.PyTree) -> None:
        """Refuses an optimizer with which the algorithm cannot work."""
        ...

    def init_state(self, params: tree_lib.PyTree) -> SparseState:
        """Makes the state before the first step, without the optimizer's."""
        ...

    def init_algorithm_state(
        self, params: tree_lib.PyTree, target_sparsities: tree_lib.PyTree
    ) -> tree_lib.PyTree:
        """Makes the first values of what the algorithm itself keeps from step to step."""
        ...

    def plan(self, params: tree_lib.PyTree) -> Any:
        """Tells what will happen to each leaf; handed on to `check_plan` as it is."""
        ...

    def check_plan(self, plan: Any) -> None:
        """Warns where the masks cannot become what was asked for."""
        ...

    def overrides(self, method: str) -> bool:
        """Whether the algorithm, or this object, defines a method of `BaseUpdater` itself."""
        ...

    def track(self, sparse_state: SparseState, params: tree_lib.PyTree) -> tuple[SparseState, Any]:
        """Computes what every step needs; further named arguments receive gradients and extra arguments."""
        ...

    def update_state(
        self,
        sparse_state: SparseState,
        params: tree_lib.PyTree,
        grads: tree_lib.PyTree,
        **extra_args: Any,
    ) -> SparseState:
        """Makes new masks, when they are due."""
        ...

    def moments_to_reset(
        self, old_state: SparseState, new_state: SparseState
    ) -> tree_lib.PyTree | None:
        """Chooses the weights whose moments become zero after a mask update."""
        ...

    def lands_on_zero(self) -> bool:
        """Whether updates land pruned weights on zero."""
        ...

    def packs_masks(self) -> bool:
        """Whether the state holds masks at one bit per weight."""
        ...
