"""Groups are exact where removing channels equals zeroing them, and only there."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.structure import channel_groups
from structure import hostile
from structure.values import values_like
from uses.table import floats


@pytest.mark.parametrize(('function', 'exact'), hostile.MODELS.values(), ids=hostile.MODELS)
def test_a_group_is_exact_only_if_zeros_stay_apart(function, exact):
    params, (x,) = values_like({'up': floats(3, 6), 'down': floats(6, 2)}, (floats(2, 3),))
    graph = channel_groups(lambda p, x: function(x @ p['up']) @ p['down'], params, x)
    (group,) = graph.groups.values()
    assert (group.exact, bool(group.reason)) == (exact, not exact)
    found = graph.verify(params, {'up[1]': [0, 2, 3]}, x, allow_inexact=True)
    assert found.verdict != 'different' or not exact


def quantize_weights(p):
    """Learned step sizes: LSQ divides by a parameter for each channel."""
    return jnp.round(p['up'] / p['step']) * p['step']


# (hidden channels of the parameters and the inputs, reason): the remedy is in the reason, and it works.
DIVISIONS = {
    'learned step sizes': (
        lambda p, x: jax.nn.relu(x @ quantize_weights(p)),
        r'^div: nan at zeroed .*jnp\.maximum.*test_zeros\.py',
    ),
    'a divided parameter': (lambda p, x: x @ (p['up'] / p['step']), r'^div: nan at zeroed '),
    'one over a parameter': (lambda p, x: (x @ p['up']) * (1 / p['step']), r'^div: inf at zeroed '),
    'a logarithm': (lambda p, x: (x @ p['up']) + jnp.log(p['step']), r'^log: -inf at zeroed '),
    'not infinite at last': (
        lambda p, x: (x @ p['up']) * p['step'] * (jnp.exp(jnp.log(p['step'])) + 1).sum(),
        r'^reduce_sum: meets 1.0 at zeroed channels',
    ),
    'with the remedy': (lambda p, x: x @ (p['up'] / jnp.maximum(p['step'], 1e-6)), None),
}


@pytest.mark.parametrize(('function', 'reason'), DIVISIONS.values(), ids=DIVISIONS)
def test_the_reason_names_the_operation_that_is_not_finite_at_zero(function, reason):
    params = {'up': jnp.ones((3, 6)), 'step': jnp.ones(6), 'down': jnp.ones((6, 2))}
    graph = channel_groups(lambda p, x: function(p, x) @ p['down'], params, jnp.ones((2, 3)))
    (group,) = graph.groups.values()
    assert group.exact == (reason is None)
    assert re.search(reason or '^$', group.reason)
