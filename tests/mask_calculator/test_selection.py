"""Exact selection: against a sort, on every dtype, with ties, NaN, infinities and signed zeros."""

import fractions

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import selection


def sorted_mask(scores, count):
    """What selection must return, by a stable sort; NaN is kept only if everything is."""
    flat = np.asarray(scores, np.float64).ravel()
    if count >= flat.size:
        return np.ones(np.shape(scores), np.uint8)
    order = np.argsort(-(flat + 0.0), kind='stable')  # NaN sorts last, -0.0 + 0.0 is 0.0
    kept = np.zeros(flat.size, np.uint8)
    kept[order[:count]] = 1
    kept[np.isnan(flat)] = 0
    return kept.reshape(np.shape(scores))


VALUES = {
    'normal': lambda normal: normal,
    'ties': lambda normal: np.round(2 * normal) / 2,
    'zeros': lambda normal: np.copysign(0, normal),
    'constant': lambda normal: np.full_like(normal, -1.5),
    'NaN': lambda normal: np.where(normal > 0.2, np.nan, normal),
    'all NaN': lambda normal: np.full_like(normal, np.nan),
    'infinities': lambda normal: np.where(np.abs(normal) > 0.7, np.sign(normal) * np.inf, normal),
    'no numbers': lambda normal: np.where(np.abs(normal) > 0.7, np.sign(normal) * np.inf, np.nan),
    'far apart': lambda normal: np.sign(normal) * np.exp2(np.round(4 * normal)),
}
# Each shape in some dtype, each dtype in some shape: programs are compiled for each pair.
SHAPES = {
    'float32': [(), (7,), (5, 9), (1000,)],
    'bfloat16': [(1,), (1000,)],
    'float16': [(64,)],
    'float8_e4m3fn': [(5, 9)],
    'float8_e5m2': [(2, 3, 1, 4)],
    'int8': [(64,)],
}


def made(shape, dtype, seed=0):
    """Scores of each kind, as they are in the dtype."""
    normal = np.random.default_rng(seed).normal(size=shape)
    if dtype == 'int8':
        return [np.clip(np.round(9 * normal), -99, 99).astype(dtype)]
    with np.errstate(over='ignore'):
        return [change(normal).astype(jnp.dtype(dtype)) for change in VALUES.values()]


