"""A step on compact weights is that of the dense model under their masks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpruner import sparse
from sparse.training.models import (
    KINDS,
    PARAMS,
    PRUNED,
    X,
    apply_fn,
    loss,
    made,
    masked,
    probed_loss,
)
from uses.table import scan

OPTIMIZERS = {
    'adamw': optax.adamw(1e-2, weight_decay=0.1),
    'lamb': optax.lamb(1e-2),
    'clipped when accumulated': optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2
    ).gradient_transformation(),
}
dense_gradients = jax.jit(jax.grad(lambda params: loss(apply_fn, params)))


@pytest.fixture(scope='module', params=KINDS)
def packed(request):
    """A model, its weights and topology, and a compiled gradient."""
    model = made(request.param)
    weights, topology = model.pack(PARAMS)
    gradients = jax.jit(jax.grad(lambda weights: probed_loss(model, weights, topology)))
    return model, weights, topology, gradients


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_steps_are_those_of_the_masked_dense_model(packed, name):
    model, weights, topology, gradients = packed
    tx = OPTIMIZERS[name]
    if model.layouts['up/kernel'].block is None and name not in ('adamw', 'lamb'):
        pytest.skip('these do the same with single weights as with blocks')
    masks = model.masks(topology)
    params = masked(PARAMS, masks)
    dense_state, state = tx.init(params), model.wrap_optax(tx).init(weights)
    for _ in range(4):
        updates, dense_state = tx.update(
            masked(dense_gradients(params), masks), dense_state, params
        )
        params = optax.apply_updates(params, updates)
        updates, state = tx.update(gradients(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
    found = model.unpack(weights, topology)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    # Adam divides by roots of squares, which are tiny where gradients are; no sign of lion's turns here.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, params)
    for name in PRUNED.values():
        is_pruned = np.asarray(masks[name]['kernel']) == 0
        assert not np.any(np.asarray(found[name]['kernel'])[is_pruned])


def test_what_is_packed_comes_back(packed):
    model, weights, topology, _ = packed
    found = model.unpack(weights, topology)
    jax.tree.map(np.testing.assert_array_equal, found, masked(PARAMS, model.masks(topology)))
    again = model.pack(found, topology)
    jax.tree.map(np.testing.assert_array_equal, again, (weights, topology))
    kept = sum(int(mask.sum()) for mask in jax.tree.leaves(model.masks(topology)))
    assert kept == sum(leaf.kept for leaf in model.plan.leaves.values() if leaf.layout)
    assert all(array.dtype == jnp.int32 for array in jax.tree.leaves(topology))


@pytest.mark.parametrize('kind', KINDS)
def test_what_is_kept_of_a_trained_model_is_the_largest(kind):
    params = jax.tree.map(jnp.zeros_like, PARAMS)
    kernel = params['up']['kernel'].at[4:8, :8].set(1).at[9, 8:].set(2)
    params['up']['kernel'] = kernel
    model = made(kind, sparsity=0.7)
    weights, topology = model.pack(params, select='magnitude')
    jax.tree.map(np.testing.assert_array_equal, model.unpack(weights, topology), params)


def test_a_term_of_low_rank_counts_and_is_unpacked():
    model = made('blocks', sparsity=0.4, only='layers/*', low_rank=2)
    weights, topology = model.pack(PARAMS)
    leaf = weights['layers']['kernel']
    assert leaf.keys() == {'values', 'down', 'up'}
    assert not np.any(leaf['up'])
    leaf['up'] = leaf['up'] + 0.1
    found = model.apply(weights, topology, X)
    expected = apply_fn(model.unpack(weights, topology), X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    blocks_kept = int(model.masks(topology)['layers']['kernel'].sum())
    planned = model.plan.leaves['layers/kernel']
    assert planned.kept == blocks_kept + 2 * 2 * (24 + 24)
    assert abs(planned.kept / planned.size - 0.6) < 0.1


def test_the_probe_has_the_gradient_of_the_dense_leaf(packed):
    model, weights, topology, _ = packed
    of_probe = jax.jit(jax.grad(lambda p: probed_loss(model, weights, topology, p)))(model.probe())
    gradient = dense_gradients(model.unpack(weights, topology))['layers']['kernel']
    if 'values' in weights['up']['kernel']:
        blocks = np.asarray(gradient).reshape(2, 6, 4, 3, 8)
        expected = np.sqrt((blocks**2).sum((2, 4))).swapaxes(1, 2)
    else:
        expected = gradient.swapaxes(1, 2).reshape(2, -1)
    np.testing.assert_allclose(of_probe['layers/kernel'], expected, rtol=1e-4, atol=1e-6)


SQUARE = jnp.asarray(np.random.default_rng(5).normal(size=(8, 8)) / 3, jnp.float32)
ROWS = jnp.asarray(np.random.default_rng(6).normal(size=(5, 8)), jnp.float32)


def repeated(params, x):
    """The gradients of the two products cancel."""
    return x @ params['w'] - x @ params['w'] + 1


def recurrent(params, x):
    return scan(lambda x, _: jnp.tanh(x @ params['w']), x, length=3)


def untied(params, x):
    """The same as `recurrent`, with a leaf of its own for each trip."""
    return scan(lambda x, kernel: jnp.tanh(x @ kernel), x, params['w'])


def test_the_norms_of_several_places_and_trips_are_added():
    def norms(function, w):
        model = sparse.block_sparse(function, {'w': w}, ROWS, sparsity=0.5, block=(4, 4))
        # Layers of equal weights then have equal blocks.
        weights, topology = model.pack({'w': w}, select='magnitude')

        def total(probe):
            return jnp.sum(model.apply(weights, topology, ROWS, probe=probe) ** 3)

        return jax.grad(total)(model.probe())['w']

    at_one_place = (ROWS.T @ jnp.full((5, 8), 3.0)).reshape(2, 4, 2, 4)
    at_one_place = jnp.linalg.norm(at_one_place, axis=(1, 3)).T
    np.testing.assert_allclose(norms(repeated, SQUARE), 2 * at_one_place, rtol=1e-5)
    of_trips = norms(untied, jnp.stack([SQUARE] * 3))
    np.testing.assert_allclose(norms(recurrent, SQUARE), of_trips.sum(0), rtol=1e-4)
