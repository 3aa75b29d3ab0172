"""Kept weights that are replaced by others."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import mask_calculator, tree


def replace_weights(mask, drop, grow, fraction):
    leaf = mask_calculator.MaskedLeaf(mask, drop, grow, jaxpruner.Unstructured())
    return mask_calculator.drop_and_grow([leaf], fraction)[0]


MASK = jnp.array([1, 1, 1, 0, 0, 0], jnp.uint8)
DROP = jnp.array([3.0, 1.0, 2.0, 0.0, 0.0, 0.0])
GROW = jnp.array([9.0, 5.0, 9.0, 1.0, 7.0, 2.0])
CASES = {
    'what is dropped may be grown at once': (DROP, GROW.at[1].set(8), [1, 1, 1, 0, 0, 0]),
    'NaN are dropped first': (DROP.at[2].set(jnp.nan), -GROW, [1, 1, 0, 1, 0, 0]),
    'NaN are grown last': (DROP, GROW.at[4].set(jnp.nan), [1, 1, 1, 0, 0, 0]),
}


@pytest.mark.parametrize(('drop', 'grow', 'expected'), CASES.values(), ids=CASES)
def test_weights_are_replaced(drop, grow, expected):
    assert replace_weights(MASK, drop, grow, 1 / 3).tolist() == expected


def reference(mask, drop, grow, fraction):
    kept = np.flatnonzero(mask)
    count = int(np.round(np.float32(len(kept)) * np.float32(fraction)))
    stays = sorted(kept, key=lambda i: (-drop[i], i))[: len(kept) - count]
    free = [i for i in range(len(mask)) if i not in stays]
    grown = sorted(free, key=lambda i: (-grow[i], i))[:count]
    new = np.zeros_like(mask)
    new[[*stays, *grown]] = 1
    return new


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]))
def test_counts_and_choices_are_those_of_a_sort(seed, fraction):
    generator = np.random.default_rng(seed)
    mask = generator.integers(0, 2, 40, np.uint8)
    drop, grow = generator.normal(size=(2, 40)).round(1).astype(np.float32)
    new = replace_weights(mask, drop, grow, fraction)
    np.testing.assert_array_equal(new, reference(mask, drop, grow, fraction))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 0.0])
def test_no_weight_is_lost_whatever_the_scores_are(bad):
    mask, drop = jnp.array([1, 1, 1, 1, 0, 0, 0, 0], jnp.uint8), jnp.arange(8.0)
    new = replace_weights(mask, drop, jnp.full(8, bad), 0.5)
    assert int(new.sum()) == 4
    assert new[2:4].tolist() == [1, 1]


@pytest.mark.parametrize('dtypes', [('float32', 'bfloat16'), ('float8_e4m3fn', 'int32')])
def test_both_scores_may_be_of_other_dtypes(dtypes):
    with jax.numpy_dtype_promotion('strict'):
        new = replace_weights(MASK, DROP.astype(dtypes[0]), GROW.astype(dtypes[1]), 1 / 3)
    assert new.tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize('sparsity_type', [jaxpruner.Block((2, 2)), jaxpruner.Channel(-1)], ids=str)
@pytest.mark.parametrize('axis', [None, 0, 1])
def test_blocks_and_channels_are_replaced_whole_and_by_the_same_rule(sparsity_type, axis):
    shape = (8, 20) if axis is None else (3, 8, 20)
    layers = [jnp.abs(jax.random.normal(jax.random.key(i), shape)) for i in range(2)]
    drop, grow = (layer if axis is None else jnp.moveaxis(layer, 0, axis) for layer in layers)
    topk = tree.per_layer(lambda x: mask_calculator.get_topk_fn(sparsity_type)(x, 0.5), axis)
    mask = topk(drop)
    leaf = mask_calculator.MaskedLeaf(mask, drop, grow, sparsity_type, axis)
    (new,) = mask_calculator.drop_and_grow([leaf], 0.3)

    def pooled(array):
        array = jnp.asarray(array, jnp.float32)
        layers = array[None] if axis is None else jnp.moveaxis(array, axis, 0)
        return np.asarray(jax.vmap(sparsity_type.group_scores)(layers)).reshape(len(layers), -1)

    for old, own, drops, grows in zip(*map(pooled, (mask, new, drop, grow)), strict=True):
        expected = reference((old > 0).astype(np.uint8), drops, grows, 0.3)
        np.testing.assert_array_equal(own > 0, expected)


def test_empty_leaves_pass():
    none = jnp.zeros((0, 5))
    assert replace_weights(none.astype(jnp.uint8), none, none, 1.0).shape == (0, 5)
