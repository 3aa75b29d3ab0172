"""A recipe's optimizer and learning-rate schedule, as optax has them."""

from typing import Any

import jax
import optax

from jaxpruner.baselines.recipe import Optimizer, Recipe
from jaxpruner.core import tree as tree_lib

_DECAYS = 'cosine', 'steps', 'constant', 'inverse_sqrt'
_OPTIMIZERS = 'sgd', 'adam', 'adamw', 'adafactor'


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer of a recipe.

    Args:
      recipe: its sections `optimizer` and `schedule`.

    Returns:
      An optax transformation; the pruner wraps it.

    Raises:
      ValueError: an unknown optimizer or decay.

    >>> make_optimizer(Recipe('resnet')).init({'kernel': jax.numpy.ones((2, 2))}) is None
    False
    """
    numbers = recipe.optimizer
    make = {'sgd': _sgd, 'adam': _adam, 'adamw': _adamw, 'adafactor': _adafactor}.get(numbers.name)
    if make is None:
        raise ValueError(
            f'optimizer.name {numbers.name!r} is unknown; {tree_lib.nearest(numbers.name, _OPTIMIZERS)}'
        )
    optimizer = make(numbers, make_schedule(recipe))
    return (
        optax.chain(optax.clip_by_global_norm(numbers.clip_norm), optimizer)
        if numbers.clip_norm
        else optimizer
    )


def make_schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate of a recipe: a linear warmup, then a decay.

    Args:
      recipe: its sections `optimizer` and `schedule`.

    Returns:
      step -> learning rate.

    Raises:
      ValueError: an unknown decay, or boundaries that do not grow.

    >>> float(make_schedule(Recipe('resnet', steps=10))(10))
    0.0
    """
    rate, schedule = recipe.optimizer.learning_rate, recipe.schedule
    if schedule.decay not in _DECAYS:
        raise ValueError(
            f'schedule.decay {schedule.decay!r} is unknown; {tree_lib.nearest(schedule.decay, _DECAYS)}'
        )
    warmup = recipe.share(schedule.warmup)
    if schedule.decay == 'inverse_sqrt':
        # Both parts meet at the end of the warmup.
        after: optax.Schedule = lambda step: rate * ((warmup + 1) / (warmup + 1 + step)) ** 0.5  # noqa: E731
    elif schedule.decay == 'cosine':
        after = optax.cosine_decay_schedule(rate, max(1, recipe.steps - warmup))
    elif schedule.decay == 'steps':
        after = _steps(recipe, warmup)
    else:
        after = optax.constant_schedule(rate)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warmup), after], [warmup])


def _steps(recipe: Recipe, warmup: int) -> optax.Schedule:
    boundaries = [recipe.share(share) for share in recipe.schedule.boundaries]
    if not boundaries or sorted(set(boundaries)) != boundaries or boundaries[0] <= warmup:
        raise ValueError(
            'schedule.boundaries must be growing shares of the steps after the warmup, '
            f'got {list(recipe.schedule.boundaries)}'
        )
    scales = {boundary - warmup: recipe.schedule.factor for boundary in boundaries}
    return optax.piecewise_constant_schedule(recipe.optimizer.learning_rate, scales)


def _decay_mask(numbers: Optimizer) -> Any:
    if not numbers.decay_kernels_only:
        return None
    return lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _l2(numbers: Optimizer) -> list[optax.GradientTransformation]:
    return (
        [optax.add_decayed_weights(numbers.weight_decay, _decay_mask(numbers))]
        if numbers.weight_decay
        else []
    )


def _sgd(numbers: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        *_l2(numbers),
        optax.sgd(schedule, momentum=numbers.momentum or None, nesterov=numbers.nesterov),
    )


def _adam(numbers: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(*_l2(numbers), optax.adam(schedule, b2=numbers.beta2, eps=numbers.epsilon))


def _adamw(numbers: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b2=numbers.beta2,
        eps=numbers.epsilon,
        weight_decay=numbers.weight_decay,
        mask=_decay_mask(numbers),
    )


def _adafactor(numbers: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adafactor(
        schedule,
        weight_decay_rate=numbers.weight_decay or None,
        weight_decay_mask=_decay_mask(numbers),
    )
