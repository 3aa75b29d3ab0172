"""The group lasso makes channels exactly zero in training; `test_repeated_channels` has its operator by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import channel_groups
from jaxpruner.structure import GroupedChannels, group_lasso

RNG = np.random.default_rng(0)
SHAPES = {'up': (5, 12), 'bias': (12,), 'middle': (12, 8), 'down': (8, 3)}
PARAMS = {name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
X = jnp.asarray(RNG.normal(size=(16, 5)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(16, 3)), jnp.float32)


def apply(params, x):
    x = jax.nn.relu(x @ params['up'] + params['bias'])
    return jnp.tanh(x @ params['middle']) @ params['down']


def loss(params):
    return jnp.mean((apply(params, X) - Y) ** 2)


GRAPH = channel_groups(apply, PARAMS, X)


def test_training_ends_with_channels_that_are_removed_without_a_change():
    strength = optax.linear_schedule(0.0, 0.01, 50)
    with_schedule = optax.inject_hyperparams(group_lasso)(GRAPH, strength)
    tx = optax.chain(optax.adam(1e-2), with_schedule)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(100):
        params, state = step(params, state)
    keep = GRAPH.nonzero_channels(params)
    assert keep
    assert sum(map(len, keep.values())) < 16
    found = GRAPH.small_apply(keep)(GRAPH.shrink(params, keep), X)
    np.testing.assert_allclose(found, apply(params, X), rtol=1e-5, atol=1e-5)
    assert int(GRAPH.shrink(state, keep)[1].count) == 100


def test_it_works_inside_a_pruner_and_on_named_groups():
    pruner = jaxpruner.MagnitudePruning(
        scheduler=jaxpruner.sparsity_schedules.OneShotSchedule(0),
        sparsity=0.5,
        sparsity_type=GroupedChannels(GRAPH),
    )
    tx = pruner.wrap_optax(optax.chain(optax.sgd(0.0), group_lasso(GRAPH, 100.0, 'up*')))
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert GRAPH.nonzero_channels(state)['middle[1]'].size == 4
    # What no channel of the named group meets is left as it is.
    np.testing.assert_array_equal(updates['up'], -PARAMS['up'])
    is_kept = (updates['down'] == 0).all(1)
    assert is_kept.sum() == 4


REFUSED = {
    'no number': (ValueError, lambda: group_lasso(GRAPH, '0.1'), "strength .* got '0.1'"),
    'negative': (ValueError, lambda: group_lasso(GRAPH, -1.0), 'strength .* got -1.0'),
    'no such group': (KeyError, lambda: group_lasso(GRAPH, 0.1, 'pu*'), r"'pu\*' matches no group"),
    'no params': (
        ValueError,
        lambda: group_lasso(GRAPH, 0.1).update(PARAMS, group_lasso(GRAPH, 0.1).init(PARAMS)),
        'pass the parameters .* tx.update',
    ),
}


@pytest.mark.parametrize(('error', 'attempt', 'message'), REFUSED.values(), ids=REFUSED)
def test_errors_name_value_and_remedy(error, attempt, message):
    with pytest.raises(error, match=message):
        attempt()
