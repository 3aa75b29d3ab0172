"""Exact selection: against a sort, on every dtype, with ties, NaN, infinities and signed zeros."""

import functools
import subprocess
import sys

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compiling
from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import whole_numbers

as_users = functools.partial(jax.jit, compiler_options=compiling.AS_USERS)
keep_largest = as_users(selection.keep_largest)


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
    return [
        part.reshape(np.shape(array))
        for part, array in zip(np.split(kept, splits), arrays, strict=True)
    ]


# Few values, so that ties are common; the extremes and their neighbours, and what many devices take for zero.
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    np.inf,
    -np.inf,
    np.nan,
    2.0**127,
    -(2.0**127),
    2.0**-126,
    1e-40,
    -1e-45,
]
DTYPES = ['float32', 'bfloat16', 'float16']
# A program is compiled for each shape: few shapes, many scores.
SHAPES = [(1,), (7,), (64,), (5, 9), (2, 3, 1, 4)]


def as_compared(array):
    """Scores as a CPU compares them: it takes float32's denormals for zero, and widens 16 bits to 32."""
    wide = np.asarray(jnp.asarray(array).astype(jnp.float32)).copy()
    wide[np.abs(wide) < np.finfo(np.float32).tiny] = 0
    return wide


@st.composite
def rankings(draw, shapes=SHAPES):
    """Scores, how many to keep, and a threshold to begin at."""
    values = st.one_of(st.sampled_from(SPECIAL), st.floats(-2, 2, width=32), st.floats(width=32))
    # As bits: older versions of hypothesis take denormals for a fault of NumPy.
    bits = values.map(lambda value: int(np.float32(value).view(np.uint32)))
    array = draw(
        hypothesis_numpy.arrays(np.uint32, draw(st.sampled_from(shapes)), elements=bits)
    ).view(np.float32)
    dtype = draw(st.sampled_from(DTYPES))
    count = draw(
        st.one_of(
            st.integers(0, array.size), st.floats(0, 1).map(lambda share: round(share * array.size))
        )
    )
    start = draw(
        st.one_of(
            st.just(np.nan), st.sampled_from(SPECIAL), st.sampled_from(array.ravel().tolist())
        )
    )
    return jnp.asarray(array).astype(dtype), count, jnp.asarray(start).astype(dtype)


@as_users
def keep_from(array, count, start):
    return selection.keep_largest_each([selection.Request(array, count, start)])[0]


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(rankings())
def test_it_keeps_what_a_stable_sort_keeps(ranking):
    array, count, start = ranking
    mask, threshold = keep_from(array, count, start)
    expected = sorted_mask([as_compared(array)], count)[0]
    np.testing.assert_array_equal(mask, expected)
    if 0 < count < array.size:
        assert np.all(as_compared(array)[expected == 1] >= as_compared(threshold[None]))


