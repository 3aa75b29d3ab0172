"""Models of Equinox for the table of uses. Its layers take one example; batches come from `vmap`."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp

from uses.table import BIAS, KEY, Model, floats, stacked, tokens


def _is_shape(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _model(make_module, *inputs, call=None):
    def make():
        params, rest = eqx.partition(eqx.filter_eval_shape(make_module), _is_shape)

        def apply_fn(params, *inputs):
            module = eqx.combine(params, rest)
            return jax.vmap(module if call is None else lambda *x: call(module, *x))(*inputs)

        return apply_fn, params, inputs

    return make


KEYS = jax.random.split(KEY, 8)


def _mlp():
    return eqx.nn.MLP(3, 5, 4, 1, key=KEY)


# Newer versions keep running means in more than one way, and ask for one.
EMA = {'mode': 'ema'} if 'mode' in inspect.signature(eqx.nn.BatchNorm).parameters else {}


def _resnet():
    conv = [
        eqx.nn.Conv2d(3, 4, 3, padding=1, key=KEY),
        eqx.nn.Conv2d(4, 4, 3, padding=1, use_bias=False, key=KEY),
    ]
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, 'batch', inference=True, **EMA)
    return conv, norm, state, eqx.nn.Linear(4 * 64, 5, key=KEY)


def _call_resnet(modules, x):
    (stem, conv), norm, state, head = modules
    x = stem(x)
    y, _ = norm(x, state)
    return head((x + conv(jax.nn.relu(y))).ravel())


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(8), eqx.nn.RMSNorm(8)
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, jax.nn.gelu, key=key)

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


def _transformer():
    return {
        'embed': eqx.nn.Embedding(11, 8, key=KEY),
        'positions': jnp.zeros((16, 8)),
        'block': Block(KEY),
        'head': eqx.nn.Linear(8, 11, use_bias=False, key=KEY),
    }


def _call_transformer(modules, words):
    x = jax.vmap(modules['embed'])(words) + modules['positions'][: words.shape[0]]
    return jax.vmap(modules['head'])(modules['block'](x))


def _scanned():
    return eqx.filter_vmap(Block)(KEYS[:3])


def _call_scanned(layers, x):
    arrays, rest = eqx.partition(layers, eqx.is_array)

    @jax.checkpoint
    def through(x, arrays):
        return eqx.combine(arrays, rest)(x), None

    return jax.lax.scan(through, x, arrays)[0]


def _recurrent():
    return eqx.nn.GRUCell(3, 6, key=KEY)


def _call_recurrent(cell, x):
    return jax.lax.scan(lambda hidden, x: (cell(x, hidden), None), jnp.zeros(6), x)[0]


def _convolutions():
    return {
        'grouped': eqx.nn.Conv2d(4, 8, 3, padding=1, groups=2, use_bias=False, key=KEY),
        'depthwise': eqx.nn.Conv2d(8, 8, 3, padding=1, groups=8, use_bias=False, key=KEY),
        'transposed': eqx.nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, use_bias=False, key=KEY),
    }


def _call_convolutions(modules, x):
    return modules['transposed'](modules['depthwise'](modules['grouped'](x)))


LINEAR = {'*/weight': 'dot 1>0', '*/bias': BIAS}
BLOCK = {'norm*': BIAS, **LINEAR}

MODELS = {
    'mlp': Model(_model(_mlp, floats(2, 3)), LINEAR, flops=2 * 2 * (3 * 4 + 4 * 5) + 2 * (4 + 5)),
    'resnet': Model(
        _model(_resnet, floats(2, 3, 8, 8), call=_call_resnet),
        {
            '0/*/weight': 'conv 123>0',
            '3/weight': 'dot 1>0',
            '2/1/1': '~elementwise >0',  # the running variance
            '0/*/bias': 'elementwise >012',
            '*': BIAS,
        },
        unused=('2/0',),  # whether the running means have begun
    ),
    'transformer': Model(
        _model(_transformer, tokens(2, 6), call=_call_transformer),
        {'embed/*': 'gather >01', 'positions': 'elementwise >01', 'block/norm*': BIAS, **LINEAR},
    ),
    'scanned': Model(_model(_scanned, floats(2, 6, 8), call=_call_scanned), stacked(BLOCK)),
    'recurrent': Model(
        _model(_recurrent, floats(2, 7, 3), call=_call_recurrent),
        {'weight*': 'dot 1>0', '*': BIAS},
        flops=2 * 7 * (2 * 3 * 18 + 2 * 6 * 18 + 18 + 6),
    ),
    'convolutions': Model(
        _model(_convolutions, floats(2, 4, 8, 8), call=_call_convolutions),
        {'*': 'conv 123>0'},
        flops=2 * 2 * 64 * (9 * 2 * 8 + 9 * 8 + 9 * 8 * 4),
    ),
    'weight norm': Model(
        _model(lambda: eqx.nn.WeightNorm(eqx.nn.Linear(3, 4, key=KEY)), floats(2, 3)),
        {'*/weight': '~dot 1>0', '*/bias': BIAS, 'g': '~dot 1>0'},
    ),
}
