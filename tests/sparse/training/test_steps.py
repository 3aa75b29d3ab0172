"""A step on blocks is that of the dense model under their masks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpruner import sparse, tree
from sparse.training.models import BLOCK, PARAMS, X, apply_fn, loss

OPTIMIZERS = {
    'sgd': optax.sgd(0.1),
    'momentum': optax.sgd(0.1, momentum=0.9),
    'adam': optax.adam(1e-2),
    'adamw': optax.adamw(1e-2, weight_decay=0.1),
    'lion': optax.lion(1e-2),
    'clipped': optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    'clipped when accumulated': optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 2
    ).gradient_transformation(),
}
MODEL = sparse.block_sparse(
    apply_fn, PARAMS, X, sparsity=0.6, block=BLOCK, only=('up/*', 'layers/*')
)
WEIGHTS, TOPOLOGY = MODEL.pack(PARAMS)


def masked(params, masks):
    return tree.map_with_missing(lambda p, m: p if m is None else p * m, params, masks)


@jax.jit
def dense_gradients(params):
    return jax.grad(lambda params: loss(apply_fn, params))(params)


@jax.jit
def block_gradients(weights):
    return jax.grad(lambda w: loss(lambda w, x: MODEL.apply(w, TOPOLOGY, x), w))(weights)


@pytest.mark.parametrize('tx', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_the_masked_dense_model(tx):
    masks = MODEL.masks(TOPOLOGY)
    params, weights = masked(PARAMS, masks), WEIGHTS
    dense_state, state = tx.init(params), MODEL.wrap_optax(tx).init(weights)
    for _ in range(4):
        gradients = masked(dense_gradients(params), masks)
        updates, dense_state = tx.update(gradients, dense_state, params)
        params = optax.apply_updates(params, updates)
        updates, state = tx.update(block_gradients(weights), state, weights)
        weights = optax.apply_updates(weights, updates)
    found = MODEL.unpack(weights, TOPOLOGY)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    # A sign of lion's may turn where a gradient is next to zero; none does here.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, params)
    for name, mask in {'up': masks['up'], 'layers': masks['layers']}.items():
        assert not np.any(np.asarray(found[name]['kernel'])[np.asarray(mask['kernel']) == 0])
    values = weights['up']['kernel']['values']
    positions = TOPOLOGY['up/kernel']
    # The last block of inputs has 2 of 4, the last group of outputs 6 of 8.
    padding = np.zeros(values.shape, bool)
    padding[..., 6:][-1] = True
    padding[:, :, 2:] |= (np.asarray(positions) == 2)[:, :, None, None]
    assert not np.any(np.asarray(values)[padding])


def test_what_is_packed_comes_back():
    found = MODEL.unpack(WEIGHTS, TOPOLOGY)
    expected = masked(PARAMS, MODEL.masks(TOPOLOGY))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    again, topology = MODEL.pack(found, TOPOLOGY)
    jax.tree.map(np.testing.assert_array_equal, (again, topology), (WEIGHTS, TOPOLOGY))
    kept = sum(int(mask.sum()) for mask in jax.tree.leaves(MODEL.masks(TOPOLOGY)))
    assert kept == sum(leaf.kept for leaf in MODEL.plan.leaves.values() if leaf.layout)


def test_blocks_of_a_trained_model_are_the_largest():
    params = jax.tree.map(jnp.zeros_like, PARAMS)
    params['up']['kernel'] = params['up']['kernel'].at[4:8, :8].set(1).at[9, 8:].set(2)
    weights, topology = MODEL.pack(params, select='magnitude')
    blocks = MODEL.layouts['up/kernel'].blocks
    assert blocks == 1
    assert topology['up/kernel'].tolist() == [[1], [2], [2]]
    jax.tree.map(np.testing.assert_array_equal, MODEL.unpack(weights, topology), params)


def test_a_term_of_low_rank_counts_and_is_unpacked():
    model = sparse.block_sparse(
        apply_fn, PARAMS, X, sparsity=0.4, block=BLOCK, only='layers/*', low_rank=2
    )
    weights, topology = model.pack(PARAMS)
    leaf = weights['layers']['kernel']
    assert leaf.keys() == {'values', 'down', 'up'}
    assert not np.any(leaf['up'])
    leaf['up'] = leaf['up'] + 0.1
    found, expected = (
        model.apply(weights, topology, X),
        apply_fn(model.unpack(weights, topology), X),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    blocks_kept = int(model.masks(topology)['layers']['kernel'].sum())
    planned = model.plan.leaves['layers/kernel']
    assert planned.kept == blocks_kept + 2 * 2 * (22 + 22)
    assert abs(planned.kept / planned.size - 0.6) < 0.1


def test_several_seeds_train_in_one_program():
    tx = optax.adam(1e-2)

    @jax.jit
    @jax.vmap
    def step(weights):
        gradients = block_gradients(weights)
        return optax.apply_updates(weights, tx.update(gradients, tx.init(weights))[0])

    doubled = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), WEIGHTS)
    many = step(doubled)
    for number in range(2):
        each = jax.tree.map(lambda x, number=number: x[number][None], doubled)
        alone = step(each)
        jax.tree.map(
            lambda a, b, number=number: np.testing.assert_allclose(a[number], b[0], atol=2e-4),
            many,
            alone,
        )
