"""Exact selection: against a sort, on every dtype, with ties, NaN, infinities and signed zeros."""

import subprocess
import sys
from fractions import Fraction

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import selection

keep_largest = jax.jit(selection.keep_largest)


def sorted_mask(arrays, count):
    """What selection must return, by a stable sort; NaN is kept only if everything is."""
    flat = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    if count >= flat.size:
        kept = np.ones(flat.size, np.uint8)
    else:
        order = np.argsort(-(flat + 0.0), kind='stable')  # NaN sorts last, -0.0 + 0.0 is 0.0
        kept = np.zeros(flat.size, np.uint8)
        kept[order[:count]] = 1
        kept[np.isnan(flat)] = 0
    splits = np.cumsum([np.size(array) for array in arrays])[:-1]
    return [part.reshape(np.shape(array)) for part, array in zip(np.split(kept, splits), arrays, strict=True)]


# Few values, so that ties are common; the extremes and their neighbours. No denormals, which some devices round to 0.
VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, np.inf, -np.inf, np.nan, 2.0**127, -(2.0**127), 2.0**-126]
scores = hypothesis_numpy.arrays(
    np.float32,
    hypothesis_numpy.array_shapes(min_dims=1, max_dims=3, max_side=4),
    elements=st.one_of(st.sampled_from(VALUES), st.floats(-2, 2, width=32, allow_subnormal=False)).map(np.float32),
)


@hypothesis.settings(max_examples=60)
@hypothesis.given(scores, st.floats(0, 1))
def test_it_keeps_what_a_stable_sort_keeps(array, share):
    count = round(share * array.size)
    np.testing.assert_array_equal(keep_largest(array, count), sorted_mask([array], count)[0])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('shape', [(1,), (257,), (32, 40), (3, 3, 8, 16), (5, 1, 9)])
@pytest.mark.parametrize('sparsity', [0.0, 0.1, 0.5, 0.873, 0.99, 1.0])
def test_normal_scores_of_every_dtype(dtype, shape, sparsity):
    array = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    count = int(selection.number_to_keep(array.size, sparsity))
    mask = keep_largest(array, count)
    assert mask.dtype == jnp.uint8
    assert int(mask.sum()) == count
    np.testing.assert_array_equal(mask, sorted_mask([array.astype(jnp.float32)], count)[0])


def test_float64_scores_that_float32_cannot_tell_apart():
    # The switch is for a whole process.
    program = """
import jax
jax.config.update('jax_enable_x64', True)
import jax.numpy as jnp
from jaxpruner import selection
array = jnp.asarray([1.0, 1.0 + 1e-12, 1.0 + 2e-12])
print(selection.keep_largest(array, 1), selection.keep_largest(array, 2), selection.number_to_keep(3, 0.5).dtype)
"""
    output = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == '[0 0 1] [0 1 1] uint32'


CASES = [
    ('all equal: the lower indices', [2.0, 2.0, 2.0, 2.0], 2, [1, 1, 0, 0]),
    ('-0.0 equals 0.0', [-0.0, 0.0, -1.0], 1, [1, 0, 0]),
    ('nothing', [1.0, 2.0], 0, [0, 0]),
    ('nothing of infinities', [np.inf, 2.0], 0, [0, 0]),
    ('everything, NaN too', [np.nan, 2.0], 2, [1, 1]),
    ('NaN ranks lowest', [np.nan, -np.inf, 2.0], 2, [0, 1, 1]),
    ('fewer numbers than wanted: all of them', [np.nan, np.nan, 2.0], 2, [0, 0, 1]),
    ('infinities', [np.inf, -np.inf, 0.0, np.inf], 3, [1, 0, 1, 1]),
]


@pytest.mark.parametrize(('array', 'count', 'expected'), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_special_values(array, count, expected):
    np.testing.assert_array_equal(keep_largest(jnp.array(array), count), expected)


def test_scalars_and_empty_arrays():
    assert selection.keep_largest(jnp.float32(3), 1).shape == ()
    assert int(selection.keep_largest(jnp.float32(3), 1)) == 1
    assert selection.keep_largest(jnp.zeros((0, 3)), 1).shape == (0, 3)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.lists(scores, min_size=1, max_size=3), st.floats(0, 1))
def test_many_arrays_rank_as_one(arrays, share):
    count = round(share * sum(array.size for array in arrays))
    for mask, expected in zip(selection.keep_largest_jointly(arrays, count), sorted_mask(arrays, count), strict=True):
        np.testing.assert_array_equal(mask, expected)


def test_divisors_rank_quotients():
    first, second = jnp.array([1.0, 2.0, 3.0]), jnp.array([[10.0], [40.0]])
    masks = selection.keep_largest_jointly([first, second], 2, [jnp.float32(1), jnp.float32(20)])
    np.testing.assert_array_equal(masks[0], [0, 1, 1])
    np.testing.assert_array_equal(masks[1], [[0], [0]])  # 40 / 20 ties with 2, which comes first


def test_it_maps_over_a_batch():
    batch = jax.random.normal(jax.random.key(1), (3, 8, 8))
    masks = jax.vmap(keep_largest, (0, 0))(batch, jnp.array([1, 20, 64]))
    for array, mask, count in zip(batch, masks, (1, 20, 64), strict=True):
        np.testing.assert_array_equal(mask, sorted_mask([array], count)[0])


def test_more_scores_than_a_counter_holds_are_refused():
    big = jax.ShapeDtypeStruct((2**16, 2**16), jnp.bfloat16)
    with pytest.raises(ValueError, match='4294967296 scores cannot be ranked together; at most 4294967295'):
        jax.eval_shape(lambda x: selection.keep_largest(x, 1), big)


@hypothesis.given(st.integers(1, 2**24), st.floats(0, 1, width=32))
def test_numbers_to_keep_are_float32_arithmetic_up_to_2_to_24(size, sparsity):
    expected = max(1, int(np.round(np.float32(size) * (np.float32(1) - np.float32(sparsity)))))
    assert int(selection.number_to_keep(size, sparsity)) == expected


@hypothesis.given(st.integers(2**24 + 1, 2**32 - 1), st.floats(2**-7, 1, width=32))
def test_numbers_to_keep_are_exact_above(size, sparsity):
    # Python's fractions know no rounding; round() goes to even as the library does.
    expected = max(1, round(size * (1 - Fraction(sparsity))))
    assert int(selection.number_to_keep(size, sparsity)) == expected


@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(2**-7, 1, width=32))
def test_shares_of_a_traced_count(count, share):
    expected = round(count * Fraction(share)) if count > 2**24 else int(np.round(np.float32(count) * np.float32(share)))
    assert int(selection.share_of(jnp.uint32(count), share)) == expected


def test_nothing_is_sorted():
    text = jax.jit(selection.keep_largest).lower(jnp.zeros((64, 64)), 5).compile().as_text()
    assert ' sort(' not in text
    assert 'top-k' not in text.lower()


@pytest.mark.parametrize('batched', [False, True])
def test_magnitudes_of_nan_rank_lowest(batched):
    """XLA takes the magnitude of a NaN to be at least 0 where it can see both."""
    x = jnp.full((2, 3, 4), jnp.nan)

    def magnitude_mask(array):
        return selection.keep_largest(jnp.abs(array), 2)

    keep = jax.jit(jax.vmap(magnitude_mask) if batched else magnitude_mask)
    assert int(keep(x).sum()) == 0
    assert keep(x.at[:, 2, 1].set(-0.0))[:, 2, 1].tolist() == [1, 1]
