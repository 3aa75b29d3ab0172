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
    """A way to train: a pruner, and who decides whether masks are updated."""

    pruner: jaxpruner.BaseUpdater | None  # None trains dense
    # Of the steps after the first; None leaves it to the schedule in the graph.
    update_masks: bool | None = None

    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """Adam, wrapped by the pruner."""
        if self.pruner is None:
            return optax.with_extra_args_support(DENSE_OPTIMIZER)
        return self.pruner.wrap_optax(DENSE_OPTIMIZER)

    def split(self, opt_state: Any) -> tuple[Any, tuple]:
        """The optimizer's state, and apart from it the masks, if steps only read these."""
        if self.update_masks is False:
            return jaxpruner.split_masks(opt_state)
        return opt_state, ()


METHODS = {
    'dense': Method(None),
    'magnitude, host-driven': Method(jaxpruner.MagnitudePruning(**_once), update_masks=False),
    'magnitude, in-graph': Method(jaxpruner.MagnitudePruning(**_once)),
    'magnitude, in-graph, packed': Method(
        jaxpruner.MagnitudePruning(**_once, use_packed_masks=True)
    ),
    'RigL, host-driven': Method(jaxpruner.RigL(**_once), update_masks=False),
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
        if method.update_masks is False:
            # Makes the masks sparse, as the schedule does in the other runs.
            update_step = compiled_step(model, method._replace(update_masks=True))
            params, opt_state = update_step(params, opt_state, (), self._batch)
        rest, self._masks = method.split(opt_state)
        self._carried = params, rest

    def __call__(self) -> Any:
        """The parameters and the optimizer's state after one more step, without masks that it only read."""
        self._carried = self._step(*self._carried, self._masks, self._batch)
        return self._carried


def compiled_step(model: Model, method: Method) -> Callable[..., tuple[Params, Any]]:
    """A training step `(params, opt_state, masks, batch) -> (params, opt_state)`; the first two are donated.

    The optimizer's state and the masks are what `method.split` returns.
    """
    optimizer = method.optimizer()
    decided = {} if method.pruner is None else {'update_masks': method.update_masks}

    def step(params: Params, rest: Any, masks: tuple, batch: Batch) -> tuple[Params, Any]:
        opt_state = jaxpruner.join_masks(rest, masks)

        def loss(trained: Params) -> jax.Array:
            if method.pruner is not None:
                trained = method.pruner.pre_forward_update(trained, opt_state)
            return model.loss(trained, batch)

        updates, new_state = optimizer.update(jax.grad(loss)(params), opt_state, params, **decided)
        return optax.apply_updates(params, updates), method.split(new_state)[0]

    return jax.jit(step, donate_argnums=(0, 1))
