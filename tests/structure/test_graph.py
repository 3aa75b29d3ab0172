"""What users see of a graph: tables, explanations, errors; and programs that pin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner.structure import channel_groups
from structure.values import values_like
from uses.table import floats, scan, tokens

SHAPES = {'up': floats(3, 8), 'bias': floats(8), 'down': floats(8, 2), 'unread': floats(4)}


def mlp(p, x):
    return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']


GRAPH = channel_groups(mlp, SHAPES, floats(5, 3))


def around(function):
    """The graph of a model that begins and ends with a kernel, `up` and `down`, around a function of channels."""
    shapes = {'up': floats(3, 8), 'down': floats(8, 2)}
    return channel_groups(lambda p, x: function(x @ p['up']) @ p['down'], shapes, floats(2, 3))


def test_a_graph_prints_a_table():
    text = str(GRAPH)
    assert 'up[1]         8          48  yes    bias, down, up' in text
    assert '2 axes stay' in text
    assert 'unread has no part in the results' in text
    graph = channel_groups(lambda p, x: x @ p, floats(3, 2), floats(5, 3))
    assert 'no channels can be removed' in str(graph)


def test_inexact_groups_are_named_with_their_reason_and_line():
    graph = around(jax.nn.softmax)
    assert 'up[1] is not exact: reduce_max' in str(graph)
    assert 'test_graph.py' in graph.groups['up[1]'].reason
    assert 'not exact: reduce_max' in graph.explain('down', 0)


EXPLAINED = [
    ('up', 1, 'up[1] can be cut in group up[1], 8 channels, with bias[0], down[0]'),
    (('up',), -1, 'up[1] can be cut'),
    ('up', 0, 'up[0], 3 channels, stays: axis 1 of input 0'),
    ('down', 1, 'down[1], 2 channels, stays: axis 1 of result 0'),
    ('unread', 0, 'no part in the results'),
]


def test_explain():
    for leaf, axis, part in EXPLAINED:
        assert part in GRAPH.explain(leaf, axis)
    with pytest.raises(KeyError, match=r"'upp'.*up"):
        GRAPH.explain('upp', 0)
    for axis in (2, -3):
        with pytest.raises(ValueError, match=f'up has 2 axes.* no axis {axis}'):
            GRAPH.explain('up', axis)


def test_parts_of_an_axis_are_explained_each():
    def apply(p, x):
        first, second = jnp.split(x @ p['w'], [2], -1)
        return first, jnp.tanh(second) @ p['v']

    graph = channel_groups(apply, {'w': floats(3, 6), 'v': floats(4, 2)}, floats(5, 3))
    text = graph.explain('w', 1)
    assert 'group w[1][2:6], 4 channels, with v[0]' in text
    assert 'w[1] from 0 on, 2 channels, stays: axis 1 of result 0' in text


def test_leaves_have_to_be_arrays():
    with pytest.raises(TypeError, match=r'act is no array but'):
        channel_groups(mlp, {**SHAPES, 'act': jax.nn.relu}, floats(5, 3))


PINNED = {
    'pure_callback: nothing is known of this operation': lambda h: jax.pure_callback(
        np.asarray, jax.ShapeDtypeStruct(h.shape, h.dtype), h
    ),
    'fft: a Fourier transform goes along it': lambda h: jnp.fft.fft(h).real,
    'gather: an index says where along it': lambda h: jnp.take_along_axis(h, jnp.int32(h), 1),
    'reduce_window_max: the window moves along it': lambda h: lax.reduce_window(
        h, -jnp.inf, lax.max, (1, 2), (1, 1), 'SAME'
    ),
}


@pytest.mark.parametrize(('reason', 'function'), PINNED.items(), ids=PINNED)
def test_what_cannot_be_followed_is_pinned_and_named(reason, function):
    graph = around(function)
    assert reason in graph.explain('up', 1)
    members = [member for group in graph.groups.values() for member in group.members]
    assert 'up' not in [member.name for member in members]


def test_a_fused_projection_has_heads_and_features():
    """Queries, keys and values of 2 heads lie along one axis of a kernel."""

    def apply(p, x):
        query, key, value = jnp.split(x @ p['qkv'], 3, -1)
        query, key, value = (each.reshape(2, 5, 2, 4) for each in (query, key, value))
        out = jax.nn.dot_product_attention(query, key, value)
        return out.reshape(2, 5, 8) @ p['out']

    params, x = {'qkv': floats(3, 24), 'out': floats(8, 3)}, floats(2, 5, 3)
    graph = channel_groups(apply, params, x)
    found = {name: len(group.members) for name, group in graph.groups.items()}
    assert found == {'qkv[1][0:8:4]': 4, 'qkv[1][0:4]': 2, 'qkv[1][16:20]': 2}
    heads, features, values = graph.groups.values()
    assert heads.members[3].positions()[1].tolist() == [20, 21, 22, 23]
    assert features.members[1].positions()[2].tolist() == [10, 14]
    assert all(group.exact for group in graph.groups.values())
    assert [owner.size for owner in values.lists] == [2]


def test_positions_beyond_the_inputs_stay():
    def apply(p, words):
        return (p['embed'][words] + p['positions'][:6]) @ p['head']

    params = {'embed': floats(11, 8), 'positions': floats(16, 8), 'head': floats(8, 2)}
    graph = channel_groups(apply, params, tokens(2, 6))
    assert list(graph.groups) == ['embed[1]']
    assert 'does not read this part' in graph.explain('positions', 0)


# What a layer of a scan does -> whether leaving layers out is zeroing them.
DEPTH = {
    'residual': (lambda x, w: x + jnp.tanh(x @ w), True),
    'two branches': (lambda x, w: x + jnp.tanh(x @ w) + x * (x @ w), True),
    'gate that is open': (lambda x, w: x + jax.nn.sigmoid(x @ w), False),
    'no residual': (lambda x, w: jnp.tanh(x @ w), False),
}


@pytest.mark.parametrize(('layer', 'exact'), DEPTH.values(), ids=DEPTH)
def test_layers_of_a_scan_are_a_group_that_is_exact_for_residual_blocks(layer, exact):
    def apply(p, x):
        return scan(layer, x @ p['up'], p['w'], reverse=True) @ p['down']

    shapes = {'up': floats(3, 8), 'w': floats(4, 8, 8), 'down': floats(8, 2)}
    params, (x,) = values_like(shapes, (floats(2, 3),))
    graph = channel_groups(apply, params, x)
    depth = graph.groups['w[0]']
    assert (depth.size, depth.is_depth, depth.exact, depth.lists) == (4, True, exact, ())
    assert exact or 'scan: a trip without its parameters changes' in depth.reason
    verification = graph.verify(params, {'w[0]': [0, 2]}, x, allow_inexact=True)
    assert verification.verdict == ('equal' if exact else 'different')
