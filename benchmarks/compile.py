"""How long it takes to trace and compile a mask update of a transformer of 214 arrays, and its dense training step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

import jaxpruner
from benchmarks.models import TRANSFORMERS, Transformer
from benchmarks.report import Row
from benchmarks.selection import SPARSITY
from benchmarks.timing import interleaved, ratio
from benchmarks.training import METHODS, compiled_step
from jaxpruner import sparsity_distributions, sparsity_schedules

MANY_LEAVES = Transformer(13, 256, heads=4, vocabulary=1024, batch_size=4, sequence=64)
MODELS = {'small': TRANSFORMERS['small'], 'cpu': MANY_LEAVES, 'gpu': MANY_LEAVES}
PRUNERS = {
    'magnitude': jaxpruner.MagnitudePruning,
    'global magnitude': jaxpruner.GlobalMagnitudePruning,
    'RigL': jaxpruner.RigL,
    'magnitude, 2:4': lambda scheduler, **_: jaxpruner.MagnitudePruning(
        scheduler, sparsity_type='2:4'
    ),
}
DENSE = 'dense training step'
ROUNDS = 3
COLUMNS = ('seconds', 'times the dense step', 'leaves')


def run(size: str, rounds: int) -> list[Row]:
    """Times compilations from empty caches; each is a due update alone, with SGD as the optimizer."""
    model = MODELS[size]
    params = jax.eval_shape(model.init)
    calls: dict[str, Callable[[], None]] = {
        name: _update(make(**_settings()), params) for name, make in PRUNERS.items()
    }
    calls[DENSE] = _dense_step(model, params)
    times = interleaved(calls, rounds, warm=False)
    leaves = len(jax.tree.leaves(params))
    return [
        Row(name, (times[name].median, ratio(times[name], times[DENSE]), leaves)) for name in calls
    ]


def _settings() -> dict[str, Any]:
    return {
        'scheduler': sparsity_schedules.PeriodicSchedule(update_freq=1),
        'sparsity_distribution_fn': functools.partial(
            sparsity_distributions.uniform, sparsity=SPARSITY
        ),
    }


def _update(pruner: jaxpruner.BaseUpdater, params: Any) -> Callable[[], None]:
    optimizer = pruner.wrap_optax(optax.sgd(0.1))
    state = jax.eval_shape(optimizer.init, params)
    return lambda: _compile(jax.jit(optimizer.update), params, state, params)


def _dense_step(model: Transformer, params: Any) -> Callable[[], None]:
    state = jax.eval_shape(METHODS['dense'].optimizer().init, params)
    batch = jax.eval_shape(model.batch)
    return lambda: _compile(compiled_step(model, METHODS['dense']), params, state, (), batch)


def _compile(function: Any, *shapes: Any) -> None:
    jax.clear_caches()
    function.lower(*shapes).compile()
