"""Training on single kept weights: the same steps as the masked dense model, static, SET and RigL."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparse
from jaxpruner.sparse.operators import csr_kernel

MISSING = csr_kernel.why_missing(jnp.float32)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SCHEDULE = jaxpruner.PeriodicSchedule(update_freq=2, update_start_step=1)
INPUTS = jax.random.normal(jax.random.key(9), (6, 8))
PRUNED = ('in', 'layers')


def params_of(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        'in': jax.random.normal(keys[0], (8, 10)) / 3,
        'layers': jax.random.normal(keys[1], (3, 10, 10)) / 3,
        'bias': jnp.zeros(10),
        'out': jax.random.normal(keys[2], (10, 2)),
    }


def apply_fn(params, x):
    x = jnp.tanh(x @ params['in'] + params['bias'])
    x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, params['layers'])
    return x @ params['out']


def make(algorithm='rigl', sparsity=0.8, **settings):
    return sparse.unstructured_sparse(
        apply_fn,
        params_of(),
        INPUTS,
        sparsity=sparsity,
        only=PRUNED,
        algorithm=algorithm,
        scheduler=None if algorithm == 'static_sparse' else SCHEDULE,
        **settings,
    )


def loss_of(outputs):
    return jnp.mean((outputs - 1) ** 2)


def train(model, optimizer, steps=4):
    """Weights and topology after each step."""
    tx = model.wrap_optax(optimizer)
    weights, topology = model.pack(params_of())

    def loss(weights, topology, probe):
        return loss_of(model.apply(weights, topology, INPUTS, probe=probe))

    @jax.jit
    def train_step(weights, topology, opt_state, step):
        def dense_grads(weights, topology):
            return jax.grad(loss, argnums=2)(weights, topology, model.probe())

        updates, opt_state = tx.update(jax.grad(loss)(weights, topology, None), opt_state, weights)
        weights = optax.apply_updates(weights, updates)
        return model.update(weights, topology, opt_state, tx=tx, step=step, dense_grads=dense_grads)

    state = weights, topology, tx.init(weights)
    history = [state]
    for step in range(steps):
        state = train_step(*state, step)
        history.append(state)
    assert train_step._cache_size() == 1
    return history


@pytest.mark.parametrize('optimizer', [optax.adamw(0.05), optax.sgd(0.1, momentum=0.9)])
def test_static_training_is_that_of_the_masked_model(optimizer):
    model = make('static_sparse')
    history = train(model, optimizer)
    _, topology, _ = history[0]
    masks = model.masks(topology)
    pruner = jaxpruner.FixedMask(masks)
    tx = pruner.wrap_optax(optimizer)
    params = params_of()
    state = tx.init(params)
    params = pruner.post_gradient_update(params, state)
    for weights, topology, _ in history:
        for name, leaf in model.unpack(weights, topology).items():
            np.testing.assert_allclose(leaf, params[name], rtol=1e-4, atol=1e-5, err_msg=name)
        grads = jax.grad(lambda params: loss_of(apply_fn(params, INPUTS)))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)


def test_probe_adds_gradients_of_several_places():
    def repeated(params, x):
        return x @ params['w'] - x @ params['w'] + 1

    params = {'w': jax.random.normal(jax.random.key(0), (8, 10))}
    model = sparse.unstructured_sparse(repeated, params, INPUTS, sparsity=0.5)
    weights, topology = model.pack(params)

    def loss(probe):
        return jnp.sum(model.apply(weights, topology, INPUTS, probe=probe) ** 3)

    # Those of the two places cancel, as in the dense model.
    np.testing.assert_allclose(jax.grad(loss)(model.probe())['w'], 0, atol=1e-5)


def test_probe_has_the_gradients_of_whole_matrices():
    model = make()
    weights, topology = model.pack(params_of())

    def loss(weights, probe):
        return loss_of(model.apply(weights, topology, INPUTS, probe=probe))

    of_probe = jax.jit(jax.grad(loss, argnums=1))(weights, model.probe())
    dense = model.unpack(weights, topology)
    expected = jax.grad(lambda params: loss_of(apply_fn(params, INPUTS)))(dense)
    for name in PRUNED:
        np.testing.assert_allclose(of_probe[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('algorithm', ['set', 'rigl'])
def test_weights_are_replaced(algorithm):
    model = make(algorithm)
    history = train(model, optax.adam(0.05))
    (before, old, _), (after, new, state) = history[2:4]
    for name in PRUNED:
        kept = model.leaves[name].kept
        for key, array in old[name].items():
            assert new[name][key].shape == array.shape
        masks = [np.asarray(model.masks(topology)[name]) for topology in (old, new)]
        per_layer = [mask.reshape(-1, mask.shape[-2] * mask.shape[-1]) for mask in masks]
        assert (per_layer[1].sum(1) == kept).all()
        came = (masks[1] > masks[0]).sum()
        assert 0 < came <= round(0.3 * kept) * len(per_layer[1])
        dense = [
            np.asarray(model.unpack(weights, topology)[name])
            for weights, topology in ((before, old), (after, new))
        ]
        assert (dense[1][masks[1] > masks[0]] == 0).all()
        moments = state[0].mu[name]['compressed']
        values = after[name]['compressed']
        assert (moments[values == 0] == 0).all()
        assert (moments != 0).any()
        assert (values == 0).sum() == came


def test_rigl_grows_where_the_gradient_is_largest():
    model = sparse.unstructured_sparse(
        lambda params, x: x @ params['w'],
        {'w': jnp.ones((4, 5))},
        jnp.ones((1, 4)),
        sparsity=0.75,
        algorithm='rigl',
        scheduler=SCHEDULE,
    )
    tx = optax.sgd(0.1)
    params = {'w': jnp.arange(20.0).reshape(4, 5)}
    weights, topology = model.pack(params, select='magnitude')
    assert topology['w']['positions'].tolist() == [15, 16, 17, 18, 19]
    grads = {'w': jnp.zeros((4, 5)).at[0, 3].set(-9.0).at[1, 0].set(5.0)}
    weights, topology, _ = model.update(
        weights, topology, tx.init(weights), tx=tx, step=1, dense_grads=grads, due=True
    )
    assert topology['w']['positions'].tolist() == [3, 5, 17, 18, 19]
    assert weights['w']['compressed'].tolist() == [0, 0, 17, 18, 19]


def test_plan_and_memory():
    model = make(sparsity=0.95)
    weights, topology = model.pack(params_of())
    assert model.plan.leaves['layers'].kept == weights['layers']['compressed'].size == 15
    assert 'each of 3 10×10' in str(model.plan).replace('\n', ' ')
    for arrays in topology.values():
        assert all(array.dtype == jnp.int32 for array in arrays.values())
    again, _ = model.pack(params_of(), topology)
    jax.tree.map(np.testing.assert_array_equal, again, weights)


def test_settings_by_name():
    model = sparse.unstructured_sparse(
        apply_fn, params_of(), INPUTS, sparsity={'in': 0.9, 'out': None, '*': 0.8}
    )
    kept = {name: leaf.kept for name, leaf in model.leaves.items()}
    assert kept == {'in': 8, 'layers': 20}
    assert model.plan.leaves['out'].note == 'it has no sparsity'


REFUSED = {
    'sparsity': ({'sparsity': 1.5}, r'sparsity.*1\.5'),
    'algorithm': ({'algorithm': 'rigle'}, r"'rigle'.*rigl"),
    'only': ({'only': 'inn'}, r"'inn'.*in"),
    'a bias': ({'only': 'bias'}, r'bias.*no contraction'),
    'nothing': ({'sparsity': 0.0}, 'its sparsity is 0'),
    'gradual': (
        {'scheduler': jaxpruner.PolynomialSchedule(2, 0, 10)},
        'PolynomialSchedule changes the number',
    ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_refused_settings(name):
    settings, words = REFUSED[name]
    settings = {'sparsity': 0.8, **settings}
    with pytest.raises(ValueError, match=words):
        sparse.unstructured_sparse(apply_fn, params_of(), INPUTS, **settings)


def test_other_refusals():
    model = make()
    weights, topology = model.pack(params_of())
    with pytest.raises(ValueError, match=r'scale_by_muon|muon'):
        model.wrap_optax(optax.contrib.muon(0.1)).init(weights)
    with pytest.raises(ValueError, match="select='largest' is unknown"):
        model.pack(params_of(), select='largest')
    with pytest.raises(ValueError, match='dense_grads'):
        model.update(weights, topology, (), tx=optax.sgd(0.1), step=1, due=True)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of())
    with pytest.raises(NotImplementedError, match=r'in cannot.*not for bfloat16; cast'):
        sparse.unstructured_sparse(
            apply_fn, half, INPUTS.astype(jnp.bfloat16), sparsity=0.8, only=PRUNED
        )


def test_products_in_a_short_type_are_refused():
    def in_bfloat16(params, x):
        return x.astype(jnp.bfloat16) @ params['w'].astype(jnp.bfloat16)

    with pytest.raises(NotImplementedError, match=r'w cannot.*not for bfloat16; cast'):
        sparse.unstructured_sparse(in_bfloat16, {'w': jnp.ones((8, 4))}, INPUTS, sparsity=0.8)


def test_experts_have_matrices_of_their_own():
    params = {'experts': jax.random.normal(jax.random.key(0), (4, 8, 10))}
    inputs = jax.random.normal(jax.random.key(1), (4, 5, 8))

    def experts(params, x):
        return jnp.einsum('end,edf->enf', x, params['experts'])

    model = sparse.unstructured_sparse(experts, params, inputs, sparsity=0.7)
    weights, topology = model.pack(params)
    assert weights['experts']['compressed'].shape == (4, 24)
    dense = model.unpack(weights, topology)
    np.testing.assert_allclose(
        model.apply(weights, topology, inputs), experts(dense, inputs), rtol=1e-5, atol=1e-5
    )
