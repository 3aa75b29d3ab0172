"""Loops that decide themselves when masks are updated: `update_masks` of a step, and `new_masks` before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from contract import tables

STEPS = 7
SCHEDULE = {'update_freq': 2, 'update_start_step': 1, 'update_end_step': 6, 'drop_fraction': 0.3}
STRAIGHT_THROUGH = {name for name, row in tables.ALGORITHMS.items() if row.straight_through}
EVERY_STEP = jaxpruner.PeriodicSchedule(update_freq=1)


def make_pruner(algorithm, packed=False, **settings):
    config = {'algorithm': algorithm, 'sparsity': 0.75, 'use_packed_masks': packed} | SCHEDULE
    if algorithm == 'iterative_nm':
        config |= {'sparsity': 0.5, 'sparsity_type': '2:4'}
    return jaxpruner.create_updater_from_config(config | settings)


def make_params(seed=0):
    random = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return {'a': {'kernel': draw(16, 24), 'bias': draw(24)}, 'b': {'kernel': draw(24, 8)}}


def assert_equal(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def assert_close(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, first, second)


@pytest.mark.parametrize(
    ('algorithm', 'packed'),
    [(name, i % 2 == 0) for i, name in enumerate(jaxpruner.all_algorithm_names())],
)
def test_masks_made_before_a_step_are_those_of_the_step(algorithm, packed):
    pruner = make_pruner(algorithm, packed)
    tx = pruner.wrap_optax(optax.adam(1e-2))
    by_schedule = jax.jit(tx.update)
    by_loop = jax.jit(functools.partial(tx.update, update_masks=False))
    params = make_params()
    state = tx.init(params)
    params = pruner.post_gradient_update(params, state)
    due_steps = 0
    for step in range(STEPS):
        grads = make_params(step + 1)
        expected_updates, expected = by_schedule(grads, state, params)
        if pruner.scheduler.is_mask_update_iter(step):
            due_steps += 1
            new = pruner.new_masks(state, params, grads)
            assert_equal(new.masks, expected.masks)
            assert int(new.count) == step
            if pruner.skip_gradients:
                assert_close(new.inner_state, expected.inner_state)
            state = new
        updates, loop_state = by_loop(grads, state, params)
        assert_equal(loop_state.masks, expected.masks)
        if due_steps == 0 or not pruner.skip_gradients:
            assert_close((updates, loop_state), (expected_updates, expected))
        params, state = optax.apply_updates(params, updates), loop_state
        if algorithm not in STRAIGHT_THROUGH:
            assert_equal(jaxpruner.apply_mask(params, state.masks), params)
    assert due_steps == (0 if algorithm == 'no_prune' else 3)


def test_moments_of_regrown_weights_are_zeroed():
    pruner = make_pruner('rigl')
    tx, params, grads = pruner.wrap_optax(optax.adam(1e-2)), make_params(), make_params(1)
    _, state = tx.update(grads, tx.init(params), params, update_masks=False)
    new = pruner.new_masks(state, params, grads)
    regrown = (new.masks['b']['kernel'] == 1) & (state.masks['b']['kernel'] == 0)
    moments = new.inner_state[0].mu['b']['kernel']
    assert regrown.any()
    assert (moments[regrown] == 0).all()
    np.testing.assert_array_equal(
        moments[~regrown], state.inner_state[0].mu['b']['kernel'][~regrown]
    )


PLACES = {
    'multi_steps': lambda tx: optax.MultiSteps(tx, 2),
    'multi_transform': lambda tx: optax.multi_transform(
        {'pruned': tx, 'other': optax.sgd(0.1)}, {'a': 'pruned', 'b': 'other'}
    ),
}


@pytest.mark.parametrize('place', PLACES)
def test_the_state_may_stand_in_any_other(place):
    pruner = make_pruner('rigl')
    tx = PLACES[place](pruner.wrap_optax(optax.adam(1e-2)))
    params, grads = make_params(), make_params(1)
    state = pruner.new_masks(tx.init(params), params, grads)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    (found,) = jaxpruner.sparse_states(state)
    (first,) = jaxpruner.sparse_states(tx.init(params))
    alone = first._replace(
        masks={'a': first.masks['a']},
        target_sparsities={'a': first.target_sparsities['a']},
        inner_state=None,
    )
    expected = pruner.new_masks(alone, {'a': params['a']}, {'a': grads['a']}).masks
    np.testing.assert_array_equal(found.masks['a']['kernel'], expected['a']['kernel'])


def test_what_cannot_be_done_is_said():
    params = make_params()
    rigl = make_pruner('rigl')
    state = rigl.wrap_optax(optax.sgd(0.1)).init(params)
    with pytest.raises(ValueError, match='gradients'):
        rigl.new_masks(state, params)
    strategy = jaxpruner.StrategyPruning(
        {1: {'method': 'unstr_local', 'prune_rate_pattern': 0.5}}, steps_per_epoch=10
    )
    with pytest.raises(ValueError, match='update_masks=True'):
        strategy.new_masks(strategy.wrap_optax(optax.sgd(0.1)).init(params), params)
    with pytest.raises(ValueError, match='found 0'):
        rigl.new_masks(optax.sgd(0.1).init(params), params, params)


@pytest.mark.parametrize('update_masks', [1, 'yes', jnp.bool_(True)])
def test_update_masks_is_a_bool(update_masks):
    tx, params = make_pruner('magnitude').wrap_optax(optax.sgd(0.1)), make_params()
    with pytest.raises(TypeError, match='update_masks'):
        tx.update(params, tx.init(params), params, update_masks=update_masks)