@pytest.mark.parametrize(
    ('shape', 'dtype'), [(shape, dtype) for dtype, shapes in SHAPES.items() for shape in shapes]
)
def test_every_count_of_every_kind_of_scores(shape, dtype):
    scores = made(shape, dtype)
    size = scores[0].size
    counts = sorted({0, 1, size // 3, size - 1, size, size + 5} - {-1})
    keep = jax.jit(jax.vmap(jax.vmap(selection.keep_largest, (None, 0)), (0, None)))
    masks = np.asarray(keep(jnp.stack(scores), jnp.array(counts, jnp.uint32)))
    for own, of_counts in zip(scores, masks, strict=True):
        for count, mask in zip(counts, of_counts, strict=True):
            np.testing.assert_array_equal(mask, sorted_mask(own, count))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_long_arrays_are_cut_among_ties_that_threads_share(dtype):
    for scores in made((257, 1021), dtype):
        for count in (1, 26_239, scores.size - 5):
            mask = selection.keep_largest(jnp.asarray(scores), count)
            np.testing.assert_array_equal(mask, sorted_mask(scores, count))


def test_many_arrays_in_one_program():
    """Of several dtypes and shapes, some of which share a buffer; every second one is lazy."""
    arrays = []
    for i, shape in enumerate([(7,), (5, 9), (), (130,), (40, 41), (64, 2), (0, 4)] * 2):
        arrays.append(made(shape, ('float32', 'bfloat16')[i % 2], seed=i)[i % len(VALUES)])
    counts = [array.size // 3 for array in arrays]

    @jax.jit
    def select(arrays, counts):
        scores = [
            selection.LazyScores(array, jnp.abs) if i % 2 else jnp.abs(array)
            for i, array in enumerate(arrays)
        ]
        return selection.keep_largest_each([*zip(scores, counts, strict=True)])

    masks = select([jnp.asarray(array) for array in arrays], counts)
    for mask, array, count in zip(masks, arrays, counts, strict=True):
        np.testing.assert_array_equal(mask, sorted_mask(np.abs(array), count))


@pytest.mark.parametrize('shape', [(3, 40, 41), (70, 6), (2, 400, 330)])
def test_layers_of_a_stack_rank_alone(shape):
    scores, count = made(shape, 'float32')[1], 5
    mask = jax.jit(selection.keep_largest)(jnp.asarray(scores), jnp.full(shape[0], count))
    np.testing.assert_array_equal(mask, [sorted_mask(row, count) for row in scores])


@pytest.mark.parametrize('dtypes', [('bfloat16',) * 4, ('float32', 'bfloat16') * 2])
@pytest.mark.parametrize('divisors', [None, (3, 0.7, 11, 1e-3)])
def test_one_ranking_over_many_arrays(dtypes, divisors):
    keep = jax.jit(selection.keep_largest_jointly)
    leaves = [*zip([(7,), (3, 4, 5), (), (9, 10)], dtypes, divisors or (1,) * 4, strict=True)]
    divided = None if divisors is None else [jnp.float32(divisor) for divisor in divisors]
    for seed in range(len(VALUES)):
        arrays = [made(*leaf[:2], seed)[(seed + i) % len(VALUES)] for i, leaf in enumerate(leaves)]
        with np.errstate(over='ignore', invalid='ignore'):
            quotients = [
                array.astype(np.float32).ravel() / np.float32(divisor)
                for array, (_, _, divisor) in zip(arrays, leaves, strict=True)
            ]
        flat = np.concatenate(quotients)
        for count in (0, 1, flat.size // 3, flat.size - 1, flat.size):
            masks = keep([jnp.asarray(array) for array in arrays], count, divided)
            found = np.concatenate([np.ravel(mask) for mask in masks])
            np.testing.assert_array_equal(found, sorted_mask(flat, count))


def test_64_bits():
    with jax.enable_x64(True) if hasattr(jax, 'enable_x64') else jax.experimental.enable_x64():
        for scores in made((300,), 'float64'):
            for count in (0, 1, 100, 299, 300):
                mask = selection.keep_largest(jnp.asarray(scores), jnp.uint32(count))
                np.testing.assert_array_equal(mask, sorted_mask(scores, count))


def test_masks_have_no_derivative_and_no_promotion_is_needed():
    def loss(weights):
        return jnp.sum(weights * selection.keep_largest(jnp.abs(weights), 2).astype(weights.dtype))

    with jax.numpy_dtype_promotion('strict'):
        grads = jax.grad(loss)(jnp.array([1.0, -3.0, 2.0]))
    assert grads.tolist() == [0, 1, 1]


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason='older XLA writes more down')
def test_a_selection_takes_no_memory_for_scores():
    def keep(weights):
        return [
            selection.keep_largest(selection.LazyScores(weights, jnp.abs), 1000),
            *selection.keep_largest_jointly([selection.LazyScores(weights, jnp.abs)], 1000),
        ]

    weights = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    compiled = jax.jit(keep).lower(weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * weights.size


SIZES = [1, 2, 10, 999, 2**24, 2**24 + 1, 2**31, 2**32 - 1]


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.sampled_from(SIZES), st.floats(0, 1, width=32))
def test_the_number_to_keep_is_that_of_float32_and_exact_above(size, sparsity):
    share = np.float32(sparsity)
    expected = np.round(np.float32(size) * (np.float32(1) - share))
    if size > 2**24:
        fixed = round(fractions.Fraction(float(share)) * 2**31)
        expected = round(fractions.Fraction(size * (2**31 - fixed), 2**31))
    expected = max(1, int(expected))
    assert int(selection.number_to_keep(size, sparsity)) == expected
    assert selection.number_to_keep_on_host(size, sparsity) == expected


def test_what_32_bits_cannot_count():
    with pytest.raises(ValueError, match='4294967296 scores cannot be ranked together in 32 bits'):
        selection.number_to_keep(2**32, 0.5)
    assert selection.number_to_keep_on_host(2**32, 0.5) == 2**31
    assert not selection.number_to_keep_on_host(0, 0.5)


def test_a_pruner_of_many_layers_compiles_no_search_for_each():
    """Leaves of one size share one; a layer more adds its mask, and a copy."""

    def lines(layers):
        params = {str(i): jnp.ones((80, 90)) for i in range(layers)}
        updater = jaxpruner.MagnitudePruning(sparsity=0.5)
        return jax.jit(updater.instant_sparsify).lower(params).as_text().count('stablehlo.while')

    assert lines(9) == lines(3)
