"""OWL on models, against the published equations in NumPy and float64: one share for each block, or for each leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.random_numbers import Normal
from jaxpruner.oneshot import RIA, SparseGPT, Wanda
from oneshot import references

normal = Normal(2)

LAYERS = 3
# Some columns are large, so that layers differ in their outliers, and the two matrices of a layer do, too.
STACKED = {
    'up': normal(LAYERS, 8, 16)
    * jnp.where(jnp.arange(16) < 2, jnp.array([1.0, 6.0, 3.0])[:, None, None], 1),
    'down': normal(LAYERS, 16, 8)
    * jnp.where(jnp.arange(8) < 1, jnp.array([4.0, 1.0, 2.0])[:, None, None], 1),
}
UNROLLED = {'h': {str(i): {name: STACKED[name][i] for name in STACKED} for i in range(LAYERS)}}
X = normal(64, 8)
SETTINGS = {'owl': True, 'owl_multiple': 2.0, 'owl_deviation': 0.2, 'per': 'layer'}


def layer(x, weights):
    return x + jnp.tanh(x @ weights['up']) @ weights['down'] / 8


def scanned(params, x):
    return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params)[0]


def unrolled(params, x):
    for weights in params['h'].values():
        x = layer(x, weights)
    return x


def half(params):
    return jax.tree.map(lambda _: 0.5, params)


def layers_in_numpy():
    x, found = np.asarray(X, np.float64), []
    for i in range(LAYERS):
        up, down = (np.asarray(STACKED[name][i], np.float64) for name in ('up', 'down'))
        hidden = np.tanh(x @ up)
        found.append([(up, x), (down, hidden)])
        x = x + hidden @ down / 8
    return found


def expected_sparsities(per):
    layers = layers_in_numpy()
    if per == 'block':
        return np.repeat(references.owl(layers, 0.5, 2.0, 0.2), 2)
    return references.owl([[matrix] for matrices in layers for matrix in matrices], 0.5, 2.0, 0.2)


@pytest.mark.parametrize('per', ['block', 'leaf'])
@pytest.mark.parametrize('sequential', [False, True])
@pytest.mark.parametrize('form', ['unrolled', 'scanned'])
def test_masks_are_those_of_the_published_equations(form, sequential, per):
    sparsities = expected_sparsities(per)
    assert np.ptp(sparsities) > 0.3
    if per == 'block':
        np.testing.assert_array_equal(sparsities[::2], sparsities[1::2])
    params, apply_fn = (STACKED, scanned) if form == 'scanned' else (UNROLLED, unrolled)
    pruner = Wanda(sparsity_distribution_fn=half, owl_per=per, sequential=sequential, **SETTINGS)
    _, masks = pruner.instant_sparsify(params, apply_fn=apply_fn, batches=[X])
    matrices = [matrix for matrices in layers_in_numpy() for matrix in matrices]
    for number, ((weights, inputs), sparsity) in enumerate(zip(matrices, sparsities, strict=True)):
        i, name = number // 2, ('up', 'down')[number % 2]
        mask = masks[name][i] if form == 'scanned' else masks['h'][str(i)][name]
        expected = references.mask_of(references.wanda(weights, inputs), sparsity, per='layer')
        assert mask.sum() == expected.sum()
        if not sequential:  # where later layers see what the earlier ones have become
            np.testing.assert_array_equal(mask, expected)


def test_weights_of_sparsegpt_with_the_sparsities_of_blocks():
    pruner = SparseGPT(sparsity_distribution_fn=half, **SETTINGS)
    found, masks = pruner.instant_sparsify(UNROLLED, apply_fn=unrolled, batches=[X])
    for i, (matrices, sparsity) in enumerate(
        zip(layers_in_numpy(), expected_sparsities('block')[::2], strict=True)
    ):
        for name, (weights, inputs) in zip(('up', 'down'), matrices, strict=True):
            expected, mask = references.sparsegpt(weights, inputs, sparsity)
            np.testing.assert_array_equal(masks['h'][str(i)][name], mask)
            np.testing.assert_allclose(
                found['h'][str(i)][name], expected, atol=1e-4 * np.abs(expected).max()
            )


def test_blocks_may_be_named():
    params = {
        f'{name}_{letter}': UNROLLED['h'][str(i)][name]
        for i, letter in enumerate('abc')
        for name in STACKED
    }

    def apply(params, x):
        for letter in 'abc':
            x = layer(x, {name: params[f'{name}_{letter}'] for name in STACKED})
        return x

    pruner = RIA(
        sparsity_distribution_fn=half, blocks=['*_a', '*_b', ['up_c', 'down_c']], **SETTINGS
    )
    _, masks = pruner.instant_sparsify(params, apply_fn=apply, batches=[X])
    for number, letter in enumerate('abc'):
        kept = references.number_kept(128, expected_sparsities('block')[2 * number])
        assert masks[f'up_{letter}'].sum() == masks[f'down_{letter}'].sum() == kept


def test_the_mean_is_kept_where_blocks_differ_in_size():
    params = {'h': {'0': {'w': normal(8, 8) ** 3}, '1': {'w': normal(8, 32), 'v': normal(32, 8)}}}

    def apply(params, x):
        return (
            jnp.tanh(jnp.tanh(x @ params['h']['0']['w']) @ params['h']['1']['w'])
            @ params['h']['1']['v']
        )

    _, masks = Wanda(sparsity_distribution_fn=half, **SETTINGS).instant_sparsify(
        params, apply_fn=apply, batches=[X]
    )
    kept = [int(mask.sum()) for mask in jax.tree.leaves(masks)]
    assert sum(kept) == pytest.approx(576 / 2, abs=2)
    assert kept[0] != 32
