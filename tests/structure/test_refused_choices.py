"""What `choose` refuses: each message names the value, the place and the remedy."""

import jax
import jax.numpy as jnp
import pytest

import jaxpruner
from jaxpruner.structure import channel_groups
from structure.test_choosing import GRAPH, LAYERS, PARAMS, SCANNED, X

HALF = {'budget': 'parameters=0.5'}
REFUSED = {
    'neither': ({}, ValueError, 'budget=None, counts=None'),
    'both': ({**HALF, 'counts': {'a[1]': 2}}, ValueError, "budget='parameters=0.5', counts={'a"),
    'no text': ({'budget': 0.5}, TypeError, "'flops=0.5', got 0.5"),
    'unknown quantity': ({'budget': 'flop=0.5'}, ValueError, "flop=0.5.*'flops'"),
    'no share': ({'budget': 'flops'}, ValueError, "budget='flops'.*between 0 and 1"),
    'share of all': ({'budget': 'flops=1.5'}, ValueError, "budget='flops=1.5'.*between 0 and 1"),
    'unknown ranking': ({**HALF, 'ranking': 'al'}, ValueError, "ranking='al'.*'all'"),
    'unknown reduce': ({**HALF, 'reduce': 'summ'}, ValueError, "reduce='summ'.*'sum'"),
    'unknown normalise': ({**HALF, 'normalise': 'men'}, ValueError, "normalise='men'.*'mean'"),
    'unknown score': ({**HALF, 'score': 'magnitud'}, ValueError, "'magnitud'.*'magnitude'"),
    'no score': ({**HALF, 'score': 5}, TypeError, 'score is .*got 5'),
    'unknown glob': ({**HALF, 'leave': 'x*'}, KeyError, r"leave: 'x\*' matches no group"),
    'unknown group': ({'counts': {'a': 2}}, KeyError, r"counts: 'a' matches no group; .*'a\[1\]'"),
    'unknown in a mapping': ({**HALF, 'round_to': {'x': 2}}, KeyError, "round_to: 'x' matches"),
    'all left alone': (
        {**HALF, 'leave': '*'},
        ValueError,
        r'no group to choose from: a\[1\] .left',
    ),
    'count above': ({'counts': {'a[1]': 5}}, ValueError, r"counts\['a\[1\]'\] is 5; .*1 to 4"),
    'count of none': ({'counts': {'a[1]': 0}}, ValueError, r"counts\['a\[1\]'\] is 0"),
    'count of halves': ({'counts': {'a[1]': 1.5}}, TypeError, r"counts\['a\[1\]'\] is 1.5"),
    'no effect': ({'counts': {'a[1]': 2}, 'round_to': 2}, ValueError, 'round_to=2 has no effect'),
    'multiples above': ({**HALF, 'round_to': 6}, ValueError, r'round_to=6 .* of a\[1\], 4; leave'),
    'multiples of none': ({**HALF, 'round_to': 0}, ValueError, 'round_to=0.*1 or more'),
    'halves of multiples': ({**HALF, 'round_to': 1.5}, TypeError, 'round_to=1.5.*whole number'),
    'no multiple between': (
        {**HALF, 'round_to': 4, 'greatest': {'a[1]': 0.9}},
        ValueError,
        r'multiple of 4 .*greatest=0.9 of a\[1\]',
    ),
    'no share of a group': ({**HALF, 'least': 1.5}, ValueError, 'least=1.5.*from 0 to 1'),
    'text for a share': ({**HALF, 'greatest': '1'}, TypeError, "greatest='1'.*number"),
    'out of reach': (
        {**HALF, 'least': 0.9},
        ValueError,
        r"'parameters=0.5'.* 1\.0000 of the param",
    ),
    'gradients missing': ({**HALF, 'score': 'saliency'}, ValueError, 'Saliency.* gradients=…'),
    'gradients of a function missing': (
        {**HALF, 'score': lambda weights, gradients: weights},
        ValueError,
        'lambda.*scores by gradients.*gradients=…',
    ),
    'scores of another shape': (
        {**HALF, 'score': lambda weights: weights[:3]},
        ValueError,
        r'a: score gets 4 channels of 3 weights.* got shape \(3, 3\)',
    ),
    'no score for a group': (
        {**HALF, 'score': {'a': PARAMS['a'], 'b': None, 'c': None}},
        ValueError,
        r"b\[1\]: no member .*leave='b\[1\]'",
    ),
    'an algorithm without scores': ({**HALF, 'score': 'sparsegpt'}, ValueError, 'SparseGPT.*wanda'),
    'one with derivatives': ({**HALF, 'score': 'grasp'}, ValueError, 'GraSP takes derivatives'),
    'one with a history': ({**HALF, 'score': 'movement'}, ValueError, 'MovementPruning has no sco'),
}


