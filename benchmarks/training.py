"""Training steps to time and to look into: dense ones, and those of pruners whose masks are sparse already."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import jaxpruner
from benchmarks.models import Batch, Model, Params
from benchmarks.selection import SPARSITY
from jaxpruner import sparsity_distributions, sparsity_schedules

DENSE_OPTIMIZER = optax.adam(1e-3)

_FIRST_STEP_ALONE = sparsity_schedules.OneShotSchedule(target_step=0)
_EACH_STEP = sparsity_schedules.PeriodicSchedule(update_freq=1)
_settings = functools.partial(
    dict,
    sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=SPARSITY),
)
_once = _settings(scheduler=_FIRST_STEP_ALONE)


class Method(NamedTuple):
    """A way to train."""

    pruner: jaxpruner.BaseUpdater | None  # None trains dense

    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """Adam, wrapped by the pruner."""
        if self.pruner is None:
            return optax.with_extra_args_support(DENSE_OPTIMIZER)
        return self.pruner.wrap_optax(DENSE_OPTIMIZER)


METHODS = {
    'dense': Method(None),
    'magnitude, in-graph': Method(jaxpruner.MagnitudePruning(**_once)),
    'magnitude, in-graph, packed': Method(
        jaxpruner.MagnitudePruning(**_once, use_packed_masks=True)
    ),
    'RigL, in-graph': Method(jaxpruner.RigL(**_once)),
    'straight-through magnitude': Method(jaxpruner.SteMagnitudePruning(**_once)),
    'magnitude, an update due': Method(
        jaxpruner.MagnitudePruning(**_settings(scheduler=_EACH_STEP))
    ),
}


class Training:
    """A training run: each call takes one step, whose buffers are donated to the next."""

    def __init__(self, model: Model, method: Method):
        self._batch = model.batch()
        params = jax.jit(model.init)()
        opt_state = method.optimizer().init(params)
        if method.pruner is not None:
            params = method.pruner.post_gradient_update(params, opt_state)
        self._step = compiled_step(model, method)
        self._carried = params, opt_state

    def __call__(self) -> Any:
        """The parameters and the optimizer's state after one more step."""
        self._carried = self._step(*self._carried, self._batch)
        return self._carried


def compiled_step(model: Model, method: Method) -> Callable[..., tuple[Params, Any]]:
    """A training step `(params, opt_state, batch) -> (params, opt_state)`; the first two are donated."""
    optimizer = method.optimizer()

    def step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any]:

        def loss(trained: Params) -> jax.Array:
            if method.pruner is not None:
                trained = method.pruner.pre_forward_update(trained, opt_state)
            return model.loss(trained, batch)

        updates, new_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), new_state

    return jax.jit(step, donate_argnums=(0, 1))
