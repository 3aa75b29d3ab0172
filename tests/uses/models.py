"""Models of frameworks, each for what no other one here has: how they are made, and the uses of their leaves."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
from flax import nnx

from uses.table import KEY, floats, tokens


class Model(NamedTuple):
    """A model as shapes, and what is expected of its leaves.

    Attributes:
      make: nothing -> apply function, parameters, inputs.
      expected: glob of leaves -> their uses in short form; the first that matches counts.
      flops: of the whole model, counted by hand; `None` where it is not counted.
    """

    make: Callable
    expected: dict[str, str]
    flops: int | None = None


def linen(module, *inputs):
    def make():
        return module.apply, jax.eval_shape(module.init, KEY, *inputs), inputs

    return make


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), use_bias=False, name='stem')(x)
        y = nn.relu(nn.BatchNorm(use_running_average=True)(x))
        y = nn.Conv(8, (3, 3), strides=2, use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=True)(y)
        x = nn.relu(y + nn.Conv(8, (1, 1), strides=2, use_bias=False, name='shortcut')(x))
        return nn.Dense(5)(x.mean((1, 2)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, name='attention')(h, h)
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, words):
        positions = self.param('positions', nn.initializers.normal(), (16, 8))
        x = nn.Embed(11, 8)(words) + positions[: words.shape[1]]
        return nn.Dense(11, name='head')(Block(name='block')(x))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.RNN(nn.LSTMCell(6))(x))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), feature_group_count=2, use_bias=False, name='grouped')(x)
        x = nn.Conv(8, (3, 3), feature_group_count=8, use_bias=False, name='depthwise')(x)
        return nn.ConvTranspose(4, (3, 3), strides=(2, 2), use_bias=False, name='transposed')(x)


class LoRA(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param('w', nn.initializers.normal(), (3, 4))
        a = self.param('a', nn.initializers.normal(), (3, 2))
        b = self.param('b', nn.initializers.normal(), (2, 4))
        return x @ w + x @ a @ b + x @ (w + 2 * a @ b)


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(4))(nn.GroupNorm(2)(nn.RMSNorm()(x)))


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NNXScanned(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: NNXBlock(rngs)))(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x, layer):
            return layer(x)

        return through(x, self.layers)


def nnx_scanned():
    module = nnx.eval_shape(lambda: NNXScanned(rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    return lambda params, x: nnx.merge(graphdef, params, rest)(x), params, (floats(2, 6, 8),)


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=key)
        self.norm = eqx.nn.LayerNorm(8)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        return x + self.attention(h, h, h)


def equinox_scanned():
    """Layers take one example; the batch comes from `vmap`."""
    layers = eqx.filter_eval_shape(eqx.filter_vmap(EquinoxBlock), jax.random.split(KEY, 3))
    params, rest = eqx.partition(layers, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    @jax.checkpoint
    def through(x, arrays):
        return eqx.combine(arrays, rest)(x), None

    def apply_fn(params, x):
        return jax.vmap(lambda x: jax.lax.scan(through, x, params)[0])(x)

    return apply_fn, params, (floats(2, 6, 8),)


BIAS = 'elementwise >0'
VARIANCE = '~elementwise >0'
STACKED_BIAS = 'elementwise >1@0'
# Of a transposed convolution each input meets the whole window.
CONVOLUTION_FLOPS = 2 * 2 * 64 * (9 * 2 * 8 + 9 * 8 + 9 * 8 * 4)

MODELS = {
    # running means, strides, a shortcut with a kernel
    'linen resnet': Model(
        linen(ResNet(), floats(2, 8, 8, 3)),
        {
            '*Dense*/kernel': 'dot 0>1',
            '*var': VARIANCE,
            '*BatchNorm*/scale': VARIANCE,
            '*/kernel': 'conv 012>3',
            '*': BIAS,
        },
    ),
    # attention, lookups, positions of which some are read
    'linen transformer': Model(
        linen(Transformer(), tokens(2, 6)),
        {
            '*embedding': 'gather >01',
            '*positions': 'elementwise >01',
            '*attention/out/kernel': 'dot 01>2',
            '*attention/*/kernel': 'dot 0>12',
            '*attention/out/bias': BIAS,
            '*attention/*/bias': 'elementwise >01',
            '*/kernel': 'dot 0>1',
            '*': BIAS,
        },
    ),
    # each kernel is read in every trip
    'linen recurrent': Model(
        linen(Recurrent(), floats(2, 7, 3)),
        {'*/kernel': 'dot 0>1', '*': BIAS},
        flops=2 * 7 * (2 * 3 * 24 + 2 * 6 * 24 + 24) + 2 * 7 * (2 * 6 * 5 + 5),
    ),
    # feature groups
    'linen convolutions': Model(
        linen(Convolutions(), floats(2, 8, 8, 4)), {'*': 'conv 012>3'}, CONVOLUTION_FLOPS
    ),
    # leaves that are used twice, as they are and computed with
    'linen lora': Model(
        linen(LoRA(), floats(2, 3)),
        {'*/w': 'dot 0>1, ~dot 0>1', '*/a': 'dot 0>1, ~dot 0>', '*/b': 'dot 0>1, ~dot >1'},
    ),
    # groups of channels, kernels divided by their norms
    'linen norms': Model(
        linen(Norms(), floats(2, 4)),
        {'*Norm_0/Dense_0/kernel/scale': '~dot >0', '*Dense*/kernel': '~dot 0>1', '*': BIAS},
    ),
    # layers that are stacked, and whose values are computed again
    'nnx scanned': Model(nnx_scanned, {'*/kernel': 'dot 1>2@0', '*': STACKED_BIAS}),
    # kernels of outputs by inputs, under `vmap`
    'equinox scanned': Model(
        equinox_scanned,
        {'norm*': STACKED_BIAS, '*/weight': 'dot 2>1@0', '*': STACKED_BIAS},
    ),
}
