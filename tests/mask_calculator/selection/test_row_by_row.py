"""Rows one after another: masks are those of the selection in its simplest form, in every kind of batch."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compiling, rows
from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import row_by_row
from jaxpruner.mask_calculator.selection.by_counting import keep_largest_by_counting

# Like arrays and a longer one, which share a buffer; two that are too short for it; stacked ones; an empty one.
SHAPES = [
    (4, 10),
    (5, 8),
    (40,),
    (2, 19),
    (8, 5),
    (39,),
    (3, 13),
    (300,),
    (7,),
    (3, 6, 5),
    (2, 41),
    (1,),
    (0, 4),
]
STACKED = {9, 10}
VALUES = [0.0, -0.0, 1.0, 1.0, 2.0, -3.0, np.nan, np.inf, -np.inf]


def arrays_of(seed, dtype, tied):
    random = np.random.default_rng(seed)
    arrays = []
    for shape in SHAPES:
        values = random.choice(VALUES, shape) if tied else random.normal(size=shape)
        arrays.append(jnp.asarray(values, dtype))
    return arrays


def counts_of(seed):
    random = np.random.default_rng(seed)
    counts = []
    for i, shape in enumerate(SHAPES):
        size = int(np.prod(shape[1:] if i in STACKED else shape))
        counts.append(jnp.uint32(random.choice([0, 1, size // 3, size, random.integers(size + 1)])))
    return counts


@jax.jit
def masks_of(arrays, counts, starts=None):
    requests = []
    for i, array in enumerate(arrays):
        start = None if starts is None else starts[i]
        requests.append(selection.Request(array, counts[i], start, is_stacked=i in STACKED))
    return [selected.mask for selected in selection.keep_largest_each(requests)]


def expected_masks(arrays, counts):
    masks = []
    for i, array in enumerate(arrays):
        if not array.size:
            masks.append(np.zeros(array.shape))
        elif i in STACKED:
            masks.append([keep_largest_by_counting(layer, counts[i]) for layer in array])
        else:
            masks.append(keep_largest_by_counting(array, counts[i]))
    return masks


def test_the_shapes_are_of_all_kinds():
    alone = [
        jnp.zeros(shape)[None]
        for i, shape in enumerate(SHAPES)
        if i not in STACKED and 0 not in shape
    ]
    (batch,) = [batch for batch in row_by_row.batches(alone) if batch.lengths is not None]
    assert len(batch.indices) == 8
    assert len(set(batch.lengths)) == 2


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.booleans())
def test_masks_are_those_of_the_simplest_form(dtype, seed, tied):
    arrays, counts = arrays_of(seed, dtype, tied), counts_of(seed)
    got, expected = masks_of(arrays, counts), expected_masks(arrays, counts)
    for mask, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mask, wanted)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([np.nan, 0.5, np.inf]))
def test_masks_do_not_depend_on_earlier_thresholds(dtype, seed, tied, start):
    arrays, counts = arrays_of(seed, dtype, tied), counts_of(seed)
    starts = [jnp.asarray(start, dtype)] * len(arrays)
    got, expected = masks_of(arrays, counts, starts), expected_masks(arrays, counts)
    for mask, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mask, wanted)


@pytest.mark.parametrize('function', [jnp.square, jnp.exp, jnp.tanh])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_lazy_scores_are_kept_as_they_were_counted(function, dtype):
    """Masks of every step are made apart from the buffer in which scores were counted."""
    if jax.__version_info__ < (0, 10) and (function, dtype) == (jnp.exp, 'float16'):
        pytest.skip('older XLA computes an exponential of float16 in more bits')
    keys = jax.random.split(jax.random.key(0), 8)
    weights = [jax.random.normal(key, (300, 17)).astype(dtype) for key in keys]
    counts = [1, 2, 510, 511, 2550, 4000, 5098, 5099]

    def masks(weights):
        requests = []
        for i, count in enumerate(counts):
            scores = selection.Scores(weights[i], function)
            start = jnp.asarray(0.1, dtype)
            requests.append(selection.Request(scores, count, start))
        return [selected.mask for selected in selection.keep_largest_each(requests)]

    keep = jax.jit(masks, compiler_options=compiling.AS_USERS)
    assert [int(mask.sum()) for mask in keep(weights)] == counts


def test_under_vmap_each_has_its_own_counts_and_scores():
    several = [(arrays_of(seed, 'float32', seed > 1), counts_of(seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    got = jax.vmap(masks_of)(*stacked)
    for i, (arrays, counts) in enumerate(several):
        for mask, wanted in zip(got, expected_masks(arrays, counts), strict=True):
            np.testing.assert_array_equal(mask[i], wanted)


def test_an_accelerator_makes_the_same_masks_in_passes_over_all(monkeypatch):
    arrays, counts = arrays_of(5, 'float32', tied=True), counts_of(5)
    with monkeypatch.context() as patch, compiling.traced_as('gpu'):
        patch.setattr(jax, 'default_backend', lambda: 'gpu')
        got = masks_of(arrays, counts)
    for mask, wanted in zip(got, expected_masks(arrays, counts), strict=True):
        np.testing.assert_array_equal(mask, wanted)


@pytest.mark.parametrize(
    ('backend', 'dtypes', 'tied'),
    rows.crossed(['cpu', 'gpu'], [['float32'], ['bfloat16', 'float16']], [False, True]),
)
def test_many_like_arrays_rank_as_one(monkeypatch, backend, dtypes, tied):
    random = np.random.default_rng(0)
    arrays = []
    for i in range(20):
        values = random.choice(VALUES[:6], 24) if tied else random.normal(size=24)
        arrays.append(jnp.asarray(values, dtypes[i % len(dtypes)]).reshape(4, 6))
    joined = jnp.concatenate([array.ravel() for array in arrays]).astype(jnp.float32)
    rank = jax.jit(selection.keep_largest_jointly)
    for count in (1, 100, 333):
        with monkeypatch.context() as patch, compiling.traced_as(backend):
            patch.setattr(jax, 'default_backend', lambda: backend)
            masks = rank(arrays, jnp.uint32(count))
        got = np.concatenate([np.ravel(mask) for mask in masks])
        np.testing.assert_array_equal(got, keep_largest_by_counting(joined, jnp.uint32(count)))


TOO_LONG = 2**19 + 1


@pytest.mark.parametrize(
    ('lengths', 'expected'),
    [
        pytest.param([], [], id='none'),
        pytest.param([9] * 5, [([0, 1, 2, 3, 4], None)], id='too few for a buffer'),
        pytest.param([9] * 6, [([0, 1, 2, 3, 4, 5], [9] * 6)], id='enough'),
        pytest.param([4, *[9] * 6], [([1, 2, 3, 4, 5, 6, 0], [9] * 7)], id='a little padding'),
        pytest.param(
            [*[2] * 6, *[9] * 3],
            [([6, 7, 8, 0, 1, 2, 3, 4, 5], [9] * 3 + [2] * 6)],
            id='more padding than is worth it',
        ),
        pytest.param(
            [*[1] * 6, *[17] * 6],
            [([6, 7, 8, 9, 10, 11], [17] * 6), ([0, 1, 2, 3, 4, 5], [1] * 6)],
            id='much too short for the buffer of the others',
        ),
        pytest.param([TOO_LONG] * 6, [([0, 1, 2, 3, 4, 5], None)], id='too long to be copied'),
    ],
)
def test_batches(lengths, expected):
    arrays = [jax.ShapeDtypeStruct((1, length), jnp.float32) for length in lengths]
    assert row_by_row.batches(arrays) == expected


def test_a_table_of_masks_is_of_a_limited_size(monkeypatch):
    monkeypatch.setattr(row_by_row, 'LARGEST_TABLE', 6 * 90)
    arrays = [jax.ShapeDtypeStruct((10, 9), jnp.float32)] * 13
    arrays.append(jax.ShapeDtypeStruct((61, 9), jnp.float32))
    batches = row_by_row.batches(arrays)
    expected = [(list(range(6)), [9] * 6), (list(range(6, 12)), [9] * 6), ([13, 12], None)]
    assert batches == expected


@pytest.mark.parametrize(
    ('shape', 'expected'), [((64, 64), True), ((63, 64), False), ((64, 65), False)]
)
def test_many_short_rows_go_in_passes(shape, expected):
    assert row_by_row.has_many_short_rows(jnp.zeros(shape)) == expected
    scores = jax.random.normal(jax.random.key(0), shape)
    (selected,) = selection.keep_largest_each([selection.Request(scores, 5, is_stacked=True)])
    for mask, row in zip(selected.mask, scores, strict=True):
        np.testing.assert_array_equal(mask, keep_largest_by_counting(row, jnp.uint32(5)))
