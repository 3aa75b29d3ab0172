"""Models of Flax NNX for the table of uses."""

import jax
import jax.numpy as jnp
from flax import nnx

from uses.table import ATTENTION, BIAS, REST, Model, floats, stacked, tokens


def _model(make_module, *inputs):
    def make():
        module = nnx.eval_shape(lambda: make_module(rngs=nnx.Rngs(0)))
        graphdef, params, rest = nnx.split(module, (nnx.Param, nnx.BatchStat), ...)
        # Keys of random numbers and the like are no parameters; none of these models uses them.
        rest = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if leaf.dtype != 'key<fry>' else leaf,
            rest,
        )

        def apply_fn(params, *inputs):
            return nnx.merge(graphdef, params, rest)(*inputs)

        return apply_fn, params, inputs

    return make


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.head = nnx.Linear(4 * 64, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        x = x + self.conv(nnx.relu(self.norm(x)))
        return self.head(nnx.max_pool(x, (1, 1)).reshape(x.shape[0], -1))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((16, 8)))
        self.block, self.head = Block(rngs), nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, words):
        return self.head(self.block(self.embed(words) + self.positions[: words.shape[1]]))


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return Block(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x, layer):
            return layer(x)

        return through(x, self.layers)


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(3, 6, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        start = jnp.zeros((x.shape[0], 6))
        return self.rnn(x, initial_carry=(start, start))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)

    def __call__(self, words):
        return self.embed.attend(self.embed(words))


class Convolutions(nnx.Module):
    def __init__(self, rngs):
        self.grouped = nnx.Conv(4, 8, (3, 3), feature_group_count=2, use_bias=False, rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, use_bias=False, rngs=rngs)
        self.transposed = nnx.ConvTranspose(8, 4, (3, 3), strides=(2, 2), use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.transposed(self.depthwise(self.grouped(x)))


class LoRA(nnx.Module):
    def __init__(self, rngs):
        self.lora = nnx.LoRALinear(3, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.lora(x)


MODELS = {
    'resnet': Model(
        _model(ResNet, floats(2, 8, 8, 3)),
        {
            'head/kernel': 'dot 0>1',
            '*/kernel': 'conv 012>3',
            'norm/var': '~elementwise >0',
            'norm/scale': '~elementwise >0',
            '*': BIAS,
        },
    ),
    'transformer': Model(
        _model(Transformer, tokens(2, 6)),
        {'*embedding': 'gather >01', 'positions': 'elementwise >01', **ATTENTION, **REST},
    ),
    'scanned': Model(_model(Scanned, floats(2, 6, 8)), stacked({**ATTENTION, **REST})),
    'recurrent': Model(_model(Recurrent, floats(2, 7, 3)), REST),
    'tied': Model(_model(Tied, tokens(2, 6)), {'*': 'gather >01, dot 1>0'}, flops=2 * 12 * 8 * 11),
    'convolutions': Model(
        _model(Convolutions, floats(2, 8, 8, 4)),
        {'*': 'conv 012>3'},
        flops=2 * 2 * 64 * (9 * 2 * 8 + 9 * 8 + 9 * 8 * 4),
    ),
    'lora': Model(_model(LoRA, floats(2, 3)), {'*/bias': BIAS, '*': 'dot 0>1'}),
}
