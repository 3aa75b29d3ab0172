"""One transformer block in four libraries, with its widths as arguments.

Each function is `(**arguments) -> (apply function, shapes of parameters)`.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
from flax import nnx

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 5, 3))


class _Linen(nn.Module):
    width: int
    hidden: int
    heads: int
    features: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name='embed')(x)
        h = nn.RMSNorm()(x)
        x += nn.MultiHeadDotProductAttention(
            self.heads, qkv_features=self.heads * self.features, out_features=self.width
        )(h, h)
        h = nn.gelu(nn.Dense(self.hidden)(nn.RMSNorm()(x)))
        return nn.Dense(3)(x + nn.Dense(self.width)(h))


def _linen(**arguments):
    module = _Linen(**arguments)
    return module.apply, jax.eval_shape(module.init, KEY, X)


class _Nnx(nnx.Module):
    def __init__(self, width, hidden, heads, qkv, rngs):
        self.embed, self.head = nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)
        self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, qkv_features=qkv, decode=False, rngs=rngs
        )
        self.up, self.down = (
            nnx.Linear(width, hidden, rngs=rngs),
            nnx.Linear(hidden, width, rngs=rngs),
        )

    def __call__(self, x):
        x = self.embed(x)
        x = x + self.attention(self.norm1(x))
        return self.head(x + self.down(nnx.gelu(self.up(self.norm2(x)))))


def _nnx(**arguments):
    graphdef, params, rest = nnx.split(_Nnx(**arguments, rngs=nnx.Rngs(0)), nnx.Param, ...)
    return lambda params, x: nnx.merge(graphdef, params, rest)(x), params


class _Equinox(eqx.Module):
    embed: eqx.nn.Linear
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, hidden, heads, size):
        self.embed, self.norm = eqx.nn.Linear(3, width, key=KEY), eqx.nn.RMSNorm(width)
        self.attention = eqx.nn.MultiheadAttention(
            heads, width, qk_size=size, vo_size=size, key=KEY
        )
        self.mlp = eqx.nn.MLP(width, 3, hidden, 1, key=KEY)

    def __call__(self, x):
        x = jax.vmap(self.embed)(x)
        h = jax.vmap(self.norm)(x)
        return jax.vmap(self.mlp)(x + self.attention(h, h, h))


def _equinox(**arguments):
    module = eqx.filter_eval_shape(_Equinox, **arguments)
    params, rest = eqx.partition(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda params, x: jax.vmap(eqx.combine(params, rest))(x), params


def _haiku(width, hidden, heads, size):
    def forward(x):
        start = hk.initializers.VarianceScaling(1.0)
        x = hk.Linear(width)(x)
        h = hk.RMSNorm(-1)(x)
        x += hk.MultiHeadAttention(heads, size, model_size=width, w_init=start)(h, h, h)
        x += hk.Linear(width)(jax.nn.gelu(hk.Linear(hidden)(hk.RMSNorm(-1)(x))))
        return hk.Linear(3)(x)

    network = hk.without_apply_rng(hk.transform(forward))
    return network.apply, jax.eval_shape(network.init, KEY, X)


# Function, arguments, and those of a module in which every width is halved.
LIBRARIES = {
    'linen': (
        _linen,
        {'width': 16, 'hidden': 24, 'heads': 4, 'features': 8},
        {'width': 8, 'hidden': 12, 'heads': 2, 'features': 4},
    ),
    'nnx': (
        _nnx,
        {'width': 16, 'hidden': 24, 'heads': 4, 'qkv': 32},
        {'width': 8, 'hidden': 12, 'heads': 2, 'qkv': 8},
    ),
    'equinox': (
        _equinox,
        {'width': 16, 'hidden': 24, 'heads': 4, 'size': 8},
        {'width': 8, 'hidden': 12, 'heads': 2, 'size': 4},
    ),
    'haiku': (
        _haiku,
        {'width': 16, 'hidden': 24, 'heads': 4, 'size': 8},
        {'width': 8, 'hidden': 12, 'heads': 2, 'size': 4},
    ),
}
