"""A strategy as an updater: it drives a jitted training loop that knows nothing of epochs."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, sparsity_schedules
from jaxpruner.base_updater import leaf_plans
from jaxpruner.core import tree as tree_lib
from jaxpruner.jax_pruning.plan import EntryPlan, plan_entries, warn_about_partial_groups
from jaxpruner.jax_pruning.strategy import PruningStrategy, check_axis


@dataclasses.dataclass(init=False)
class StrategyPruning(base_updater.BaseUpdater):
    """Carries out a strategy inside `wrap_optax`.

    Equal, up to rounding, to a loop over epochs that calls `pruning_apply` after every step, and `pruning` and
    `pruning_apply` after an epoch's last one: on that step the parameters after the update are ranked, and the update
    lands on the new masks. A weight that a later entry keeps again starts at zero.

    Args:
      prune_strategy: a `PruningStrategy` or what `PruningStrategy.parse` reads.
      steps_per_epoch: calls of `update` in an epoch.
      first_epoch: the number of the first epoch, 1 as in `for epoch in range(1, num_epochs + 1)`.
      prune_axis: the axis along which N:M groups lie for entries that give none; the last by default.
      settings: `use_packed_masks`, `is_sparse_gradients` and `stacked` of `BaseUpdater`.

    Raises:
      ValueError, TypeError: a setting is wrong; in `init`, the strategy does not fit the parameters.

    >>> import optax
    >>> strategy = {1: {'method': 'unstr_global', 'prune_rate_pattern': 0.5}}
    >>> tx = StrategyPruning(strategy, steps_per_epoch=1).wrap_optax(optax.sgd(0.1))
    >>> params = {'kernel': jnp.array([[1.0, -4.0]])}
    >>> tx.update({'kernel': jnp.zeros((1, 2))}, tx.init(params), params)[1].masks
    {'kernel': Array([[0, 1]], dtype=uint8)}
    """

    ranks_next_params: ClassVar[bool] = True
    regrows_from_zero: ClassVar[bool] = True

    prune_strategy: PruningStrategy
    steps_per_epoch: int
    first_epoch: int
    prune_axis: int | None

    def __init__(
        self,
        prune_strategy: Any,
        steps_per_epoch: int,
        *,
        first_epoch: int = 1,
        prune_axis: int | None = None,
        **settings: Any,
    ):
        for name in settings:
            if name not in ('use_packed_masks', 'is_packed', 'is_sparse_gradients', 'stacked'):
                raise TypeError(
                    f'{name!r} is no setting of StrategyPruning: what is pruned, and when, is its strategy'
                )
        if (
            isinstance(first_epoch, bool)
            or not hasattr(first_epoch, '__index__')
            or first_epoch < 0
        ):
            raise ValueError(
                f'first_epoch must be a whole number of at least 0, got {first_epoch!r}'
            )
        check_axis(prune_axis, 'prune_axis')
        self.prune_strategy = PruningStrategy.parse(prune_strategy)
        self.steps_per_epoch = sparsity_schedules.checked_step(
            'steps_per_epoch', steps_per_epoch, minimum=1
        )
        self.first_epoch, self.prune_axis = first_epoch, prune_axis
        super().__init__(scheduler=self._schedule(), **settings)

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The sparsity that the last entry to mean a leaf gives it; all entries are checked."""
        _, leaves, treedef = tree_lib.flatten_with_paths(params)
        targets: list[float | None] = [None] * len(leaves)
        for plan, sparsities in self._plans(params):
            warn_about_partial_groups(plan, params)
            targets = [
                old if new is None else new for old, new in zip(targets, sparsities, strict=True)
            ]
        return jax.tree.unflatten(treedef, targets)

    def plan(self, params: tree_lib.PyTree) -> leaf_plans.PruningPlan:
        """As the base's: each leaf as the last entry leaves it that means it."""
        paths, leaves, _ = tree_lib.flatten_with_paths(params)
        planned = []
        for i, path in enumerate(paths):
            leaf = leaf_plans.unpruned_leaf(path, leaves[i], None, False)
            planned.append(dataclasses.replace(leaf, why_dense='no entry of the strategy means it'))
        for entry, sparsities in self._plans(params):
            for i, sparsity in enumerate(sparsities):
                if sparsity is not None:
                    leaf = leaf_plans.unpruned_leaf(
                        paths[i], leaves[i], entry.types[i], paths[i] in entry.stacked
                    )
                    planned[i] = leaf_plans.with_target(
                        leaf, sparsity, '', is_counted=not entry.is_global
                    )
        is_known = all(leaf.kept is not None for leaf in planned)
        kept = sum(leaf.kept or 0 for leaf in planned) if is_known else None
        return leaf_plans.PruningPlan(type(self).__name__, tuple(planned), kept)

    def check_plan(self, plan: leaf_plans.PruningPlan) -> None:
        """A strategy without entries asks for dense training."""
        if self.prune_strategy.epochs:
            super().check_plan(plan)

    def update_state(self, sparse_state, params, grads):
        """The masks after this epoch's entry."""
        del grads
        plans = self._plans(params)
        entry = jnp.searchsorted(jnp.asarray(self._steps(), jnp.int32), sparse_state.count)
        # Entries that differ in their rates alone share a branch, so that a gradual strategy is compiled once.
        distinct = list(dict.fromkeys(plan for plan, _ in plans))

        def branch(plan: EntryPlan) -> Any:
            rows = [sparsities if other == plan else None for other, sparsities in plans]
            return lambda params, masks, entry: plan.new_masks(
                params, masks, _rates_of(rows, plan, entry)
            )

        which = jnp.asarray([distinct.index(plan) for plan, _ in plans])[entry]
        masks = jax.lax.switch(
            which, [branch(plan) for plan in distinct], params, sparse_state.masks, entry
        )
        return sparse_state._replace(masks=masks)

    def instant_sparsify(self, params, grads=None):
        """All entries at once, in their order."""
        del grads
        self.get_target_sparsities(params)
        masks = None
        for plan, sparsities in self._plans(params):
            masks = plan.new_masks(params, masks, sparsities)
        if masks is None:
            masks = jax.tree.map(lambda _: None, params)
        return self.apply_masks(params, masks), masks

    def _plans(self, params: tree_lib.PyTree) -> list[tuple[EntryPlan, tuple[float | None, ...]]]:
        return list(
            plan_entries(self.prune_strategy, params, self.prune_axis, self.stacked).values()
        )

    def _steps(self) -> tuple[int, ...]:
        """The last step of each epoch that prunes, counted from 0."""
        return tuple(
            (epoch - self.first_epoch + 1) * self.steps_per_epoch - 1
            for epoch in self.prune_strategy.epochs
        )

    def _schedule(self) -> sparsity_schedules.BaseSchedule:
        if not self.prune_strategy.epochs:
            return sparsity_schedules.NoUpdateSchedule()
        if self.prune_strategy.epochs[0] < self.first_epoch:
            raise ValueError(
                f'prune_strategy has an entry for epoch {self.prune_strategy.epochs[0]}, but epochs begin with '
                f'{self.first_epoch}; pass first_epoch={self.prune_strategy.epochs[0]} if they are counted from there'
            )
        return sparsity_schedules.StepsSchedule(self._steps())


def _rates_of(
    rows: list[tuple[float | None, ...] | None], plan: EntryPlan, entry: Any
) -> list[Any]:
    """For each leaf the sparsity in row `entry`; rows of other plans are never read."""
    columns = zip(
        *[row if row is not None else (0.0,) * len(plan.types) for row in rows], strict=True
    )
    return [
        None if leaf_type is None else jnp.asarray(column, jnp.float32)[entry]
        for leaf_type, column in zip(plan.types, columns, strict=True)
    ]
