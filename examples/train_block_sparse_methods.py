"""Three ways to train a model with as many steps: dense, with masks (RigL), and on blocks (RigL among blocks)."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

import jaxpruner
from jaxpruner import sparse, sparsity_schedules
from jaxpruner.sparse import CompactModel

Loss = Callable[[Any, Any], jax.Array]  # of outputs and labels
_MOVE_EVERY = 100  # steps, or a quarter of a short training
_LAST_MOVE = 0.75  # of the steps
_DROPPED = 0.3  # of the weights or blocks at first, falling to nothing


@dataclasses.dataclass
class Run:
    """A training run.

    Attributes:
      step: `(carried, inputs, labels, number) -> carried`, compiled.
      apply: `(carried, inputs) -> outputs`, compiled.
      carried: what goes from step to step.
      seconds: that steps took, without the first, which compiles.
    """

    step: Callable[..., Any]
    apply: Callable[..., Any]
    carried: Any
    seconds: float = 0.0

    def advance(self, inputs: Any, labels: Any, number: int) -> None:
        """Takes a step, and waits for it."""
        began = time.perf_counter()
        self.carried = jax.block_until_ready(self.step(self.carried, inputs, labels, number))
        if number:
            self.seconds += time.perf_counter() - began

    def outputs(self, inputs: Any) -> jax.Array:
        """What the model makes of inputs now."""
        return self.apply(self.carried, inputs)


def move_settings(steps: int) -> dict[str, Any]:
    """When weights or blocks move, and how many."""
    last = int(_LAST_MOVE * steps)
    every = max(1, min(_MOVE_EVERY, steps // 4))
    scheduler = sparsity_schedules.PeriodicSchedule(every, every, update_end_step=max(every, last))
    fraction = optax.cosine_decay_schedule(_DROPPED, max(1, last))
    return {'scheduler': scheduler, 'drop_fraction_fn': fraction}


def dense_run(apply_fn: Callable[..., Any], params: Any, tx: Any, loss: Loss) -> Run:
    """Trains all weights."""

    def step(carried: Any, inputs: Any, labels: Any, number: Any) -> Any:
        del number
        params, state = carried
        grads = jax.grad(lambda params: loss(apply_fn(params, inputs), labels))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Run(
        jax.jit(step),
        jax.jit(lambda carried, inputs: apply_fn(carried[0], inputs)),
        (params, tx.init(params)),
    )


def masked_run(apply_fn: Callable[..., Any], params: Any, tx: Any, loss: Loss, pruner: Any) -> Run:
    """Trains dense arrays under masks."""
    masked = pruner.wrap_optax(tx)
    run = dense_run(apply_fn, params, masked, loss)
    run.carried = pruner.post_gradient_update(*run.carried), run.carried[1]
    return run


def rigl(model: CompactModel, steps: int, seed: int) -> jaxpruner.RigL:
    """RigL that keeps as many weights of each leaf as the blocks are."""
    sparsities = {}
    for leaf in model.plan.leaves.values():
        if leaf.layout is not None:
            sparsities[leaf.name] = 1 - leaf.kept / leaf.size
    return jaxpruner.RigL(
        sparsity_distribution_fn=functools.partial(
            jaxpruner.sparsity_distributions.uniform,
            sparsity=0.0,
            filter_fn=lambda path, leaf: False,  # all others stay dense
            custom_sparsity_map=sparsities,
        ),
        rng_seed=seed,
        **move_settings(steps),
    )


def block_model(
    apply_fn: Callable[..., Any], params: Any, sample: Any, steps: int, **settings: Any
) -> CompactModel:
    """The model in blocks."""
    return sparse.block_sparse(
        apply_fn, params, sample, algorithm='rigl', **move_settings(steps), **settings
    )


def block_run(model: CompactModel, params: Any, tx: Any, loss: Loss) -> Run:
    """Trains blocks."""
    tx = model.wrap_optax(tx)

    def loss_of(weights: Any, topology: Any, probe: Any, inputs: Any, labels: Any) -> jax.Array:
        return loss(model.apply(weights, topology, inputs, probe=probe), labels)

    def step(carried: Any, inputs: Any, labels: Any, number: Any) -> Any:
        weights, topology, state = carried

        def probe_grads(weights: Any, topology: Any) -> Mapping[str, jax.Array]:
            return jax.grad(loss_of, argnums=2)(weights, topology, model.probe(), inputs, labels)

        grads = jax.grad(loss_of)(weights, topology, None, inputs, labels)
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
        return model.update(weights, topology, state, tx=tx, step=number, probe_grads=probe_grads)

    weights, topology = model.pack(params)
    return Run(
        jax.jit(step),
        jax.jit(lambda carried, inputs: model.apply(*carried[:2], inputs)),
        (weights, topology, tx.init(weights)),
    )
