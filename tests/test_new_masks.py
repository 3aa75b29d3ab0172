"""Loops that decide themselves when masks are updated: `update_masks` of a step, and `new_masks` before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import steps

SCHEDULE = {'update_freq': 2, 'update_start_step': 1, 'update_end_step': 6, 'drop_fraction': 0.3}


def make_pruner(algorithm, packed=False):
    config = {'algorithm': algorithm, 'use_packed_masks': packed} | SCHEDULE
    of_type = {'sparsity_type': '2:4'} if algorithm == 'iterative_nm' else {'sparsity': 0.75}
    return jaxpruner.create_updater_from_config(config | of_type)


def make_params(seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = {'a': {'kernel': (16, 24), 'bias': (24,)}, 'b': {'kernel': (24, 8)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(draw(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


assert_close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
)


# With masks that move, phases, a random draw, the optimizer's moments, values of its own, dense weights, and none.
ALGORITHMS = 'rigl acdc random adam_fisher movement magnitude_ste no_prune'.split()


@pytest.mark.parametrize(
    ('algorithm', 'packed'), [(name, i % 2 == 0) for i, name in enumerate(ALGORITHMS)]
)
def test_masks_made_before_a_step_are_those_of_the_step(algorithm, packed):
    pruner = make_pruner(algorithm, packed)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    by_schedule = jax.jit(tx.update)
    by_loop = jax.jit(functools.partial(tx.update, update_masks=False))
    params = make_params()
    state = tx.init(params)
    params, due_steps = pruner.post_gradient_update(params, state), 0
    for step in range(7):
        grads = make_params(step + 1)
        expected_updates, expected = by_schedule(grads, state, params)
        if pruner.scheduler.is_mask_update_iter(step):
            due_steps += 1
            state = pruner.new_masks(state, params, grads)
            steps.assert_equal(state.masks, expected.masks)
            assert int(state.count) == step
            if pruner.skip_gradients:  # moments of regrown weights are zeroed
                assert_close(state.inner_state, expected.inner_state)
        updates, state = by_loop(grads, state, params)
        steps.assert_equal(state.masks, expected.masks)
        if due_steps == 0 or not pruner.skip_gradients:
            assert_close((updates, state), (expected_updates, expected))
        params = optax.apply_updates(params, updates)
    assert due_steps == (0 if algorithm == 'no_prune' else 3)


def test_the_state_may_stand_in_any_other():
    pruner, params, grads = make_pruner('rigl'), make_params(), make_params(1)
    pruned = optax.MultiSteps(pruner.wrap_optax(optax.adam(1e-2)), 2)
    rules = {'pruned': pruned.gradient_transformation(), 'other': optax.sgd(0.1)}
    before = optax.multi_transform(rules, {'a': 'pruned', 'b': 'other'}).init(params)
    after = pruner.new_masks(before, params, grads)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    old, new = (steps.masks(state, params)['a/kernel'] for state in (before, after))
    assert 0 < np.sum(new > old) == np.sum(new < old)
    assert steps.masks(after, params)['b/kernel'] is None


def test_what_cannot_be_done_is_said():
    params, rigl = make_params(), make_pruner('rigl')
    tx = rigl.wrap_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match='gradients'):
        rigl.new_masks(tx.init(params), params)
    with pytest.raises(ValueError, match='found 0'):
        rigl.new_masks(optax.sgd(0.1).init(params), params, params)
    entries = {1: {'method': 'unstr_local', 'prune_rate_pattern': 0.5}}
    strategy = jaxpruner.StrategyPruning(entries, steps_per_epoch=10)
    with pytest.raises(ValueError, match='update_masks=True'):
        strategy.new_masks(strategy.wrap_optax(optax.sgd(0.1)).init(params), params)
    for update_masks in (1, 'yes', jnp.bool_(True)):
        with pytest.raises(TypeError, match='update_masks'):
            tx.update(params, tx.init(params), params, update_masks=update_masks)
