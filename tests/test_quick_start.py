"""Training on many devices, replicated or on a mesh, is that on one."""

import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpruner
from helpers import eight_devices

STEPS = 20
SHAPES = {
    'first': {'kernel': (16, 32), 'bias': (32,)},
    'middle': {'kernel': (32, 16), 'bias': (16,)},
    'last': {'kernel': (16, 4), 'bias': (4,)},
}


def initial_params():
    keys = jax.random.split(jax.random.PRNGKey(0), len(SHAPES))
    params = {}
    for key, (name, shapes) in zip(keys, SHAPES.items(), strict=True):
        kernel = jax.random.normal(key, shapes['kernel']) / np.sqrt(shapes['kernel'][0])
        params[name] = {'kernel': kernel, 'bias': jnp.zeros(shapes['bias'])}
    return params


def loss_fn(params, x, y):
    for name in ('first', 'middle'):
        x = jax.nn.relu(x @ params[name]['kernel'] + params[name]['bias'])
    logits = x @ params['last']['kernel'] + params['last']['bias']
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def batch():
    x = jax.random.normal(jax.random.PRNGKey(1), (32, 16))
    return x, jnp.argmax(x[:, :4], axis=-1)


def train_step(pruner, tx, params, state, x, y, average=lambda grads: grads):
    grads = jax.grad(lambda p: loss_fn(pruner.pre_forward_update(p, state), x, y))(params)
    updates, state = tx.update(average(grads), state, params)
    return pruner.post_gradient_update(optax.apply_updates(params, updates), state), state


# One shot.


# While training.


def config(**settings):
    sparsity_config = ml_collections.ConfigDict()
    sparsity_config.algorithm = 'magnitude'
    sparsity_config.update_freq = 5
    sparsity_config.update_end_step = 15
    sparsity_config.update_start_step = 5
    sparsity_config.sparsity = 0.75
    sparsity_config.dist_type = 'erk'
    sparsity_config.update(settings)
    return sparsity_config


def train(pruner, params, steps=STEPS):
    tx = pruner.wrap_optax(optax.adam(1e-2))
    step = jax.jit(functools.partial(train_step, pruner, tx))
    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state, *batch())
    return params, state


# On many devices.


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config)


def equal_to_one_device(params, state, pruner):
    expected, expected_state = train(pruner, initial_params())
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(compare, jax.device_get(params), expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.masks), expected_state.masks)


@pytest.mark.skipif(not hasattr(jax, 'pmap'), reason='this JAX has no pmap')
@pytest.mark.parametrize('algorithm', ['magnitude'])
def check_replicas_stay_alike(algorithm):
    pruner = jaxpruner.create_updater_from_config(config(algorithm=algorithm, drop_fraction=0.3))
    tx = pruner.wrap_optax(optax.adam(1e-2))
    assert jax.device_count() == 8

    def replicate(tree):
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (8, *leaf.shape)), tree)

    average = functools.partial(jax.lax.pmean, axis_name='devices')
    step = jax.pmap(functools.partial(train_step, pruner, tx, average=average), axis_name='devices')
    params, state = replicate(initial_params()), replicate(tx.init(initial_params()))
    x, y = (array.reshape(8, 4, *array.shape[1:]) for array in batch())
    for _ in range(STEPS):
        params, state = step(params, state, x, y)
    for leaf in jax.tree.leaves((params, state)):
        assert (np.asarray(leaf) == np.asarray(leaf)[0]).all()
    first = jax.tree.map(lambda leaf: leaf[0], jax.device_get((params, state)))
    equal_to_one_device(*first, pruner)


@pytest.mark.parametrize('algorithm', ['rigl', 'global_magnitude'])
def check_a_mesh_trains_as_one_device(algorithm):
    pruner = jaxpruner.create_updater_from_config(config(algorithm=algorithm, drop_fraction=0.3))
    tx = pruner.wrap_optax(optax.adam(1e-2))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('rows', 'columns'))

    def sharded(leaf):
        spec = PartitionSpec('rows', 'columns') if leaf.ndim == 2 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    params = jax.tree.map(sharded, initial_params())
    state = tx.init(params)
    step = jax.jit(functools.partial(train_step, pruner, tx))
    for _ in range(STEPS):
        params, state = step(params, state, *batch())
    for layer in params.values():
        assert layer['kernel'].sharding.spec == PartitionSpec('rows', 'columns')
    equal_to_one_device(params, state, pruner)
