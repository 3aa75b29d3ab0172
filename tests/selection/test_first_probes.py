"""First probes of large arrays: near the threshold, and never the reason for another mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import selection
from jaxpruner.selection import first_probes
from jaxpruner.selection.ordered_floats import Order

LARGE = (1024, 640)  # more scores than are compared pair by pair
NORMAL = jax.random.normal(jax.random.key(0), LARGE)
SCALES = jnp.exp(jax.random.normal(jax.random.key(1), (1024, 1)) / 2)

SCORES = {
    'normal': NORMAL,
    'magnitudes': jnp.abs(NORMAL),
    'rows of different scales': jnp.abs(NORMAL) * SCALES,
    'columns of different scales': jnp.abs(NORMAL) * SCALES[:640, 0],
    'one axis': jnp.abs(NORMAL).ravel()[: 2**19 + 7],
}


def shares_reached(probes, scores):
    values, scores = (np.asarray(x.astype(jnp.float32)) for x in (Order.of(scores.dtype).value(probes)[0], scores))
    return [float(np.mean(scores >= value)) for value in values]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('share', [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize('name', SCORES)
def test_a_sample_knows_about_where_the_threshold_is(name, share, dtype):
    scores = SCORES[name].astype(dtype)
    wanted = jnp.array([round(share * scores.size)])
    order = Order.of(scores.dtype)
    reached = shares_reached(first_probes.sampled([scores[None]], wanted, [scores.size], order), scores)
    # Three standard deviations of a share in a sample of 4096 are at most 0.023; those of its outer probes come on top.
    np.testing.assert_allclose(reached, share, atol=0.05)
    assert reached[0] > reached[1] > reached[2]
    jointly = first_probes.sampled_jointly([scores[None]] * 2, jnp.ones(2, dtype), 2 * wanted, order)
    np.testing.assert_allclose(shares_reached(jointly, scores), share, atol=0.05)


def some(value, share):
    return jnp.where(jax.random.uniform(jax.random.key(2), LARGE) < share, value, NORMAL)


@pytest.mark.parametrize(
    'scores',
    [
        pytest.param(jnp.full(LARGE, 0.5), id='one value'),
        pytest.param(jnp.full(LARGE, jnp.nan), id='no number'),
        pytest.param(some(jnp.nan, 0.99), id='few numbers'),
        pytest.param(some(jnp.inf, 0.2), id='many infinities'),
        pytest.param(some(0.0, 0.95), id='mostly zeros'),
        pytest.param(jnp.sort(NORMAL.ravel()).reshape(LARGE), id='sorted'),
        pytest.param(NORMAL.at[::8].set(100.0), id='a period that the sample may meet'),
    ],
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_masks_of_large_arrays_are_those_of_a_sort(scores, dtype):
    scores = scores.astype(dtype)
    wide = np.asarray(scores.astype(jnp.float32)).ravel()
    order = np.argsort(np.where(np.isnan(wide), np.inf, -wide), kind='stable')
    for count in (1, scores.size // 10, scores.size - 1):
        expected = np.zeros(scores.size, np.uint8)
        expected[order[:count]] = 1
        expected[np.isnan(wide)] = 0
        np.testing.assert_array_equal(selection.keep_largest(scores, count).ravel(), expected)


def test_samples_of_a_batch_and_beside_small_arrays():
    batch = jnp.stack([NORMAL, NORMAL * 100])
    masks = jax.vmap(lambda scores: selection.keep_largest(scores, 1000))(batch)
    alone = selection.keep_largest(NORMAL, 1000)
    np.testing.assert_array_equal(masks, jnp.stack([alone, alone]))
    small = jnp.array([3.0, 1.0, 2.0])
    large, beside = selection.keep_largest_each([jnp.concatenate([NORMAL] * 2), small], [1000, 2])
    assert int(large.mask.sum()) == 1000
    assert beside.mask.tolist() == [1, 0, 1]
