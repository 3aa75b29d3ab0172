"""Kept weights that are replaced by others."""

import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers import compiling, rows
from jaxpruner import sparsity_distributions
from jaxpruner.mask_calculator import replacement, selection
from jaxpruner.mask_calculator.replacement import MaskedLeaf
from jaxpruner.sparsity_types import Groups


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason='older XLA writes more down')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
    ('algorithm', 'most'),
    [
        (jaxpruner.RigL, 1.2),  # what becomes of each weight takes a byte
        (jaxpruner.SET, 18.2),  # and chance, and the making of it, the rest
    ],
)
def test_replacing_weights_of_large_leaves_writes_no_scores_down(algorithm, most, dtype):
    updater = algorithm(sparsity_distribution_fn=lambda _: {'w': 0.9})
    params = {'w': jax.ShapeDtypeStruct((1000, 600), dtype)}
    state = jax.eval_shape(updater.init_state, params)
    temporary = compiling.as_written(
        jax.jit(updater.update_state).lower(state, params, params)
    ).memory_analysis()
    assert temporary.temp_size_in_bytes < most * 600_000


def replace_weights(mask, drop, grow, fraction):
    leaf = MaskedLeaf(mask, drop, grow, Groups(jaxpruner.Unstructured()))
    return replacement.drop_and_grow([leaf], fraction)[0]


def test_rigl_grows_where_gradients_are_largest():
    mask = jnp.array([1, 1, 1, 0, 0, 0], jnp.uint8)
    magnitudes, gradients = (
        jnp.array([3.0, 1.0, 2.0, 0.0, 0.0, 0.0]),
        jnp.array([9.0, 5.0, 9.0, 1.0, 7.0, 2.0]),
    )

    assert replace_weights(mask, magnitudes, gradients, 1 / 3).tolist() == [1, 0, 1, 0, 1, 0]
    assert replace_weights(mask, magnitudes, gradients.astype(int), 1 / 3).tolist() == [
        1,
        0,
        1,
        0,
        1,
        0,
    ]
    assert replace_weights(mask, magnitudes, gradients, 0.0).tolist() == mask.tolist()
    # A dropped weight may be grown at once; a pruned one never outranks a kept one that is zero.
    assert (
        replace_weights(mask, magnitudes, gradients.at[1].set(8.0), 1 / 3).tolist() == mask.tolist()
    )
    assert (
        replace_weights(mask, magnitudes.at[0].set(0.0), gradients, 0.0).tolist() == mask.tolist()
    )


class Opposite(jaxpruner.RigL):
    """Drops the largest, and grows where gradients are smallest."""

    def get_drop_scores(self, sparse_state, params, grads):
        return jax.tree.map(jnp.negative, super().get_drop_scores(sparse_state, params, grads))

    def get_grow_scores(self, sparse_state, params, grads):
        return jax.tree.map(jnp.negative, super().get_grow_scores(sparse_state, params, grads))


def opposite_magnitude(weights):
    return -jnp.abs(weights)


class OppositeLazily(jaxpruner.RigL):
    def get_drop_scores(self, sparse_state, params, grads):
        raise AssertionError('the method is not called where there is an elementwise function')

    def get_grow_scores(self, sparse_state, params, grads):
        raise AssertionError('the method is not called where there is an elementwise function')

    def elementwise_drop_score(self):
        return opposite_magnitude

    def elementwise_grow_score(self):
        return opposite_magnitude


@pytest.fixture(params=[0, 2**30], ids=['lazy', 'arrays'])
def min_lazy_size(request, monkeypatch):
    """Leaves of so many weights have scores that are not written down."""
    monkeypatch.setattr(replacement, '_MIN_LAZY_SIZE', request.param)


@pytest.mark.usefixtures('min_lazy_size')
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 0.0])
@pytest.mark.parametrize('function', [jnp.abs, jnp.negative, opposite_magnitude])
def test_no_weight_is_lost_whatever_the_scores_are(function, bad):
    mask, drop = jnp.array([1, 1, 1, 1, 0, 0, 0, 0], jnp.uint8), jnp.arange(8.0)
    for grow in (selection.Scores(jnp.full(8, bad), function), function(jnp.full(8, bad))):
        new = replace_weights(mask, drop, grow, 0.5)
        assert int(new.sum()) == 4
        assert new[2:4].tolist() == [1, 1]


