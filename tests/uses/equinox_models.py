"""Models of Equinox for the table of uses. Its layers take one example; batches come from `vmap`."""

import inspect

import equinox as eqx
import jax

from uses.table import BIAS, KEY, Model, floats, stacked


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


# Newer versions keep running means in more than one way, and ask for one.
EMA = {'mode': 'ema'} if 'mode' in inspect.signature(eqx.nn.BatchNorm).parameters else {}


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


def _scanned():
    return eqx.filter_vmap(Block)(KEYS[:3])


def _call_scanned(layers, x):
    arrays, rest = eqx.partition(layers, eqx.is_array)

    @jax.checkpoint
    def through(x, arrays):
        return eqx.combine(arrays, rest)(x), None

    return jax.lax.scan(through, x, arrays)[0]


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
    'scanned': Model(_model(_scanned, floats(2, 6, 8), call=_call_scanned), stacked(BLOCK)),
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