@functools.cache
def compiled_as_elsewhere(shape, dtype, machine, name, value):
    """What runs on accelerators (many probes in a fixed number of passes), or on many devices (counts alone)."""
    with pytest.MonkeyPatch.context() as patch, compiling.traced_as(machine):
        patch.setattr(jax, name, lambda: value)
        lowered = jax.jit(selection.keep_largest).lower(
            jax.ShapeDtypeStruct(shape, dtype), jnp.uint32(0)
        )
    return lowered.compile()


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    rankings(SHAPES[3:4]),
    st.sampled_from([('gpu', 'default_backend', 'gpu'), ('several devices', 'device_count', 2)]),
)
def test_programs_for_other_machines_find_the_same(ranking, machine):
    array, count, _ = ranking
    mask = compiled_as_elsewhere(array.shape, array.dtype, *machine)(array, jnp.uint32(count))
    np.testing.assert_array_equal(mask, sorted_mask([as_compared(array)], count)[0])


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
from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import whole_numbers
array = jnp.asarray([1.0, 1.0 + 1e-12, 1.0 + 2e-12])
print(selection.keep_largest(array, 1), selection.keep_largest(array, 2), selection.number_to_keep(3, 0.5).dtype)
"""
    output = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, check=True
    ).stdout
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


@pytest.mark.parametrize(
    ('array', 'count', 'expected'), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_special_values(array, count, expected):
    np.testing.assert_array_equal(keep_largest(jnp.array(array), count), expected)


def test_scalars_and_empty_arrays():
    assert selection.keep_largest(jnp.float32(3), 1).shape == ()
    assert int(selection.keep_largest(jnp.float32(3), 1)) == 1
    assert selection.keep_largest(jnp.zeros((0, 3)), 1).shape == (0, 3)
    first, second = selection.keep_largest_each(
        [
            selection.Request(jnp.zeros((2, 0)), 1, is_stacked=True),
            selection.Request(jnp.ones(3), 2),
        ]
    )
    assert (first.mask.shape, first.threshold.shape) == ((2, 0), (2,))
    assert second.mask.tolist() == [1, 1, 0]


@as_users
def keep_jointly(arrays, count, divisors):
    return selection.keep_largest_jointly(arrays, count, divisors)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.lists(rankings(SHAPES[:4]), min_size=3, max_size=3), st.floats(0, 1))
def test_many_arrays_rank_as_one(rankings, share):
    arrays = [array.astype(jnp.float32) for array, _, _ in rankings]
    arrays = [jnp.resize(array, shape) for array, shape in zip(arrays, SHAPES[1:4], strict=True)]
    count = round(share * sum(array.size for array in arrays))
    expected = sorted_mask([as_compared(array) for array in arrays], count)
    for mask, wanted in zip(keep_jointly(arrays, count, None), expected, strict=True):
        np.testing.assert_array_equal(mask, wanted)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    st.lists(rankings(SHAPES[1:2]), min_size=2, max_size=2),
    st.floats(0, 1),
    st.lists(st.floats(2.0**-26, 2.0**26, width=32), min_size=2, max_size=2),
)
def test_divisors_rank_quotients_that_are_never_written_down(rankings, share, divisors):
    arrays = [rankings[0][0].astype(jnp.float32), rankings[1][0].astype(jnp.bfloat16)]
    scales = [jnp.float32(divisor) for divisor in divisors]
    quotients = [
        jax.jit(jnp.divide)(array.astype(jnp.float32), scale)
        for array, scale in zip(arrays, scales, strict=True)
    ]
    count = round(share * sum(array.size for array in arrays))
    expected = sorted_mask([as_compared(quotient) for quotient in quotients], count)
    for mask, wanted in zip(keep_jointly(arrays, count, scales), expected, strict=True):
        np.testing.assert_array_equal(mask, wanted)


def test_rows_are_rankings_of_their_own():
    scores = jax.random.normal(jax.random.key(2), (3, 5, 7))
    counts = jnp.array([1, 20, 35], jnp.uint32)
    request = selection.Request(scores, counts, is_stacked=True)
    ((masks, thresholds),) = selection.keep_largest_each([request])
    assert thresholds.shape == (3,)
    for row, mask, count in zip(scores, masks, counts, strict=True):
        np.testing.assert_array_equal(mask, sorted_mask([row], int(count))[0])


@pytest.mark.parametrize('precision', ['BF16_BF16_F32', 'F32_F32_F32', 'highest'])
def test_the_precision_of_products_does_not_matter(precision):
    scores = jnp.round(jax.random.normal(jax.random.key(3), (3, 600, 100)) * 64)
    with jax.default_matmul_precision(precision):
        mask = jax.jit(selection.keep_largest)(scores, 50_000)
    np.testing.assert_array_equal(mask, sorted_mask([scores], 50_000)[0])


@pytest.mark.parametrize('dtype', DTYPES)
def test_large_arrays_are_read_in_shares(dtype):
    scores = jnp.round(jax.random.normal(jax.random.key(3), (3, 600, 100)) * 64).astype(
        dtype
    )  # ties everywhere
    mask = keep_largest(scores, 50_000)
    np.testing.assert_array_equal(mask, sorted_mask([scores.astype(jnp.float32)], 50_000)[0])


@pytest.mark.parametrize('count', [0, 1, 100, 127, 128, 129, 200, 254, 255])
def test_counters_that_are_nearly_full(count, monkeypatch):
    """Arithmetic as it is above 2^31 scores, in counters of 8 bits: nothing overflows into a sign or beyond."""
    monkeypatch.setattr(whole_numbers, 'counter_for', lambda size: jnp.dtype('uint8'))
    ties = jnp.array([2.0] * 120 + [1.0] * 100 + [3.0] * 35)
    halves = [ties[:128], ties[128:]]
    with compiling.traced_as('small counters'):
        alone = selection.keep_largest(ties, count)
        jointly = selection.keep_largest_jointly(halves, count)
    np.testing.assert_array_equal(alone, sorted_mask([ties], count)[0])
    np.testing.assert_array_equal(np.concatenate(jointly), sorted_mask([ties], count)[0])


def test_batches_are_cut_in_different_arrays():
    first, second, third = jnp.full((3, 4), 2.0), jnp.full((2, 3), 2.0), jnp.full(5, 2.0)
    counts = jnp.array([0, 3, 12, 14, 18, 20, 23])
    masks = jax.vmap(lambda count: selection.keep_largest_jointly([first, second, third], count))(
        counts
    )
    kept = jnp.concatenate([mask.reshape(len(counts), -1) for mask in masks], 1)
    np.testing.assert_array_equal(kept, np.arange(23) < counts[:, None])


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


def test_counts_of_python():
    scores = jnp.array([1.0, 3.0, jnp.nan])
    assert selection.keep_largest(scores, 3 * 10**9).tolist() == [1, 1, 1]
    for keep in (
        selection.keep_largest,
        lambda scores, count: selection.keep_largest_jointly([scores], count),
    ):
        with pytest.raises(ValueError, match='count must not be negative, got -1'):
            keep(scores, -1)


def test_three_thousand_million_scores():
    """Traced alone: nothing of a program for so many fails for its numbers."""
    big = jax.ShapeDtypeStruct((1500, 10**6), jnp.bfloat16)
    twice = jax.ShapeDtypeStruct((3000, 10**6), jnp.bfloat16)
    assert jax.eval_shape(selection.keep_largest, twice, jnp.uint32(5)).shape == twice.shape
    masks = jax.eval_shape(
        selection.keep_largest_jointly, [big, big], jnp.uint32(5), [jnp.float32(2)] * 2
    )
    assert [mask.shape for mask in masks] == [big.shape] * 2


def test_more_scores_than_a_counter_holds_are_refused():
    big = jax.ShapeDtypeStruct((2**16, 2**16), jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match='4294967296 scores cannot be ranked together in 32 bits; at most 4294967295',
    ):
        jax.eval_shape(lambda x: selection.keep_largest(x, 1), big)


OLDER_XLA = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason='older XLA writes what is compared in a tie cut'
)
LARGE = [
    pytest.param([(1000, 1000), (2**20,)], id='few'),
    pytest.param([(256, 1024), *[(256, 256)] * 20], id='many', marks=OLDER_XLA),
]


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shapes', LARGE)
@pytest.mark.parametrize('jointly', [False, True])
def test_nothing_as_large_as_the_scores_is_written_but_the_mask(dtype, shapes, jointly):
    arrays = [jnp.zeros(shape, dtype) for shape in shapes]

    def masks(arrays):
        if jointly:
            return selection.keep_largest_jointly(
                arrays, 5, [jnp.float32(2 + i) for i in range(len(arrays))]
            )
        requests = [selection.Request(array, 5) for array in arrays]
        return [kept.mask for kept in selection.keep_largest_each(requests)]

    temporary = (
        compiling.as_written(jax.jit(masks).lower(arrays)).memory_analysis().temp_size_in_bytes
    )
    total = sum(array.size for array in arrays)
    if len(arrays) > 2 and not jointly:
        # Short arrays are copied to a buffer one after another, and their masks are made in a table.
        temporary -= arrays[0].nbytes + arrays[0].size + total
    assert temporary <= 0.05 * total


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('batch', [None, 4])
def test_nothing_as_large_as_one_array_or_a_batch_is_written(dtype, batch):
    def mask(scores):
        return selection.keep_largest(scores, 5)

    scores = jax.ShapeDtypeStruct((1024, 1024) if batch is None else (batch, 1024, 1024), dtype)
    function = mask if batch is None else jax.vmap(mask)
    temporary = (
        compiling.as_written(jax.jit(function).lower(scores)).memory_analysis().temp_size_in_bytes
    )
    assert temporary <= 0.05 * scores.size


def test_strict_promotion_of_dtypes():
    with jax.numpy_dtype_promotion('strict'):
        for dtype in DTYPES:
            assert int(selection.keep_largest(jnp.ones(3, dtype), 2).sum()) == 2
            assert int(selection.keep_largest(jnp.ones(2**19, dtype), 2).sum()) == 2


def test_nothing_is_sorted():
    text = compiling.as_written(
        jax.jit(selection.keep_largest).lower(jnp.zeros((64, 64)), 5)
    ).as_text()
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
