"""The simple selection, which explains the fast one and is its reference: both against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import by_counting

SIZE = 60
NORMAL = np.asarray(jax.random.normal(jax.random.key(0), (SIZE,)))
SCORES = {
    'normal': NORMAL,
    'ties': NORMAL.round(),
    'one value': np.full(SIZE, 0.5, np.float32),
    'zeros of both signs': np.where(NORMAL > 0.5, NORMAL, NORMAL * 0),
    'infinities and NaN': np.where(
        NORMAL > 0.8, np.inf, np.where(NORMAL < -0.5, -np.inf, np.where(NORMAL > 0, np.nan, NORMAL))
    ),
    'no number': np.full(SIZE, np.nan, np.float32),
}
COUNTS = [0, 1, 7, 30, 59, 60]
DTYPES = ['float16', 'bfloat16', 'float32']


@pytest.mark.parametrize('count', COUNTS)
@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('name', SCORES)
def test_it_keeps_what_a_stable_sort_keeps(name, dtype, count):
    scores = SCORES[name].astype(dtype)
    order = np.argsort(-(scores + 0.0), kind='stable')
    expected = np.zeros(SIZE, np.uint8)
    expected[order[:count]] = 1
    if count < SIZE:
        expected[np.isnan(scores)] = 0
    np.testing.assert_array_equal(by_counting.keep_largest_by_counting(scores, count), expected)


@pytest.mark.parametrize('shape', [(60,), (6, 10), (2, 5, 6)], ids=str)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('name', SCORES)
def test_the_fast_selection_keeps_what_it_keeps(name, dtype, shape):
    scores = jnp.asarray(SCORES[name].reshape(shape), dtype)
    # NumPy's floats of 16 bits are the scores; wider ones rank alike.
    wide = np.asarray(scores.astype(jnp.float32))
    for count in COUNTS:
        expected = by_counting.keep_largest_by_counting(wide, count)
        np.testing.assert_array_equal(selection.keep_largest(scores, count), expected)


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
def test_float_ranks_are_in_the_order_of_floats(dtype):
    dtype = np.dtype(dtype)
    infinity = by_counting.float_rank_of_infinity(dtype)
    float_ranks = np.linspace(-infinity, infinity, 101).astype(np.int64).tolist()
    values = [by_counting.value_at(float_rank, dtype) for float_rank in float_ranks]
    assert np.all(np.diff(values[1:-1]) > 0)
    assert (values[0], values[50], values[-1]) == (-np.inf, 0, np.inf)
    for float_rank in (-3, 0, 1, 1000):
        value = by_counting.value_at(float_rank, dtype)
        assert np.nextafter(value, dtype.type(np.inf)) == by_counting.value_at(
            float_rank + 1, dtype
        )
