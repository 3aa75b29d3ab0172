"""What users see of a graph: tables, explanations, errors; and programs that pin."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner.structure import channel_groups
from structure.values import values_like
from uses.table import floats, tokens

SHAPES = {'up': floats(3, 8), 'bias': floats(8), 'down': floats(8, 2), 'unread': floats(4)}


def mlp(p, x):
    return jax.nn.relu(x @ p['up'] + p['bias']) @ p['down']


def make(function, **shapes):
    """Groups of a model that begins and ends with a kernel, `up` and `down`, around a function of hidden channels."""
    shapes = {'up': floats(3, 8), 'down': floats(8, 2), **shapes}

    def apply(p, x):
        return function(p, x @ p['up']) @ p['down']

    return channel_groups(apply, shapes, floats(2, 3))


def test_a_graph_prints_a_table():
    graph = channel_groups(mlp, SHAPES, floats(5, 3))
    text = str(graph)
    assert 'up[1]         8          48  yes    bias, down, up' in text
    assert '2 axes stay' in text
    assert 'unread has no part in the results' in text


def test_a_graph_without_groups_says_so():
    graph = channel_groups(lambda p, x: x @ p, floats(3, 2), floats(5, 3))
    assert 'no channels can be removed' in str(graph)


def test_inexact_groups_are_named_with_their_reason_and_line():
    graph = make(lambda p, h: jax.nn.softmax(h))
    assert 'up[1] is not exact: reduce_max' in str(graph)
    assert 'test_graph.py' in graph.groups['up[1]'].reason
    assert 'not exact: reduce_max' in graph.explain('down', 0)


@pytest.mark.parametrize(
    ('leaf', 'axis', 'parts'),
    [
        ('up', 1, ['up[1] can be cut in group up[1], 8 channels, with bias[0], down[0]', 'exact']),
        (('up',), -1, ['up[1] can be cut']),
        ('up', 0, ['up[0], 3 channels, stays: axis 1 of input 0']),
        ('down', 1, ['down[1], 2 channels, stays: axis 1 of result 0']),
        ('unread', 0, ['no part in the results']),
    ],
)
def test_explain(leaf, axis, parts):
    text = channel_groups(mlp, SHAPES, floats(5, 3)).explain(leaf, axis)
    for part in parts:
        assert part in text


def test_parts_of_an_axis_are_explained_each():
    def apply(p, x):
        first, second = jnp.split(x @ p['w'], [2], -1)
        return first, jnp.tanh(second) @ p['v']

    graph = channel_groups(apply, {'w': floats(3, 6), 'v': floats(4, 2)}, floats(5, 3))
    text = graph.explain('w', 1)
    assert 'group w[1][2:6], 4 channels, with v[0]' in text
    assert 'w[1] from 0 on, 2 channels, stays: axis 1 of result 0' in text


@pytest.mark.parametrize(
    ('leaf', 'axis', 'error', 'parts'),
    [
        ('upp', 0, KeyError, ["'upp'", 'up']),
        ('up', 2, ValueError, ['up has 2 axes', 'no axis 2']),
        ('up', -3, ValueError, ['up has 2 axes', 'no axis -3']),
    ],
)
def test_explain_refuses_what_is_not_there(leaf, axis, error, parts):
    graph = channel_groups(mlp, SHAPES, floats(5, 3))
    with pytest.raises(error) as caught:
        graph.explain(leaf, axis)
    for part in parts:
        assert part in str(caught.value)


def test_leaves_have_to_be_arrays():
    with pytest.raises(TypeError, match=r'act is no array but'):
        channel_groups(mlp, {**SHAPES, 'act': jax.nn.relu}, floats(5, 3))


def unknown(h):
    return jax.pure_callback(lambda h: np.asarray(h), jax.ShapeDtypeStruct(h.shape, h.dtype), h)


PINNED = {
    'callback': (unknown, 'pure_callback: nothing is known of this operation'),
    'fft': (lambda h: jnp.fft.fft(h).real, 'fft: a Fourier transform goes along it'),
    'taken at data': (
        lambda h: jnp.take_along_axis(h, jnp.int32(h), 1),
        'gather: an index says where along it',
    ),
    'a window that moves': (
        lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 1), 'SAME'),
        'reduce_window_max: the window moves along it',
    ),
    'rows of groups': (
        lambda h: h.reshape(2, 4, 2).reshape(2, 2, 4)[:, :, :3].reshape(2, 6) @ jnp.ones((6, 8)),
        None,
    ),
}


@pytest.mark.parametrize(('function', 'reason'), PINNED.values(), ids=PINNED)
def test_what_cannot_be_followed_is_pinned_and_named(function, reason):
    graph = make(lambda p, h: function(h))
    if reason is not None:
        assert reason in graph.explain('up', 1)
        assert not any(group.members[-1].name == 'up' for group in graph.groups.values())


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


class Dropped(nn.Module):
    """A model that draws random numbers along its channels."""

    @nn.compact
    def __call__(self, x, key):
        x = nn.relu(nn.Dense(8)(x))
        x = nn.Dropout(0.5, deterministic=False)(x, rng=key)
        return nn.Dense(3)(x)


def test_random_numbers_along_channels():
    key = jax.random.key(1)
    params = jax.eval_shape(Dropped().init, jax.random.key(0), floats(2, 4), key)
    graph = channel_groups(Dropped().apply, params, floats(2, 4), key)
    assert [(name, group.exact) for name, group in graph.groups.items()] == [
        ('params/Dense_0/kernel[1]', True)
    ]
    params, (x,) = values_like(params, (floats(2, 4),))
    keep = {'params/Dense_0/kernel[1]': [0, 2, 5]}
    assert graph.verify(params, keep, x, key).verdict == 'equal'


def scanned(layer, **options):
    """Layers of width 8 in a scan."""

    def apply(p, x):
        return (
            lax.scan(lambda x, w: (layer(x, w), None), x @ p['up'], p['w'], **options)[0]
            @ p['down']
        )

    params = {'up': floats(3, 8), 'w': floats(4, 8, 8), 'down': floats(8, 2)}
    return (channel_groups(apply, params, floats(2, 3)), *values_like(params, (floats(2, 3),)))


DEPTH = {
    'residual': (lambda x, w: x + jnp.tanh(x @ w), True),
    'two branches': (lambda x, w: x + jnp.tanh(x @ w) + x * (x @ w), True),
    'gate that is open': (lambda x, w: x + jax.nn.sigmoid(x @ w), False),
    'no residual': (lambda x, w: jnp.tanh(x @ w), False),
}


@pytest.mark.parametrize(('layer', 'exact'), DEPTH.values(), ids=DEPTH)
def test_layers_of_a_scan_are_a_group_that_is_exact_for_residual_blocks(layer, exact):
    graph, params, inputs = scanned(layer, reverse=True)
    depth = graph.groups['w[0]']
    assert (depth.size, depth.is_depth, depth.exact, depth.lists) == (4, True, exact, ())
    if exact:
        assert graph.verify(params, {'w[0]': [0, 2]}, *inputs).verdict == 'equal'
    else:
        assert 'scan: a trip without its parameters changes' in depth.reason
        verification = graph.verify(params, {'w[0]': [0, 2]}, *inputs, allow_inexact=True)
        assert verification.verdict == 'different'
