"""Moments of chosen weights become zero under every optimizer, or the optimizer is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxpruner.core import optimizer_state

PARAMS = {'w': jnp.ones((4, 3)), 'b': jnp.ones(3)}
WHERE = {'w': jnp.zeros((4, 3), bool).at[0].set(True), 'b': None}

OPTIMIZERS = {
    'sgd': optax.sgd(0.1, momentum=0.9),
    'adam': optax.adam(0.1),
    'adamw': optax.adamw(0.1),
    'adafactor': optax.adafactor(0.1, momentum=0.9),
    'lion': optax.lion(0.1),
    'rmsprop': optax.rmsprop(0.1, momentum=0.9),
    'lamb': optax.lamb(0.1),
    'muon': contrib.muon(0.1),
    'chain': optax.chain(optax.clip(1.0), optax.adam(0.1)),
    'MultiSteps': optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    'inject_hyperparams': optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    'masked': optax.masked(optax.adam(0.1), {'w': True, 'b': False}),
    'multi_transform': optax.multi_transform(
        {'x': optax.adam(0.1), 'y': optax.sgd(0.1, 0.9)}, {'w': 'x', 'b': 'y'}
    ),
}


@pytest.mark.parametrize('tx', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_moments_of_chosen_weights_alone_become_zero(tx):
    _, state = tx.update(jax.tree.map(lambda p: p * 0.5, PARAMS), tx.init(PARAMS), PARAMS)
    after = optimizer_state.zero_moments(tx, state, WHERE, PARAMS)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    changed = 0
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        if new.shape == (4, 3):
            np.testing.assert_array_equal(new[1:], old[1:])
            np.testing.assert_array_equal(new[0], 0)
            changed += bool((old[0] != 0).any())
        else:
            np.testing.assert_array_equal(new, old)
    assert changed


@pytest.mark.parametrize('tx', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_moments_are_found_by_path_as_by_optax(tx):
    _, state = tx.update(jax.tree.map(lambda p: p * 0.5, PARAMS), tx.init(PARAMS), PARAMS)
    expected = optimizer_state.zero_moments(tx, state, WHERE, PARAMS)
    restarted = optimizer_state.restart_inner_state(state, WHERE)
    jax.tree.map(np.testing.assert_array_equal, restarted, expected)
    optimizer_state.check_restartable(tx, PARAMS)


def test_a_moment_of_another_shape_is_left_alone():
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    after = optimizer_state.zero_moments(tx, state, WHERE, PARAMS)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), after, state))


@pytest.mark.parametrize(
    'tx', [optax.lbfgs(), optax.lbfgs(0.1, linesearch=None), optax.scale_by_lbfgs()]
)
@pytest.mark.parametrize(
    'check', [optimizer_state.check_resettable, optimizer_state.check_restartable]
)
def test_lbfgs_is_refused(check, tx):
    with pytest.raises(ValueError, match=r'cannot be zeroed.*lbfgs.*use a first-order'):
        check(tx, PARAMS)


@pytest.mark.parametrize(
    'name', ['adam', 'adamw', 'rmsprop', 'chain', 'MultiSteps', 'inject_hyperparams', 'lamb']
)
def test_second_moments_are_found(name):
    tx = OPTIMIZERS[name]
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    moments = optimizer_state.second_moments(state, PARAMS)
    assert [moment.shape for moment in moments] == [(3,), (4, 3)]


def test_second_moments_of_a_part_of_the_model():
    assert [
        m is None for m in optimizer_state.second_moments(OPTIMIZERS['masked'].init(PARAMS), PARAMS)
    ] == [
        True,
        False,
    ]
    for name in ('sgd', 'lion', 'adafactor'):
        assert optimizer_state.second_moments(OPTIMIZERS[name].init(PARAMS), PARAMS) == [None, None]
