"""Training with one algorithm, as pure functions of data, target sparsities and a carry.

Nothing here is compiled; a sweep compiles it for as many cells as it trains.
"""

import dataclasses
import math
from typing import Any

import jax
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.baselines.metrics import Metrics
from jaxpruner.baselines.optimizers import make_optimizer
from jaxpruner.baselines.pruners import make_updater, target_sparsities
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Task, Workload, step_key

# What a seed's key is folded with: another number for each use; that of the steps is `task.STEPS`.
_INIT = 0
_MASKS = 1
_STATE = 3


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of a workload with one algorithm.

    Seeds are paired: with the same seed all algorithms have the same initial weights and batches.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 8, 'model': {'hidden': [4]}})
    >>> training, data = Training(workload, recipe, 'magnitude'), workload.data(recipe, None)
    >>> targets = training.targets(data, 0.5)
    >>> carry = training.start(targets, 0, *training.init(data, 0))
    >>> carry = training.advance(data, targets, carry, 0, 2)
    >>> sorted(training.evaluate(data, training.forward(targets, carry), carry.state))
    ['accuracy', 'loss']
    """

    workload: Workload
    recipe: Recipe
    algorithm: str

    def targets(self, data: Any, sparsity: float) -> Any:
        """The sparsity that each leaf is to reach: floats, `None` where dense."""
        task = self._task(data)
        params = jax.eval_shape(task.init, jax.random.key(0))
        return target_sparsities(params, self.algorithm, sparsity, self.recipe, task.filter_fn)

    def init(self, data: Any, seed: Any) -> tuple[Any, Any]:
        """Parameters and state before pruning, the same for every algorithm."""
        task = self._task(data)
        key = jax.random.key(seed)
        params_key = jax.random.fold_in(key, _INIT)
        state_key = jax.random.fold_in(key, _STATE)
        params = task.init(params_key)
        return params, task.init_state(params, state_key)

    def start(self, targets: Any, seed: Any, params: Any, state: Any) -> Carry:
        """The carry before the first step; `targets` may hold arrays in place of floats."""
        key = jax.random.key(seed)
        updater, tx = self._pruner(targets, key)
        opt_state = tx.init(params)
        # Methods that begin sparse have masks already; otherwise their first step would be dense.
        params = updater.post_gradient_update(params, opt_state)
        return Carry(params, state, opt_state, key)

    def advance(self, data: Any, targets: Any, carry: Carry, first: Any, stop: Any) -> Carry:
        """Trains from step `first` up to `stop`, both int32 scalars.

        They are no constants of the program, so that it serves chunks of any length.
        """

        def step(number, carry):
            return self.step(data, targets, carry, number)

        return jax.lax.fori_loop(first, stop, step, carry)

    def step(self, data: Any, targets: Any, carry: Carry, number: Any, *batch: Any) -> Carry:
        """One step; of a task with a feed its batch comes last."""
        task = self._task(data)
        updater, tx = self._pruner(targets, carry.key)
        if task.step is not None:
            return task.step(updater, tx, carry, number, *batch)
        return _generic_step(task, updater, tx, carry, number, *batch)

    def forward(self, targets: Any, carry: Carry) -> Any:
        """The parameters of the forward pass: straight-through methods prune only there."""
        updater, _ = self._pruner(targets, carry.key)
        return updater.pre_forward_update(carry.params, carry.opt_state)

    def evaluate(self, data: Any, params: Any, state: Any) -> Metrics:
        """The task's metrics of parameters from `forward`."""
        return self._task(data).evaluate(params, state)

    def prunable(self, data: Any) -> dict[str, int]:
        """The number of weights of each leaf that may be pruned, by path."""
        task = self._task(data)
        params = jax.eval_shape(task.init, jax.random.key(0))
        paths, leaves, _ = tree_lib.flatten_with_paths(params)
        sizes = {}
        for path, leaf in zip(paths, leaves, strict=True):
            if task.filter_fn(path, leaf):
                sizes[tree_lib.path_string(path)] = math.prod(leaf.shape)
        return sizes

    def _task(self, data: Any) -> Task:
        return self.workload.task(self.recipe, data)

    def _pruner(
        self, targets: Any, key: jax.Array
    ) -> tuple[BaseUpdater, optax.GradientTransformationExtraArgs]:
        mask_key = jax.random.fold_in(key, _MASKS)
        updater = make_updater(self.algorithm, targets, self.recipe, mask_key)
        optimizer = make_optimizer(self.recipe)
        return updater, updater.wrap_optax(optimizer)


def _generic_step(
    task: Task,
    updater: BaseUpdater,
    tx: optax.GradientTransformation,
    carry: Carry,
    step: Any,
    batch: Any = None,
) -> Carry:
    """One update of the optimizer on one batch, drawn here where no feed gives it."""
    key = step_key(carry.key, step)
    batch_key, loss_key = jax.random.split(key)
    if batch is None and task.batch is not None:
        batch = task.batch(batch_key, step)

    def loss(params):
        forward = updater.pre_forward_update(params, carry.opt_state)
        return task.loss(forward, carry.state, batch, loss_key)

    grads, state = jax.grad(loss, has_aux=True)(carry.params)
    updates, opt_state = tx.update(grads, carry.opt_state, carry.params)
    params: Any = optax.apply_updates(carry.params, updates)
    return carry._replace(params=params, state=state, opt_state=opt_state)
