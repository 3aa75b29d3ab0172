"""SparseGPT with blocks of any size, and under masks from elsewhere, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers.random_numbers import Normal
from jaxpruner.oneshot import SparseGPT, calibrate, sparsegpt_matrices
from oneshot import model, references

normal = Normal(3)

X = normal(400, 200) @ (jnp.eye(200) + normal(200, 200) / 30)
W = normal(200, 24)


@pytest.mark.parametrize('block_size', [1, 7, 32, 100, 128, 200, 1000])
@pytest.mark.parametrize('per', ['layer', 'output'])
def test_blocks_of_any_size(block_size, per):
    pruner = SparseGPT(
        sparsity_distribution_fn=lambda params: {'w': 0.6}, block_size=block_size, per=per
    )
    params, masks = pruner.instant_sparsify(
        {'w': W}, apply_fn=lambda params, x: x @ params['w'], batches=[X]
    )
    weights, mask = references.sparsegpt(
        np.asarray(W), np.asarray(X), 0.6, per=per, block=block_size
    )
    np.testing.assert_array_equal(masks['w'], mask)
    np.testing.assert_allclose(params['w'], weights, atol=1e-3 * np.abs(weights).max())


def test_groups_do_not_depend_on_the_size_of_blocks():
    found = [
        jaxpruner.prune(
            {'w': W},
            0.5,
            'sparsegpt',
            apply_fn=lambda params, x: x @ params['w'],
            batches=[X],
            sparsity_type='2:4',
            block_size=size,
        )[1]['w']
        for size in (8, 50, 128)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize('sequential', [False, True])
def test_weights_under_masks_from_elsewhere(sequential):
    params = {'up': normal(8, 16), 'down': normal(16, 8), 'bias': normal(8)}
    x = normal(64, 8)

    def apply(params, x):
        return jnp.tanh(x @ params['up']) @ params['down'] + params['bias']

    _, masks = jaxpruner.prune(params, 0.5)
    given = {'algorithm': 'sparsegpt', 'apply_fn': apply, 'batches': [x], 'sequential': sequential}
    found, kept = jaxpruner.prune(params, **given, masks=masks)
    jax.tree.map(np.testing.assert_array_equal, kept, masks)
    inputs = np.asarray(x, np.float64)
    for name in ('up', 'down'):
        weights, _ = references.sparsegpt(np.asarray(params[name]), inputs, 0, given=masks[name])
        np.testing.assert_allclose(found[name], weights, atol=1e-4 * np.abs(weights).max())
        inputs = np.tanh(inputs @ (weights if sequential else np.asarray(params[name], np.float64)))
    assert found['bias'] is params['bias']
    plain = params['up'] * masks['up']
    changes = [
        float(jnp.sum((x @ (pruned - params['up'])) ** 2)) for pruned in (found['up'], plain)
    ]
    assert changes[0] < changes[1]


def test_any_way_to_read_weights_and_statistics_that_are_given():
    _, masks = jaxpruner.prune(model.PARAMS, 0.5)
    calibration = calibrate(model.apply, model.PARAMS, model.BATCHES, kind='gram')
    found, kept = SparseGPT().instant_sparsify(model.PARAMS, calibration=calibration, masks=masks)
    jax.tree.map(np.testing.assert_array_equal, kept, masks)
    samples = model.samples(model.PARAMS)
    for name in samples:
        inputs = samples[name].reshape(-1, *samples[name].shape[-2:])
        read = [
            np.concatenate(
                [np.asarray(entry.matrices.read(tree[name])) for entry in calibration[name]]
            )
            for tree in (model.PARAMS, found, jax.tree.map(jnp.float32, masks))
        ]
        read = [array.reshape(-1, *array.shape[-2:]) for array in read]
        for i, (before, after, mask) in enumerate(zip(*read, strict=True)):
            if name != 'fused':
                weights, _ = references.sparsegpt(before, inputs[i % len(inputs)], 0, given=mask)
                np.testing.assert_allclose(
                    after, weights, atol=1e-4 * np.abs(weights).max(), err_msg=name
                )
    # An embedding that is looked up has no inputs: it is masked alone.
    np.testing.assert_array_equal(
        found['embedding'], model.PARAMS['embedding'] * masks['embedding']
    )


def test_on_matrices():
    gram = X.T @ X
    mask = references.keep_best(np.abs(np.asarray(W)), 2000)
    pruned = sparsegpt_matrices.prune_by_sparsegpt(W, gram, 0.0, mask=jnp.asarray(mask))
    weights, _ = references.sparsegpt(np.asarray(W), np.asarray(X), 0, given=mask)
    np.testing.assert_array_equal(pruned.mask, mask)
    np.testing.assert_allclose(pruned.weights, weights, atol=1e-3 * np.abs(weights).max())


ONES = {'w': jnp.ones((4, 2))}
GIVEN = {'apply_fn': lambda params, x: x @ params['w'], 'batches': [normal(9, 4)]}
BAD = [
    ({'algorithm': 'wanda', 'masks': ONES}, ValueError, 'Wanda changes no weight that stays'),
    ({'algorithm': 'magnitude', 'masks': ONES}, ValueError, "'magnitude' makes masks of its own"),
    ({'masks': ONES, 'sparsity': 0.5}, ValueError, 'leave the sparsity out'),
    ({'masks': ONES, 'owl': True}, ValueError, 'masks=… have already'),
    (
        {'masks': {'w': jnp.ones((2, 4))}},
        ValueError,
        r'w: its mask has shape \(2, 4\), and the parameter \(4, 2\)',
    ),
    ({'masks': {'w': 2 * jnp.ones((4, 2))}}, ValueError, 'w: a mask holds 0 .* and 1'),
    ({'masks': {'w': None}}, ValueError, 'all masks are None'),
    ({'masks': {'v': jnp.ones((4, 2))}}, ValueError, "lacks 'w' and has 'v'"),
    ({'sparsity': 0.5, 'block_size': 0}, ValueError, 'block_size must be .* got 0'),
    ({'sparsity': 0.5, 'block_size': 1.5}, TypeError, 'block_size .* got 1.5'),
]


@pytest.mark.parametrize(('arguments', 'error', 'message'), BAD)
def test_bad_calls(arguments, error, message):
    with pytest.raises(error, match=message):
        jaxpruner.prune(ONES, **({'algorithm': 'sparsegpt'} | arguments), **GIVEN)
