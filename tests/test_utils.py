"""Counting zeros, overlaps, and reading seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import utils

TREE = {
    'a': {'kernel': jnp.array([[0.0, 1.0], [0.0, 0.0]]), 'bias': jnp.array([1.0, jnp.nan])},
    'b': None,
}


def test_sparsity_summary():
    totals = {'_total_sparsity': 0.5, '_nparams': 6, '_nparams_nnz': 3}
    assert utils.summarize_sparsity(TREE) == {'a/kernel': 0.75, 'a/bias': 0.0} | totals
    assert utils.summarize_sparsity(TREE, only_total_sparsity=True) == totals
    assert float(jax.jit(utils.summarize_sparsity)(TREE)['_total_sparsity']) == 0.5
    # Random keys and numbers of Python are no parameters.
    others = {'w': jnp.zeros(3), 'rng': jax.random.key(0), 'scale': 2.0}
    for tree, total in [({}, 0.0), (jnp.zeros(3), 1.0), (others, 1.0)]:
        assert utils.summarize_sparsity(tree)['_total_sparsity'] == total


def test_counts_are_exact_above_float32():
    # 2^24 + 1 ones: float32 cannot hold the number.
    ones = jnp.ones(2**24 + 1, jnp.uint8)
    assert utils.summarize_sparsity({'w': ones, 'v': jnp.zeros(1)})['_nparams_nnz'] == 2**24 + 1


def test_intersection_is_the_share_of_the_first_trees_weights():
    first = {'a': jnp.array([1, 1, 0, 1]), 'b': jnp.array([1]), 'c': jnp.ones(3)}
    second = {'a': jnp.array([0, 1, 1, 1]), 'b': jnp.array([1]), 'c': None}
    summary = utils.summarize_intersection(first, second)
    assert summary == {'a': pytest.approx(2 / 3), 'b': 1.0, '_total_intersection': 0.75}

    with pytest.raises(ValueError, match=r'a: shapes differ, \(2,\) and \(3,\)'):
        utils.summarize_intersection({'a': jnp.ones(2)}, {'a': jnp.ones(3)})


SEEDS = [8, np.int64(8), jnp.int32(8), jax.random.PRNGKey(8), jax.random.key(8)]


@pytest.mark.parametrize('seed', SEEDS, ids=['int', 'numpy', 'array', 'raw key', 'typed key'])
def test_every_seed_means_the_same_key(seed):
    expected = jax.random.uniform(jax.random.PRNGKey(8), (3,))
    np.testing.assert_array_equal(jax.random.uniform(utils.prng_key(seed), (3,)), expected)


@pytest.mark.parametrize(
    'seed', ['8', 8.0, True, jnp.ones(2), jnp.zeros((2, 2), jnp.uint32), jnp.zeros(5, jnp.uint32)]
)
def test_bad_seeds(seed):
    with pytest.raises(TypeError, match='rng_seed must be a whole number, a uint32 key or a typ'):
        utils.prng_key(seed)


PACKED = {'a': None, 'w': jnp.packbits(jnp.ones((8, 4), jnp.uint8), axis=0)}


@pytest.mark.parametrize(
    'summarize',
    [utils.summarize_sparsity, lambda masks: utils.summarize_intersection(masks, masks)],
)
def test_packed_masks_are_not_counted_without_a_word(summarize):
    with pytest.warns(
        UserWarning, match=r'^w: uint8 values above 1 .*unpack_masks\(masks, params\)'
    ):
        summarize(PACKED)
    params = {'a': jnp.ones(3), 'w': jnp.ones((8, 4))}
    assert summarize(jaxpruner.unpack_masks(PACKED, params))['w'] in (0.0, 1.0)
