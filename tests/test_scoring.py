"""Scores that are not written down: the masks are those of arrays, and take no more memory than masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compiling
import jaxpruner
from jaxpruner import scoring, selection
from jaxpruner.algorithms import pruners

KEY = jax.random.key(0)
# With ties, zeros of both signs, NaN and infinities; shapes that are counted at once and in shares.
SHAPES = [(7,), (5, 9), (3, 64, 32), (300, 500)]
UPDATERS = {
    'magnitude': jaxpruner.MagnitudePruning,
    'straight-through': jaxpruner.SteMagnitudePruning,
    'global': jaxpruner.GlobalMagnitudePruning,
}


def weights_of(shape, dtype='float32'):
    weights = np.array(jax.random.normal(KEY, shape).round(1))
    weights.flat[:5] = [0.0, -0.0, np.nan, -np.inf, 1.0]
    return jnp.asarray(weights, dtype)


def half(params):
    return jax.tree.map(lambda _: 0.5, params)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('in_rows', [False, True])
def test_they_are_selected_as_arrays_are(shape, dtype, in_rows):
    weights = weights_of(shape, dtype)
    count = 2 if in_rows else weights.size // 3

    def select(scores):
        ((mask, _),) = selection.keep_largest_each([scores], [count], in_rows=[in_rows])
        return mask

    expected = select(jnp.abs(weights))
    np.testing.assert_array_equal(select(selection.Scores(weights, jnp.abs)), expected)


@pytest.mark.parametrize('divisors', [None, [2.0, 0.5]])
def test_they_are_ranked_together_with_arrays(divisors):
    first, second = weights_of((5, 9)), weights_of((40,), 'bfloat16')
    divisors = divisors and [jnp.float32(divisor) for divisor in divisors]
    expected = selection.keep_largest_jointly([jnp.abs(first), jnp.abs(second)], 30, divisors)
    got = selection.keep_largest_jointly([selection.Scores(first, jnp.abs), jnp.abs(second)], 30, divisors)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ('name', 'sparsity_type'),
    [
        (name, sparsity_type)
        for name in UPDATERS
        for sparsity_type in ('unstructured', '2:4', 'block_2,2')
        if name != 'global' or sparsity_type == 'unstructured'
    ],
)
def test_masks_are_those_of_magnitudes(name, sparsity_type):
    updater = UPDATERS[name](sparsity_distribution_fn=half, sparsity_type=sparsity_type)
    params = {'a': weights_of((8, 16)), 'b': weights_of((4, 8), 'bfloat16')}
    expected = updater.create_masks(pruners.magnitudes(params), half(params))
    jax.tree.map(np.testing.assert_array_equal, updater.instant_sparsify(params)[1], expected)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason='older XLA writes what is compared in a tie cut')
@pytest.mark.parametrize('name', UPDATERS)
def test_pruning_takes_no_memory_for_scores(name):
    updater = UPDATERS[name](sparsity_distribution_fn=half)
    params = {'a': jnp.ones((512, 512)), 'b': jnp.ones((256, 1024))}
    lowered = jax.jit(lambda params: updater.instant_sparsify(params)[1]).lower(params)
    weights = sum(leaf.size for leaf in params.values())
    assert compiling.as_written(lowered).memory_analysis().temp_size_in_bytes < 0.2 * weights


def test_who_overrides_the_scores_is_asked_for_them():
    class Smallest(jaxpruner.MagnitudePruning):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return jax.tree.map(jnp.negative, super().calculate_scores(params))

    updater = Smallest(sparsity_distribution_fn=half)
    assert updater.instant_sparsify({'w': jnp.array([-2.0, 1.0])})[1]['w'].tolist() == [0, 1]


def test_who_overrides_the_masks_gets_arrays():
    given = []

    class Watching(jaxpruner.MagnitudePruning):
        def create_masks(self, scores, sparsities):
            given.append(scores['w'].tolist())
            return super().create_masks(scores, sparsities)

    Watching(sparsity_distribution_fn=half).instant_sparsify({'w': jnp.array([-2.0, 1.0])})
    assert given == [[2.0, 1.0]]


@pytest.mark.parametrize(
    ('leaf', 'expected'), [(jnp.array([-3]), [3]), (jnp.array([3 - 4j]), [5]), (KEY, None), ('name', None)]
)
def test_scores_of_what_is_no_float_are_written_down(leaf, expected):
    scores = scoring.each_weight({'leaf': leaf}, jnp.abs)['leaf']
    assert scores is expected or scores.tolist() == expected
