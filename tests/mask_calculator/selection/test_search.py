"""First probes of large arrays: near the threshold, and never the reason for another mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import search
from jaxpruner.mask_calculator.selection.brackets import Order
from jaxpruner.mask_calculator.selection.row_by_row import RankedRow
from jaxpruner.mask_calculator.selection.scores import RowCursor

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


@jax.jit  # one program for all rows and targets
def probes_of_row(arrays, row, target):
    cursor = RowCursor.at_row(arrays, row, jnp.dtype('uint32'))
    return RankedRow(cursor, Order.from_dtype(arrays[0].dtype)).sampled_probes(target[None])


def probes_of_rows(arrays, targets):
    return jnp.concatenate([probes_of_row(arrays, i, target) for i, target in enumerate(targets)])


@jax.jit
def probes_jointly(arrays, targets):
    dtype = arrays[0].dtype
    return search.sampled_jointly(
        arrays, jnp.ones(len(arrays), dtype), targets, Order.from_dtype(dtype)
    )


def shares_reached(probes, scores):
    values, scores = (
        np.asarray(x.astype(jnp.float32))
        for x in (Order.from_dtype(scores.dtype).value(probes)[0], scores)
    )
    return [float(np.mean(scores >= value)) for value in values]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('share', [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize('name', SCORES)
def test_a_sample_knows_about_where_the_threshold_is(name, share, dtype):
    scores = SCORES[name].astype(dtype)
    wanted = np.array([round(share * scores.size)])
    alone = probes_of_rows([scores[None]], wanted)
    jointly = probes_jointly([scores[None]] * 2, 2 * wanted)
    # Of a sample of 3000. Runs of neighbours whose rows differ are worth fewer, and equal scores have one share.
    deviation = np.sqrt(share * (1 - share) / 3000)
    for probes in (alone, jointly):
        reached = np.array(shares_reached(probes, scores))
        assert np.all(np.diff(reached) < 0)
        assert np.all(np.abs(reached - share) <= 6 * deviation + 0.01)
        assert reached[0] - reached[2] >= deviation


def test_outer_probes_nearly_always_hold_the_threshold():
    """Two deviations do in 19 of 20 samples."""
    rows = jax.random.normal(jax.random.key(3), (40, 2**19))
    wanted = np.arange(1, 41) * 2**19 // 41
    probes = probes_of_rows([rows], wanted)
    values = np.asarray(Order.from_dtype(rows.dtype).value(probes))
    reached = (np.asarray(rows)[:, :, None] >= values[:, None]).sum(1)
    held = (reached[:, 0] >= wanted) & (reached[:, 2] < wanted)
    assert held.sum() >= 35


def test_each_row_has_its_own_probes():
    rows = jnp.abs(NORMAL).reshape(1, -1)
    scales = [1.0, 1000.0, 0.001]
    stacked = jnp.concatenate([rows * scale for scale in scales])
    apart = [jnp.concatenate([rows * scale for scale in scales[:2]]), rows * scales[2]]
    wanted = np.full(3, NORMAL.size // 10)
    for arrays in ([stacked], apart):
        values = np.asarray(Order.from_dtype(rows.dtype).value(probes_of_rows(arrays, wanted)))
        np.testing.assert_allclose(values / np.array(scales)[:, None], 1.645, rtol=0.1)


WAVES = jnp.abs(jnp.sin(jnp.arange(2730 * 768.0))).reshape(-1, 768)
LOST = {
    # Stretches are as long as two rows.
    'half of the columns': jnp.where(jnp.arange(768) < 384, 0.0, WAVES),
    'the beginning': jnp.arange(2.0**20).reshape(1024, 1024),
}


@pytest.mark.parametrize('name', LOST)
def test_a_sample_meets_all_of_an_array(name):
    scores = LOST[name]
    probes = probes_of_rows([scores[None]], np.array([scores.size * 3 // 10]))
    np.testing.assert_allclose(shares_reached(probes, scores), 0.3, atol=0.03)


def test_a_sample_meets_all_of_a_short_row_beside_a_long_one():
    short = jnp.arange(30_000.0)[None]
    long = jnp.abs(jax.random.normal(jax.random.key(4), (1, 2**22)))
    probes = probes_of_rows([short, long], np.array([short.size // 2, long.size // 2]))
    np.testing.assert_allclose(shares_reached(probes[:1], short), 0.5, atol=0.05)


def test_all_arrays_of_a_model_are_sampled():
    """The last of many weigh as much as the first."""
    arrays = [jnp.full((1, 2**15), float(i)) for i in range(64)]
    probes = probes_jointly(arrays, np.array([2**15 * 16]))
    np.testing.assert_allclose(Order.from_dtype(arrays[0].dtype).value(probes)[0], 48, atol=2)


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
    large, beside = selection.keep_largest_each(
        [
            selection.Request(jnp.concatenate([NORMAL] * 2), 1000),
            selection.Request(small, 2),
        ]
    )
    assert int(large.mask.sum()) == 1000
    assert beside.mask.tolist() == [1, 0, 1]
