"""A strategy as a pruner: it drives a jitted training loop that knows nothing of epochs."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import base_updater, caller_warnings, checks, sparsity_schedules
from jaxpruner import tree as tree_lib
from jaxpruner.jax_pruning.plan import EntryPlan, ResolvedEntry, resolve_entries
from jaxpruner.jax_pruning.strategy import PruningStrategy, check_axis
from jaxpruner.plan import LeafPlan, PruningPlan, unpruned_leaf, with_target


@dataclasses.dataclass(init=False)
class StrategyPruning(base_updater.BaseUpdater):
    """Carries out a strategy inside `wrap_optax`.

    It equals, up to rounding, a loop over epochs that calls `pruning_apply` after every step, and `pruning` and
    `pruning_apply` after the last step of an epoch. On that step the parameters after the update are ranked, and the
    update lands on the new masks. A weight that a later entry keeps again starts at zero.

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
        is_whole = hasattr(first_epoch, '__index__') and not isinstance(first_epoch, bool)
        if not is_whole or first_epoch < 0:
            raise ValueError(
                f'first_epoch must be a whole number of at least 0, got {first_epoch!r}'
            )
        check_axis(prune_axis, 'prune_axis')
        self.prune_strategy = PruningStrategy.parse(prune_strategy)
        self.steps_per_epoch = sparsity_schedules.checked_step(
            'steps_per_epoch', steps_per_epoch, minimum=1
        )
        self.first_epoch = first_epoch
        self.prune_axis = prune_axis
        super().__init__(scheduler=self._schedule(), **settings)

    def get_target_sparsities(self, params: tree_lib.PyTree) -> tree_lib.PyTree:
        """The sparsity that the last entry to mean a leaf gives it; all entries are checked."""
        targets: dict[tree_lib.Path, float] = {}
        for entry in self._resolve_entries(params):
            for message in entry.warnings:
                caller_warnings.warn(message)
            targets |= entry.sparsities
        paths, leaves, treedef = tree_lib.flatten_with_paths(params)
        return tree_lib.unflatten(treedef, map(targets.get, paths), leaves)

    def plan(self, params: tree_lib.PyTree, opt_state: Any = None) -> PruningPlan:
        """What happens to each leaf: what the last entry that means it leaves of it."""
        del opt_state  # entries decide, not the targets in a state
        last_entries: dict[tree_lib.Path, ResolvedEntry] = {}
        for entry in self._resolve_entries(params):
            last_entries |= dict.fromkeys(entry.sparsities, entry)
        paths, leaves, _ = tree_lib.flatten_with_paths(params)
        planned = []
        kept: int | None = 0
        for path, leaf in zip(paths, leaves, strict=True):
            leaf_plan = _plan_leaf(path, leaf, last_entries.get(path))
            planned.append(leaf_plan)
            kept = None if kept is None or leaf_plan.kept is None else kept + leaf_plan.kept
        return PruningPlan(type(self).__name__, tuple(planned), kept)

    def check_plan(self, plan: PruningPlan) -> None:
        """A strategy without entries asks for dense training."""
        if self.prune_strategy.epochs:
            super().check_plan(plan)

    def update_state(self, sparse_state, params, grads):
        """The masks after this epoch's entry."""
        del grads
        entries = self._resolve_entries(params)
        due = jnp.searchsorted(jnp.asarray(self._steps(), jnp.int32), sparse_state.count)
        # Entries that differ in their rates alone share a branch, so that a gradual strategy is compiled once.
        plans = list(dict.fromkeys(entry.plan for entry in entries))
        branches = [_branch(plan, entries) for plan in plans]
        branch_of_entry = jnp.asarray([plans.index(entry.plan) for entry in entries])
        masks = jax.lax.switch(branch_of_entry[due], branches, params, sparse_state.masks, due)
        return sparse_state._replace(masks=masks)

    def instant_sparsify(self, params, grads=None):
        """All entries at once, in their order."""
        del grads
        self.get_target_sparsities(params)
        masks = None
        for entry in self._resolve_entries(params):
            masks = entry.plan.new_masks(params, masks, entry.sparsities)
        if masks is None:
            masks = tree_lib.map_with_missing(lambda _: None, params)
        if self.prune_strategy.epochs:
            checks.check_masks(self, params, masks)
        return self.apply_masks(params, masks), masks

    def _resolve_entries(self, params: tree_lib.PyTree) -> list[ResolvedEntry]:
        entries = resolve_entries(self.prune_strategy, params, self.prune_axis, self.stacked)
        return list(entries.values())

    def _steps(self) -> tuple[int, ...]:
        """The last step of each epoch that prunes, counted from 0."""
        steps = []
        for epoch in self.prune_strategy.epochs:
            epochs_trained = epoch - self.first_epoch + 1
            steps.append(epochs_trained * self.steps_per_epoch - 1)
        return tuple(steps)

    def _schedule(self) -> sparsity_schedules.BaseSchedule:
        epochs = self.prune_strategy.epochs
        if not epochs:
            return sparsity_schedules.NoUpdateSchedule()
        if epochs[0] < self.first_epoch:
            raise ValueError(
                f'prune_strategy has an entry for epoch {epochs[0]}, but epochs begin with {self.first_epoch}; '
                f'pass first_epoch={epochs[0]} if they are counted from there'
            )
        return sparsity_schedules.StepsSchedule(self._steps())


def _plan_leaf(path: tree_lib.Path, leaf: Any, entry: ResolvedEntry | None) -> LeafPlan:
    """The plan of a leaf that an entry means, or no entry."""
    if entry is None:
        unpruned = unpruned_leaf(path, leaf, None, None)
        return dataclasses.replace(unpruned, why_dense='no entry of the strategy means it')
    plan = entry.plan
    layer_axis = dict(plan.stacked).get(path)
    unpruned = unpruned_leaf(path, leaf, dict(plan.types)[path], layer_axis)
    leaf_plan = with_target(
        unpruned, entry.sparsities[path], reason='', is_counted=not plan.is_global
    )
    is_ranked_with_others = plan.is_global and leaf_plan.is_pruned
    return dataclasses.replace(leaf_plan, is_ranked_with_others=is_ranked_with_others)


def _branch(plan: EntryPlan, entries: list[ResolvedEntry]) -> Callable[..., tree_lib.PyTree]:
    """Makes the masks of whichever entry is due, among those that have this plan."""

    def new_masks(
        params: tree_lib.PyTree, masks: tree_lib.PyTree, due: jax.Array
    ) -> tree_lib.PyTree:
        sparsities = {}
        for path, _ in plan.types:
            # Entries of other plans stand in for their position alone: their value is never read.
            column = [entry.sparsities.get(path, 0.0) for entry in entries]
            sparsities[path] = jnp.asarray(column, jnp.float32)[due]
        return plan.new_masks(params, masks, sparsities)

    return new_masks
