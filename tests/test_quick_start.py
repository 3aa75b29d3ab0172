"""The first things that a user does: prune in one shot, then while training, on one device and on many."""

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


def uniform(sparsity, **settings):
    return functools.partial(
        jaxpruner.sparsity_distributions.uniform, sparsity=sparsity, **settings
    )


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


def sparsity(params):
    return jaxpruner.utils.summarize_sparsity(params, only_total_sparsity=True)['_total_sparsity']


# One shot.


def test_prune_a_matrix():
    matrix = jax.random.normal(jax.random.PRNGKey(0), (8, 25))
    pruned, mask = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=uniform(0.8)
    ).instant_sparsify(matrix)
    assert sparsity(pruned) == sparsity(mask) == pytest.approx(0.8)
    assert np.array_equal(pruned, np.where(mask, matrix, 0))
    assert np.abs(matrix)[mask == 1].min() >= np.abs(matrix)[mask == 0].max()


def test_prune_a_matrix_to_one_of_five():
    matrix = jax.random.normal(jax.random.PRNGKey(0), (8, 25))
    pruner = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=uniform(0.8), sparsity_type=jaxpruner.sparsity_types.NByM(1, 5)
    )
    pruned, mask = pruner.instant_sparsify(matrix)
    assert (mask.reshape(8, 5, 5).sum(-1) == 1).all()
    assert np.array_equal(
        np.abs(pruned).reshape(8, 5, 5).max(-1), np.abs(matrix).reshape(8, 5, 5).max(-1)
    )


def test_prune_a_model():
    params = initial_params()
    pruned, masks = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=uniform(0.75)
    ).instant_sparsify(params)
    for name, shapes in SHAPES.items():
        assert masks[name]['bias'] is None
        assert np.array_equal(pruned[name]['bias'], params[name]['bias'])
        assert int(masks[name]['kernel'].sum()) == int(np.prod(shapes['kernel'])) // 4
        assert np.array_equal(pruned[name]['kernel'] != 0, masks[name]['kernel'] == 1)


def test_prune_by_a_distribution_of_one_s_own():
    def but_the_first(params):
        return {name: {'kernel': None if name == 'first' else 0.5, 'bias': None} for name in params}

    params = initial_params()
    pruned, masks = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=but_the_first
    ).instant_sparsify(params)
    assert masks['first'] == {'kernel': None, 'bias': None}
    assert np.array_equal(pruned['first']['kernel'], params['first']['kernel'])
    assert [sparsity(pruned[name]['kernel']) for name in ('middle', 'last')] == [0.5, 0.5]


def test_prune_by_gradients():
    params = initial_params()
    grads = jax.grad(loss_fn)(params, *batch())
    pruner = jaxpruner.SaliencyPruning(sparsity_distribution_fn=uniform(0.5))
    _, masks = pruner.instant_sparsify(params, grads=grads)
    saliency = np.abs(params['middle']['kernel'] * grads['middle']['kernel'])
    mask = np.asarray(masks['middle']['kernel'])
    assert mask.sum() == mask.size // 2
    assert saliency[mask == 1].min() >= saliency[mask == 0].max()
    with pytest.raises(ValueError, match='gradients'):
        pruner.instant_sparsify(params)


# While training.

SCHEDULES = {
    'one_shot': jaxpruner.sparsity_schedules.OneShotSchedule(target_step=10),
    'polynomial': jaxpruner.sparsity_schedules.PolynomialSchedule(
        update_freq=3, update_start_step=3, update_end_step=15
    ),
}


@pytest.mark.parametrize('name', SCHEDULES)
def test_prune_while_training(name):
    pruner = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=uniform(0.75), scheduler=SCHEDULES[name]
    )
    tx = pruner.wrap_optax(optax.adam(1e-2))
    params, (x, y) = initial_params(), batch()
    state = tx.init(params)
    before = loss_fn(params, x, y)
    step = jax.jit(functools.partial(train_step, pruner, tx))
    sparsities = []
    for _ in range(STEPS):
        params, state = step(params, state, x, y)
        sparsities.append(float(sparsity([layer['kernel'] for layer in params.values()])))
    if name == 'one_shot':
        assert sparsities == [0] * 10 + [0.75] * 10
    else:
        assert sparsities[:3] == [0, 0, 0]
        assert sparsities == sorted(sparsities)
        assert (
            len(set(sparsities)) == 6
        )  # dense, and after each of five updates, which reach the target
        assert sparsities[-1] == 0.75
    assert loss_fn(params, x, y) < before


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


@pytest.mark.parametrize('is_packed', [False, True], ids=['unpacked', 'packed'])
def test_a_config_makes_the_pruner(is_packed):
    pruner = jaxpruner.api.create_updater_from_config(config(use_packed_masks=is_packed))
    assert isinstance(pruner, jaxpruner.MagnitudePruning)
    params, state = train(pruner, initial_params())
    kernels = {name: layer['kernel'] for name, layer in params.items()}
    assert sparsity(kernels) == pytest.approx(0.75, abs=1e-3)
    assert sparsity(kernels['last']) < sparsity(kernels['middle']), 'small layers stay denser'
    metrics = jaxpruner.sparsity_metrics(state)
    assert float(metrics['_mask_sparsity']) == pytest.approx(float(sparsity(kernels)))


# On many devices.


def test_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config, '-m', 'not slow')


@pytest.mark.slow
def test_further_algorithms_on_eight_devices(request):
    eight_devices.run_checks(__file__, request.config, '-m', 'slow')


SLOW = pytest.mark.slow


def equal_to_one_device(params, state, pruner):
    expected, expected_state = train(pruner, initial_params())
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(compare, jax.device_get(params), expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.masks), expected_state.masks)


@pytest.mark.skipif(not hasattr(jax, 'pmap'), reason='this JAX has no pmap')
@pytest.mark.parametrize('algorithm', ['magnitude', pytest.param('rigl', marks=SLOW)])
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


@pytest.mark.parametrize(
    'algorithm',
    ['rigl', pytest.param('magnitude', marks=SLOW), pytest.param('global_magnitude', marks=SLOW)],
)
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
