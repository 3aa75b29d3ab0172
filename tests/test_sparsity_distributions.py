"""Distributions: budgets, filters, custom maps, stacked layers, and what they refuse."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparsity_distributions as distributions

PARAMS = {
    'conv': {'kernel': jnp.zeros((3, 3, 8, 16)), 'bias': jnp.zeros(16)},
    'dense': {'kernel': jnp.zeros((256, 64)), 'bias': jnp.zeros(64)},
    'head': {'kernel': jnp.zeros((64, 10)), 'bias': jnp.zeros(10)},
}


def kept_share(targets, params, everything=False):
    """Share of weights kept, of the leaves that have a target or of all."""
    kept = total = 0
    for target, leaf in zip(
        jax.tree.leaves(targets, is_leaf=lambda t: t is None), jax.tree.leaves(params), strict=True
    ):
        if target is not None or everything:
            kept += leaf.size * (1 - (target or 0))
            total += leaf.size
    return kept / total


@pytest.mark.parametrize('sparsity', [0.0, 0.3, 0.8, 0.95])
def test_erk_keeps_to_its_budget(sparsity):
    targets = distributions.erk(PARAMS, sparsity)
    assert kept_share(targets, PARAMS) == pytest.approx(1 - sparsity, abs=1e-3)
    assert all(0 <= target <= 1 for target in jax.tree.leaves(targets))
    assert targets['conv']['bias'] is None


def test_erk_makes_wide_layers_sparser():
    targets = distributions.erk(PARAMS, 0.9)
    assert targets['head']['kernel'] < targets['dense']['kernel']


def test_excluded_leaves_can_count_in_the_budget():
    targets = distributions.erk(
        PARAMS, 0.8, custom_sparsity_map={'head/kernel': 0.0}, count_excluded=True
    )
    assert kept_share(targets, PARAMS, everything=True) == pytest.approx(0.2, abs=1e-6)
    with pytest.raises(
        ValueError,
        match=r'sparsity 0.999 of all \d+ parameters cannot be reached: .* keep 730 weights',
    ):
        distributions.erk(
            PARAMS, 0.999, custom_sparsity_map={'head/kernel': 0.0}, count_excluded=True
        )


@pytest.mark.parametrize('distribution', [distributions.uniform, distributions.erk])
def test_a_custom_map_overrides_the_filter(distribution):
    custom = {'*/bias': 0.25, ('dense', 'kernel'): None}
    targets = distribution(PARAMS, 0.5, custom_sparsity_map=custom)
    assert targets['conv']['bias'] == 0.25
    assert targets['dense']['kernel'] is None
    assert targets['conv']['kernel'] is not None


def test_filters_get_path_and_leaf():
    targets = distributions.uniform(
        PARAMS, 0.5, filter_fn=lambda path, leaf: path[0] == 'head' and leaf.ndim == 1
    )
    assert jax.tree.leaves(targets) == [0.5]


@pytest.mark.parametrize('distribution', [distributions.uniform, distributions.erk])
@pytest.mark.parametrize(
    'params',
    [jnp.zeros((4, 4)), [jnp.zeros((4, 4)), jnp.zeros(4)], {}],
    ids=['array', 'list', 'empty'],
)
def test_every_pytree_is_taken(distribution, params):
    targets = distribution(params, 0.5)
    assert jax.tree.structure(jax.tree.map(lambda _: 0, params)) == jax.tree.structure(
        jax.tree.map(lambda _: 0, targets, is_leaf=lambda t: t is None)
    )


STACKED = {
    'blocks': {
        'norm': {'scale': jnp.zeros((6, 32))},
        'mlp': {'kernel': jnp.zeros((6, 32, 64)), 'bias': jnp.zeros((6, 64))},
    }
}


def test_stacked_layers_are_warned_about_and_named():
    with pytest.warns(
        UserWarning,
        match=r"blocks/mlp/bias has shape \(6, 64\) and looks like .* 6 stacked layers.*stacked='blocks/\*'",
    ):
        distributions.uniform(STACKED, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        targets = distributions.erk(STACKED, 0.5, stacked='blocks/*')
    assert targets == {
        'blocks': {'norm': {'scale': None}, 'mlp': {'kernel': pytest.approx(0.5), 'bias': None}}
    }


# As the attention layers of Flax NNX have them.
ATTENTION = {
    name: {'kernel': jnp.zeros((64, 4, 16)), 'bias': jnp.zeros((4, 16))}
    for name in ('query', 'key', 'value', 'extra')
} | {'out': {'kernel': jnp.zeros((4, 16, 64)), 'bias': jnp.zeros(64)}}


def test_biases_of_two_dimensions_are_named_with_the_filter_that_leaves_them_out():
    with pytest.warns(
        UserWarning, match=r'extra/bias \(4, 16\), key/bias.* and 1 more .*NOT_BIAS_FILTER'
    ) as caught:
        targets = distributions.uniform(ATTENTION, 0.5)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert targets['query'] == {'bias': 0.5, 'kernel': 0.5}  # by the published filter
    targets = distributions.uniform(ATTENTION, 0.5, filter_fn=distributions.NOT_BIAS_FILTER)
    assert targets['query'] == {'bias': None, 'kernel': 0.5}
    assert (
        distributions.uniform(ATTENTION, 0.5, filter_fn=lambda path, leaf: leaf.ndim > 1)['key'][
            'bias'
        ]
        == 0.5
    )


def test_biases_of_two_dimensions_in_stacked_layers():
    stacked = {
        'blocks': {'query': {'kernel': jnp.zeros((6, 64, 4, 16)), 'bias': jnp.zeros((6, 4, 16))}}
    }
    with pytest.warns(UserWarning, match=r'blocks/query/bias has shape .* 6 stacked layers'):
        distributions.uniform(stacked, 0.5)
    with pytest.warns(UserWarning, match=r'blocks/query/bias \(6, 4, 16\) .*NOT_BIAS_FILTER'):
        distributions.uniform(stacked, 0.5, stacked='blocks/*')


def test_a_b_beside_a_kernel_is_a_bias_and_a_b_of_lora_is_none():
    haiku = {'query': {'w': jnp.zeros((64, 4, 16)), 'b': jnp.zeros((4, 16))}}
    with pytest.warns(UserWarning, match='query/b'):
        distributions.uniform(haiku, 0.5)
    distributions.uniform({'lora': {'a': jnp.zeros((64, 4)), 'b': jnp.zeros((4, 64))}}, 0.5)


def test_norms_with_axes_of_length_one_are_no_stacks():
    with pytest.warns(UserWarning, match=r'norm/beta \(1, 1, 8\), norm/gamma .*NOT_BIAS_FILTER'):
        distributions.uniform(
            {'norm': {'beta': jnp.zeros((1, 1, 8)), 'gamma': jnp.zeros((1, 1, 8))}}, 0.5
        )


BAD = [
    (
        1.5,
        ValueError,
        r'sparsity must lie in \[0, 1\] \(the share of weights removed\), got 1.5; 1.5 per cent is 0.015',
    ),
    (90, ValueError, r'got 90; 90.0 per cent is 0.9'),
    (-0.1, ValueError, r'got -0.1'),
    (math.nan, ValueError, r'got nan'),
    ('half', TypeError, r"sparsity must be a number between 0 and 1, got 'half'"),
    (None, TypeError, r'sparsity must be a number between 0 and 1, got None'),
    (True, TypeError, r'sparsity must be a number between 0 and 1, got True'),
]


@pytest.mark.parametrize('distribution', [distributions.uniform, distributions.erk])
@pytest.mark.parametrize(('sparsity', 'error', 'message'), BAD)
def test_bad_sparsities(distribution, sparsity, error, message):
    with pytest.raises(error, match=message):
        distribution(PARAMS, sparsity)


def test_bad_custom_maps():
    with pytest.raises(
        ValueError,
        match=r"custom_sparsity_map: 'dens/kernel' matches no parameter; the nearest are 'dense/kernel'",
    ):
        distributions.uniform(PARAMS, 0.5, custom_sparsity_map={'dens/kernel': 0.5})
    with pytest.raises(
        ValueError, match=r"custom_sparsity_map\['head/kernel'\] must lie in \[0, 1\]"
    ):
        distributions.uniform(PARAMS, 0.5, custom_sparsity_map={'head/kernel': 2})
    with pytest.raises(ValueError, match=r"stacked: 'layers/\*' matches no parameter"):
        distributions.uniform(PARAMS, 0.5, stacked=('layers/*',))


def test_a_traced_sparsity_is_taken_where_it_can_be():
    np.testing.assert_allclose(
        jax.jit(lambda s: distributions.uniform(jnp.zeros((2, 2)), s))(0.25), 0.25
    )
    with pytest.raises(TypeError, match='erk needs a concrete sparsity'):
        jax.jit(lambda s: distributions.erk(jnp.zeros((2, 2)), s))(0.25)
