"""Distributions: budgets, filters, custom maps, stacked layers, and what they refuse."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions as distributions

PARAMS = {
    'conv': {'kernel': jnp.zeros((3, 3, 8, 16)), 'bias': jnp.zeros(16)},
    'dense': {'kernel': jnp.zeros((256, 64)), 'bias': jnp.zeros(64)},
    'head': {'kernel': jnp.zeros((64, 10)), 'bias': jnp.zeros(10)},
}


@pytest.mark.parametrize('distribution', [distributions.uniform, distributions.erk])
def test_a_custom_map_overrides_the_filter(distribution):
    custom = {'*/bias': 0.25, ('dense', 'kernel'): None}
    targets = distribution(PARAMS, 0.5, custom_sparsity_map=custom)
    assert targets['conv']['bias'] == 0.25
    assert targets['dense']['kernel'] is None
    assert targets['conv']['kernel'] is not None


@pytest.mark.parametrize('distribution', [distributions.uniform, distributions.erk])
def test_every_pytree_is_taken(distribution):
    assert distribution([jnp.zeros((4, 4)), jnp.zeros(4)], 0.5) == [pytest.approx(0.5), None]
    assert distribution(jnp.zeros((4, 4)), 0.5) == pytest.approx(0.5)
    assert distribution({}, 0.5) == {}


STACKED = {
    'blocks': {
        'norm': {'scale': jnp.zeros((6, 32))},
        'mlp': {'kernel': jnp.zeros((6, 32, 64)), 'bias': jnp.zeros((6, 64))},
    }
}


# As the attention layers of Flax NNX have them.
ATTENTION = {
    name: {'kernel': jnp.zeros((64, 4, 16)), 'bias': jnp.zeros((4, 16))}
    for name in ('query', 'key', 'value', 'extra')
} | {'out': {'kernel': jnp.zeros((4, 16, 64)), 'bias': jnp.zeros(64)}}
QUERY = {'kernel': jnp.zeros((6, 64, 4, 16)), 'bias': jnp.zeros((6, 4, 16))}

HAIKU = {'query': {'w': jnp.zeros((64, 4, 16)), 'b': jnp.zeros((4, 16))}}
NORM = {'norm': {'beta': jnp.zeros((1, 1, 8)), 'gamma': jnp.zeros((1, 1, 8))}}

# Parameters, `stacked`, and what the one warning says.
VECTORS = {
    'layers': (STACKED, (), r"blocks/mlp/bias \(6, 64\), .*scale.* stacked='blocks/mlp/\*'"),
    'two dimensions': (ATTENTION, (), r'extra/bias \(4, 16\), key/bias.* and 1 more '),
    'both': ({'blocks': {'query': QUERY}}, 'blocks/*', r'blocks/query/bias \(6, 4, 16\) '),
    'a b beside a kernel': (HAIKU, (), r'query/b \(4, 16\) '),
    'axes of length one': (NORM, (), r'norm/beta \(1, 1, 8\), norm/gamma '),
}


@pytest.mark.parametrize(('params', 'stacked', 'words'), VECTORS.values(), ids=VECTORS)
def test_vectors_that_look_like_kernels_are_warned_of(params, stacked, words):
    with pytest.warns(UserWarning, match=words + '.*NOT_BIAS_FILTER') as caught:
        jaxpruner.MagnitudePruning(sparsity=0.5, stacked=stacked).plan(params)
    assert len(caught) == 1
    assert caught[0].filename == __file__


# Parameters, settings of a distribution and of the pruner, and the target of each leaf; no warning.
DECIDED = [
    (STACKED, {}, {'stacked': 'blocks/*'}, [None, 0.5, None]),
    (ATTENTION['query'], {'filter_fn': distributions.NOT_BIAS_FILTER}, {}, [None, 0.5]),
    (ATTENTION['query'], {'filter_fn': lambda path, leaf: leaf.ndim > 1}, {}, [0.5, 0.5]),
    (ATTENTION['query'], {'custom_sparsity_map': {'bias': 0.25}}, {}, [0.25, 0.5]),
    (ATTENTION['query'], {}, {'sparsity_type': {'bias': None}}, [None, 0.5]),
    ({'lora': {'a': jnp.zeros((64, 4)), 'b': jnp.zeros((4, 64))}}, {}, {}, [0.5, 0.5]),
]


@pytest.mark.parametrize(('params', 'settings', 'of_pruner', 'expected'), DECIDED)
def test_nothing_is_said_of_what_is_decided(params, settings, of_pruner, expected):
    distribution = functools.partial(distributions.uniform, sparsity=0.5, **settings)
    pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=distribution, **of_pruner)
    targets = pruner.get_target_sparsities(params)
    assert jax.tree.leaves(targets, is_leaf=lambda target: target is None) == expected


BAD = [
    (1.5, ValueError, r'sparsity must lie in \[0, 1\] .*, got 1.5; 1.5 per cent is 0.015'),
    (-0.1, ValueError, r'got -0.1'),
    (math.nan, ValueError, r'got nan'),
    ('half', TypeError, r"sparsity must be a number between 0 and 1, got 'half'"),
]


@pytest.mark.parametrize(('sparsity', 'error', 'message'), BAD)
def test_bad_sparsities(sparsity, error, message):
    for distribution in (distributions.uniform, distributions.erk):
        with pytest.raises(error, match=message):
            distribution(PARAMS, sparsity)


BAD_NAMES = [
    ({'dens/kernel': 0.5}, "'dens/kernel' matches no .*are 'dense/kernel'"),
    ({'head/kernel': 2}, r"map\['head/kernel'\] must lie in \[0, 1\]"),
]


@pytest.mark.parametrize(('custom', 'message'), BAD_NAMES)
def test_bad_custom_maps(custom, message):
    with pytest.raises(ValueError, match=message):
        distributions.uniform(PARAMS, 0.5, custom_sparsity_map=custom)


def test_a_traced_sparsity_is_taken_where_it_can_be():
    np.testing.assert_allclose(
        jax.jit(lambda s: distributions.uniform(jnp.zeros((2, 2)), s))(0.25), 0.25
    )
    with pytest.raises(TypeError, match='erk needs a concrete sparsity'):
        jax.jit(lambda s: distributions.erk(jnp.zeros((2, 2)), s))(0.25)
