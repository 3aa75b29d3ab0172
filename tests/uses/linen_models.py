"""Models of Flax linen for the table of uses."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from uses.table import ATTENTION, BIAS, KEY, REST, Model, floats, rotary, stacked, tokens


def _model(module, *inputs):
    def make():
        return module.apply, jax.eval_shape(module.init, KEY, *inputs), inputs

    return make


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.gelu(nn.Dense(4)(x)))


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
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, name='attention')(h, h)
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))), None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, words):
        x = (
            nn.Embed(11, 8)(words)
            + self.param('positions', nn.initializers.normal(), (16, 8))[: words.shape[1]]
        )
        return nn.Dense(11, name='head')(Block(name='block')(x)[0])


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block), variable_axes={'params': 0}, split_rngs={'params': True}, length=3
        )
        return layers(name='layers')(x, None)[0]


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.RNN(nn.LSTMCell(6))(x))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, words):
        embed = nn.Embed(11, 8)
        return embed.attend(embed(words))


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
        x = nn.RMSNorm()(x)
        x = nn.GroupNorm(2)(x)
        return nn.WeightNorm(nn.Dense(4))(x)


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.softmax(nn.Dense(3, use_bias=False, name='router')(x))
        up = self.param('up', nn.initializers.normal(), (3, 4, 8))
        down = self.param('down', nn.initializers.normal(), (3, 8, 4))
        hidden = nn.gelu(jnp.einsum('btd,edf->btef', x, up))
        return jnp.einsum('btef,efd->btd', hidden * gate[..., None], down)


class GroupedQueries(nn.Module):
    @nn.compact
    def __call__(self, x):
        query = rotary(nn.DenseGeneral((4, 6), use_bias=False, name='query')(x))
        key = rotary(nn.DenseGeneral((2, 6), use_bias=False, name='key')(x))
        value = nn.DenseGeneral((2, 6), use_bias=False, name='value')(x)
        out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return nn.DenseGeneral(8, axis=(-2, -1), use_bias=False, name='out')(out)


BATCH_NORM = {
    '*mean': BIAS,
    '*var': '~elementwise >0',
    '*BatchNorm*/scale': '~elementwise >0',
    '*BatchNorm*/bias': BIAS,
}

MODELS = {
    'mlp': Model(_model(MLP(), floats(2, 3)), REST, flops=2 * 2 * (3 * 4 + 4 * 5) + 2 * (4 + 5)),
    'resnet': Model(
        _model(ResNet(), floats(2, 8, 8, 3)),
        {'*Dense*/kernel': 'dot 0>1', **BATCH_NORM, '*/kernel': 'conv 012>3', '*/bias': BIAS},
    ),
    'transformer': Model(
        _model(Transformer(), tokens(2, 6)),
        {'*embedding': 'gather >01', '*positions': 'elementwise >01', **ATTENTION, **REST},
    ),
    'scanned': Model(_model(Scanned(), floats(2, 6, 8)), stacked({**ATTENTION, **REST})),
    'recurrent': Model(
        _model(Recurrent(), floats(2, 7, 3)),
        REST,
        flops=2 * 7 * (2 * 3 * 24 + 2 * 6 * 24 + 24) + 2 * 7 * (2 * 6 * 5 + 5),
    ),
    'tied': Model(
        _model(Tied(), tokens(2, 6)), {'*': 'gather >01, dot 1>0'}, flops=2 * 12 * 8 * 11
    ),
    'convolutions': Model(
        _model(Convolutions(), floats(2, 8, 8, 4)),
        {'*': 'conv 012>3'},
        # Of a transposed convolution each input meets the whole window.
        flops=2 * 2 * 64 * (9 * 2 * 8 + 9 * 8 + 9 * 8 * 4),
    ),
    'lora': Model(
        _model(LoRA(), floats(2, 3)),
        {'*/w': 'dot 0>1, ~dot 0>1', '*/a': 'dot 0>1, ~dot 0>', '*/b': 'dot 0>1, ~dot >1'},
    ),
    'norms': Model(
        _model(Norms(), floats(2, 4)),
        {'*Norm_0/Dense_0/kernel/scale': '~dot >0', '*Dense*/kernel': '~dot 0>1', '*': BIAS},
    ),
    'experts': Model(
        _model(Experts(), floats(2, 6, 4)),
        {'*router*': 'dot 0>1', '*up': 'dot 1>02', '*down': 'dot 01>2'},
    ),
    'grouped queries': Model(
        _model(GroupedQueries(), floats(2, 6, 8)),
        {'*out/kernel': 'dot 01>2', '*': 'dot 0>12'},
        flops=2 * 12 * 8 * 6 * (4 + 2 + 2 + 4) + 2 * 2 * (2 * 4 * 6 * 6 * 6),
    ),
}
