"""Steps under `vmap`, `scan` and donation: scores are computed when masks are due, and only then."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpruner

SEEDS = 3
SHAPES = {'first': (16, 24), 'last': (24, 8)}


def initial(seed):
    keys = jax.random.split(jax.random.PRNGKey(seed), len(SHAPES))
    shapes = zip(keys, SHAPES.items(), strict=True)
    return {name: jax.random.normal(key, shape) for key, (name, shape) in shapes}


@dataclasses.dataclass
class Observed(jaxpruner.BaseUpdater):
    """Magnitude pruning that calls back whenever scores are computed."""

    on_scores: object = None

    def calculate_scores(self, params, sparse_state=None, grads=None):
        jax.debug.callback(self.on_scores, sparse_state.count)
        return jax.tree.map(jnp.abs, params)


def scan_then_vmap(step, starts):
    return jax.vmap(lambda start: jax.lax.scan(step, start, length=10)[0])(starts)


def vmap_then_scan(step, starts):
    steps_of_all = jax.vmap(lambda one: step(one, None)[0])
    return jax.lax.scan(lambda carry, _: (steps_of_all(carry), None), starts, length=10)[0]


@pytest.mark.parametrize(('run', 'is_packed'), [(scan_then_vmap, True), (vmap_then_scan, False)])
def test_scores_are_computed_only_when_due(run, is_packed):
    calls = collections.Counter()
    pruner = Observed(
        jaxpruner.PeriodicSchedule(update_freq=5),
        sparsity=0.75,
        use_packed_masks=is_packed,
        on_scores=lambda count: calls.update([int(count)]),
    )
    tx = pruner.wrap_optax(optax.adam(0.1))

    def start(seed):
        return initial(seed), tx.init(initial(seed))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(params, state, params)
        return (optax.apply_updates(params, updates), state), None

    params, state = jax.jit(functools.partial(run, step))(jax.vmap(start)(jnp.arange(SEEDS)))
    jax.block_until_ready(params)
    jax.effects_barrier()
    assert calls == {0: SEEDS, 5: SEEDS}  # one call for each of the trainings that run as one
    assert state.count.tolist() == [10] * SEEDS
    for name, shape in SHAPES.items():
        assert (params[name] != 0).sum((1, 2)).tolist() == [math.prod(shape) // 4] * SEEDS


@pytest.mark.parametrize('algorithm', jaxpruner.all_algorithm_names())
def test_a_step_gives_back_what_it_took_so_that_it_can_be_scanned_and_donated(algorithm):
    config = {'algorithm': algorithm, 'use_packed_masks': True, 'sparsity': 0.5}
    window = {'update_freq': 2, 'update_start_step': 0, 'update_end_step': 5}
    pruner = jaxpruner.create_updater_from_config(config | window)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initial(0))
    tx = pruner.wrap_optax(optax.adam(0.1))
    start = tx.init(params)
    found = jax.eval_shape(tx.update, params, start, params)
    assert found == jax.eval_shape(lambda: (params, start))
    if algorithm == 'rigl':
        jax.jit(tx.update, donate_argnums=1)(params, start, params)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start)), 'donated'
