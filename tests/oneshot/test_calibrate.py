"""Statistics of what a model's weights meet, against products written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers.random_numbers import Normal
from jaxpruner.oneshot import calibrate
from jaxpruner.trace import UnsupportedPrimitive
from oneshot import model

pytestmark = pytest.mark.filterwarnings('ignore:samples are fewer')
normal = Normal(11)

PATHS = {('conv',): 1, ('fused',): 2, ('stack',): 1, ('experts',): 1, ('out',): 1}


@pytest.fixture(scope='module')
def grams():
    return calibrate(model.apply, model.PARAMS, model.BATCHES, kind='gram')


def test_statistics_are_those_of_the_samples_and_matrices_are_read_and_written_back(grams):
    assert {path: len(grams[path]) for path in grams} == PATHS
    expected = model.samples(model.PARAMS)
    squares = calibrate(model.apply, model.PARAMS, model.BATCHES)
    for (name,), entries in grams.items():
        samples = expected[name]
        products = np.swapaxes(samples, -2, -1) @ samples
        for (matrices, found), (_, other) in zip(entries, squares[name,], strict=True):
            shape = matrices.shape
            assert found.gram.shape == (*shape[:-1], shape[-2])
            assert (np.asarray(found.count) == samples.shape[-2]).all()
            products = np.broadcast_to(products, found.gram.shape)
            np.testing.assert_allclose(found.gram, products, atol=1e-5 * products.max())
            np.testing.assert_allclose(found.second_moment, np.diagonal(found.gram, 0, -2, -1))
            assert other.gram is None
            np.testing.assert_allclose(other.second_moment, found.second_moment, rtol=1e-5)
        leaf = model.PARAMS[name]
        written = sum(part.write(part.read(leaf), leaf) for part, _ in entries)
        np.testing.assert_array_equal(written, leaf)
    first, second = grams['fused',]
    assert first.statistics.gram is second.statistics.gram
    # Channels of a convolution are the fastest of its inputs.
    kernel = grams['conv',][0].matrices.read(model.PARAMS['conv'])
    np.testing.assert_array_equal(kernel[1, 4:8, 0], model.PARAMS['conv'][0, 1, :, 4])


def test_a_layer_that_is_called_twice_sees_both_inputs():
    params, x = {'w': jnp.eye(2) * 2, 'b': jnp.ones(2)}, jnp.array([[1.0, 3.0]])
    found = calibrate(lambda p, x: (x @ p['w'] + p['b']) @ p['w'], params, [x], kind='gram')
    (entry,) = found['w',]
    assert entry.statistics.count == 2
    expected = np.outer([1, 3], [1, 3]) + np.outer([3, 7], [3, 7])
    np.testing.assert_allclose(entry.statistics.gram, expected)


def test_large_gram_matrices_are_whole():
    x = normal(6, 515)
    found = calibrate(linear, {'w': jnp.ones((515, 1))}, [x, x], kind='gram')
    np.testing.assert_allclose(found['w',][0].statistics.gram, 2 * x.T @ x, rtol=1e-4, atol=1e-4)


def apply_tied(params, x):
    return jnp.tanh(x @ params['w']) @ params['w'].T


def apply_beside(params, x):
    return jnp.concatenate([x, x[:, :2]], 1) @ jnp.concatenate([params['w'], params['v']], 0)


def apply_opaque(params, x):
    return x @ jnp.linalg.qr(params['w'])[0]


def linear(params, x):
    return x @ params['w']


BAD = [
    (apply_tied, {}, r'w: a weight of this leaf stands in more than one place .*test_calibrate'),
    (apply_beside, {'only': 'w'}, r'w: other parameters are put beside this leaf before .* so'),
    (apply_opaque, {'only': ['w']}, 'w: no rule'),
    (apply_tied, {'kind': 'hessian'}, "kind is 'second_moment' or 'gram', got 'hessian'"),
    (lambda params, x: x, {}, 'calibrate: what apply_fn returns does not depend on'),
]


@pytest.mark.parametrize(('apply_fn', 'arguments', 'message'), BAD)
def test_what_cannot_be_calibrated(apply_fn, arguments, message):
    params = {'w': jnp.ones((3, 3)), 'v': jnp.ones((2, 3))}
    with pytest.raises((ValueError, UnsupportedPrimitive), match=message):
        calibrate(apply_fn, params, **({'batches': [jnp.ones((2, 3))]} | arguments))


@pytest.mark.parametrize('lengths', [(6, 4), (4, 6)])
def test_shapes_with_which_other_leaves_share_their_inputs_are_refused(lengths):
    def last_four(params, x):
        """Of short batches both leaves meet the same value."""
        recent = x if x.shape[1] <= 4 else x[:, -4:]
        return (recent @ params['a']).sum() + (x @ params['b']).sum()

    params, batches = {'a': normal(8, 4), 'b': normal(8, 4)}, [normal(2, n, 8) for n in lengths]
    words = r'other leaves meet the same value, .* give batches of one shape'
    with pytest.raises(ValueError, match=words):
        calibrate(last_four, params, batches)


# Samples that count differently, and padding that counts nothing.

WORDS = 9
PARAMS = {'tokens': normal(WORDS, 8), 'up': normal(8, 12), 'down': normal(12, 4)}
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
IDS = np.arange(15).reshape(3, 5) * 7 % WORDS


def batch_of(padding, mask=MASK):
    return {'ids': jnp.where(MASK != 0, IDS, padding), 'mask': jnp.asarray(mask)}


def mask_of(batch):
    return batch['mask']


def mlp(params, x):
    return jnp.tanh(x @ params['up']) @ params['down']


def by_position(params, batch):
    return mlp(params, params['tokens'][batch['ids']])


def flattened(params, batch):
    return mlp(params, params['tokens'][batch['ids']].reshape(-1, 8))


@pytest.mark.parametrize('apply', [by_position, flattened])
def test_statistics_are_those_of_the_real_tokens_alone(apply):
    batches, only = [batch_of(padding) for padding in (0, 5)], ['up', 'down']
    x = np.asarray(PARAMS['tokens'], np.float64)[IDS[MASK != 0]]
    inputs = {'up': x, 'down': np.tanh(x @ np.asarray(PARAMS['up'], np.float64))}
    for kind in ('second_moment', 'gram'):
        found = calibrate(apply, PARAMS, batches, kind, only, weights=mask_of)
        for name in only:
            (entry,) = found[name,]
            assert float(entry.statistics.count) == 2 * len(x)
            gram = 2 * inputs[name].T @ inputs[name]
            np.testing.assert_allclose(entry.statistics.second_moment, np.diag(gram), rtol=1e-5)
    np.testing.assert_allclose(entry.statistics.gram, gram, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('settings', [{}, {'sequential': True}])
def test_layers_of_a_scan_are_weighed_and_padding_may_be_nan(settings):
    def apply(params, x, mask):
        del mask
        body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jax.lax.scan(body, x, params['stack'])[0]

    stack, x = {'stack': normal(3, 8, 8)}, normal(3, 5, 8)
    padded = jnp.where(MASK[..., None] != 0, x, jnp.nan)
    given = {'algorithm': 'wanda', 'apply_fn': apply, 'weights': lambda batch: batch[1]} | settings
    found = jaxpruner.prune(stack, 0.5, batches=[(padded, MASK)], **given)
    real = x[MASK != 0], np.ones(MASK.sum())
    expected = jaxpruner.prune(stack, 0.5, batches=[real], **given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def images(params, batch):
    numbers = ('NWC', 'WIO', 'NWC')
    x = params['tokens'][batch['ids']]
    return jax.lax.conv_general_dilated(x, params['conv'], (1,), 'SAME', dimension_numbers=numbers)


def pooled(params, batch):
    return by_position(params, batch).mean(1) @ params['head']


REFUSED = [
    (pooled, {'head': normal(4, 4)}, mask_of, r'head: inputs \(3, 4\) at .*\{\'head\': None'),
    (images, {'conv': normal(3, 8, 4)}, mask_of, r'conv: inputs \(3, 5, 8\)'),
    (by_position, {}, lambda batch: batch['mask'] - 1, 'finite and not negative'),
]


@pytest.mark.parametrize(('apply', 'more', 'weights', 'words'), REFUSED)
def test_weights_that_do_not_tell_their_samples_are_refused(apply, more, weights, words):
    given = {'apply_fn': apply, 'batches': [batch_of(0)], 'weights': weights}
    sparsity = dict.fromkeys(more or ('up', 'down'), 0.5)
    for sequential in (False, True):
        with pytest.raises((TypeError, ValueError), match=words):
            jaxpruner.prune(PARAMS | more, sparsity, 'wanda', sequential=sequential, **given)
