"""A case of the contract, set up and trained; what the tests of this folder share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpruner
from contract import front_ends, tables
from helpers import compiling

STEPS = 12
SPARSITY = 0.6
_BATCH = 32


@dataclasses.dataclass
class Setup:
    """A case, ready to train; `step` is the one jitted function that all its runs share."""

    case: tables.Case
    updater: jaxpruner.BaseUpdater
    tx: optax.GradientTransformation
    step: Callable[..., tuple[Any, Any]]

    @property
    def rules(self) -> tables.Algorithm:
        return tables.ALGORITHMS[self.case.algorithm]

    def start(self, seed: int) -> tuple[Any, Any]:
        """Parameters and optimizer state before the first step."""
        params, _ = front_ends.make(self.case.front_end, seed)
        opt_state = self.tx.init(params)
        if self.rules.starts_sparse:
            params = self.updater.post_gradient_update(params, opt_state)
        return params, opt_state


def config_of(case: tables.Case) -> dict[str, Any]:
    """A flat config, as users write it; the keys that an algorithm does not know are given to all."""
    config = {
        'algorithm': case.algorithm,
        'drop_fraction': 0.3,
        'use_packed_masks': case.packed,
        **tables.OPTIMIZERS[case.optimizer].schedule,
    }
    if case.sparsity_type not in tables.N_BY_M:  # N:M says itself how much is removed
        config |= {'dist_type': case.distribution, 'sparsity': SPARSITY}
    return (
        config
        if case.sparsity_type == tables.DENSE
        else config | {'sparsity_type': case.sparsity_type}
    )


def make_step(
    updater: jaxpruner.BaseUpdater, tx: optax.GradientTransformation, apply: Callable
) -> Callable:
    """One training step, not jitted. It never calls `post_gradient_update`."""

    def step(params, opt_state, batch):
        def loss(values):
            predicted = apply(updater.pre_forward_update(values, opt_state), batch[0])
            return jnp.mean((predicted - batch[1]) ** 2)

        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def set_up(case: tables.Case) -> Setup:
    updater = jaxpruner.create_updater_from_config(config_of(case))
    tx = tables.OPTIMIZERS[case.optimizer].wrap(updater)
    _, apply = front_ends.make(case.front_end, 0)
    return Setup(case, updater, tx, compiled(case, make_step(updater, tx, apply)))


def compiled(case: tables.Case, step: Callable) -> Callable:
    """The jitted step. Quick cases are compiled as users' programs are."""
    return jax.jit(step, compiler_options=compiling.AS_USERS if case in tables.QUICK else {})


@dataclasses.dataclass
class Trained:
    """A case after training; the tests of one case in one process share it, and with it what was compiled."""

    setup: Setup
    history: list[
        tuple[Any, Any]
    ]  # parameters and optimizer state before the first step and after each
    compilations: int  # how often the step was compiled


@functools.cache
def trained(case: tables.Case) -> Trained:
    setup = set_up(case)
    history = run(setup.step, setup.start(seed=0), batches())
    return Trained(setup, history, setup.step._cache_size())


def run(step: Callable, start: tuple[Any, Any], data: list) -> list[tuple[Any, Any]]:
    """The start, and what each step on one batch made of it."""
    history = [start]
    for batch in data:
        history.append(step(*history[-1], batch))
    return history


@functools.cache
def batches() -> list[tuple[jax.Array, jax.Array]]:
    """Another batch for each step."""
    random = np.random.default_rng(1)
    widths = (front_ends.INPUTS, front_ends.OUTPUTS)
    return [
        tuple(jnp.asarray(random.normal(size=(_BATCH, w)), jnp.float32) for w in widths)
        for _ in range(STEPS)
    ]


def by_path(tree: Any) -> dict[str, np.ndarray]:
    """Leaves as NumPy arrays under their paths; what is `None` or belongs to another optimizer is not in it."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in entries}


def assert_same(first: Any, second: Any) -> None:
    """Two trees are equal bit by bit, and hold the same kinds of nodes."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
