"""Architectures of plain JAX beside those of frameworks: name -> (apply function, shapes of parameters, inputs)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from uses.layers import conv
from uses.table import floats, tokens

MODELS = {}
SEQUENCE = floats(2, 5, 3)
IMAGE = floats(2, 8, 8, 3)


def model(params, *inputs):
    """Adds a model to the table, with shapes of its parameters and inputs."""

    def add(apply_fn):
        MODELS[apply_fn.__name__.strip('_').replace('_', ' ')] = (apply_fn, params, inputs)
        return apply_fn

    return add


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def heads_of(x, count):
    return x.reshape(*x.shape[:-1], count, -1)


@model({'up': floats(3, 16), 'down': floats(8, 2)}, SEQUENCE)
def _gated_linear_unit(p, x):
    gate, value = jnp.split(x @ p['up'], 2, -1)
    return (jax.nn.silu(gate) * value) @ p['down']


@model({'up': floats(3, 16), 'down': floats(8, 2)}, SEQUENCE)
def _interleaved_gates(p, x):
    h = x @ p['up']
    gate, value = (lax.slice_in_dim(h, start, 16, 2, axis=-1) for start in (0, 1))
    return (jax.nn.silu(gate) * value) @ p['down']


@model({'up': floats(3, 12), 'down': floats(4, 2)}, SEQUENCE)
def _unequal_parts(p, x):
    gate, value = jnp.split(x @ p['up'], [8], -1)
    return (jax.nn.silu(gate).sum(-1, keepdims=True) * value) @ p['down']


@model(
    {
        'stem': floats(3, 3, 3, 8),
        'squeeze': floats(8, 4),
        'excite': floats(4, 8),
        'head': floats(8, 2),
    },
    IMAGE,
)
def _squeeze_and_excitation(p, x):
    x = jax.nn.relu(conv(x, p['stem']))
    gate = jax.nn.sigmoid(jax.nn.relu(x.mean((1, 2)) @ p['squeeze']) @ p['excite'])
    return (x * gate[:, None, None]).mean((1, 2)) @ p['head']


@model({'stem': floats(3, 3, 3, 16), 'out': floats(3, 3, 4, 2)}, IMAGE)
def _pixel_shuffle(p, x):
    x = conv(x, p['stem']).reshape(2, 8, 8, 2, 2, 4).transpose(0, 1, 3, 2, 4, 5)
    return conv(x.reshape(2, 16, 16, 4), p['out'])


@model(
    {'stem': floats(3, 3, 3, 8), 'scale': floats(8), 'shift': floats(8), 'head': floats(8, 2)},
    IMAGE,
)
def _group_norm(p, x):
    x = conv(x, p['stem'])
    groups = x.reshape(2, 8, 8, 4, 2)
    mean = groups.mean((1, 2, 4), keepdims=True)
    groups = (groups - mean) * lax.rsqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
    x = groups.reshape(x.shape) * p['scale'] + p['shift']
    return jax.nn.relu(x).mean((1, 2)) @ p['head']


@model(
    {'stem': floats(3, 3, 3, 8), 'scale': floats(8), 'shift': floats(8), 'head': floats(8, 2)},
    IMAGE,
)
def _batch_norm_in_training(p, x):
    x = conv(x, p['stem'])
    x = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * p['scale'] + p['shift']
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
    first = jax.nn.relu(conv(x, p['down']))
    second = jax.nn.relu(conv(first, p['mid'], window_strides=(2, 2)))
    up = lax.conv_transpose(second, p['up'], (2, 2), 'SAME')
    return conv(jnp.concatenate([first, up], -1), p['out'])


@model({'a': floats(3, 3, 3, 4), 'b': floats(3, 3, 7, 4), 'head': floats(11, 2)}, IMAGE)
def _dense_net(p, x):
    for name in 'ab':
        x = jnp.concatenate([x, jax.nn.relu(conv(x, p[name]))], -1)
    return x.mean((1, 2)) @ p['head']


@model(
    {
        'embed': floats(3, 8),
        'norm': floats(8),
        'tokens': floats(5, 7),
        'back': floats(7, 5),
        'up': floats(8, 6),
        'down': floats(6, 8),
        'head': floats(8, 2),
    },
    SEQUENCE,
)
def _mixer(p, x):
    x = x @ p['embed']
    mixed = jax.nn.gelu(rms_norm(x, p['norm']).swapaxes(1, 2) @ p['tokens']) @ p['back']
    x = x + mixed.swapaxes(1, 2)
    x = x + jax.nn.gelu(x @ p['up']) @ p['down']
    return x.mean(1) @ p['head']


@model(
    {
        'token': floats(1, 1, 8),
        'embed': floats(3, 8),
        'positions': floats(1, 6, 8),
        'qkv': floats(8, 24),
        'out': floats(8, 8),
        'head': floats(8, 2),
    },
    SEQUENCE,
)
def _vision_transformer(p, x):
    token = jnp.broadcast_to(p['token'], (2, 1, 8))
    x = jnp.concatenate([token, x @ p['embed']], 1) + p['positions']
    query, key, value = (heads_of(each, 2) for each in jnp.split(x @ p['qkv'], 3, -1))
    x = x + jax.nn.dot_product_attention(query, key, value).reshape(x.shape) @ p['out']
    return x[:, 0] @ p['head']


@model({'qkv': floats(3, 3, 2, 4), 'bias': floats(9, 2), 'out': floats(2, 4, 3)}, SEQUENCE)
def _relative_positions(p, x):
    query, key, value = jnp.einsum('btd,dkhf->kbthf', x, p['qkv'])
    distance = np.arange(5)[:, None] - np.arange(5) + 4
    scores = jnp.einsum('bqhf,bkhf->bhqk', query, key) + p['bias'][distance].transpose(2, 0, 1)
    return jnp.einsum('bhqk,bkhf,hfd->bqd', jax.nn.softmax(scores), value, p['out'])


@model(
    {'q': floats(3, 4, 6), 'k': floats(3, 6), 'v': floats(3, 6), 'out': floats(4, 6, 3)}, SEQUENCE
)
def _multi_query_attention(p, x):
    query = jnp.einsum('btd,dhf->bthf', x, p['q'])
    scores = jax.nn.softmax(jnp.einsum('bqhf,bkf->bhqk', query, x @ p['k']))
    return jnp.einsum('bhqk,bkf,hfd->bqd', scores, x @ p['v'], p['out'])


@model(
    {
        'compress': floats(3, 4),
        'k': floats(4, 2, 6),
        'v': floats(4, 2, 6),
        'q': floats(3, 2, 6),
        'out': floats(2, 6, 3),
    },
    SEQUENCE,
)
def _latent_attention(p, x):
    latent = x @ p['compress']
    key, value = (jnp.einsum('btc,chf->bthf', latent, p[name]) for name in 'kv')
    query = jnp.einsum('btd,dhf->bthf', x, p['q'])
    return jnp.einsum('bthf,hfd->btd', jax.nn.dot_product_attention(query, key, value), p['out'])


@model(
    {'k': floats(3, 2, 4), 'q': floats(3, 2, 4), 'v': floats(3, 2, 4), 'out': floats(2, 4, 3)},
    SEQUENCE,
)
def _linear_attention(p, x):
    query, key, value = (jnp.einsum('btd,dhf->bthf', x, p[name]) for name in 'qkv')
    memory = jnp.einsum('bthf,bthv->bhfv', jax.nn.elu(key) + 1, value)
    return jnp.einsum('bthf,bhfv,hvd->btd', jax.nn.elu(query) + 1, memory, p['out'])


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


@model({'in': floats(3, 8), 'kernel': floats(3, 1, 8), 'out': floats(8, 3)}, SEQUENCE)
def _causal_depthwise(p, x):
    h = x @ p['in']
    h = lax.conv_general_dilated(
        h,
        p['kernel'],
        (1,),
        [(2, 0)],
        dimension_numbers=('NWC', 'WIO', 'NWC'),
        feature_group_count=8,
    )
    return jax.nn.silu(h) @ p['out']


@model({'in': floats(3, 8), 'filter': floats(5, 8), 'out': floats(8, 3)}, SEQUENCE)
def _long_convolution(p, x):
    h = jnp.fft.rfft(x @ p['in'], n=10, axis=1) * jnp.fft.rfft(p['filter'], n=10, axis=0)
    return jnp.fft.irfft(h, n=10, axis=1)[:, :5] @ p['out']


@model({'router': floats(3, 4), 'up': floats(4, 3, 8), 'down': floats(4, 8, 3)}, floats(6, 3))
def _top_two_experts(p, x):
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p['router']), 2)
    up, down = p['up'][chosen], p['down'][chosen]
    hidden = jax.nn.silu(jnp.einsum('td,tkdf->tkf', x, up))
    return jnp.einsum('tk,tkf,tkfd->td', weights, hidden, down)


@model({'up': floats(4, 3, 8), 'down': floats(4, 8, 3)}, floats(6, 3), tokens(4))
def _experts_by_groups_of_rows(p, x, sizes):
    hidden = jax.nn.silu(lax.ragged_dot(x, p['up'], sizes))
    return lax.ragged_dot(hidden, p['down'], sizes)


@model(
    {'message': floats(3, 8), 'update': floats(11, 6), 'head': floats(6, 2)},
    floats(5, 3),
    tokens(7),
    tokens(7),
)
def _graph_network(p, x, senders, receivers):
    messages = jax.nn.relu(x @ p['message'])[senders]
    received = jax.ops.segment_sum(messages, receivers, 5)
    return jax.nn.relu(jnp.concatenate([x, received], -1) @ p['update']).sum(0) @ p['head']


@model({'up': floats(3, 8), 'v': floats(8, 6), 'g': floats(6), 'down': floats(6, 2)}, SEQUENCE)
def _weight_norm(p, x):
    w = p['g'] * p['v'] / jnp.linalg.norm(p['v'], axis=0)
    return jax.nn.relu(jax.nn.relu(x @ p['up']) @ w) @ p['down']


@model({'stem': floats(3, 3, 3, 8), 'kernel': floats(3, 3, 8, 6), 'head': floats(6, 2)}, IMAGE)
def _weight_standardisation(p, x):
    w = p['kernel'] - p['kernel'].mean((0, 1, 2))
    w = w * lax.rsqrt((w * w).mean((0, 1, 2)) + 1e-5)
    return conv(jax.nn.relu(conv(x, p['stem'])), w).mean((1, 2)) @ p['head']


@model({'forward': floats(7, 4), 'backward': floats(7, 4), 'head': floats(8, 2)}, SEQUENCE)
def _bidirectional(p, x):
    def run(kernel, reverse):
        def step(state, row):
            state = jnp.tanh(jnp.concatenate([row, state], -1) @ kernel)
            return state, state

        return lax.scan(step, jnp.zeros((2, 4)), x.swapaxes(0, 1), reverse=reverse)[1]

    both = [run(p['forward'], False), run(p['backward'], True)]
    return jnp.concatenate(both, -1) @ p['head']


@model(
    {
        'embed': floats(11, 8),
        'scale': floats(2, 8),
        'up': floats(2, 8, 12),
        'down': floats(2, 12, 8),
    },
    tokens(2, 5),
)
def _scanned_and_tied(p, words):
    def layer(x, q):
        return x + jax.nn.silu(rms_norm(x, q['scale']) @ q['up']) @ q['down'], None

    layers = {name: p[name] for name in ('scale', 'up', 'down')}
    x, _ = lax.scan(jax.checkpoint(layer), p['embed'][words], layers)
    return x @ p['embed'].T


@model(
    {'k': floats(3, 2, 4), 'q': floats(3, 2, 4), 'v': floats(3, 2, 4), 'out': floats(2, 4, 3)},
    floats(2, 1, 3),
    floats(2, 6, 2, 4),
    floats(2, 6, 2, 4),
)
def _decoding_with_a_cache(p, x, keys, values):
    query, key, value = (jnp.einsum('btd,dhf->bthf', x, p[name]) for name in 'qkv')
    keys = lax.dynamic_update_slice(keys, key, (0, 3, 0, 0))
    values = lax.dynamic_update_slice(values, value, (0, 3, 0, 0))
    return (
        jnp.einsum('bthf,hfd->btd', jax.nn.dot_product_attention(query, keys, values), p['out']),
        keys,
        values,
    )


@model({'up': floats(3, 12), 'down': floats(4, 2)}, SEQUENCE)
def _maxout(p, x):
    return (x @ p['up']).reshape(2, 5, 4, 3).max(-1) @ p['down']


@model({'up': floats(3, 8), 'grid': floats(8, 6, 5), 'down': floats(6, 2)}, SEQUENCE)
def _splines(p, x):
    h = jnp.tanh(x @ p['up'])
    basis = jnp.exp(-((h[..., None] - jnp.linspace(-1, 1, 5)) ** 2))
    return jnp.einsum('btig,iog->bto', basis, p['grid']) @ p['down']


@model(
    {
        'up': floats(3, 8),
        'a': floats(8, 2),
        'b': floats(2, 8),
        'w': floats(8, 8),
        'down': floats(8, 2),
    },
    SEQUENCE,
)
def _adapters(p, x):
    h = jax.nn.relu(x @ p['up'])
    return (h @ (p['w'] + 0.5 * p['a'] @ p['b'])) @ p['down']


@model({'up': floats(3, 4), 'pairs': floats(16, 2)}, SEQUENCE)
def _bilinear_pooling(p, x):
    h = jax.nn.relu(x @ p['up'])
    pooled = jnp.einsum('bti,btj->bij', h, h)
    return pooled.reshape(2, -1) @ p['pairs']


@model({'up': floats(3, 6), 'square': floats(36), 'down': floats(6, 2)}, SEQUENCE)
def _square_matrix_stored_flat(p, x):
    h = jnp.tanh(x @ p['up'])
    return jnp.tanh(h + h @ p['square'].reshape(6, 6)) @ p['down']


@model(
    {
        'stem': floats(3, 3, 3, 16),
        'first': floats(1, 1, 4, 16),
        'depthwise': floats(3, 3, 1, 16),
        'second': floats(1, 1, 4, 16),
        'head': floats(16, 2),
    },
    IMAGE,
)
def _shuffle_net(p, x):
    x = jax.nn.relu(conv(x, p['stem']))
    h = jax.nn.relu(conv(x, p['first'], feature_group_count=4))
    h = h.reshape(2, 8, 8, 4, 4).swapaxes(3, 4).reshape(x.shape)
    h = conv(h, p['depthwise'], feature_group_count=16)
    x = jax.nn.relu(x + conv(h, p['second'], feature_group_count=4))
    return x.mean((1, 2)) @ p['head']


@model(
    {
        'stem': floats(3, 3, 3, 8),
        'squeeze': floats(8, 4),
        'excite': floats(4, 8),
        'spatial': floats(3, 3, 2, 1),
        'head': floats(8, 2),
    },
    IMAGE,
)
def _convolutional_block_attention(p, x):
    x = jax.nn.relu(conv(x, p['stem']))
    pooled = jnp.stack([x.mean((1, 2)), x.max((1, 2))])
    gates = jax.nn.relu(pooled @ p['squeeze']) @ p['excite']
    x = x * jax.nn.sigmoid(gates.sum(0))[:, None, None]
    maps = jnp.stack([x.mean(-1), x.max(-1)], -1)
    return (x * jax.nn.sigmoid(conv(maps, p['spatial']))).mean((1, 2)) @ p['head']


@model({'up': floats(3, 8), 'down': floats(8, 2), 'head': floats(2, 2)}, SEQUENCE)
def _dynamic_int8(p, x):
    def quantize(values, axis):
        scale = jnp.maximum(jnp.abs(values).max(axis, keepdims=True) / 127, 1e-6)
        return jnp.round(values / scale).astype(jnp.int8), scale

    h, scale = quantize(jax.nn.gelu(x @ p['up']), -1)
    kernel, scale_of_kernel = quantize(p['down'], 0)
    h = lax.dot_general(h, kernel, (((2,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    return (h * scale * scale_of_kernel) @ p['head']
