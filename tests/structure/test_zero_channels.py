"""Channels that are zero already: they are found, and removing them changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.structure import channel_groups
from uses.table import scan

UP, BIAS, GATE, DOWN = ('up', 1), ('bias', 0), ('gate', 1), ('down', 0)
GROUP = 'up[1]'
X = jax.random.normal(jax.random.key(9), (5, 3))


def make_params():
    shapes = {'up': (3, 6), 'bias': (6,), 'gate': (3, 6), 'down': (6, 2)}
    return {name: jax.random.normal(jax.random.key(ord(name[0])), shapes[name]) for name in shapes}


def mlp(activation):
    def apply(p, x):
        hidden = activation(x @ p['up'] + p['bias'])
        return (hidden * jax.nn.silu(x @ p['gate'])) @ p['down']

    return apply


def normed(p, x):
    hidden = x @ p['up'] + p['bias']
    hidden = hidden * jax.lax.rsqrt(jnp.mean(hidden**2, -1, keepdims=True) + 1e-6)
    return (hidden * (x @ p['gate'])) @ p['down']


# name -> (model, members that are zero in channel 2, whether it can be removed)
CASES = {
    'column and bias': (mlp(jax.nn.relu), [UP, BIAS], True),
    'column and bias, but cos(0) is 1': (mlp(jnp.cos), [UP, BIAS], False),
    'row': (mlp(jnp.cos), [DOWN], True),
    'gate': (mlp(jnp.cos), [GATE], True),
    'row, but a norm sees the channel': (normed, [DOWN], False),
    'what the norm sees': (normed, [UP, BIAS], True),
    'nothing': (mlp(jnp.cos), [], False),
}


def zero(params, members, channel):
    params = dict(params)
    for name, axis in members:
        index = (slice(None),) * axis + (channel,)
        params[name] = params[name].at[index].set(0)
    return params


@pytest.mark.parametrize(('apply_fn', 'members', 'is_removable'), CASES.values(), ids=CASES)
def test_some_members_are_enough(apply_fn, members, is_removable):
    params = zero(make_params(), members, 2)
    graph = channel_groups(apply_fn, params, X)
    others = {GROUP: [0, 1, 3, 4, 5]}
    small = graph.shrink(params, others, verify=False)
    results = graph.small_apply(others)(small, X)
    is_same = bool(jnp.allclose(results, apply_fn(params, X), rtol=1e-5, atol=1e-6))
    assert is_same is is_removable
    keep = graph.nonzero_channels(params)
    assert [indices.tolist() for indices in keep.values()] == list(others.values()) * is_removable


def test_channels_of_one_group_may_differ_in_what_is_zero():
    params = make_params()
    zeroed = zero(zero(zero(params, [DOWN], 0), [UP, BIAS], 3), [UP], 4)
    graph = channel_groups(mlp(jax.nn.relu), params, X)
    assert graph.nonzero_channels(zeroed)[GROUP].tolist() == [1, 2, 4, 5]
    everything = zero(params, [DOWN], slice(None))
    assert graph.nonzero_channels(everything)[GROUP].tolist() == [0]


def test_layers_of_a_scan_and_heads():
    """Of a scan a layer that adds nothing goes, and in each layer the units that are zero there."""
    keys = jax.random.split(jax.random.key(1), 2)
    up, down = jax.random.normal(keys[0], (3, 4, 6)), jax.random.normal(keys[1], (3, 6, 4))
    params = {'up': up, 'down': down.at[1].set(0).at[0, 2].set(0).at[:, 5].set(0)}

    def apply(p, x):
        return scan(lambda x, p: x + jnp.cos(x @ p['up']) @ p['down'], x, p)

    x = jax.random.normal(jax.random.key(2), (5, 4))
    graph = channel_groups(apply, params, x)
    keep = graph.nonzero_channels(params)
    assert keep['up[0]'].tolist() == [0, 2]
    assert keep['up[2]'][2].tolist() == [0, 1, 2, 3, 4]
    small = graph.shrink(params, keep)
    np.testing.assert_allclose(graph.small_apply(keep)(small, x), apply(params, x), rtol=1e-6)


def test_what_does_not_fit_is_refused():
    params = make_params()
    graph = channel_groups(mlp(jnp.cos), params, X)
    with pytest.raises(ValueError, match=r'down has shape \(3, 2\), .* \(6, 2\)'):
        graph.nonzero_channels(params | {'down': params['down'][:3]})
    with pytest.raises(ValueError, match='the leaves pu are'):
        graph.nonzero_channels({'pu': params['up']})
