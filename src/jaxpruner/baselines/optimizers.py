"""A recipe's optimizer and learning-rate schedule, as optax has them."""

from typing import Any

import jax
import optax

from jaxpruner import tree as tree_lib
from jaxpruner.baselines.recipe import Optimizer, Recipe

_DECAYS = 'cosine', 'steps', 'constant', 'inverse_sqrt'


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer of a recipe, which the pruner wraps; `ValueError` for an unknown name."""
    settings = recipe.optimizer
    if settings.name not in _OPTIMIZERS:
        nearest = tree_lib.nearest(settings.name, _OPTIMIZERS)
        raise ValueError(f'optimizer.name {settings.name!r} is unknown; {nearest}')
    optimizer = _OPTIMIZERS[settings.name](settings, make_schedule(recipe))
    if not settings.clip_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), optimizer)


def make_schedule(recipe: Recipe) -> optax.Schedule:
    """The learning rate of a step: a linear warmup, then a decay; `ValueError` for an unknown one."""
    rate = recipe.optimizer.learning_rate
    decay = recipe.schedule.decay
    if decay not in _DECAYS:
        raise ValueError(f'schedule.decay {decay!r} is unknown; {tree_lib.nearest(decay, _DECAYS)}')
    warmup = recipe.share(recipe.schedule.warmup)
    if decay == 'inverse_sqrt':
        after = _inverse_sqrt(rate, warmup)
    elif decay == 'cosine':
        decay_steps = max(1, recipe.steps - warmup)
        after = optax.cosine_decay_schedule(rate, decay_steps)
    elif decay == 'steps':
        after = _steps(recipe, warmup)
    else:
        after = optax.constant_schedule(rate)
    if not warmup:
        return after
    before = optax.linear_schedule(0.0, rate, warmup)
    return optax.join_schedules([before, after], [warmup])


def _inverse_sqrt(rate: float, warmup: int) -> optax.Schedule:
    """Has the full rate at the end of the warmup."""

    def schedule(step):
        return rate * ((warmup + 1) / (warmup + 1 + step)) ** 0.5

    return schedule


def _steps(recipe: Recipe, warmup: int) -> optax.Schedule:
    boundaries = [recipe.share(share) for share in recipe.schedule.boundaries]
    are_growing = boundaries == sorted(set(boundaries))
    if not boundaries or not are_growing or boundaries[0] <= warmup:
        raise ValueError(
            'schedule.boundaries must be growing shares of the steps after the warmup, '
            f'got {list(recipe.schedule.boundaries)}'
        )
    scales = {boundary - warmup: recipe.schedule.factor for boundary in boundaries}
    return optax.piecewise_constant_schedule(recipe.optimizer.learning_rate, scales)


def _decay_mask(settings: Optimizer) -> Any:
    if not settings.decay_kernels_only:
        return None

    def are_kernels(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return are_kernels


def _with_l2(
    settings: Optimizer, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    if not settings.weight_decay:
        return optax.chain(optimizer)
    decay = optax.add_decayed_weights(settings.weight_decay, _decay_mask(settings))
    return optax.chain(decay, optimizer)


def _sgd(settings: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    momentum = settings.momentum or None
    optimizer = optax.sgd(schedule, momentum=momentum, nesterov=settings.nesterov)
    return _with_l2(settings, optimizer)


def _adam(settings: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    optimizer = optax.adam(schedule, b2=settings.beta2, eps=settings.epsilon)
    return _with_l2(settings, optimizer)


def _adamw(settings: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(
        schedule,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mask=_decay_mask(settings),
    )


def _adafactor(settings: Optimizer, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adafactor(
        schedule,
        weight_decay_rate=settings.weight_decay or None,
        weight_decay_mask=_decay_mask(settings),
    )


_OPTIMIZERS = {'sgd': _sgd, 'adam': _adam, 'adamw': _adamw, 'adafactor': _adafactor}
