"""The structure of zeros is found where it is, and not where it is not."""

import ml_dtypes
import numpy as np
import pytest

from jaxpruner import mask_calculator
from jaxpruner.checkpoints.inspection import NOfM, inspect_array

RNG = np.random.default_rng(0)


def masked(kind, shape, sparsity=0.5, dtype=np.float32):
    weights = RNG.standard_normal(shape).astype(dtype)
    mask = mask_calculator.get_topk_fn(kind)(np.abs(weights.astype(np.float32)), sparsity)
    return np.where(np.asarray(mask), weights, np.zeros((), dtype))


@pytest.mark.parametrize(
    ('kind', 'shape', 'dtype', 'n_of_m'),
    [
        ('2:4', (64, 32), ml_dtypes.bfloat16, NOfM(2, 4, 1)),
        ('nm_2,4,0', (64, 32), np.float64, NOfM(2, 4, 0)),
        ('nm_4,8,1', (8, 64, 5), np.float32, NOfM(4, 8, 1)),
        ('2:4', (400,), np.float32, NOfM(2, 4, 0)),
        ('block_4,4', (64, 66), np.float32, None),
        ('unstructured', (256, 256), np.float32, None),
    ],
)
def test_patterns_are_found(kind, shape, dtype, n_of_m):
    found = inspect_array('w', masked(kind, shape, dtype=dtype))
    assert found.n_of_m == n_of_m


def test_dead_channels_are_found_beside_a_pattern():
    array = masked('2:4', (64, 32))
    array[:20] = 0
    report = inspect_array('w', array)
    assert report.n_of_m == NOfM(2, 4, 1)
    assert report.dead_indices == [list(range(20)), []]
    report = inspect_array('w', masked('channel_-1', (3, 8, 20), 0.25))
    assert list(map(len, report.dead_indices)) == [0, 0, 5]


@pytest.mark.parametrize(
    ('array', 'sparsity'),
    [
        (masked('unstructured', (256, 256), 0.9), 0.9),
        (np.ones((4, 4)), 0),
        (np.zeros((4, 4)), 1),
        (np.zeros((0, 4)), 0),
        (np.float32(1), 0),
        (np.array([np.nan, -0.0, 0.0]), 2 / 3),
        (np.ones(3, bool), 0),
    ],
)
def test_sparse_dense_empty_and_single_arrays_without_a_pattern(array, sparsity):
    found = inspect_array('w', array)
    assert found.n_of_m is None
    assert found.sparsity == pytest.approx(sparsity, abs=1e-4)
