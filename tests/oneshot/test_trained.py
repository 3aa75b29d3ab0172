"""Trained models pruned with statistics of their inputs, at once and block by block, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers import rows
from jaxpruner.oneshot import RIA, SparseGPT, Wanda, calibrate, owl_sparsities
from oneshot import model, references

ALGORITHMS = {
    'wanda': (references.wanda, 'output'),
    'ria': (references.ria, 'layer'),
    'sparsegpt': (None, 'layer'),
}
DENSE = ('embedding', 'bias')


def half(params):
    return jax.tree.map(lambda _: 0.5, params)


def close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope='module')
def calibration():
    return calibrate(model.apply, model.PARAMS, model.BATCHES, kind='gram')


@pytest.fixture(scope='module')
def samples():
    return model.samples(model.PARAMS)


def matrices_of(tree, calibration, name):
    """All weight matrices of a leaf, `[number, inputs, outputs]`."""
    parts = [entry.matrices.read(jnp.float32(tree[name])) for entry in calibration[name,]]
    return np.concatenate([np.asarray(part).reshape(-1, *part.shape[-2:]) for part in parts])


@pytest.mark.parametrize(
    ('algorithm', 'pattern'), rows.crossed(ALGORITHMS, ['unstructured', '2:4'])
)
def test_models_are_pruned_as_the_references_prune_matrices(
    algorithm, pattern, calibration, samples
):
    config = {'algorithm': algorithm, 'sparsity': 0.5, 'sparsity_type': pattern}
    pruner = jaxpruner.create_updater_from_config(config)
    params, masks = pruner.instant_sparsify(model.PARAMS, calibration=calibration)
    assert all(masks[name] is None and params[name] is model.PARAMS[name] for name in DENSE)
    n_by_m = None if pattern == 'unstructured' else (2, 4)
    score, per = ALGORITHMS[algorithm]
    for name in samples:
        inputs = samples[name].reshape(-1, *samples[name].shape[-2:])
        trees = [matrices_of(tree, calibration, name) for tree in (model.PARAMS, params, masks)]
        for i, (before, after, mask) in enumerate(zip(*trees, strict=True)):
            x = inputs[i % len(inputs)]
            if score is None:
                weights, expected = references.sparsegpt(before, x, 0.5, n_by_m)
            else:
                scores = score(before.astype(np.float64), x)
                expected = references.mask_of(scores, 0.5, n_by_m, per)
                weights = before * expected
            np.testing.assert_array_equal(mask, expected, err_msg=name)
            np.testing.assert_allclose(after, weights, atol=1e-4 * np.abs(weights).max())


# Block by block.

LAYERS = 3
STACKED = {
    'a': model.normal(LAYERS, 8, 16) / 2,
    'b': model.normal(LAYERS, 16, 8) / 2,
    'out': model.normal(8, 4),
}
UNROLLED = {f'{name}{i}': STACKED[name][i] for name in 'ab' for i in range(LAYERS)}
UNROLLED['out'] = STACKED['out']
BATCHES = [model.normal(40, 8) for _ in range(2)]


def layer(x, a, b):
    return jnp.tanh(x @ a) @ b


def scanned(params, x):
    def body(x, taken):
        return jax.checkpoint(layer)(x, *taken), x.sum()

    x, sums = jax.lax.scan(body, jnp.exp(x * 0.1), (params['a'], params['b']), reverse=True)
    return (x + sums.sum()) @ params['out']


def unrolled(params, x):
    x, total = jnp.exp(x * 0.1), 0
    for i in reversed(range(LAYERS)):
        total += x.sum()
        x = jax.jit(layer)(x, params[f'a{i}'], params[f'b{i}'])
    return (x + total) @ params['out']


def stacked(tree):
    by_name = {name: np.stack([tree[f'{name}{i}'] for i in range(LAYERS)]) for name in 'ab'}
    return by_name | {'out': tree['out']}


def test_a_scan_is_pruned_as_its_layers_one_after_another():
    given = {'batches': BATCHES}
    pruner = SparseGPT(sparsity_distribution_fn=half, sequential=True)
    copied = jax.tree.map(jnp.copy, STACKED)
    found = pruner.instant_sparsify(copied, apply_fn=scanned, **given)
    jax.tree.map(np.testing.assert_array_equal, copied, STACKED)
    blocks = [[f'a{i}', f'b{i}'] for i in range(LAYERS)]
    alone = SparseGPT(sparsity_distribution_fn=half, sequential=True, blocks=blocks)
    expected = alone.instant_sparsify(UNROLLED, apply_fn=unrolled, **given)
    jax.tree.map(np.testing.assert_array_equal, found[1], stacked(expected[1]))
    jax.tree.map(close, found[0], stacked(expected[0]))
    at_once = SparseGPT(sparsity_distribution_fn=half)
    _, other = at_once.instant_sparsify(STACKED, apply_fn=scanned, batches=BATCHES)
    assert any((other[name] != found[1][name]).any() for name in STACKED)


TURNS = {'in': model.normal(8, 8), 'shared': model.normal(8, 8), 'out': model.normal(8, 4)}
TURNS |= {'stack': model.normal(LAYERS, 8, 8), 'scale': model.normal(8)}


def in_turns(params, x, is_long):
    """A call, what is made of parameters alone, a leaf that a loop reads in each trip, and a branch."""
    x = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, params['in']) + np.arange(8) / 8
    scale = jnp.exp(params['scale'])

    def body(carried, w):
        x, count = carried
        x = jnp.tanh(x @ w * scale + x @ params['shared'])
        return (x, count + 1), x.sum(0)

    (x, count), sums = jax.lax.scan(body, (x, 0), params['stack'][::-1], reverse=True)
    x = jax.lax.cond(is_long, lambda x: x + sums.sum(0) * count, lambda x: x, x)
    return (x * scale) @ params['out']


def test_blocks_in_turn_are_those_of_statistics_that_are_taken_anew_before_each():
    given = {'apply_fn': in_turns, 'batches': [(batch, jnp.array(True)) for batch in BATCHES]}
    sparsity = {'stack': None, '*': 0.5}
    found = jaxpruner.prune(TURNS, sparsity, 'sparsegpt', sequential=True, **given)
    params = TURNS
    for name in ('in', 'shared', 'out'):
        params, masks = jaxpruner.prune(params, {name: 0.5}, 'sparsegpt', **given)
        np.testing.assert_array_equal(found[1][name], masks[name])
    jax.tree.map(close, found[0], params)


# OWL, against the published equations: one share for each block, or for each leaf.

# Some columns are large, so that layers differ in their outliers, and the two matrices of a layer do, too.
DEEP = {
    'up': model.normal(LAYERS, 8, 16)
    * jnp.where(jnp.arange(16) < 2, jnp.array([1.0, 6.0, 3.0])[:, None, None], 1),
    'down': model.normal(LAYERS, 16, 8)
    * jnp.where(jnp.arange(8) < 1, jnp.array([4.0, 1.0, 2.0])[:, None, None], 1),
}
BY_NUMBER = {'h': {str(i): {name: DEEP[name][i] for name in DEEP} for i in range(LAYERS)}}
X = model.normal(64, 8)
OWL = {'owl': True, 'owl_multiple': 2.0, 'owl_deviation': 0.2, 'per': 'layer'}


def residual(x, weights):
    return x + jnp.tanh(x @ weights['up']) @ weights['down'] / 8


def deep_scanned(params, x):
    return jax.lax.scan(lambda x, weights: (residual(x, weights), None), x, params)[0]


def deep_unrolled(params, x):
    for weights in params['h'].values():
        x = residual(x, weights)
    return x


def layers_in_numpy():
    """For each layer its two matrices with their inputs."""
    x, found = np.asarray(X, np.float64), []
    for up, down in zip(
        *(np.asarray(DEEP[name], np.float64) for name in ('up', 'down')), strict=True
    ):
        hidden = np.tanh(x @ up)
        found.append([(up, x), (down, hidden)])
        x = x + hidden @ down / 8
    return found


def expected_sparsities(per):
    layers = layers_in_numpy()
    if per == 'block':
        return np.repeat(references.owl(layers, 0.5, 2.0, 0.2), 2)
    return references.owl([[matrix] for matrices in layers for matrix in matrices], 0.5, 2.0, 0.2)


@pytest.mark.parametrize(
    ('form', 'sequential', 'per'),
    [('unrolled', False, 'block'), ('scanned', True, 'block'), ('scanned', False, 'leaf')],
)
def test_owl_gives_the_sparsities_of_the_published_equations(form, sequential, per):
    sparsities = expected_sparsities(per)
    assert np.ptp(sparsities) > 0.3
    params, apply_fn = (DEEP, deep_scanned) if form == 'scanned' else (BY_NUMBER, deep_unrolled)
    pruner = Wanda(sparsity_distribution_fn=half, owl_per=per, sequential=sequential, **OWL)
    _, masks = pruner.instant_sparsify(params, apply_fn=apply_fn, batches=[X])
    matrices = [matrix for matrices in layers_in_numpy() for matrix in matrices]
    for number, ((weights, inputs), sparsity) in enumerate(zip(matrices, sparsities, strict=True)):
        i, name = number // 2, ('up', 'down')[number % 2]
        mask = masks[name][i] if form == 'scanned' else masks['h'][str(i)][name]
        expected = references.mask_of(references.wanda(weights, inputs), sparsity, per='layer')
        assert mask.sum() == expected.sum()
        if not sequential:  # where later layers see what the earlier ones have become
            np.testing.assert_array_equal(mask, expected)


def test_blocks_of_owl_may_be_named():
    letters = dict(zip('abc', range(LAYERS), strict=True))
    params = {f'{name}_{a}': DEEP[name][i] for a, i in letters.items() for name in DEEP}

    def apply(params, x):
        for letter in letters:
            x = residual(x, {name: params[f'{name}_{letter}'] for name in DEEP})
        return x

    blocks = ['*_a', '*_b', ['up_c', 'down_c']]
    pruner = RIA(sparsity_distribution_fn=half, blocks=blocks, **OWL)
    _, masks = pruner.instant_sparsify(params, apply_fn=apply, batches=[X])
    for letter, i in letters.items():
        kept = references.number_kept(128, expected_sparsities('block')[2 * i])
        assert masks[f'up_{letter}'].sum() == masks[f'down_{letter}'].sum() == kept


@pytest.mark.parametrize('sparsity', [0.0, 0.03, 0.7, 1.0])
def test_owl_reaches_the_target_and_stays_within_its_bounds(sparsity):
    shares, sizes = [0.01, 0.05, 0.02, 0.02], [100, 400, 50, 1000]
    found = np.array(owl_sparsities(shares, sizes, sparsity))
    assert np.average(found, weights=sizes) == pytest.approx(sparsity)
    assert ((found >= 0) & (found <= 1)).all()
    assert np.ptp(found) <= 0.16 + 1e-9
    if sparsity == 0.7:  # density 2 lambda (D - min D) / (max D - min D), shifted
        raw = 0.16 * (np.array(shares) - 0.01) / 0.04
        np.testing.assert_allclose(found, sparsity - raw + np.average(raw, weights=sizes))
    assert owl_sparsities([0.02, 0.02], [10, 20], sparsity) == [sparsity] * 2
