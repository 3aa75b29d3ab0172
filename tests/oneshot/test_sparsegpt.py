"""SparseGPT against NumPy in float64, and what surrounds it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.oneshot import cholesky, sparsegpt_matrices
from jaxpruner.sparsity_types import Block, NByM, Unstructured
from oneshot import references


def made_up(inputs, outputs, samples=None, seed=0):
    """Weights, and inputs that are correlated and of different sizes."""
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(samples or 3 * inputs, inputs)) @ (
        np.eye(inputs) + random.normal(size=(inputs, inputs)) / np.sqrt(inputs)
    )
    return random.normal(size=(inputs, outputs)).astype(np.float32), mixed * np.exp(
        random.normal(size=inputs)
    )


def pruned(weights, inputs, *args, **kwargs):
    gram = jnp.asarray(inputs.T @ inputs, jnp.float32)
    return sparsegpt_matrices.prune_by_sparsegpt(jnp.asarray(weights), gram, *args, **kwargs)


CASES = [
    # inputs, outputs, sparsity, type, per: three blocks, the last a partial one; less than a block
    (300, 24, 0.5, Unstructured(), 'layer'),
    (300, 24, 0.6, Unstructured(), 'output'),
    (288, 24, 0.5, NByM(2, 4), 'layer'),
    (288, 24, 0.5, NByM(4, 8), 'layer'),
    (90, 7, 0.5, NByM(2, 20, allow_partial=True), 'layer'),
    (5, 3, 0.7, Unstructured(), 'layer'),
]


@pytest.mark.parametrize(('inputs', 'outputs', 'sparsity', 'kind', 'per'), CASES)
def test_masks_and_weights_equal_the_reference(inputs, outputs, sparsity, kind, per):
    weights, samples = made_up(inputs, outputs)
    samples[:, 2] = 0  # an input that never occurs
    found = pruned(weights, samples, sparsity, kind, per)
    n_by_m = (kind.n, kind.m) if isinstance(kind, NByM) else None
    expected, mask = references.sparsegpt(weights, samples, sparsity, n_by_m, per)
    np.testing.assert_array_equal(found.mask, mask)
    np.testing.assert_allclose(
        found.weights, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
    )
    assert found.damping == np.float32(0.01)
    if n_by_m is None:
        ranked = (inputs * outputs, 1) if per == 'layer' else (inputs, outputs)
        assert found.mask.sum() == references.number_kept(ranked[0], sparsity) * ranked[1]


@pytest.mark.parametrize(('inputs', 'outputs', 'sparsity', 'kind', 'per'), CASES)
def test_zeros_stay_zero_as_in_the_reference(inputs, outputs, sparsity, kind, per):
    weights, samples = made_up(inputs, outputs)
    samples[:, 2] = 0
    is_zero = np.random.default_rng(1).uniform(size=weights.shape) < 0.7
    weights[is_zero] = 0
    found = pruned(weights, samples, sparsity, kind, per, keep_zeros=True)
    n_by_m = (kind.n, kind.m) if isinstance(kind, NByM) else None
    expected, mask = references.sparsegpt(weights, samples, sparsity, n_by_m, per, keep_zeros=True)
    np.testing.assert_array_equal(found.mask, mask)
    np.testing.assert_allclose(
        found.weights, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
    )
    assert not np.asarray(found.mask)[is_zero].any()
    assert not np.asarray(found.weights)[is_zero].any()


def test_stacked_matrices_are_pruned_each_by_itself():
    pairs = [made_up(20, 6, seed=seed) for seed in range(3)]
    weights = jnp.stack([weights for weights, _ in pairs]).astype(jnp.bfloat16)
    gram = jnp.stack([jnp.asarray(inputs.T @ inputs, jnp.float32) for _, inputs in pairs])
    gram = gram.at[1].set(jnp.ones((20, 20)))  # of rank 1
    sparsities = jnp.array([0.5, 0.25, 0.0])
    found = sparsegpt_matrices.prune_by_sparsegpt(weights, gram, sparsities, damping=0.0)
    assert found.mask.sum((1, 2)).tolist() == [60, 90, 120]
    assert found.damping.tolist()[::2] == [0.0, 0.0]
    assert found.damping[1] >= 1e-6  # more was tried
    assert found.weights.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.weights[2], weights[2])  # sparsity 0 changes nothing
    for i in range(2):
        alone = sparsegpt_matrices.prune_by_sparsegpt(
            weights[i], gram[i], sparsities[i], damping=0.0
        )
        np.testing.assert_array_equal(found.mask[i], alone.mask)
        np.testing.assert_array_equal(found.weights[i], alone.weights)
    assert np.isfinite(np.asarray(found.weights, np.float32)).all()


def test_outputs_change_less_than_without_making_up():
    weights, inputs = made_up(60, 10)
    found = pruned(weights, inputs, 0.5)
    errors = [
        np.linalg.norm(inputs @ (np.asarray(w) - weights))
        for w in (found.weights, weights * found.mask)
    ]
    assert errors[0] < 0.9 * errors[1]


def test_a_gram_matrix_that_is_not_finite_is_seen_in_the_weights():
    found = sparsegpt_matrices.prune_by_sparsegpt(jnp.ones((3, 2)), jnp.full((3, 3), jnp.nan), 0.5)
    assert not np.isfinite(found.weights).any()
    assert found.damping > 1e5


# One block and less, one band, and several bands with a remainder.
@pytest.mark.parametrize('size', [5, 128, 300, 1000])
def test_the_factor_is_that_of_the_damped_matrix(size):
    _, inputs = made_up(size, 1)
    gram = inputs.T @ inputs
    factors = cholesky.flipped_cholesky(jnp.asarray(gram, jnp.float32), 0.1)
    damped, upper = gram + 0.1 * np.diag(gram).mean() * np.eye(size), np.triu(factors.upper)
    np.testing.assert_allclose(upper @ upper.T, damped, atol=1e-4 * damped.max())
    assert factors.occurs.all()
    assert factors.damping == np.float32(0.1)


@pytest.mark.parametrize('size', [300, 1000])
def test_more_damping_is_tried_with_the_matrix_that_was_given(size):
    gram = jnp.ones((size, size)).at[7].set(0).at[:, 7].set(0)
    factors = cholesky.flipped_cholesky(gram, 0.0)  # of which the last corner cannot be decomposed
    again = cholesky.flipped_cholesky(gram, factors.damping)
    np.testing.assert_array_equal(factors.upper, again.upper)
    assert factors.damping >= 1e-6
    assert factors.occurs.tolist() == [i != 7 for i in range(size)]


def test_a_gram_matrix_of_few_bits_is_decomposed_in_float32():
    factors = cholesky.flipped_cholesky(
        jnp.full((2, 2), 2, jnp.bfloat16) + 2 * jnp.eye(2, dtype=jnp.bfloat16), 0.25
    )
    upper = jnp.triu(factors.upper)
    np.testing.assert_allclose(upper @ upper.T, [[5, 2], [2, 5]], rtol=1e-6)


def test_factors_take_the_place_of_the_gram_matrices():
    inputs, number = 1024, 3
    gram = jax.ShapeDtypeStruct((number, inputs, inputs), jnp.float32)
    compiled = jax.jit(cholesky.flipped_cholesky, donate_argnums=0).lower(gram, 0.01).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * number * inputs**2
    assert memory.temp_size_in_bytes < 2 * 4 * inputs**2


class Pooled(Unstructured):
    """Pools scores, although it derives from the type that does not."""

    def group_scores(self, scores):
        return scores.mean(0)


BAD = [
    (
        {'sparsity_type': Pooled()},
        TypeError,
        r'weights: calibrated pruning is unstructured or N:M, got Pooled',
    ),
    (
        {'sparsity_type': Block((2, 2))},
        TypeError,
        r'weights: calibrated pruning is unstructured or N:M, got Block',
    ),
    (
        {'sparsity_type': NByM(2, 4)},
        ValueError,
        'weights: its 6 inputs do not divide into groups of m=4; choose',
    ),
    ({'per': 'column'}, ValueError, "compared per 'output' or per 'layer', got per='column'"),
]


@pytest.mark.parametrize(('arguments', 'error', 'message'), BAD)
def test_bad_calls(arguments, error, message):
    with pytest.raises(error, match=message):
        sparsegpt_matrices.prune_by_sparsegpt(jnp.ones((6, 2)), jnp.eye(6), 0.5, **arguments)


def test_empty_matrices():
    assert sparsegpt_matrices.prune_by_sparsegpt(
        jnp.ones((2, 0, 3)), jnp.ones((2, 0, 0)), 0.5
    ).damping.shape == (2,)
