"""Leaves of integers, of complex numbers and of few bits, through all that prunes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import steps
from jaxpruner import sparsity_distributions

KERNEL = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
# What stands beside weights in a tree of arrays, such as `equinox.filter(model, equinox.is_array)`.
NO_WEIGHTS = {
    'index': jnp.arange(16).reshape(4, 4),
    'flags': jnp.ones((4, 4), bool),
    'keys': jax.random.split(jax.random.key(0), 4).reshape(2, 2),
    'old_keys': jax.random.split(jax.random.PRNGKey(0), 4),
}
PARAMS = {'kernel': KERNEL} | NO_WEIGHTS
ALGORITHMS = ['magnitude', 'global_magnitude', 'magnitude_ste', 'movement', 'rigl', 'adam_fisher']
WINDOW = {
    'update_freq': 1,
    'update_start_step': 0,
    'update_end_step': 1,
    'sparsity': 0.5,
    'drop_fraction': 0.5,
}


def config(algorithm, **settings):
    return jaxpruner.create_updater_from_config({'algorithm': algorithm} | settings)


@pytest.mark.parametrize(
    'distribution', [sparsity_distributions.uniform, sparsity_distributions.erk]
)
def test_what_holds_no_weights_is_in_no_budget(distribution):
    alone = distribution({'kernel': KERNEL}, 0.5)
    targets = distribution(PARAMS, 0.5, filter_fn=lambda path, leaf: True)
    assert targets == alone | dict.fromkeys(NO_WEIGHTS)


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_training_leaves_them_alone(algorithm):
    params = {name: PARAMS[name] for name in ('kernel', 'index')}
    ones = jax.tree.map(jnp.ones_like, params)
    tx = config(algorithm, **WINDOW).wrap_optax(optax.adam(0.1))
    _, state = jax.jit(tx.update)(ones, tx.init(params), params)
    masks = steps.masks(state, params)
    assert masks['index'] is None
    assert int(masks['kernel'].sum()) == 16


@pytest.mark.parametrize('algorithm', ['magnitude', 'random', 'global_magnitude'])
def test_pruning_once_leaves_them_alone(algorithm):
    pruned, masks = jaxpruner.prune(PARAMS, 0.5, algorithm)
    assert all(pruned[name] is leaf and masks[name] is None for name, leaf in NO_WEIGHTS.items())
    assert int(jnp.count_nonzero(pruned['kernel'])) == 16
    assert 'int32' in config(algorithm, sparsity=0.5).plan(PARAMS)['index'].why_dense
    found = jaxpruner.masks_from_zeros(pruned)
    assert {name for name, mask in found.items() if mask is not None} == {'kernel'}


# By name integers are pruned; so they are by a distribution that gives them a target.
BY_NAME = {
    'a custom map': {'custom_sparsity_map': {'ind*': 0.5}},
    'a mapping': {'sparsity': {'index': 0.5}},
    'a distribution': {'sparsity_distribution_fn': lambda params: {'kernel': None, 'index': 0.5}},
}


@pytest.mark.parametrize('settings', BY_NAME.values(), ids=list(BY_NAME))
def test_integers_are_pruned_by_name_unless_gradients_are_needed(settings):
    params = {name: PARAMS[name] for name in ('kernel', 'index')}
    pruned, _ = jaxpruner.prune(params, **settings)
    assert pruned['index'].ravel().tolist() == [0] * 8 + [*range(8, 16)]
    if 'sparsity_distribution_fn' in settings:
        for algorithm in ('saliency', 'movement', 'rigl'):
            with pytest.raises(ValueError, match=r'index: .*int32'):
                config(algorithm, **settings).plan(params)


COMPLEX = jnp.array([[3 + 4j, 1j, -2.0, 0.5 + 0.5j]])  # magnitudes 5, 1, 2, 0.7
# What an optimizer descends by; times the weights, part by part: 3, -3, 0, 1.
COMPLEX_GRADS = jnp.array([[1 + 0j, 2 - 3j, 5j, 1 + 1j]])


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_complex_weights_are_trained(algorithm):
    params, grads = {'w': COMPLEX}, {'w': COMPLEX_GRADS}
    tx = config(algorithm, **WINDOW).wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    for _ in range(2):
        _, state = jax.jit(tx.update)(grads, state, params)
    mask = state.masks['w']
    if algorithm == 'movement':
        mask = config(algorithm, sparsity=0.5).instant_sparsify(params, grads)[1]['w']
        assert mask.tolist() == [[0, 1, 1, 0]]
    elif algorithm != 'rigl':  # |w g|: 5, 3.6, 10, 1
        assert mask.tolist() == [[1, 0, 1, 0]]
    assert int(mask.sum()) == 2


@pytest.mark.parametrize('base', [jaxpruner.BaseUpdater, jaxpruner.GlobalMagnitudePruning])
def test_complex_scores_have_no_order(base):
    class ByWeights(base):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params

    with pytest.raises(TypeError, match='complex64'):
        ByWeights(sparsity=0.5).instant_sparsify({'w': COMPLEX})


def test_a_leaf_that_is_to_be_pruned_needs_scores():
    class Forgetful(jaxpruner.BaseUpdater):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params | {'b': None}

    with pytest.raises(ValueError, match=r'b.*None'):
        Forgetful(sparsity=0.5).instant_sparsify({'a': KERNEL, 'b': KERNEL})


FEW_BITS = ['float8_e4m3fn', 'float8_e5m2']
FEW_BITS += ['float4_e2m1fn'] if hasattr(jnp, 'float4_e2m1fn') else []
LAYERS = {
    'up': np.random.default_rng(1).normal(size=(8, 12)) * 2,
    'down': np.random.default_rng(2).normal(size=(12, 8)) * 2,
}
TYPES = ['unstructured', '2:4', 'channel_-1', 'block_3,5', jaxpruner.Block((3, 5), False)]
CASES = [('float8_e4m3fn', kind, 'magnitude') for kind in TYPES]
CASES += [(dtype, '2:4', 'movement') for dtype in FEW_BITS[1:]]


def narrow_and_wide(dtype):
    """The same numbers in a dtype of few bits, and in float32."""
    narrow = {name: jnp.asarray(leaf, dtype) for name, leaf in LAYERS.items()}
    return narrow, {name: leaf.astype(jnp.float32) for name, leaf in narrow.items()}


@pytest.mark.parametrize(('dtype', 'kind', 'algorithm'), CASES, ids=str)
def test_floats_of_few_bits_are_ranked_as_float32(algorithm, kind, dtype):
    pruner = config(algorithm, sparsity=0.5, sparsity_type=kind)
    narrow, wide = (
        pruner.instant_sparsify(params, {name: leaf[::-1] for name, leaf in params.items()})
        for params in narrow_and_wide(dtype)
    )
    steps.assert_equal(narrow[1], wide[1])
    for name, pruned in narrow[0].items():
        assert pruned.dtype == dtype
        assert not np.asarray(narrow[1][name]).all()


@pytest.mark.parametrize('algorithm', ['wanda', 'sparsegpt'])
def test_weights_of_few_bits_are_calibrated_and_cut_as_float32(algorithm):
    def mlp(params, x):
        return jax.nn.relu(x @ params['up'].astype('float32')) @ params['down'].astype('float32')

    x = jnp.asarray(np.random.default_rng(3).normal(size=(64, 8)), jnp.float32)
    masks, groups = [], []
    for params in narrow_and_wide('float8_e4m3fn'):
        masks.append(jaxpruner.prune(params, 0.5, algorithm, apply_fn=mlp, batches=[x])[1])
        groups.append(jaxpruner.channel_groups(mlp, params, x).choose(params, 'parameters=0.5'))
    steps.assert_equal(*masks)
    assert str(groups[0].keep) == str(groups[1].keep)


@pytest.mark.parametrize('algorithm', ['movement', 'rigl'])
def test_weights_of_few_bits_are_trained(algorithm):
    params, _ = narrow_and_wide('float8_e4m3fn')
    tx = config(algorithm, **WINDOW).wrap_optax(optax.adam(0.1))
    updates, state = tx.update(params, tx.init(params), params)
    assert optax.apply_updates(params, updates)['up'].dtype == jnp.float8_e4m3fn
    assert int(state.masks['up'].sum()) == 48
