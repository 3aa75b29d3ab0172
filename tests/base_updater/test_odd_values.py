"""Numbers of Python as leaves, flags, NaN and denormal numbers."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import rows
from jaxpruner import mask_calculator, sparsity_distributions, sparsity_types

# What people keep beside their weights.
PARAMS = {
    'w': jnp.arange(1.0, 33).reshape(4, 8),
    'scale': 1.0,
    'steps': 3,
    'of NumPy': np.float32(2.0),
    'flag': True,
    'flags': jnp.ones((2, 2), bool),
    'key': jax.random.key(0),
}
FLOATS = {name: PARAMS[name] for name in ('w', 'scale', 'of NumPy')}


def at(sparsity, **settings):
    return {
        'sparsity_distribution_fn': functools.partial(
            sparsity_distributions.uniform, sparsity=sparsity, **settings
        )
    }


def everything(path, leaf):
    del path, leaf
    return True


@pytest.mark.parametrize(
    'distribution', [sparsity_distributions.uniform, sparsity_distributions.erk]
)
def test_numbers_have_no_dimension_and_one_weight(distribution):
    targets = distribution(PARAMS, 0.5)
    assert {name for name, target in targets.items() if target is not None} == {'w'}
    assert distribution(FLOATS, 0.5, custom_sparsity_map={'scale': 0.25})['scale'] == 0.25
    assert distribution(FLOATS, 0.5, filter_fn=everything)['of NumPy'] is not None


def test_flags_and_keys_are_not_ranked_whatever_the_filter_says():
    updater = jaxpruner.MagnitudePruning(**at(0.5, filter_fn=everything))
    targets = updater.get_target_sparsities(PARAMS)
    assert {name for name, target in targets.items() if target is not None} == set(FLOATS)
    assert updater.plan(PARAMS)['flags'].why_dense == 'it holds no numbers that can be ranked'
    assert updater.instant_sparsify(PARAMS)[1]['flags'] is None


PRUNE = [name for name in jaxpruner.all_algorithm_names() if name != 'no_prune']
FILTERS = [sparsity_distributions.NOT_DIM_ONE_FILTER, everything]


@pytest.mark.parametrize(('name', 'filter_fn'), rows.crossed(PRUNE, FILTERS))
def test_numbers_are_trained_as_arrays_are(name, filter_fn):
    config = {
        'algorithm': name,
        'sparsity': 0.5,
        'update_freq': 1,
        'update_start_step': 0,
        'update_end_step': 2,
    }
    if name == 'iterative_nm':
        config['sparsity_type'] = {'w': '2:4', '*': None}
    updater = jaxpruner.create_updater_from_config(config | {'filter_fn': filter_fn})
    states = []
    for params in (FLOATS, jax.tree.map(jnp.asarray, FLOATS)):
        tx = updater.wrap_optax(optax.adam(0.1))
        state = tx.init(params)
        grads = jax.tree.map(jnp.ones_like, updater.pre_forward_update(params, state))
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
        states.append((updates, state.masks))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_numbers_in_what_is_pruned_once_and_summed_up():
    pruned, masks = jaxpruner.MagnitudePruning(**at(0.5)).instant_sparsify(FLOATS)
    assert pruned['scale'] == 1.0
    assert masks['scale'] is None
    assert jaxpruner.masks_from_zeros(pruned)['scale'] is None
    assert jaxpruner.summarize_intersection(pruned, FLOATS)['scale'] == 1.0
    fixed = jaxpruner.FixedMask(
        jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.uint8), FLOATS)
    )
    assert fixed.instant_sparsify(FLOATS)[0]['scale'] == 0


# Weights, gradients, and the leaves that the warning has to name; `None` for none.
NANS = {
    'one leaf': ({'a': jnp.full((2, 4), jnp.nan), 'b': PARAMS['w']}, None, 'a holds NaN alone'),
    'two leaves': (
        {'a': jnp.full((2, 4), jnp.nan), 'b': jnp.full((2, 4), jnp.nan)},
        None,
        r'a holds .* 1 more leaves',
    ),
    'some weights': ({'a': PARAMS['w'].at[0].set(jnp.nan), 'b': PARAMS['w']}, None, None),
    'gradients': (
        {'a': PARAMS['w'], 'b': PARAMS['w']},
        {'a': PARAMS['w'], 'b': jnp.full((4, 8), jnp.nan)},
        'gradients of b hold NaN alone',
    ),
}


@pytest.mark.parametrize(('params', 'grads', 'words'), NANS.values(), ids=list(NANS))
def test_a_leaf_of_nan_alone_is_named_where_it_is_emptied(params, grads, words):
    pruner = (jaxpruner.MagnitudePruning if grads is None else jaxpruner.SaliencyPruning)(**at(0.5))
    if words is None:
        pruner.instant_sparsify(params, grads)
        return
    with pytest.warns(UserWarning, match=words) as caught:
        pruner.instant_sparsify(params, grads)
    assert [warning.filename for warning in caught] == [__file__]


def test_nothing_is_looked_at_where_values_are_traced():
    program = jax.make_jaxpr(jaxpruner.MagnitudePruning(**at(0.5)).instant_sparsify)(
        {'a': PARAMS['w']}
    )
    assert 'is_finite' not in str(program)
    jax.jit(jaxpruner.MagnitudePruning(**at(0.5)).instant_sparsify)(
        {'a': jnp.full((2, 4), jnp.nan)}
    )


def test_a_leaf_that_a_global_ranking_empties_is_no_leaf_of_nan():
    params = {'small': jnp.full((2, 2), 0.001), 'large': PARAMS['w']}
    pruner = jaxpruner.GlobalMagnitudePruning(normalize_scores=False, **at(0.5))
    assert int(pruner.instant_sparsify(params)[1]['small'].sum()) == 0


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='of other devices nothing is said')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@hypothesis.given(
    st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=16), st.floats(0, 1, width=32)
)
@hypothesis.settings(deadline=None, max_examples=30)
def test_on_a_cpu_denormal_scores_are_ties_of_zero(dtype, multiples, sparsity):
    """XLA compares them as zero there. The documents say so."""
    denormal = jnp.asarray(np.float32(1.4e-45) * np.asarray(multiples, np.float64), dtype)
    scores = jnp.concatenate([denormal, jnp.asarray([1.0, -1.0, 0.0], dtype)])
    flushed = jnp.concatenate([jnp.zeros_like(denormal), jnp.asarray([1.0, -1.0, 0.0], dtype)])
    for kind in (sparsity_types.Unstructured(), sparsity_types.NByM(1, 2, allow_partial=True)):
        topk = mask_calculator.get_topk_fn(kind)
        np.testing.assert_array_equal(topk(scores, sparsity), topk(flushed, sparsity))


def test_denormal_scores_of_float16_are_ranked():
    scores = jnp.asarray([6e-8, 1.2e-7, 1.8e-7, 0, 2.4e-7], jnp.float16)
    np.testing.assert_array_equal(
        mask_calculator.topk_mask_calculator(scores, 0.4), [0, 1, 1, 0, 1]
    )
