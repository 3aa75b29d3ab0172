"""SparseGPT on matrices, and under masks from elsewhere, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.oneshot import prune_by_sparsegpt
from jaxpruner.sparsity_types import Block, NByM, Unstructured
from oneshot import model, references


def made_up(inputs, outputs, samples=None, seed=0):
    """Weights, and inputs that are correlated and of different sizes."""
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(samples or 3 * inputs, inputs)) @ (
        np.eye(inputs) + random.normal(size=(inputs, inputs)) / np.sqrt(inputs)
    )
    weights = random.normal(size=(inputs, outputs)).astype(np.float32)
    return weights, mixed * np.exp(random.normal(size=inputs))


CASES = [
    # inputs, outputs, sparsity, type, per, keep_zeros: three blocks, the last a partial one; less than a block
    (300, 24, 0.5, Unstructured(), 'layer', False),
    (300, 24, 0.5, Unstructured(), 'layer', True),
    (300, 24, 0.6, Unstructured(), 'output', False),
    (288, 24, 0.5, NByM(2, 4), 'layer', True),
    (90, 7, 0.5, NByM(2, 20, allow_partial=True), 'layer', False),
    (5, 3, 0.7, Unstructured(), 'layer', False),
]


@pytest.mark.parametrize(('inputs', 'outputs', 'sparsity', 'kind', 'per', 'keep_zeros'), CASES)
def test_masks_and_weights_equal_the_reference(inputs, outputs, sparsity, kind, per, keep_zeros):
    weights, samples = made_up(inputs, outputs)
    samples[:, 2] = 0  # an input that never occurs
    if keep_zeros:
        is_zero = np.random.default_rng(1).uniform(size=weights.shape) < 0.7
        weights[is_zero] = 0
    gram = jnp.asarray(samples.T @ samples, jnp.float32)
    found = prune_by_sparsegpt(weights, gram, sparsity, kind, per, keep_zeros=keep_zeros)
    n_by_m = (kind.n, kind.m) if isinstance(kind, NByM) else None
    expected, mask = references.sparsegpt(
        weights, samples, sparsity, n_by_m, per, keep_zeros=keep_zeros
    )
    np.testing.assert_array_equal(found.mask, mask)
    tolerance = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(found.weights, expected, rtol=1e-4, atol=tolerance)
    assert found.damping == np.float32(0.01)
    if keep_zeros:
        assert not np.asarray(found.mask)[is_zero].any()
    elif n_by_m is None:
        size, number = (inputs * outputs, 1) if per == 'layer' else (inputs, outputs)
        assert found.mask.sum() == references.number_kept(size, sparsity) * number


BAD = [
    ({'sparsity_type': Block((2, 2))}, r'weights: calibrated pruning is .* got Block'),
    ({'sparsity_type': NByM(2, 4)}, 'weights: its 6 inputs do not divide into groups of m=4; choo'),
    ({'per': 'column'}, "compared per 'output' or per 'layer', got per='column'"),
    ({'block_size': 0}, 'block_size is a number of inputs from 1 up, got 0'),
]


@pytest.mark.parametrize(('arguments', 'message'), BAD)
def test_bad_calls_on_matrices(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        prune_by_sparsegpt(jnp.ones((6, 2)), jnp.eye(6), 0.5, **arguments)


X = model.normal(400, 200) @ (jnp.eye(200) + model.normal(200, 200) / 30)
W = model.normal(200, 24)
LINEAR = {'apply_fn': lambda params, x: x @ params['w'], 'batches': [X]}


@pytest.mark.parametrize('sequential', [False, True])
def test_weights_under_masks_from_elsewhere(sequential):
    params = {name: model.normal(*shape) for name, shape in (('up', (8, 16)), ('down', (16, 8)))}
    params['bias'] = model.normal(8)
    x = model.normal(64, 8)

    def apply(params, x):
        return jnp.tanh(x @ params['up']) @ params['down'] + params['bias']

    _, masks = jaxpruner.prune(params, 0.5)
    given = {'algorithm': 'sparsegpt', 'apply_fn': apply, 'batches': [x], 'sequential': sequential}
    found, kept = jaxpruner.prune(params, **given, masks=masks)
    jax.tree.map(np.testing.assert_array_equal, kept, masks)
    inputs = np.asarray(x, np.float64)
    for name in ('up', 'down'):
        weights, _ = references.sparsegpt(np.asarray(params[name]), inputs, 0, given=masks[name])
        np.testing.assert_allclose(found[name], weights, atol=1e-4 * np.abs(weights).max())
        inputs = np.tanh(inputs @ (weights if sequential else np.asarray(params[name], np.float64)))
    assert found['bias'] is params['bias']


ONES = {'w': jnp.ones((4, 2))}
BAD_MASKS = [
    ({'algorithm': 'wanda', 'masks': ONES}, 'Wanda changes no weight that stays'),
    ({'algorithm': 'magnitude', 'masks': ONES}, "'magnitude' makes masks of its own"),
    ({'masks': ONES, 'sparsity': 0.5}, 'leave the sparsity out'),
    ({'masks': ONES, 'owl': True}, 'masks=… have already'),
    ({'masks': ONES, 'keep_zeros': True}, 'masks say which weights go: leave keep_zeros out'),
    (
        {'masks': {'w': jnp.ones((2, 4))}},
        r'w: its mask has shape \(2, 4\), and the parameter \(4, 2\)',
    ),
    ({'masks': {'v': jnp.ones((4, 2))}}, "lacks 'w' and has 'v'"),
    ({'sparsity': 0.5, 'block_size': 1.5}, 'block_size .* got 1.5'),
]


@pytest.mark.parametrize(('arguments', 'message'), BAD_MASKS)
def test_bad_calls(arguments, message):
    given = {'apply_fn': LINEAR['apply_fn'], 'batches': [model.normal(9, 4)]}
    with pytest.raises((TypeError, ValueError), match=message):
        jaxpruner.prune(ONES, **({'algorithm': 'sparsegpt'} | arguments), **given)
