"""Training with one algorithm, as pure functions of data, target sparsities and a carry.

Nothing here is compiled; a sweep compiles it for as many cells as it trains.
"""

import dataclasses
import math
from typing import Any

import jax
import optax

from jaxpruner.base_updater import BaseUpdater
from jaxpruner.baselines.optimizers import make_optimizer
from jaxpruner.baselines.pruners import make_updater, target_sparsities
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Task, Workload, step_key
from jaxpruner.core import tree as tree_lib

# What a key is folded with: other numbers for other uses.
_INIT, _MASKS, _STATE = 0, 1, 3  # and the steps: `task.STEPS`


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of a workload with one algorithm.

    Seeds are paired: with the same seed every algorithm begins with the same weights and sees the same batches.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 8, 'model': {'hidden': [4]}})
    >>> training, data = Training(workload, recipe, 'magnitude'), workload.data(recipe, None)
    >>> targets = training.targets(data, 0.5)
    >>> carry = training.advance(data, targets, training.start(targets, 0, *training.init(data, 0)), 0, 2)
    >>> sorted(training.evaluate(data, training.forward(targets, carry), carry.state))
    ['accuracy', 'loss']
    """

    workload: Workload
    recipe: Recipe
    algorithm: str

    def targets(self, data: Any, sparsity: float) -> Any:
        """The sparsity that each leaf is to reach, found from shapes.

        Args:
          data: of the workload.
          sparsity: over all leaves that may be pruned.

        Returns:
          A tree like the parameters of floats, `None` where dense.
        """
        task = self._task(data)
        params = jax.eval_shape(task.init, jax.random.key(0))
        return target_sparsities(params, self.algorithm, sparsity, self.recipe, task.filter_fn)

    def init(self, data: Any, seed: Any) -> tuple[Any, Any]:
        """Parameters and state before pruning, the same for every algorithm.

        Args:
          data: of the workload.
          seed: int32 scalar.
        """
        task, key = self._task(data), jax.random.key(seed)
        params = task.init(jax.random.fold_in(key, _INIT))
        return params, task.init_state(params, jax.random.fold_in(key, _STATE))

    def start(self, targets: Any, seed: Any, params: Any, state: Any) -> Carry:
        """The carry before the first step.

        Args:
          targets: from `targets`, or an array for each of its floats.
          seed: as for `init`.
          params: from `init`.
          state: from `init`.
        """
        key = jax.random.key(seed)
        updater, tx = self._pruner(targets, key)
        opt_state = tx.init(params)
        # Methods that are sparse from the beginning have masks already: without this the first step would be dense.
        return Carry(updater.post_gradient_update(params, opt_state), state, opt_state, key)

    def advance(self, data: Any, targets: Any, carry: Carry, first: Any, stop: Any) -> Carry:
        """Trains from a step up to another.

        Args:
          data: of the workload.
          targets: as for `start`.
          carry: before step `first`.
          first: the first step, int32 scalar.
          stop: past the last step, int32 scalar; no constant of the program, so that it serves chunks of any length.

        Returns:
          The carry before step `stop`.
        """
        return jax.lax.fori_loop(
            first, stop, lambda number, carry: self.step(data, targets, carry, number), carry
        )

    def step(self, data: Any, targets: Any, carry: Carry, number: Any, *batch: Any) -> Carry:
        """One step.

        Args:
          data: of the workload.
          targets: as for `start`.
          carry: before the step.
          number: of the step, int32 scalar.
          *batch: the batch, of a task with a feed.

        Returns:
          The carry after it.
        """
        task = self._task(data)
        updater, tx = self._pruner(targets, carry.key)
        step = task.step or (lambda *arguments: generic_step(task, *arguments))
        return step(updater, tx, carry, number, *batch)

    def forward(self, targets: Any, carry: Carry) -> Any:
        """The parameters that the forward pass sees: those of a straight-through method are pruned only there.

        Args:
          targets: as for `start`.
          carry: of any step.
        """
        return self._pruner(targets, carry.key)[0].pre_forward_update(carry.params, carry.opt_state)

    def evaluate(self, data: Any, params: Any, state: Any) -> dict[str, jax.Array]:
        """The task's metrics.

        Args:
          data: of the workload.
          params: from `forward`.
          state: of the carry.
        """
        return self._task(data).evaluate(params, state)

    def prunable(self, data: Any) -> dict[str, int]:
        """The leaves that may be pruned: their number of weights by path.

        Args:
          data: of the workload.
        """
        task = self._task(data)
        paths, leaves, _ = tree_lib.flatten_with_paths(jax.eval_shape(task.init, jax.random.key(0)))
        chosen = [
            (path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
            if task.filter_fn(path, leaf)
        ]
        return {tree_lib.path_string(path): math.prod(leaf.shape) for path, leaf in chosen}

    def _task(self, data: Any) -> Task:
        return self.workload.task(self.recipe, data)

    def _pruner(
        self, targets: Any, key: jax.Array
    ) -> tuple[BaseUpdater, optax.GradientTransformationExtraArgs]:
        updater = make_updater(
            self.algorithm, targets, self.recipe, jax.random.fold_in(key, _MASKS)
        )
        return updater, updater.wrap_optax(make_optimizer(self.recipe))


def generic_step(
    task: Task,
    updater: BaseUpdater,
    tx: optax.GradientTransformation,
    carry: Carry,
    step: Any,
    batch: Any = None,
) -> Carry:
    """One update of the optimizer on one batch.

    Args:
      task: what is trained.
      updater: the pruner.
      tx: the optimizer that it wraps.
      carry: before the step.
      step: its number, int32 scalar.
      batch: of a task with a feed; others draw their own.

    Returns:
      The carry after it.

    >>> generic_step.__name__
    'generic_step'
    """
    batch_key, loss_key = jax.random.split(step_key(carry.key, step))
    batch = task.batch(batch_key, step) if batch is None else batch

    def loss(params: Any) -> tuple[jax.Array, Any]:
        return task.loss(
            updater.pre_forward_update(params, carry.opt_state), carry.state, batch, loss_key
        )

    grads, state = jax.grad(loss, has_aux=True)(carry.params)
    updates, opt_state = tx.update(grads, carry.opt_state, carry.params)
    params: Any = optax.apply_updates(carry.params, updates)
    return carry._replace(params=params, state=state, opt_state=opt_state)