@pytest.mark.usefixtures('min_lazy_size')
def test_scores_of_whole_numbers_and_of_empty_leaves_replace_weights():
    mask, groups = jnp.array([1, 0, 0], jnp.uint8), Groups(jaxpruner.Unstructured())
    whole = selection.Scores(jnp.array([0, 2, 9]), jnp.negative)
    leaf = MaskedLeaf(mask, jnp.ones(3), whole, groups)
    no_scores = selection.Scores(jnp.zeros((0, 5)), jnp.abs)
    empty = MaskedLeaf(jnp.zeros((0, 5), jnp.uint8), no_scores, no_scores, groups)
    new, none = replacement.drop_and_grow([leaf, empty], fraction=1.0)
    assert new.tolist() == [1, 0, 0]
    assert none.shape == (0, 5)
    with pytest.raises(
        ValueError,
        match=r'scores of shape \(2,\) do not fit a mask of shape \(3,\); give one score',
    ):
        replace_weights(mask, jnp.ones(2), jnp.ones(3), 0.5)


@pytest.mark.usefixtures('min_lazy_size')
@pytest.mark.parametrize(
    ('kind', 'dtype', 'sparsity_type', 'stacked'),
    rows.crossed(
        [jaxpruner.RigL, Opposite, OppositeLazily],
        ['float32', 'bfloat16'],
        ['channel_-1', 'unstructured'],
        [(), 'w'],
    ),
)
def test_scores_replace_the_same_weights_written_down_or_not(kind, dtype, sparsity_type, stacked):
    drop = grow = 1 if kind is jaxpruner.RigL else -1
    updater = kind(
        sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=0.5),
        drop_fraction_fn=lambda step: 0.3,
        sparsity_type=sparsity_type,
        stacked=stacked,
    )
    params, grads = (
        {'w': jnp.abs(jax.random.normal(jax.random.key(i), (4, 30, 20))).round(1).astype(dtype)}
        for i in range(2)
    )
    state = updater.init_state(params)
    groups = Groups(updater.sparsity_type, bool(stacked))
    leaf = MaskedLeaf(state.masks['w'], drop * params['w'], grow * grads['w'], groups)
    (expected,) = replacement.drop_and_grow([leaf], fraction=0.3)
    new = updater.update_state(state, params, grads)
    np.testing.assert_array_equal(new.masks['w'], expected)
    assert not np.array_equal(new.masks['w'], state.masks['w'])
    assert int(new.masks['w'].sum()) == int(state.masks['w'].sum())


@pytest.mark.usefixtures('min_lazy_size')
@pytest.mark.parametrize('promotion', ['standard', 'strict'])
@pytest.mark.parametrize(
    ('drop_dtype', 'grow_dtype'),
    [
        ('float32', 'bfloat16'),
        ('bfloat16', 'float32'),
        ('bfloat16', 'float16'),
        ('float8_e4m3fn', 'float32'),
        ('float8_e4m3fn', 'float8_e5m2'),
        ('float16', 'int32'),
    ],
)
def test_both_scores_may_be_of_other_dtypes(drop_dtype, grow_dtype, promotion):
    mask, drop, grow = (
        jnp.array([1, 1, 1, 0, 0, 0], jnp.uint8),
        [3, 1, 2, 0, 0, 0],
        [9, 5, 9, 1, 7, 2],
    )
    with jax.numpy_dtype_promotion(promotion):
        new = replace_weights(mask, jnp.array(drop, drop_dtype), jnp.array(grow, grow_dtype), 1 / 3)
    assert new.tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize('promotion', ['standard', 'strict'])
@pytest.mark.parametrize('dtype', ['float8_e4m3fn', 'float8_e5m2', 'bfloat16', 'float16'])
def test_chance_replaces_weights_of_few_bits(dtype, promotion):
    updater = jaxpruner.SET(
        sparsity_distribution_fn=lambda _: {'w': 0.5}, drop_fraction_fn=lambda step: 0.5
    )
    params = {'w': jax.random.normal(jax.random.key(0), (4, 6)).astype(dtype)}
    with jax.numpy_dtype_promotion(promotion):
        state = updater.init_state(params)
        new = updater.update_state(state, params, params)
    assert int(new.masks['w'].sum()) == 12
    assert not np.array_equal(new.masks['w'], state.masks['w'])


def test_bad_scores_are_as_low_as_the_lowest_of_their_own_dtype():
    mask, lowest = jnp.array([1, 0, 0], jnp.uint8), jnp.finfo('float16').min
    grow = jnp.array([-jnp.inf, lowest, lowest], 'float16')
    new = replace_weights(mask, jnp.ones(3), grow, 1.0)
    assert new.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    'fraction', [fractions.Fraction(1, 3), np.float64(1 / 3), jnp.float32(1 / 3)], ids=str
)
def test_fractions_are_any_numbers_and_scores_may_be_numpys(fraction):
    mask, drop, grow = np.uint8([1, 1, 1, 0]), np.float64([3, 1, 2, 0]), np.float32([9, 1, 9, 2])
    new = replace_weights(mask, drop, grow, fraction)
    assert new.tolist() == [1, 0, 1, 1]
