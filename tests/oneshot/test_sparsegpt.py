"""SparseGPT on matrices, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.oneshot import prune_by_sparsegpt
from jaxpruner.sparsity_types import NByM, Unstructured
from oneshot import references


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


def test_a_matrix_without_inputs_stays_as_it_is():
    found = prune_by_sparsegpt(jnp.ones((2, 0, 3)), jnp.ones((2, 0, 0)), 0.5)
    assert found.weights.shape == found.mask.shape == (2, 0, 3)


BAD = [
    ({'sparsity_type': NByM(2, 4)}, 'weights: its 6 inputs do not divide into groups of m=4'),
    ({'per': 'column'}, "compared per 'output' or per 'layer', got per='column'"),
    ({'block_size': 0}, 'block_size is a number of inputs from 1 up, got 0'),
]


@pytest.mark.parametrize(('arguments', 'message'), BAD)
def test_bad_calls_on_matrices(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        prune_by_sparsegpt(jnp.ones((6, 2)), jnp.eye(6), 0.5, **arguments)
