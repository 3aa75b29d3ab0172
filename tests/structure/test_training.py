"""The first training step of a smaller model is that of the masked whole one, and trees are cut along."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import channel_groups

RNG = np.random.default_rng(0)
PARAMS = {
    'up': {'kernel': RNG.normal(size=(5, 16)), 'bias': RNG.normal(size=16)},
    'down': {'kernel': RNG.normal(size=(16, 3)), 'bias': RNG.normal(size=3)},
}
PARAMS = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), PARAMS)
X, Y = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((8, 5), (8, 3)))


def apply(params, x):
    hidden = jax.nn.relu(x @ params['up']['kernel'] + params['up']['bias'])
    return hidden @ params['down']['kernel'] + params['down']['bias']


GRAPH = channel_groups(apply, PARAMS, X)
(GROUP,) = GRAPH.groups
KEEP = {GROUP: np.array([0, 3, 4, 9, 10, 15])}
WRAPPED = {
    'sgd': optax.sgd(0.1, momentum=0.9),
    'MultiSteps': optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    'multi_transform': optax.multi_transform(
        {'a': optax.adamw(1e-2, weight_decay=0.1), 'b': optax.sgd(0.1, momentum=0.9)},
        {'up': 'a', 'down': 'b'},
    ),
}


@pytest.mark.parametrize('name', WRAPPED)
def test_the_first_step_after_channels_were_removed_in_training(name):
    """Masked whole model and small model: parameters, moments and masks are the same after a step."""
    pruner = jaxpruner.MagnitudePruning(
        scheduler=jaxpruner.sparsity_schedules.PolynomialSchedule(1, 1, 3),
        sparsity=0.5,
        sparsity_type=jaxpruner.structure.GroupedChannels(GRAPH),
        use_packed_masks=True,
    )
    tx = pruner.wrap_optax(WRAPPED[name])

    def step(function, params, state):
        grads = jax.grad(lambda params: jnp.mean((function(params, X) - Y) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(5):
        params, state = step(apply, params, state)
    keep = GRAPH.nonzero_channels(state)
    assert list(map(len, keep.values())) == [8]
    expected = GRAPH.shrink(step(apply, params, state), keep)
    found = step(GRAPH.small_apply(keep), *GRAPH.shrink((params, state), keep))
    assert jax.tree.structure(found) == jax.tree.structure(expected)

    def compare(one, other):
        # Sums of large weights that nearly cancel are as exact as the largest of the leaf.
        atol = 1e-6 * max(1, np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=atol)

    jax.tree.map(compare, found, expected)


STATES = {
    'muon': optax.contrib.muon(1e-2),
    'ema': optax.chain(optax.ema(0.9), optax.inject_hyperparams(optax.lion)(learning_rate=1e-3)),
    'masked': optax.masked(optax.adam(1e-3), {'up': True, 'down': False}),
    'rmsprop': optax.rmsprop(1e-3, momentum=0.9),
}


@pytest.mark.parametrize('tx', STATES.values(), ids=STATES)
def test_states_get_the_shapes_that_a_new_start_would_give_them(tx):
    found, expected = GRAPH.shrink(tx.init(PARAMS), KEEP), tx.init(GRAPH.shrink(PARAMS, KEEP))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)


SMALL = GRAPH.shrink(PARAMS, KEEP)
REFUSED = {
    'factored': (
        optax.adafactor(min_dim_size_to_factor=2),
        r'v_row/.*kernel has shape \(\d+,\).*init',
    ),
    'history': (optax.lbfgs(), r'kernel has shape \(10, '),
    'flat': (optax.flatten(optax.adam(1e-2)), 'has the path of no parameter'),
}


@pytest.mark.parametrize(('tx', 'message'), REFUSED.values(), ids=REFUSED)
def test_states_that_cannot_be_cut_are_refused(tx, message):
    with pytest.raises(ValueError, match=message):
        GRAPH.shrink(tx.init(PARAMS), KEEP)


def test_parameters_of_other_shapes_are_refused():
    small_apply = GRAPH.small_apply(KEEP)
    with pytest.raises(ValueError, match=r'down/kernel has shape \(6, 3\), .* \(16, 3\)'):
        GRAPH.shrink(SMALL, KEEP)
    with pytest.raises(ValueError, match=r'down/kernel has shape \(16, 3\), where .*\(6, 3\)'):
        small_apply(PARAMS, X)
    with pytest.raises(ValueError, match='another structure'):
        small_apply({'up': PARAMS['up']}, X)


def test_the_smaller_model_takes_other_batches_and_dtypes():
    apply_small = jax.jit(GRAPH.small_apply(KEEP))
    zeroed = GRAPH.zeroed(PARAMS, KEEP)
    for x in (X[:3], X[0], jnp.stack([X, X])):
        np.testing.assert_allclose(apply_small(SMALL, x), apply(zeroed, x), rtol=1e-5, atol=1e-5)
    mapped = jax.vmap(GRAPH.small_apply(KEEP), (None, 0))(SMALL, X)
    np.testing.assert_allclose(mapped, apply(zeroed, X), rtol=1e-5, atol=1e-5)
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (SMALL, X))
    assert apply_small(*halves).dtype == jnp.bfloat16
