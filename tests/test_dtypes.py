"""Leaves of integers, of complex numbers and of few bits, through all that prunes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions
from jaxpruner.sparsity_types import NByM

KERNEL = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
# What stands beside weights in a tree of arrays, such as `equinox.filter(model, equinox.is_array)`.
NO_WEIGHTS = {
    'relative_position_index': jnp.arange(16).reshape(4, 4),
    'flags': jnp.ones((4, 4), bool),
    'keys': jax.random.split(jax.random.key(0), 4).reshape(2, 2),
    'old_keys': jax.random.split(jax.random.PRNGKey(0), 4),
}
PARAMS = {'kernel': KERNEL} | NO_WEIGHTS
ALGORITHMS = [name for name in jaxpruner.all_algorithm_names() if name != 'no_prune']


def config(algorithm, **settings):
    if algorithm == 'iterative_nm':
        settings |= {'sparsity_type': NByM(2, 4)}
    return jaxpruner.create_updater_from_config({'algorithm': algorithm} | settings)


def everything(path, leaf):
    del path, leaf
    return True


@pytest.mark.parametrize('filter_fn', [sparsity_distributions.NOT_DIM_ONE_FILTER, everything])
@pytest.mark.parametrize('dist_type', ['uniform', 'erk'])
def test_what_holds_no_weights_is_in_no_budget(dist_type, filter_fn):
    distribution = getattr(sparsity_distributions, dist_type)
    alone = distribution({'kernel': KERNEL}, 0.5)
    assert distribution(PARAMS, 0.5, filter_fn=filter_fn) == alone | dict.fromkeys(NO_WEIGHTS)


def test_a_share_of_all_parameters_does_not_count_them():
    assert sparsity_distributions.erk(PARAMS, 0.5, count_excluded=True)['kernel'] == 0.5


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_training_leaves_them_alone(algorithm):
    pruner = config(algorithm, sparsity=0.5, update_freq=1, update_start_step=0, update_end_step=1)
    tx = pruner.wrap_optax(optax.adam(0.1))
    params = {name: PARAMS[name] for name in ('kernel', 'relative_position_index')}
    state = tx.init(params)
    params = pruner.post_gradient_update(params, state)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        _, state = tx.update(grads, state, params)
    assert state.masks['relative_position_index'] is None
    assert int(state.masks['kernel'].sum()) == 16
    assert (
        pruner.post_gradient_update(params, state)['relative_position_index']
        is (params['relative_position_index'])
    )


@pytest.mark.parametrize('algorithm', ['magnitude', 'random', 'global_magnitude'])
@pytest.mark.parametrize('sparsity', [0.5, {'*': 0.5}])
def test_pruning_once_leaves_them_alone(algorithm, sparsity):
    pruned, masks = jaxpruner.prune(PARAMS, sparsity, algorithm)
    assert all(pruned[name] is leaf and masks[name] is None for name, leaf in NO_WEIGHTS.items())
    assert int(jnp.count_nonzero(pruned['kernel'])) == 16


def test_models_that_are_given_leave_them_alone():
    def apply_fn(params, x):
        return x @ params['kernel'] + params['relative_position_index'][0]

    inputs = {'apply_fn': apply_fn, 'batches': [jnp.ones((32, 8))]}
    for algorithm in ('magnitude', 'wanda'):
        _, masks = jaxpruner.prune(PARAMS, 0.5, algorithm, **inputs)
        assert {name for name, mask in masks.items() if mask is not None} == {'kernel'}


def test_zeros_of_a_table_are_no_mask():
    masks = jaxpruner.masks_from_zeros(PARAMS | {'kernel': KERNEL.at[0].set(0)})
    assert {name for name, mask in masks.items() if mask is not None} == {'kernel'}


def test_the_plan_says_why():
    plan = config('magnitude', sparsity=0.5).plan(PARAMS)
    assert plan['relative_position_index'].why_dense == (
        'int32 is pruned only where custom_sparsity_map names it'
    )


# By name integers are pruned; so they are by a distribution that gives them a target.
BY_NAME = {
    'a custom map': {'custom_sparsity_map': {'relative*': 0.5}},
    'a mapping': {'sparsity': {'relative_position_index': 0.5}},
    'a distribution': {
        'sparsity_distribution_fn': lambda params: {'kernel': None, 'relative_position_index': 0.5}
    },
}


@pytest.mark.parametrize('settings', BY_NAME.values(), ids=list(BY_NAME))
def test_integers_are_pruned_by_name(settings):
    params = {name: PARAMS[name] for name in ('kernel', 'relative_position_index')}
    pruned, _ = jaxpruner.prune(params, **settings)
    assert pruned['relative_position_index'].tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]


@pytest.mark.parametrize('algorithm', ['saliency', 'global_saliency', 'movement', 'rigl'])
def test_integers_that_are_named_have_no_gradients(algorithm):
    distribution = functools.partial(
        sparsity_distributions.uniform, sparsity=0.5, custom_sparsity_map={'relative*': 0.5}
    )
    pruner = config(algorithm, sparsity_distribution_fn=distribution)
    with pytest.raises(ValueError, match=r'^relative_position_index: .*int32.*dense'):
        pruner.plan(PARAMS)


COMPLEX = jnp.array([[3 + 4j, 1j, -2.0, 0.5 + 0.5j]])  # magnitudes 5, 1, 2, 0.7
# What an optimizer descends by; times the weights, part by part: 3, -3, 0, 1.
COMPLEX_GRADS = jnp.array([[1 + 0j, 2 - 3j, 5j, 1 + 1j]])
TRAINED = [name for name in ALGORITHMS if name != 'iterative_nm']


@pytest.mark.parametrize('algorithm', TRAINED)
def test_complex_weights_are_trained(algorithm):
    pruner = config(algorithm, sparsity=0.5, update_freq=1, update_start_step=0, update_end_step=1)
    tx = pruner.wrap_optax(optax.adam(0.1))
    params, grads = {'w': COMPLEX}, {'w': COMPLEX_GRADS}
    state = tx.init(params)
    for _ in range(2):
        _, state = jax.jit(tx.update)(grads, state, params)
    assert int(state.masks['w'].sum()) == 2
    if 'magnitude' in algorithm:
        assert state.masks['w'].tolist() == [[1, 0, 1, 0]]
    if algorithm == 'adam_fisher':  # |w g|: 5, 3.6, 10, 1
        assert state.masks['w'].tolist() == [[1, 0, 1, 0]]


def test_movement_of_complex_weights_is_that_of_their_parts():
    pruner = jaxpruner.MovementPruning(sparsity=0.5)
    tx, params, grads = pruner.wrap_optax(optax.sgd(0.1)), {'w': COMPLEX}, {'w': COMPLEX_GRADS}
    _, state = tx.update(grads, tx.init(params), params)
    assert state.algorithm_state['w'].tolist() == [[-3, 3, 0, -1]]
    assert state.algorithm_state['w'].dtype == jnp.float32
    assert pruner.instant_sparsify(params, grads)[1]['w'].tolist() == [[0, 1, 1, 0]]


# JAX 0.5 says that a complex buffer is of no use for scores, which are real.
@pytest.mark.filterwarnings('ignore:Some donated buffers')
def test_grasp_of_complex_weights_is_that_of_their_parts():
    # The loss of a + bi is a² + 2b², its gradient (2a, 4b), its Hessian diag(2, 4): the score is 4a² + 16b².
    def loss_fn(params, x):
        return x * jnp.sum(params['w'].real ** 2 + 2 * params['w'].imag ** 2)

    settings = {'loss_fn': loss_fn, 'batches': [jnp.float32(1)], 'filter_fn': everything}
    params = {
        'w': jnp.array([3 + 0j, 2j, 1 + 1j])
    }  # scores 36, 64, 20; real parts of w·w alone would rank otherwise
    assert jaxpruner.prune(params, 1 / 3, 'grasp', **settings)[1]['w'].tolist() == [1, 1, 0]


def scored_by_weights(base):
    """An algorithm whose scores are the weights themselves, as complex as they are."""

    class Own(base):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params

    return Own


class DropsByWeights(jaxpruner.SET):
    def get_drop_scores(self, sparse_state, params, grads):
        return params


class GrowsByWeights(jaxpruner.SET):
    def get_grow_scores(self, sparse_state, params, grads):
        return params


def step(algorithm, **settings):
    schedule = jaxpruner.PeriodicSchedule(update_freq=1)
    tx = algorithm(schedule, sparsity=0.5, **settings).wrap_optax(optax.sgd(0.1))
    params = {'dense': {'w': COMPLEX, 'b': COMPLEX[0]}}
    return tx.update(params, tx.init(params), params)


LOCAL = scored_by_weights(jaxpruner.BaseUpdater)
NO_ORDER = {
    'leaf by leaf': lambda: step(LOCAL),
    'once': lambda: LOCAL(sparsity=0.5).instant_sparsify({'dense': {'w': COMPLEX}}),
    'N:M': lambda: step(LOCAL, sparsity_type='2:4'),
    'blocks': lambda: step(LOCAL, sparsity_type='block_1,2'),
    'an own ranking': lambda: step(LOCAL, topk_fn=lambda scores, sparsity: scores > 0),
    'N:M step by step': lambda: step(scored_by_weights(jaxpruner.IterativeNMPruning)),
    'all together': lambda: step(scored_by_weights(jaxpruner.GlobalMagnitudePruning)),
    'straight-through': lambda: step(scored_by_weights(jaxpruner.SteMagnitudePruning)),
    'dropped': lambda: step(DropsByWeights),
    'grown': lambda: step(GrowsByWeights),
}


@pytest.mark.parametrize('call', NO_ORDER.values(), ids=list(NO_ORDER))
def test_complex_scores_are_refused_by_name(call):
    with pytest.raises(TypeError, match=r'^dense/w: .*complex64.*jnp\.abs'):
        call()


@pytest.mark.parametrize('sparsity_type', ['unstructured', '2:4', 'block_1,2', 'channel_-1'])
def test_complex_arrays_of_scores_are_refused(sparsity_type):
    topk = jaxpruner.mask_calculator.get_topk_fn(sparsity_type)
    with pytest.raises(TypeError, match='complex64'):
        topk(COMPLEX, 0.5)


def test_complex_scores_of_dense_leaves_are_not_looked_at():
    params = {'w': KERNEL, 'b': COMPLEX[0]}
    assert LOCAL(sparsity=0.5).instant_sparsify(params)[1]['b'] is None


def test_a_leaf_that_is_to_be_pruned_needs_scores():
    class Forgetful(jaxpruner.BaseUpdater):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params | {'b': None}

    params = {'a': KERNEL, 'b': KERNEL}
    pruner = Forgetful(jaxpruner.PeriodicSchedule(update_freq=1), sparsity=0.5)
    tx = pruner.wrap_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"^b: .*None.*\{'b': None"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match=r'^b: .*None'):
        pruner.instant_sparsify(params)


FEW_BITS = ['float8_e4m3fn', 'float8_e5m2']
FEW_BITS += ['float4_e2m1fn'] if hasattr(jnp, 'float4_e2m1fn') else []
LAYERS = {
    'up': np.random.default_rng(1).normal(size=(8, 12)) * 2,
    'down': np.random.default_rng(2).normal(size=(12, 8)) * 2,
}
X = jnp.asarray(np.random.default_rng(3).normal(size=(64, 8)), jnp.float32)


def narrow_and_wide(dtype):
    """The same numbers in a dtype of few bits, and in float32."""
    narrow = {name: jnp.asarray(leaf, dtype) for name, leaf in LAYERS.items()}
    return narrow, {name: leaf.astype(jnp.float32) for name, leaf in narrow.items()}


def mlp(params, x):
    hidden = jax.nn.relu(x @ params['up'].astype(jnp.float32))
    return hidden @ params['down'].astype(jnp.float32)


def assert_pruned_alike(results, dtype):
    (pruned, masks), (_, masks_of_wide) = results
    for name in LAYERS:
        assert pruned[name].dtype == dtype
        np.testing.assert_array_equal(masks[name], masks_of_wide[name])
        assert not np.asarray(masks[name]).all()


TYPES = ['unstructured', '2:4', 'channel_-1', 'block_3,5']
TYPES += [jaxpruner.Block((3, 5), use_avg_pooling=False)]


@pytest.mark.parametrize('dtype', FEW_BITS)
@pytest.mark.parametrize('sparsity_type', TYPES, ids=str)
@pytest.mark.parametrize('algorithm', ['magnitude', 'saliency', 'movement'])
def test_floats_of_few_bits_are_ranked_as_float32(algorithm, sparsity_type, dtype):
    pruner = config(algorithm, sparsity=0.5, sparsity_type=sparsity_type)
    results = []
    for params in narrow_and_wide(dtype):
        grads = {'up': params['up'][::-1], 'down': params['down'][::-1]}
        results.append(pruner.instant_sparsify(params, grads))
    assert_pruned_alike(results, dtype)


@pytest.mark.parametrize('dtype', FEW_BITS)
@pytest.mark.parametrize('algorithm', ['wanda', 'ria', 'sparsegpt'])
def test_weights_of_few_bits_are_calibrated_as_float32(algorithm, dtype):
    inputs = {'apply_fn': mlp, 'batches': [X]}
    assert_pruned_alike(
        [jaxpruner.prune(params, 0.5, algorithm, **inputs) for params in narrow_and_wide(dtype)],
        dtype,
    )


@pytest.mark.parametrize('dtype', FEW_BITS)
def test_channels_of_few_bits_are_chosen_as_those_of_float32(dtype):
    kept, masks = [], []
    for params in narrow_and_wide(dtype):
        graph = jaxpruner.channel_groups(mlp, params, X)
        kept.append(graph.choose(params, 'parameters=0.5'))
        channels = jaxpruner.structure.GroupedChannels(graph)
        pruner = jaxpruner.MagnitudePruning(sparsity_type=channels, sparsity=0.5)
        masks.append(pruner.instant_sparsify(params)[1])
    assert str(kept[0].keep) == str(kept[1].keep)
    jax.tree.map(np.testing.assert_array_equal, *masks)


@pytest.mark.parametrize('algorithm', ['saliency', 'movement', 'rigl', 'adam_fisher'])
def test_weights_of_few_bits_are_trained(algorithm):
    pruner = config(algorithm, sparsity=0.5, update_freq=1, update_start_step=0, update_end_step=1)
    params, _ = narrow_and_wide('float8_e4m3fn')
    tx = pruner.wrap_optax(optax.adam(0.1))
    updates, state = tx.update(params, tx.init(params), params)
    assert optax.apply_updates(params, updates)['up'].dtype == jnp.float8_e4m3fn
    assert int(state.masks['up'].sum()) == 48
