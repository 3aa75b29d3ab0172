"""Wanda, RIA, OWL, and what makes masks of scores, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.oneshot import (
    InputStatistics,
    input_statistics,
    matrix_masks,
    outlier_shares,
    owl_sparsities,
    ria_scores,
    wanda_scores,
)
from jaxpruner.sparsity_types import NByM, Unstructured
from oneshot import references

RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.normal(size=(3, 24, 10)).astype(np.float32)
INPUTS = RANDOM.normal(size=(3, 50, 24)) * np.exp(RANDOM.normal(size=24))
SECOND_MOMENT = jnp.asarray((INPUTS**2).sum(1), jnp.float32)

SCORES = [(wanda_scores, references.wanda), (ria_scores, references.ria)]
KINDS = [
    (Unstructured(), 'output'),
    (Unstructured(), 'layer'),
    (NByM(2, 4), 'output'),
    (NByM(4, 8), 'layer'),
]


@pytest.mark.parametrize(('scores', 'reference'), SCORES, ids=['wanda', 'ria'])
def test_masks_of_stacked_layers_equal_the_reference(scores, reference):
    found = scores(jnp.asarray(WEIGHTS), SECOND_MOMENT)
    expected = [
        reference(weights.astype(np.float64), inputs)
        for weights, inputs in zip(WEIGHTS, INPUTS, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    sparsities = jnp.array([0.5, 0.6, 0.3])
    for kind, per in KINDS:
        masks = matrix_masks.keep_in_matrices(found, sparsities, kind, per)
        n_by_m = (kind.n, kind.m) if isinstance(kind, NByM) else None
        for mask, layer, sparsity in zip(masks, expected, sparsities, strict=True):
            np.testing.assert_array_equal(mask, references.mask_of(layer, sparsity, n_by_m, per))


def test_narrow_weights_are_scored_in_float32():
    for scores, _ in SCORES:
        found = scores(jnp.asarray(WEIGHTS, jnp.bfloat16), SECOND_MOMENT)
        assert found.dtype == jnp.float32
        assert found.shape == WEIGHTS.shape


def test_ria_of_weights_that_are_all_zero():
    assert ria_scores(jnp.zeros((3, 2)), jnp.ones(3)).tolist() == [[0, 0]] * 3


def test_ties_nan_and_sparsity_zero():
    tied = jnp.ones((4, 2)).at[0, 1].set(jnp.nan)
    keep = matrix_masks.keep_in_matrices
    assert keep(tied, 0.5).T.tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert keep(tied, 0.5, per='layer').tolist() == [[1, 0], [1, 1], [1, 0], [0, 0]]
    assert keep(tied, 0.5, NByM(2, 4)).T.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    for kind, per in KINDS[:3]:
        assert keep(tied, 0.0, kind, per).all()
    assert keep(jnp.ones((0, 2)), 0.5).shape == (0, 2)


def test_outliers_are_counted_for_each_matrix():
    scores = references.wanda(WEIGHTS[0].astype(np.float64), INPUTS[0])
    expected = [(scores > multiple * scores.mean()).mean() for multiple in (2, 3)]
    stacked = jnp.stack([jnp.asarray(scores, jnp.float32)] * 2)
    found = [outlier_shares(stacked, multiple) for multiple in (2, 3)]
    np.testing.assert_allclose(found, np.stack([expected] * 2, 1), rtol=1e-6)


@pytest.mark.parametrize('sparsity', [0.0, 0.03, 0.5, 0.7, 0.95, 1.0])
def test_owl_reaches_the_target_and_stays_within_its_bounds(sparsity):
    shares, sizes = [0.01, 0.05, 0.02, 0.02], [100, 400, 50, 1000]
    found = np.array(owl_sparsities(shares, sizes, sparsity))
    assert np.average(found, weights=sizes) == pytest.approx(sparsity)
    assert (found >= 0).all()
    assert (found <= 1).all()
    assert np.ptp(found) <= 0.16 + 1e-9
    if sparsity in (0.5, 0.7):  # density 2 lambda (D - min D) / (max D - min D), shifted
        raw = 0.16 * (np.array(shares) - 0.01) / 0.04
        np.testing.assert_allclose(found, sparsity - raw + np.average(raw, weights=sizes))


def test_owl_of_equal_layers_is_uniform():
    assert owl_sparsities([0.02, 0.02], [10, 20], 0.6) == [0.6, 0.6]
    assert owl_sparsities([], [], 0.6) == []


BAD = [
    (lambda: owl_sparsities([0.1], [1], 1.5), r'sparsity must lie in \[0, 1\]'),
    (lambda: owl_sparsities([0.1], [1], 0.5, -1), 'max_deviation must not be negative, got -1'),
    (lambda: owl_sparsities([0.1], [1, 2], 0.5), 'got 1 shares and 2 sizes'),
    (lambda: owl_sparsities([0.1, np.nan], [1, 2], 0.5), 'shares of outliers must be finite'),
    (
        lambda: input_statistics.check_statistics(InputStatistics(9, jnp.ones(3)), (4, 2), 'a/w'),
        r'a/w: second_moment has shape \(3,\), and weight matrices of shape \(4, 2\) need \(4,\)',
    ),
    (
        lambda: input_statistics.check_statistics(
            InputStatistics(9, jnp.ones(4)), (4, 2), 'a/w', needs_gram=True
        ),
        "a/w: its statistics hold no Gram matrix; calibrate with kind='gram'",
    ),
]


@pytest.mark.parametrize(('call', 'message'), BAD)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_few_samples_are_warned_of_once():
    assert input_statistics.too_few_samples(InputStatistics(8, jnp.ones(8)), (8, 2), 'b') is None
    lacking = [
        input_statistics.too_few_samples(InputStatistics(3, jnp.ones(8)), (8, 2), f'a{i}')
        for i in range(7)
    ]
    with pytest.warns(
        UserWarning, match=r'a0 \(3 samples, 8 inputs\), .* and 2 more; .* 3 times'
    ) as caught:
        input_statistics.warn_of_few_samples(lacking)
    assert len(caught) == 1
