"""Architectures of plain JAX, each for a rule of its own: name -> (apply function, shapes of parameters, inputs)."""

import jax
import jax.numpy as jnp
from jax import lax

from uses.table import conv, floats, tokens

MODELS = {}
SEQUENCE = floats(2, 5, 3)
IMAGE = floats(2, 8, 8, 3)


def model(params, *inputs):
    """Adds a model to the table, with shapes of its parameters and inputs."""

    def add(apply_fn):
        MODELS[apply_fn.__name__.strip('_').replace('_', ' ')] = (apply_fn, params, inputs)
        return apply_fn

    return add


@model({'up': floats(3, 16), 'down': floats(8, 2)}, SEQUENCE)
def _gated_linear_unit(p, x):
    """Halves of one axis are tied."""
    gate, value = jnp.split(x @ p['up'], 2, -1)
    return (jax.nn.silu(gate) * value) @ p['down']


@model(
    {'stem': floats(3, 3, 3, 8), 'scale': floats(8), 'shift': floats(8), 'head': floats(8, 2)},
    IMAGE,
)
def _group_norm(p, x):
    """Channels of a group are normalised together."""
    x = conv(x, p['stem'])
    groups = x.reshape(2, 8, 8, 4, 2)
    mean = groups.mean((1, 2, 4), keepdims=True)
    groups = (groups - mean) * lax.rsqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
    x = groups.reshape(x.shape) * p['scale'] + p['shift']
    return jax.nn.relu(x).mean((1, 2)) @ p['head']


@model(
    {
        'down': floats(3, 3, 3, 8),
        'mid': floats(3, 3, 8, 8),
        'up': floats(2, 2, 8, 8),
        'out': floats(3, 3, 16, 2),
    },
    IMAGE,
)
def _u_net(p, x):
    """Channels of two values lie beside each other."""
    first = jax.nn.relu(conv(x, p['down']))
    second = jax.nn.relu(conv(first, p['mid'], window_strides=(2, 2)))
    up = lax.conv_transpose(second, p['up'], (2, 2), 'SAME')
    return conv(jnp.concatenate([first, up], -1), p['out'])


@model(
    {
        'in': floats(3, 8),
        'a': floats(8, 4),
        'b': floats(8, 4),
        'c': floats(8, 4),
        'out': floats(8, 3),
    },
    SEQUENCE,
)
def _state_space(p, x):
    """A selective scan: each channel has a state of 4 numbers."""
    h = x @ p['in']
    gates = jax.nn.sigmoid(h)[..., None] * p['a']

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, states = lax.associative_scan(
        combine, (gates, (h @ p['b'])[:, :, None] * h[..., None]), axis=1
    )
    return jnp.einsum('btcs,bts,cd->btd', states, h @ p['c'], p['out'])


@model({'router': floats(3, 4), 'up': floats(4, 3, 8), 'down': floats(4, 8, 3)}, floats(6, 3))
def _top_two_experts(p, x):
    """Experts are looked up."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p['router']), 2)
    up, down = p['up'][chosen], p['down'][chosen]
    hidden = jax.nn.silu(jnp.einsum('td,tkdf->tkf', x, up))
    return jnp.einsum('tk,tkf,tkfd->td', weights, hidden, down)


@model(
    {'message': floats(3, 8), 'update': floats(11, 6), 'head': floats(6, 2)},
    floats(5, 3),
    tokens(7),
    tokens(7),
)
def _graph_network(p, x, senders, receivers):
    """Rows are gathered and added up at indices."""
    messages = jax.nn.relu(x @ p['message'])[senders]
    received = jax.ops.segment_sum(messages, receivers, 5)
    return jax.nn.relu(jnp.concatenate([x, received], -1) @ p['update']).sum(0) @ p['head']
