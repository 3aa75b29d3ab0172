"""Statistics in which samples count differently, and padding counts nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers import rows
from helpers.random_numbers import Normal
from jaxpruner.oneshot import calibrate

pytestmark = pytest.mark.filterwarnings('ignore:samples are fewer')
normal = Normal(11)

WORDS = 9
PARAMS = {'tokens': normal(WORDS, 8), 'up': normal(8, 12), 'down': normal(12, 4)}
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
IDS = np.arange(15).reshape(3, 5) * 7 % WORDS


def batch_of(padding, mask=MASK):
    return {'ids': jnp.where(MASK != 0, IDS, padding), 'mask': jnp.asarray(mask)}


def mlp(params, x):
    return jnp.tanh(x @ params['up']) @ params['down']


def by_position(params, batch):
    return mlp(params, params['tokens'][batch['ids']])


def flattened(params, batch):
    return mlp(params, params['tokens'][batch['ids']].reshape(-1, 8))


def mapped(params, batch):
    """As Equinox has it: a function of one token, whose matrices have their outputs first."""

    def of_token(number):
        x = params['tokens'][number]
        return params['down'].T @ jnp.tanh(params['up'].T @ x)

    return jax.vmap(jax.vmap(of_token))(batch['ids'])


def in_heads(params, batch):
    x = params['tokens'][batch['ids']]
    heads = jnp.tanh(jnp.einsum('bli,ihd->blhd', x, params['up'].reshape(8, 3, 4)))
    return jnp.einsum('blhd,hdo->blo', heads, params['down'].reshape(3, 4, 4))


def heads_apart(params, batch):
    """Products of one head each, all with the same inputs: an axis that inputs and weights share."""
    x = params['tokens'][batch['ids']]
    x = jnp.broadcast_to(x, (3, *x.shape))
    heads = jnp.tanh(jnp.einsum('hbli,ihd->hbld', x, params['up'].reshape(8, 3, 4)))
    return jnp.einsum('hbld,hdo->blo', heads, params['down'].reshape(3, 4, 4))


MODELS = [by_position, flattened, mapped, in_heads, heads_apart]


def mask_of(batch):
    return batch['mask']


def real_inputs(params=PARAMS):
    """What `up` and `down` meet at the positions that are real, in NumPy."""
    x = np.asarray(params['tokens'], np.float64)[IDS[MASK != 0]]
    return {'up': x, 'down': np.tanh(x @ np.asarray(params['up'], np.float64))}


@pytest.mark.parametrize('kind', ['second_moment', 'gram'])
@pytest.mark.parametrize('apply', [by_position, flattened, mapped, in_heads])
def test_statistics_are_those_of_the_real_tokens_alone(apply, kind):
    batches = [batch_of(padding) for padding in (0, 5)]
    only = ['up', 'down']
    found = calibrate(apply, PARAMS, batches, kind, only, weights=mask_of)
    for name, inputs in real_inputs().items():
        (entry,) = found[name]
        assert float(entry.statistics.count) == 2 * len(inputs)
        gram = 2 * inputs.T @ inputs
        np.testing.assert_allclose(entry.statistics.second_moment, np.diag(gram), rtol=1e-5)
        if kind == 'gram':
            np.testing.assert_allclose(entry.statistics.gram, gram, rtol=1e-5, atol=1e-5)


def test_fractions_weigh():
    shares = np.random.default_rng(0).uniform(size=MASK.shape)
    batch = batch_of(3, shares)
    found = calibrate(by_position, PARAMS, [batch], 'gram', 'up', weights=mask_of)
    x = np.asarray(PARAMS['tokens'], np.float64)[batch['ids']].reshape(-1, 8)
    (entry,) = found['up']
    np.testing.assert_allclose(entry.statistics.count, shares.sum(), rtol=1e-6)
    expected = x.T @ (x * shares.reshape(-1, 1))
    np.testing.assert_allclose(entry.statistics.gram, expected, rtol=1e-5, atol=1e-5)


WAYS = [{}, {'sequential': True}, {'owl': True}, {'owl': True, 'sequential': True}]


@pytest.mark.parametrize(
    ('apply', 'algorithm', 'settings'), rows.crossed(MODELS, ['wanda', 'ria', 'sparsegpt'], WAYS)
)
def test_a_model_is_pruned_by_its_real_tokens_alone(apply, algorithm, settings):
    def pruned(batches, **weights):
        return jaxpruner.prune(
            PARAMS,
            0.5,
            algorithm,
            apply_fn=apply,
            batches=batches,
            sparsity_type={'tokens': None, '*': 'unstructured'},
            **settings,
            **weights,
        )

    alone = [{'ids': IDS[MASK != 0][None]}]
    expected, expected_masks = pruned(alone)
    _, with_padding = pruned([batch_of(5)])
    assert (with_padding['up'] != expected_masks['up']).any()
    for padding in (0, 5):
        found, masks = pruned([batch_of(padding)], weights=mask_of)
        for name in ('up', 'down'):
            np.testing.assert_array_equal(masks[name], expected_masks[name])
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('settings', [{}, {'sequential': True}])
def test_layers_of_a_scan_are_weighed_and_padding_may_be_nan(settings):
    stack = {'stack': normal(3, 8, 8)}

    def apply(params, x, mask):
        del mask
        body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jax.lax.scan(body, x, params['stack'])[0]

    x = normal(3, 5, 8)
    weigh = {'weights': lambda batch: batch[1]}
    padded = jnp.where(MASK[..., None] != 0, x, jnp.nan)
    given = {'algorithm': 'wanda', 'apply_fn': apply} | settings
    found = jaxpruner.prune(stack, 0.5, batches=[(padded, MASK)], **weigh, **given)
    real = x[MASK != 0]
    expected = jaxpruner.prune(stack, 0.5, batches=[(real, MASK)], **given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_images_have_one_weight_each():
    params = {'conv': normal(3, 3, 2, 4), 'out': normal(4, 4)}

    def apply(params, images):
        numbers = ('NHWC', 'HWIO', 'NHWC')
        x = jax.lax.conv_general_dilated(
            images, params['conv'], (1, 1), 'SAME', dimension_numbers=numbers
        )
        return jax.nn.relu(x).mean((1, 2)) @ params['out']

    images = normal(3, 4, 4, 2)
    found = calibrate(apply, params, [images], 'gram', weights=lambda batch: jnp.array([1, 0, 1]))
    expected = calibrate(apply, params, [images[jnp.array([0, 2])]], 'gram')
    for name in params:
        ((_, statistics),), ((_, of_two),) = found[name], expected[name]
        for one, other in zip(statistics, of_two, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def pooled(params, batch):
    return by_position(params, batch).mean(1) @ params['head']


def sorted_by_experts(params, batch):
    x = params['tokens'][batch['ids']].reshape(-1, 8)
    return jax.lax.ragged_dot(x, params['experts'], jnp.array([7, 8]))


def square(params, batch):
    x = params['tokens'][batch['ids'][:, :3]]
    return mlp(params, jnp.stack([x] * 3))


def images(params, batch):
    x = params['tokens'][batch['ids']]
    numbers = ('NWC', 'WIO', 'NWC')
    return jax.lax.conv_general_dilated(x, params['conv'], (1,), 'SAME', dimension_numbers=numbers)


REFUSED = [
    (pooled, {'head': normal(4, 4)}, mask_of, r'head: inputs \(3, 4\) at .*\{\'head\': None'),
    (sorted_by_experts, {'experts': normal(2, 8, 4)}, mask_of, r'experts: inputs \(15, 8\)'),
    (square, {}, lambda batch: batch['mask'][:, :3], r'up: inputs \(3, 3, 3, 8\)'),
    (images, {'conv': normal(3, 8, 4)}, mask_of, r'conv: inputs \(3, 5, 8\)'),
    (
        lambda params, batch: (pooled(params, batch), sorted_by_experts(params, batch)),
        {'head': normal(4, 4), 'experts': normal(2, 8, 4)},
        mask_of,
        r"experts: .*; head: .*\{'experts': None, 'head': None, '\*': …\}",
    ),
    (by_position, {}, lambda batch: batch['mask'][:, :4], r'weights of shape \(3, 4\)'),
    (by_position, {}, lambda batch: batch['mask'] - 1, 'finite and not negative'),
    (by_position, {}, lambda batch: batch['mask'] * jnp.nan, 'finite and not negative'),
]


@pytest.mark.parametrize(('apply', 'more', 'weights', 'words'), REFUSED)
def test_weights_that_do_not_tell_their_samples_are_refused(apply, more, weights, words):
    given = {'apply_fn': apply, 'batches': [batch_of(0)], 'weights': weights}
    sparsity = dict.fromkeys(more or ('up', 'down'), 0.5)
    for sequential in (False, True):
        with pytest.raises(ValueError, match=words):
            jaxpruner.prune(PARAMS | more, sparsity, 'wanda', sequential=sequential, **given)


def test_a_leaf_that_stays_dense_needs_no_weights():
    params = PARAMS | {'head': normal(4, 4)}
    given = {'apply_fn': pooled, 'batches': [batch_of(0)], 'weights': mask_of}
    sparsity = {'tokens': None, 'head': None, '*': 0.5}
    _, masks = jaxpruner.prune(params, sparsity, 'wanda', **given)
    assert (int(masks['up'].sum()), masks['head']) == (48, None)


def test_weights_are_refused_where_nothing_can_be_weighed():
    given = {'apply_fn': by_position, 'batches': [batch_of(0)]}
    for algorithm in ('magnitude', 'synflow'):
        with pytest.raises(ValueError, match=rf"'{algorithm}' takes no statistics"):
            jaxpruner.prune(PARAMS, 0.5, algorithm, weights=mask_of, **given)
    with pytest.raises(TypeError, match=r'weights=lambda batch: .* got ndarray'):
        jaxpruner.prune(PARAMS, 0.5, 'wanda', weights=MASK, **given)
    calibration = calibrate(by_position, PARAMS, given['batches'], weights=mask_of)
    pruner = jaxpruner.oneshot.Wanda(sparsity=0.5)
    with pytest.raises(ValueError, match='weighed already'):
        pruner.instant_sparsify(PARAMS, calibration=calibration, weights=mask_of)
