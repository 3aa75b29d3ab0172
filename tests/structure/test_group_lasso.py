"""The group lasso shrinks channels by the proximal operator, to exact zeros, and composes with optimizers."""

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


def shrunk_by_hand(params, strength):
    """Both factors are taken of the same weights."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    first = np.concatenate([weights['up'], weights['bias'][None], weights['middle'].T])
    second = np.concatenate([weights['middle'], weights['down'].T])
    factors = []
    for channels in (first, second):
        norms = np.linalg.norm(channels, axis=0)
        factors.append(np.maximum(0, 1 - strength * np.sqrt(len(channels)) / norms))
    return {
        'up': weights['up'] * factors[0],
        'bias': weights['bias'] * factors[0],
        'middle': weights['middle'] * factors[0][:, None] * factors[1],
        'down': weights['down'] * factors[1][:, None],
    }


@pytest.mark.parametrize('strength', [0.0, 0.3, 1.0, 10.0])
def test_one_step_is_the_proximal_operator(strength):
    tx = group_lasso(GRAPH, strength)
    step = jax.tree.map(lambda leaf: 0.1 * leaf, PARAMS)
    updates, _ = tx.update(step, tx.init(PARAMS), PARAMS)
    found = optax.apply_updates(PARAMS, updates)
    expected = shrunk_by_hand(jax.tree.map(lambda leaf: 1.1 * leaf, PARAMS), strength)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )
    is_zero = jax.tree.map(lambda leaf: np.asarray(leaf) == 0, found)
    jax.tree.map(np.testing.assert_array_equal, is_zero, jax.tree.map(lambda a: a == 0, expected))


def test_training_ends_with_channels_that_are_removed_without_a_change():
    strength = optax.linear_schedule(0.0, 0.01, 50)
    tx = optax.chain(optax.adam(1e-2), group_lasso(GRAPH, strength))

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
    tx = pruner.wrap_optax(optax.chain(optax.sgd(0.1), group_lasso(GRAPH, 0.01, 'up*')))
    updates, state = tx.update(jax.grad(loss)(PARAMS), tx.init(PARAMS), PARAMS)
    keep = GRAPH.nonzero_channels(optax.apply_updates(PARAMS, updates))
    assert {name: len(kept) for name, kept in keep.items()} == {'up[1]': 6, 'middle[1]': 4}
    jax.tree.map(np.testing.assert_array_equal, GRAPH.nonzero_channels(state), keep)
    alone = group_lasso(GRAPH, 100.0, 'up*')
    updates, _ = alone.update(jax.tree.map(jnp.zeros_like, PARAMS), alone.init(PARAMS), PARAMS)
    assert not jnp.any(updates['down'])
    np.testing.assert_array_equal(updates['up'], -PARAMS['up'])


REFUSED = {
    'no graph': (TypeError, lambda: group_lasso(PARAMS, 0.1), 'takes a graph'),
    'no number': (TypeError, lambda: group_lasso(GRAPH, '0.1'), "strength .* got '0.1'"),
    'negative': (ValueError, lambda: group_lasso(GRAPH, -1.0), 'strength .* got -1.0'),
    'no such group': (KeyError, lambda: group_lasso(GRAPH, 0.1, 'pu*'), r"'pu\*' matches no group"),
    'no params': (
        ValueError,
        lambda: group_lasso(GRAPH, 0.1).update(PARAMS, group_lasso(GRAPH, 0.1).init(PARAMS)),
        'pass them, tx.update',
    ),
}


@pytest.mark.parametrize(('error', 'attempt', 'message'), REFUSED.values(), ids=REFUSED)
def test_errors_name_value_and_remedy(error, attempt, message):
    with pytest.raises(error, match=message):
        attempt()
