"""Trained models pruned with statistics of their inputs, at once and block by block, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers import rows
from jaxpruner.oneshot import Wanda, calibrate, owl_sparsities
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
STACKS = {'a': model.normal(LAYERS, 8, 16) / 2, 'b': model.normal(LAYERS, 16, 8) / 2}
OTHERS = {'in': model.normal(8, 8), 'scale': model.normal(8) / 4, 'shared': model.normal(8, 8) / 4}
OTHERS |= {'out': model.normal(8, 4)}
UNROLLED = OTHERS | {f'{name}{i}': STACKS[name][i] for name in 'ab' for i in range(LAYERS)}
BATCHES = [model.normal(40, 8) for _ in range(2)]


def first(params, x):
    """A call, and what is made of parameters alone."""
    return jax.jit(lambda x, w: jnp.tanh(x @ w))(x, params['in']) * jnp.exp(params['scale'])


def layer(x, a, b, shared):
    return jnp.tanh(x @ a) @ b + x @ shared


def scanned(params, x):
    def body(carried, taken):
        x, count = carried
        return (jax.checkpoint(layer)(x, *taken, params['shared']), count + 1), x.sum()

    stacks = params['a'], params['b']
    (x, count), sums = jax.lax.scan(body, (first(params, x), 0), stacks, reverse=True)
    return jax.lax.cond(count > 1, lambda x: x + sums.sum(), jnp.copy, x) @ params['out']


def unrolled(params, x):
    x, total = first(params, x), 0
    for i in reversed(range(LAYERS)):
        total += x.sum()
        x = jax.jit(layer)(x, params[f'a{i}'], params[f'b{i}'], params['shared'])
    return (x + total) @ params['out']


@pytest.mark.parametrize(
    'blocks',
    [[['in'], *[[f'a{i}', f'b{i}'] for i in (2, 1, 0)], ['out']], [['in'], ['shared'], ['out']]],
)
def test_blocks_in_turn_are_those_of_statistics_that_are_taken_anew_before_each(blocks):
    def prune(params, names, apply_fn, **settings):
        sparsity = dict.fromkeys(names, 0.5)
        given = {'apply_fn': apply_fn, 'batches': BATCHES} | settings
        return jaxpruner.prune(params, sparsity, 'sparsegpt', **given)

    names = [name for block in blocks for name in block]
    found = prune(UNROLLED, names, unrolled, sequential=True, blocks=blocks)
    params = UNROLLED
    for block in blocks:
        params, masks = prune(params, block, unrolled)
        for name in block:
            np.testing.assert_array_equal(found[1][name], masks[name])
    jax.tree.map(close, found[0], params)
    in_scan = {name.rstrip('012'): name for name in names}
    copied = jax.tree.map(jnp.copy, STACKS | OTHERS)
    scan, masks = prune(copied, in_scan, scanned, sequential=True)
    jax.tree.map(np.testing.assert_array_equal, copied, STACKS | OTHERS)
    for name in in_scan:
        expected = found
        if name in STACKS:
            layers = [f'{name}{i}' for i in range(LAYERS)]
            expected = [{name: np.stack([tree[own] for own in layers])} for tree in found]
        np.testing.assert_array_equal(masks[name], expected[1][name])
        close(scan[name], expected[0][name])


# OWL, against the published equations: one share for each block, or for each leaf.

# Some columns are large, so that layers differ in their outliers, and the two matrices of a layer do, too.
DEEP = {
    'up': model.normal(LAYERS, 8, 16)
    * jnp.where(jnp.arange(16) < 2, jnp.array([1.0, 6.0, 3.0])[:, None, None], 1),
    'down': model.normal(LAYERS, 16, 8)
    * jnp.where(jnp.arange(8) < 1, jnp.array([4.0, 1.0, 2.0])[:, None, None], 1),
}
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
    ('names', 'settings'),
    [
        ('012', {}),  # paths that differ by a number
        ('abc', {'blocks': ['h/a/*', ['h/b/up', 'h/b/down'], 'h/c/*']}),
        (None, {'sequential': True}),
        (None, {'owl_per': 'leaf'}),
    ],
)
def test_owl_gives_the_sparsities_of_the_published_equations(names, settings):
    sparsities = expected_sparsities(settings.get('owl_per', 'block'))
    assert np.ptp(sparsities) > 0.3
    params, apply_fn = DEEP, deep_scanned
    if names:
        layers = {key: {name: DEEP[name][i] for name in DEEP} for i, key in enumerate(names)}
        params, apply_fn = {'h': layers}, deep_unrolled
    pruner = Wanda(sparsity_distribution_fn=half, **settings, **OWL)
    _, masks = pruner.instant_sparsify(params, apply_fn=apply_fn, batches=[X])
    matrices = [matrix for matrices in layers_in_numpy() for matrix in matrices]
    for number, ((weights, inputs), sparsity) in enumerate(zip(matrices, sparsities, strict=True)):
        i, name = number // 2, ('up', 'down')[number % 2]
        mask = masks['h'][names[i]][name] if names else masks[name][i]
        expected = references.mask_of(references.wanda(weights, inputs), sparsity, per='layer')
        assert mask.sum() == expected.sum()
        if 'sequential' not in settings:  # where later layers see what the earlier ones have become
            np.testing.assert_array_equal(mask, expected)


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
