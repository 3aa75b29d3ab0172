"""What a strategy prunes when it names nothing, and what its names mean, in every front-end."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpruner import tree
from jaxpruner.jax_pruning.kernels import is_kernel, names_leaf


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.LayerNorm()(nn.Embed(7, 8)(tokens))
        x = nn.MultiHeadDotProductAttention(2)(x)
        x = nn.BatchNorm(use_running_average=True)(nn.Conv(4, (3,))(x))
        return nn.Dense(3)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.conv = nnx.Conv(8, 4, (3,), rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)


class EquinoxNet(eqx.Module):
    embedding: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    cell: eqx.nn.GRUCell
    mlp: eqx.nn.MLP
    patch_embedding: eqx.nn.Conv2d

    def __init__(self, key):
        self.embedding = eqx.nn.Embedding(7, 8, key=key)
        self.norm = eqx.nn.LayerNorm((8, 8))
        self.cell = eqx.nn.GRUCell(8, 4, key=key)
        self.mlp = eqx.nn.MLP(4, 3, 5, 1, key=key)
        self.patch_embedding = eqx.nn.Conv2d(1, 4, 3, key=key)


def haiku_net(tokens):
    x = hk.LayerNorm(-1, True, True)(hk.Embed(7, 8)(tokens))
    x = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.RandomNormal())(x, x, x)
    return hk.nets.MLP([5, 3])(hk.Conv1D(4, 3)(x))


TOKENS = jnp.zeros((2, 5), jnp.int32)
LINEN = 'MultiHeadDotProductAttention_0'
MODELS = {
    'linen': (
        lambda: LinenNet().init(jax.random.key(0), TOKENS)['params'],
        [
            *[f'{LINEN}/{part}/kernel' for part in ('key', 'out', 'query', 'value')],
            'Conv_0/kernel',
            'Dense_0/kernel',
        ],
    ),
    'nnx': (lambda: nnx.state(NnxNet(nnx.Rngs(0))), ['conv/kernel', 'head/kernel']),
    'equinox': (
        lambda: eqx.filter(EquinoxNet(jax.random.key(0)), eqx.is_array),
        'cell/weight_ih cell/weight_hh mlp/layers/0/weight mlp/layers/1/weight patch_embedding/weight'.split(),
    ),
    'haiku': (
        lambda: hk.transform(haiku_net).init(jax.random.key(0), TOKENS),
        [
            *[f'multi_head_attention/{part}/w' for part in ('key', 'linear', 'query', 'value')],
            *['conv1_d/w', 'mlp/~/linear_0/w', 'mlp/~/linear_1/w'],
        ],
    ),
    'one array': (lambda: jnp.ones((2, 2)), ['kernel']),
    'one vector': (lambda: jnp.ones(2), []),
    'a list': (lambda: [jnp.ones((2, 2)), jnp.ones(2)], ['0']),
    'by hand': (
        lambda: {'W1': jnp.ones((2, 2)), 'b1': jnp.ones((2, 2)), 'window': jnp.ones((2, 2))},
        ['W1'],
    ),
    'a list of kernels': (lambda: {'b': [jnp.ones((2, 2))], 'w': [jnp.ones((2, 2))]}, ['w/0']),
    'tuples under layers': (
        lambda: {
            'dense': (jnp.ones((2, 2)), jnp.ones(2)),
            'embed': [jnp.ones((2, 2))],
            'norm': [jnp.ones((2, 2))],
        },
        ['dense/0'],
    ),
    'what belongs to a kernel': (
        lambda: {
            name: jnp.ones((2, 2))
            for name in ('kernel', 'kernel_scale', 'w_bias', 'weight_g', 'weight_in')
        },
        ['kernel', 'weight_in'],
    ),
    'short names of other layers': (
        lambda: {
            name: {'weight': jnp.ones((2, 2))}
            for name in ('wte', 'tok_emb', 'ln_f', 'ln1', 'inline', 'wo')
        },
        ['inline/weight', 'wo/weight'],
    ),
    'whole numbers': (lambda: {'kernel': jnp.ones((2, 2), jnp.int32)}, []),
    'keras': (
        lambda: {'conv': {'depthwise_kernel': jnp.ones((2, 2)), 'moving_mean': jnp.ones(2)}},
        ['conv/depthwise_kernel'],
    ),
}


@pytest.mark.parametrize(('make', 'expected'), MODELS.values(), ids=MODELS)
def test_kernels(make, expected):
    paths, leaves, _ = tree.flatten_with_paths(make())
    found = [
        tree.path_string(path)
        for path, leaf in zip(paths, leaves, strict=True)
        if is_kernel(path, leaf)
    ]
    assert sorted(found) == sorted(expected)


NAMES = [
    ('Dense_0-kernel', ('Dense_0', 'kernel'), True),
    ('Dense_0-kernel', ('Dense_0', 'bias'), False),
    ('Dense_0', ('Dense_0', 'bias'), True),
    ('Dense_0', ('Dense_01', 'bias'), False),
    ('block-Dense_0', ('block', 'Dense_0', 'kernel'), True),
    ('Dense_0', ('block', 'Dense_0', 'kernel'), False),
    ('*-kernel', ('block', 'Dense_0', 'kernel'), True),
    ('*Dense_0-*', ('block', 'Dense_0', 'kernel'), True),
    ('layers-0-weight', ('layers', '0', 'weight'), True),
    ('mlp/~/linear_0-w', ('mlp/~/linear_0', 'w'), True),
    ('block/Dense_0/kernel', ('block', 'Dense_0', 'kernel'), True),
    (('block', 'Dense_0', 'kernel'), ('block', 'Dense_0', 'kernel'), True),
    (('Dense_0',), ('Dense_0', 'kernel'), False),
    ('dense_0-kernel', ('Dense_0', 'kernel'), False),
]


@pytest.mark.parametrize(('name', 'path', 'meant'), NAMES)
def test_names(name, path, meant):
    assert names_leaf(name, path) is meant
