"""Statistics of what a model's weights meet, against products written out in NumPy."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.oneshot import calibrate, moments
from jaxpruner.uses import UnsupportedPrimitive
from oneshot import model

PATHS = {('conv',): 1, ('fused',): 2, ('stack',): 1, ('experts',): 1, ('out',): 1}


@pytest.fixture(scope='module')
def grams():
    return calibrate(model.apply, model.PARAMS, model.BATCHES, kind='gram')


@pytest.fixture(scope='module')
def expected():
    return model.samples(model.PARAMS)


def test_gram_matrices_are_those_of_the_samples(grams, expected):
    assert {path: len(grams[path]) for path in grams} == PATHS
    for (name,), entries in grams.items():
        samples = expected[name]
        products = np.swapaxes(samples, -2, -1) @ samples
        for entry in entries:
            found = entry.statistics
            shape = entry.matrices.layout.matrices_shape
            assert found.gram.shape == (*shape[:-1], shape[-2])
            assert (np.asarray(found.count) == samples.shape[-2]).all()
            np.testing.assert_allclose(
                found.gram, np.broadcast_to(products, found.gram.shape), atol=1e-5 * products.max()
            )
            np.testing.assert_allclose(found.second_moment, np.diagonal(found.gram, 0, -2, -1))


def test_second_moments_need_no_gram_matrix(grams):
    found = calibrate(model.apply, model.PARAMS, model.BATCHES[:1])
    again = calibrate(model.apply, model.PARAMS, model.BATCHES[:1], kind='gram')
    for path, entries in found.items():
        for entry, other in zip(entries, again[path], strict=True):
            assert entry.statistics.gram is None
            np.testing.assert_allclose(
                entry.statistics.second_moment, other.statistics.second_moment, rtol=1e-5
            )
            assert (
                entry.statistics.second_moment.shape
                == grams[path][0].statistics.second_moment.shape
            )


def test_leaves_that_meet_the_same_value_share_their_statistics(grams):
    first, second = grams['fused']
    assert first.statistics.gram is second.statistics.gram


def test_matrices_are_read_and_written_back(grams):
    for (name,), entries in grams.items():
        leaf = model.PARAMS[name]
        written = sum(entry.matrices.write(entry.matrices.read(leaf), leaf) for entry in entries)
        np.testing.assert_array_equal(written, leaf)
    # Channels of a convolution are the fastest of its inputs.
    kernel = grams['conv'][0].matrices.read(model.PARAMS['conv'])
    np.testing.assert_array_equal(kernel[1, 4:8, 0], model.PARAMS['conv'][0, 1, :, 4])


def test_narrow_inputs_are_summed_in_float32():
    params, x = {'w': jnp.ones((2, 3), jnp.bfloat16)}, jnp.full((1000, 2), 0.1, jnp.bfloat16)
    for kind in ('second_moment', 'gram'):
        (entry,) = calibrate(lambda p, x: x @ p['w'], params, [x], kind=kind)['w']
        assert entry.statistics.second_moment.dtype == jnp.float32
        np.testing.assert_allclose(
            entry.statistics.second_moment, 1000 * float(x[0, 0]) ** 2, rtol=1e-4
        )


def test_a_layer_that_is_called_twice_sees_both_inputs():
    params, x = {'w': jnp.eye(2) * 2, 'b': jnp.ones(2)}, jnp.array([[1.0, 3.0]])
    found = calibrate(lambda p, x: (x @ p['w'] + p['b']) @ p['w'], params, [x], kind='gram')
    (entry,) = found['w']
    assert entry.statistics.count == 2
    np.testing.assert_allclose(
        entry.statistics.gram, np.outer([1, 3], [1, 3]) + np.outer([3, 7], [3, 7])
    )


def test_only_some_leaves_and_their_memory(caplog):
    with caplog.at_level(logging.INFO, 'jaxpruner.oneshot.calibration'):
        found = calibrate(model.apply, model.PARAMS, model.BATCHES[:1], kind='gram', only='s*')
    assert list(found) == [('stack',)]
    assert 'statistics of 1 leaves in 1 places take 0.0 MiB' in caplog.text


def apply_tied(params, x):
    return jnp.tanh(x @ params['w']) @ params['w'].T


def apply_scaled(params, x):
    return x @ (params['w'] / jnp.linalg.norm(params['w']))


def apply_beside(params, x):
    return jnp.concatenate([x, x[:, :2]], 1) @ jnp.concatenate([params['w'], params['v']], 0)


def apply_opaque(params, x):
    return x @ jnp.linalg.qr(params['w'])[0]


BAD = [
    (
        apply_tied,
        {},
        ValueError,
        r'w: a weight of this leaf stands in more than one place .*test_calibration',
    ),
    (apply_scaled, {}, ValueError, r'w: what is contracted at .* is computed from this leaf'),
    (
        apply_beside,
        {'only': 'w'},
        ValueError,
        r'w: other parameters are put beside this leaf before .* so that it',
    ),
    (apply_opaque, {'only': ['w']}, UnsupportedPrimitive, 'w: no rule'),
    (
        apply_tied,
        {'kind': 'hessian'},
        ValueError,
        "kind is 'second_moment' or 'gram', got 'hessian'",
    ),
    (apply_tied, {'only': ['x']}, ValueError, "only: 'x' matches no parameter"),
    (apply_tied, {'batches': []}, ValueError, 'batches are empty'),
    (
        lambda params, x: x @ params['w'],
        {'only': 'w', 'batches': [jnp.ones((2, 3)), jnp.ones((0, 3))]},
        ValueError,
        r'batches\[1\] holds no samples: its inputs have shapes \(0, 3\); leave it out',
    ),
]


@pytest.mark.parametrize(('apply_fn', 'arguments', 'error', 'message'), BAD)
def test_what_cannot_be_calibrated(apply_fn, arguments, error, message):
    params = {'w': jnp.ones((3, 3)), 'v': jnp.ones((2, 3))}
    with pytest.raises(error, match=message):
        calibrate(apply_fn, params, **({'batches': [jnp.ones((2, 3))]} | arguments))


def convolve(params, images, scale):
    window = jax.lax.conv_general_dilated(images, params['w'], (1, 1), 'SAME')
    return window * scale.sum()


@pytest.mark.parametrize('kind', ['second_moment', 'gram'])
def test_no_images_beside_another_input_add_nothing(kind):
    params, images = {'w': jnp.ones((2, 3, 2, 2))}, model.normal(3, 3, 4, 4)
    batches = [(images, jnp.ones(2)), (images[:0], jnp.ones(2))]
    (expected,), (entry,) = (
        calibrate(convolve, params, some, kind=kind)['w'] for some in (batches[:1], batches)
    )
    jax.tree.map(np.testing.assert_array_equal, entry.statistics, expected.statistics)


def test_an_unknown_leaf_of_a_calibration(grams):
    with pytest.raises(KeyError, match="no statistics of 'stacks'; did you mean 'stack'"):
        grams['stacks']


def test_sharded_batches_and_parameters_give_the_same(grams):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    batches = [jax.device_put(batch, sharding) for batch in model.BATCHES]
    found = calibrate(model.apply, model.PARAMS, batches, kind='gram', only='out')
    np.testing.assert_allclose(
        found['out'][0].statistics.gram, grams['out'][0].statistics.gram, rtol=1e-5
    )


def test_inputs_of_several_axes_are_counted_as_the_weights_lie():
    params = {'w': model.normal(2, 3, 4)}
    x = model.normal(5, 3, 2)  # its axes stand the other way round
    (entry,) = calibrate(
        lambda p, x: jnp.einsum('nba,abo->no', x, p['w']), params, [x], kind='gram'
    )['w']
    samples = np.asarray(x).swapaxes(1, 2).reshape(5, 6)
    np.testing.assert_allclose(entry.statistics.gram, samples.T @ samples, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(entry.matrices.read(params['w']), params['w'].reshape(6, 4))


def test_a_layer_that_is_taken_by_its_number():
    params, x = {'w': model.normal(3, 4, 2)}, model.normal(5, 4)
    (entry,) = calibrate(
        lambda p, x: x @ jax.lax.dynamic_index_in_dim(p['w'], 2, keepdims=False), params, [x]
    )['w']
    np.testing.assert_array_equal(entry.matrices.read(params['w']), params['w'][2])


def test_a_contraction_without_statistics_is_named():
    equation = jax.make_jaxpr(jnp.add)(jnp.ones(2), jnp.ones(2)).eqns[0]
    with pytest.raises(AssertionError, match=r'\badd\b'):
        moments.statistics_of(equation, 1, jnp.ones(2), with_gram=False)
