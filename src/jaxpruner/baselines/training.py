"""Training with one algorithm, as pure functions of target sparsities and a carry: optimizer, pruner, steps.

Nothing here is compiled; a sweep compiles it for as many cells as it trains. The target of each leaf is computed before
compilation and enters the program as an array, so that one program serves every sparsity.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import jax
import optax

from jaxpruner import algorithms, api, base_updater, sparsity_distributions
from jaxpruner import tree as tree_lib
from jaxpruner.base_updater import BaseUpdater
from jaxpruner.baselines.recipe import Recipe
from jaxpruner.baselines.task import Carry, Metrics, Task, gradient_step, step_key
from jaxpruner.sparsity_distributions import FilterFn


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer of a recipe, which the pruner wraps; `ValueError` for an unknown name."""
    settings, schedule = recipe.optimizer, make_schedule(recipe)
    decay, mask = settings.weight_decay, None
    if settings.decay_kernels_only:
        mask = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    l2 = [optax.add_decayed_weights(decay, mask)] if decay else []
    adam: Any = {'b2': settings.beta2, 'eps': settings.epsilon}
    match settings.name:
        case 'sgd':
            momentum = settings.momentum or None
            sgd = optax.sgd(schedule, momentum=momentum, nesterov=settings.nesterov)
            optimizer = optax.chain(*l2, sgd)
        case 'adam':
            optimizer = optax.chain(*l2, optax.adam(schedule, **adam))
        case 'adamw':
            optimizer = optax.adamw(schedule, weight_decay=decay, mask=mask, **adam)
        case 'adafactor':
            optimizer = optax.adafactor(
                schedule, weight_decay_rate=decay or None, weight_decay_mask=mask
            )
        case name:
            _refuse('optimizer.name', name, ('sgd', 'adam', 'adamw', 'adafactor'))
    if not settings.clip_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), optimizer)


