"""The structure of zeros is found where it is, in whatever parts the array comes, and not where it is not."""

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from jaxpruner import mask_calculator
from jaxpruner.checkpoints.parts import parts_of
from jaxpruner.checkpoints.structure import NOfM, Survey, structure_of

RNG = np.random.default_rng(0)


def masked(kind, shape, sparsity=0.5, dtype=np.float32):
    weights = RNG.standard_normal(shape).astype(dtype)
    mask = np.asarray(
        mask_calculator.get_topk_fn(kind)(np.abs(weights.astype(np.float32)), sparsity)
    )
    return np.where(mask, weights, np.zeros((), dtype))


@pytest.mark.parametrize(
    ('kind', 'shape', 'n_of_m'),
    [
        ('2:4', (64, 32), NOfM(2, 4, 1)),
        ('1:2', (64, 32), NOfM(1, 2, 1)),
        ('nm_2,4,0', (64, 32), NOfM(2, 4, 0)),
        ('nm_4,8,1', (8, 64, 5), NOfM(4, 8, 1)),
        ('3:16', (40, 32), NOfM(3, 16, 1)),
        ('2:4', (400,), NOfM(2, 4, 0)),
    ],
)
@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16, np.float64])
def test_n_of_m_is_found(kind, shape, n_of_m, dtype):
    assert structure_of(masked(kind, shape, dtype=dtype)).n_of_m == n_of_m


def test_n_of_m_is_found_where_rows_are_dead():
    array = masked('2:4', (64, 32))
    array[:20] = 0
    found = structure_of(array)
    assert found.n_of_m == NOfM(2, 4, 1)
    assert found.dead == (20, 0)


@pytest.mark.parametrize('block', [(4, 4), (1, 8), (8, 1), (3, 5), (2, 16)])
@pytest.mark.parametrize('lead', [(), (3,)])
def test_blocks_are_found(block, lead):
    array = masked('block_{},{}'.format(*block), (*lead, 64, 66))
    found = structure_of(array)
    assert found.block == block
    assert found.n_of_m is None


def test_channels_are_found():
    found = structure_of(masked('channel_-1', (3, 8, 20), 0.25))
    assert found.dead == (0, 0, 5)
    assert found.block is None


@pytest.mark.parametrize('sparsity', [0.5, 0.9, 0.95])
def test_what_is_unstructured_has_none(sparsity):
    found = structure_of(masked('unstructured', (256, 256), sparsity))
    assert found.sparsity == pytest.approx(sparsity, abs=1e-4)
    assert (found.n_of_m, found.block, found.dead) == (None, None, (0, 0))


@pytest.mark.parametrize(
    'array', [np.ones((4, 4)), np.zeros((4, 4)), np.zeros((0, 4)), np.float32(1), np.ones(3, bool)]
)
def test_dense_empty_and_single_arrays(array):
    found = structure_of(np.asarray(array))
    assert found.n_of_m is None
    assert found.block is None
    assert found.sparsity == (1 if array.size and not array.any() else 0)


def test_nan_is_no_zero_and_minus_zero_is():
    assert structure_of(np.array([np.nan, -0.0, 0.0, 1.0])).nonzeros == 2


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.sampled_from(['2:4', 'nm_1,4,0', 'block_2,4', 'channel_0', 'channel_-1', 'unstructured']),
    st.integers(1, 200),
    st.integers(0, 1),
)
def test_parts_tell_the_same_as_the_whole(kind, size, lead):
    array = masked(kind, (*(2,) * lead, 32, 16) if not kind.startswith('nm') else (32, 16))
    whole, survey = structure_of(array), Survey(array.shape)
    cut = False
    for part in parts_of(array.shape, size=size):
        cut |= part.shape[-1] < array.shape[-1] or any(n % 16 for n in part.shape[-2:])
        survey.add(part, array.reshape(-1)[part.start : part.start + part.size].reshape(part.shape))
    found = survey.structure()
    assert (found.nonzeros, found.dead) == (whole.nonzeros, whole.dead)
    if not cut and lead == 0:
        assert found == whole
    else:  # groups that a part cuts are not looked for
        assert found.block in (None, whole.block)