@pytest.mark.parametrize(('settings', 'error', 'message'), REFUSED.values(), ids=REFUSED)
def test_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        GRAPH.choose(PARAMS, **settings)


@pytest.mark.parametrize(
    ('params', 'error', 'message'),
    [
        (
            {**PARAMS, 'b': PARAMS['b'].at[2, 5].set(jnp.nan)},
            ValueError,
            r'5 of b\[1\] is nan for b',
        ),
        ({**PARAMS, 'a': PARAMS['a'][:2]}, ValueError, r'a has shape \(2, 4\), .* \(3, 4\)'),
        ({**PARAMS, 'd': X}, ValueError, "'d'"),
        (jax.eval_shape(lambda: PARAMS), TypeError, 'a has no values'),
    ],
    ids=['nan', 'shape', 'leaves', 'shapes alone'],
)
def test_parameters_are_refused(params, error, message):
    with pytest.raises(error, match=message):
        GRAPH.choose(params, ranking='all', leave='a[1]' if 'b' in message else (), **HALF)


def test_one_array_for_two_leaves_is_refused():
    square = jnp.ones((4, 4))
    params = {'in': jnp.ones((3, 4)), 'a': square, 'b': square, 'out': jnp.ones((4, 2))}

    def apply_fn(p, x):
        return jnp.tanh(jnp.tanh(x @ p['in']) @ p['a']) @ p['b'] @ p['out']

    graph = channel_groups(apply_fn, params, X)
    with pytest.raises(ValueError, match=r'a and b are one array.*jnp.copy'):
        graph.choose(params, 'flops=0.5')
    assert graph.choose(jax.tree.map(jnp.copy, params), 'flops=0.5').keep
    tied = channel_groups(lambda p, x: apply_fn({**p, 'b': p['a'] * 0 + p['b']}, x), params, X)
    assert tied.choose(params, 'parameters=0.8', leave=()).keep


def test_groups_that_are_not_exact_are_no_candidates():
    graph = channel_groups(lambda p, x: jax.nn.softmax(x @ p['a']) @ p['b'], PARAMS, X)
    with pytest.raises(ValueError, match=r'no group to choose from: a\[1\] .not exact'):
        graph.choose(PARAMS, **HALF)
    with pytest.raises(ValueError, match=r'channels of a\[1\] is not the same .*allow_inexact'):
        graph.choose(PARAMS, counts={'a[1]': 2})


def test_layers_are_no_candidates():
    with pytest.raises(ValueError, match=r'depth=True'):
        SCANNED.choose(LAYERS, 'flops=0.5', leave='up[2]')


def test_calibration_without_inputs_is_refused():
    graph = channel_groups(lambda p, x: x @ p['a'] @ p['b'], PARAMS, jax.eval_shape(lambda: X))
    with pytest.raises(ValueError, match=r'Wanda .*batches=…'):
        graph.choose(PARAMS, score=jaxpruner.oneshot.Wanda(), **HALF)