def make_schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate of a step: a linear warmup, then a decay; `ValueError` for an unknown one."""
    rate, warmup = recipe.optimizer.learning_rate, recipe.share(recipe.schedule.warmup)
    match recipe.schedule.decay:
        case 'inverse_sqrt':  # the full rate at the end of the warmup
            after: Any = functools.partial(_inverse_sqrt, rate, warmup)
        case 'cosine':
            after = optax.cosine_decay_schedule(rate, max(1, recipe.steps - warmup))
        case 'steps':
            boundaries = [recipe.share(share) for share in recipe.schedule.boundaries]
            are_growing = boundaries == sorted(set(boundaries))
            if not boundaries or not are_growing or boundaries[0] <= warmup:
                raise ValueError(
                    'schedule.boundaries must be growing shares of the steps after the warmup, '
                    f'got {list(recipe.schedule.boundaries)}'
                )
            scales = {boundary - warmup: 0.1 for boundary in boundaries}
            after = optax.piecewise_constant_schedule(rate, scales)
        case 'constant':
            after = optax.constant_schedule(rate)
        case decay:
            _refuse('schedule.decay', decay, ('cosine', 'steps', 'constant', 'inverse_sqrt'))
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warmup), after], [warmup])


def _refuse(what: str, name: str, names: Iterable[str]) -> NoReturn:
    raise ValueError(f'{what} {name!r} is unknown; {tree_lib.nearest(name, names)}')


def _inverse_sqrt(rate: float, warmup: int, step: Any) -> Any:
    return rate * ((warmup + 1) / (warmup + 1 + step)) ** 0.5


DENSE = 'no_prune'
_STRAIGHT_THROUGH = algorithms.SteMagnitudePruning, algorithms.SteRandomPruning
_DISTRIBUTIONS = {'uniform': sparsity_distributions.uniform, 'erk': sparsity_distributions.erk}


def check_algorithm(name: str) -> None:
    """Raises a `ValueError` for a name that no algorithm has."""
    if name not in api.ALGORITHM_REGISTRY:
        _refuse('algorithm', name, api.all_algorithm_names())


def target_sparsities(
    params: Any, algorithm: str, sparsity: float, recipe: Recipe, filter_fn: FilterFn
) -> Any:
    """The sparsity that each leaf is to reach, by the recipe's distribution: `None` where dense.

    >>> shapes = {'kernel': jax.ShapeDtypeStruct((4, 4), 'float32')}
    >>> shapes['bias'] = jax.ShapeDtypeStruct((4,), 'float32')
    >>> not_bias = sparsity_distributions.NOT_DIM_ONE_FILTER
    >>> target_sparsities(shapes, 'magnitude', 0.5, Recipe('resnet'), not_bias)
    {'bias': None, 'kernel': 0.5}
    """
    check_algorithm(algorithm)
    name = recipe.pruning.distribution
    if name not in _DISTRIBUTIONS:
        _refuse('pruning.distribution', name, _DISTRIBUTIONS)
    targets = _DISTRIBUTIONS[name](params, sparsity, filter_fn=filter_fn)
    if algorithm == DENSE:
        return jax.tree.map(lambda _: None, params)
    return jax.tree.map(float, targets)


def make_updater(
    algorithm: str, targets: Any, recipe: Recipe, seed: Any = 0
) -> base_updater.BaseUpdater:
    """The pruner of an algorithm, with the recipe's schedule.

    `targets` is a tree like the parameters of floats or traced scalars, `None` where dense; `seed`
    may be a traced key.
    """
    check_algorithm(algorithm)
    updater_class, pruning = api.ALGORITHM_REGISTRY[algorithm], recipe.pruning
    is_trainer = updater_class.starts_sparse or issubclass(updater_class, _STRAIGHT_THROUGH)
    prefix = 'trainer_' if is_trainer else ''
    first, last = getattr(pruning, f'{prefix}start'), getattr(pruning, f'{prefix}end')
    if last < first:
        raise ValueError(
            f'pruning.{prefix}start, {prefix}end: the end {last} lies before the start {first}'
        )
    start, end = recipe.share(first), recipe.share(last)
    frequency = max(1, recipe.share(pruning.frequency))
    # The last update reaches the target, unless masks are there whenever they are sparse; so the end must be a step
    # with an update.
    if not (updater_class.starts_sparse or issubclass(updater_class, algorithms.ACDC)):
        end = max(start, end // frequency * frequency)
    return api.create_updater_from_config(
        {
            **pruning.own,
            'algorithm': algorithm,
            'sparsity_distribution_fn': lambda params: targets,
            'update_freq': frequency,
            'update_start_step': start,
            'update_end_step': end,
            'power': pruning.power,
            'drop_fraction': pruning.drop_fraction,
            'sparsity_type': pruning.sparsity_type,
            'rng_seed': seed,
        }
    )


# What a seed's key is folded with: another number for each use; that of the steps is `task.STEPS`.
_INIT = 0
_MASKS = 1
_STATE = 3


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of a task with one algorithm.

    Seeds are paired: with the same seed all algorithms have the same initial weights and batches.

    >>> from jaxpruner.baselines import WORKLOADS
    >>> workload = WORKLOADS['lenet']
    >>> recipe = workload.default('default').updated({'steps': 8, 'model': {'hidden': [4]}})
    >>> task = workload.task(recipe, workload.data(recipe, None))
    >>> training = Training(task, recipe, 'magnitude')
    >>> targets = training.targets(0.5)
    >>> carry = training.start(training.init(0), targets, 0)
    >>> carry = training.advance(carry, targets, 0, 2)
    >>> sorted(training.evaluate(carry, targets))
    ['accuracy', 'loss']
    """

    task: Task
    recipe: Recipe
    algorithm: str

    def targets(self, sparsity: float) -> Any:
        """The sparsity that each leaf is to reach: floats, `None` where dense."""
        params = jax.eval_shape(self.task.init, jax.random.key(0))
        return target_sparsities(params, self.algorithm, sparsity, self.recipe, self.task.filter_fn)

    def init(self, seed: Any) -> tuple[Any, Any]:
        """Parameters and state before pruning, the same for every algorithm."""
        key = jax.random.key(seed)
        params = self.task.init(jax.random.fold_in(key, _INIT))
        return params, self.task.init_state(params, jax.random.fold_in(key, _STATE))

    def start(self, begun: tuple[Any, Any], targets: Any, seed: Any) -> Carry:
        """The carry before the first step, from `init`; `targets` may hold arrays in place of floats."""
        (params, state), key = begun, jax.random.key(seed)
        updater, tx = self._pruner(targets, key)
        opt_state = tx.init(params)
        # Methods that begin sparse have masks already; otherwise their first step would be dense.
        params = updater.post_gradient_update(params, opt_state)
        return Carry(params, state, opt_state, key)

    def advance(self, carry: Carry, targets: Any, first: Any, stop: Any) -> Carry:
        """Trains from step `first` up to `stop`, both int32 scalars.

        They are no constants of the program, so that it serves chunks of any length.
        """
        step = lambda number, carry: self.step(carry, targets, number)  # noqa: E731
        return jax.lax.fori_loop(first, stop, step, carry)

    def step(self, carry: Carry, targets: Any, number: Any, *batch: Any) -> Carry:
        """One step; of a task with a feed its batch comes last."""
        task, (updater, tx) = self.task, self._pruner(targets, carry.key)
        if task.step is not None:
            return task.step(updater, tx, carry, number, *batch)
        batch_key, loss_key = jax.random.split(step_key(carry.key, number))
        examples = batch[0] if batch else task.batch and task.batch(batch_key, number)

        def loss(params):
            return task.loss(params, carry.state, examples, loss_key)

        return gradient_step(updater, tx, carry, loss)

    def evaluate(self, carry: Carry, targets: Any) -> Metrics:
        """The task's metrics."""
        evaluate: Any = self.task.evaluate
        return evaluate(self._forward(carry, targets), carry.state)

    def values(self, carry: Carry, targets: Any, inputs: Any) -> Any:
        """What the host asks for."""
        values: Any = self.task.values
        return values(self._forward(carry, targets), carry.state, inputs)

    def prunable(self) -> dict[str, int]:
        """The number of weights of each leaf that may be pruned, by path."""
        params = jax.eval_shape(self.task.init, jax.random.key(0))
        sizes = {}
        for path, leaf in tree_lib.zip_with_paths(params):
            if self.task.filter_fn(path, leaf):
                sizes[tree_lib.path_string(path)] = leaf.size
        return sizes

    def _forward(self, carry: Carry, targets: Any) -> Any:
        """The parameters of the forward pass: straight-through methods prune only there."""
        updater, _ = self._pruner(targets, carry.key)
        return updater.pre_forward_update(carry.params, carry.opt_state)

    def _pruner(
        self, targets: Any, key: jax.Array
    ) -> tuple[BaseUpdater, optax.GradientTransformationExtraArgs]:
        mask_key = jax.random.fold_in(key, _MASKS)
        updater = make_updater(self.algorithm, targets, self.recipe, mask_key)
        return updater, updater.wrap_optax(make_optimizer(self.recipe))
