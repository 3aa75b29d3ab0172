"""SNIP, GraSP and SynFlow against the papers' equations in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from helpers.random_numbers import Normal
from jaxpruner.oneshot import SNIP, SynFlow
from oneshot import references
from structure.doubles import doubles

normal = Normal(0)
SHAPES = {'hidden': (6, 8), 'bias': (8,), 'out': (8, 3)}
PARAMS = {name: normal(*shape) for name, shape in SHAPES.items()}
PARAMS |= {'numbers': jnp.arange(4).reshape(2, 2), 'nothing': None}
X, Y = normal(12, 6), normal(12, 3)
BATCHES = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
WEIGHTS = ('hidden', 'out')


def apply(params, x):
    return jnp.tanh(x @ params['hidden'] + params['bias']) @ params['out']


def loss_fn(params, x, y):
    return jnp.sum((apply(params, x) - y) ** 2)


def positive(params, x):
    return jax.nn.relu(x @ params['hidden'] + params['bias']) @ params['out']


def loss_of(weights):
    return loss_fn(PARAMS | weights, X, Y)


def snip_scores(weights, masks):
    gradient = jax.grad(loss_of)(weights)
    return {name: abs(weights[name] * gradient[name]) for name in WEIGHTS}


def grasp_scores(weights, masks):
    """Half of what the squared norm of the gradient loses when a weight begins to go."""

    def squared_norm(weights):
        gradient = jax.grad(loss_of)(weights)
        return sum(jnp.sum((gradient[name] * masks[name]) ** 2) for name in WEIGHTS)

    change = jax.grad(squared_norm)(weights)
    return {name: weights[name] * change[name] / 2 for name in WEIGHTS}


def synflow_scores(weights, masks):
    sizes = {name: np.abs(value) for name, value in weights.items()}
    to_hidden = np.ones(6) @ sizes['hidden'] + np.abs(np.asarray(PARAMS['bias'], np.float64))
    return {
        'hidden': sizes['hidden'] * sizes['out'].sum(1),
        'out': sizes['out'] * to_hidden[:, None],
    }


def reference(scores_of, sparsity, rounds):
    """Masks after the last round."""
    weights = {name: np.asarray(PARAMS[name], np.float64) for name in WEIGHTS}
    masks = {name: np.ones(weights[name].shape, bool) for name in WEIGHTS}
    for number in range(1, rounds + 1):
        with doubles():
            scores = scores_of({name: weights[name] * masks[name] for name in WEIGHTS}, masks)
        flat = np.concatenate(
            [np.where(masks[name], scores[name], -np.inf).ravel() for name in WEIGHTS]
        )
        count = references.number_kept(flat.size, 1 - (1 - sparsity) ** (number / rounds))
        hidden, out = np.split(references.keep_best(flat, count), [weights['hidden'].size])
        masks = {'hidden': hidden.reshape(6, 8), 'out': out.reshape(8, 3)}
    return masks


REFERENCES = {'snip': snip_scores, 'grasp': grasp_scores, 'synflow': synflow_scores}
GIVEN = {
    'snip': {'loss_fn': loss_fn, 'batches': BATCHES},
    'grasp': {'loss_fn': loss_fn, 'batches': BATCHES},
    'synflow': {'apply_fn': positive, 'batches': [jax.ShapeDtypeStruct((1, 6), jnp.float32)]},
}
CASES = [
    ('snip', 0.7, 1),
    ('snip', 0.9, 4),
    ('grasp', 0.6, 1),
    ('grasp', 0.8, 3),
    ('grasp', 0.2, 2),  # weights with negative scores are kept
    ('synflow', 0.9, 100),
]


@pytest.mark.parametrize(('algorithm', 'sparsity', 'rounds'), CASES)
def test_masks_equal_the_reference(algorithm, sparsity, rounds):
    params, masks = jaxpruner.prune(PARAMS, sparsity, algorithm, rounds=rounds, **GIVEN[algorithm])
    expected = reference(REFERENCES[algorithm], sparsity, rounds)
    for name in PARAMS:
        if name in WEIGHTS:
            np.testing.assert_array_equal(masks[name], expected[name], err_msg=name)
            np.testing.assert_array_equal(params[name], PARAMS[name] * expected[name])
        else:
            assert masks[name] is None
            assert params[name] is PARAMS[name]
    assert sum(masks[name].sum() for name in WEIGHTS) == references.number_kept(72, sparsity)


def deep(params, x):
    for _ in range(24):
        x = x @ params['w']
    return x


def test_flows_beyond_float32_are_refused_and_float64_holds_them():
    params = {'w': np.full((2, 2), 60.0, np.float32) + np.arange(4, dtype=np.float32).reshape(2, 2)}
    given = {'apply_fn': deep, 'batches': [np.zeros((1, 2), np.float32)], 'rounds': 2}
    words = r'w: its scores are not finite in round 1; .* give the parameters in float64'
    with pytest.raises(ValueError, match=words):
        jaxpruner.prune(params, 0.5, 'synflow', **given)
    with doubles():
        _, masks = jaxpruner.prune({'w': params['w'].astype(np.float64)}, 0.5, 'synflow', **given)
        assert masks['w'].sum() == 2
    found = jaxpruner.FixedMask(masks).instant_sparsify(params)[1]
    np.testing.assert_array_equal(found['w'], masks['w'])


def prune(algorithm, **given):
    return jaxpruner.prune(PARAMS, 0.5, algorithm, **given)


def snip(**given):
    return prune('snip', **(GIVEN['snip'] | given))


def of_bias(params, x, y):
    return jnp.sum(x * params['bias'][:6])


BAD = [
    (lambda: prune('snip'), 'SNIP takes loss_fn=… and batches=… alone; got none of them'),
    (lambda: snip(loss_fn=None, apply_fn=apply), 'alone; got apply_fn and batches'),
    (lambda: prune('magnitude', loss_fn=loss_fn), 'does not take loss_fn'),
    (lambda: prune('wanda', loss_fn=loss_fn), "unexpected keyword argument 'loss_fn'"),
    (lambda: snip(batches=iter(BATCHES), rounds=2), 'batches are read 2 times, and'),
    (
        lambda: prune('synflow', apply_fn=apply, batches=[(1, 6)]),
        r'jax.ShapeDtypeStruct\(.*; got 1',
    ),
    (lambda: snip(loss_fn=lambda p, x, y: apply(p, x)[:, 0]), 'scalar-output functions'),
    (lambda: snip(batches=[(X * jnp.nan, Y)]), 'hidden: its scores are not finite in round 1; loo'),
    (lambda: snip(loss_fn=of_bias), 'all scores of SNIP are zero: what loss_fn returns does not d'),
    (lambda: SNIP(rounds=0), 'rounds must be a whole number from 1 up, got 0'),
    (lambda: snip(sparsity_type='2:4'), r'SNIP ranks .* needs Unstructured\(\)'),
    (lambda: SynFlow().wrap_optax(None), r'SynFlow prunes once .* apply_fn=….* FixedMask\(masks\)'),
]


@pytest.mark.parametrize(('call', 'message'), BAD)
def test_bad_calls(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_leaves_of_which_nothing_is_left_are_warned_of():
    def almost_without_hidden(params, x, y):
        return jnp.sum(params['out'] ** 2) + 1e-6 * jnp.sum(params['hidden'] ** 2)

    with pytest.warns(UserWarning, match='^hidden: SNIP left no weight there, .* take more rounds'):
        _, masks = jaxpruner.prune(
            PARAMS, 0.9, 'snip', loss_fn=almost_without_hidden, batches=BATCHES
        )
    assert not masks['hidden'].any()
    jaxpruner.prune(PARAMS, 1.0, 'snip', **GIVEN['snip'])  # as asked for
