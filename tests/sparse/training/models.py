"""Models that tests train on blocks."""

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)


def drawn(*shape):
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


# Blocks of 4 x 8 divide neither 10 nor 22; the layers are stacked, and the output is transposed.
PARAMS = {
    'up': {'kernel': drawn(10, 22), 'bias': jnp.zeros(22)},
    'layers': {'kernel': drawn(2, 22, 22), 'bias': jnp.zeros((2, 22))},
    'table': drawn(8, 22),
    'head': {'kernel': drawn(22, 3)},
}
X, Y = drawn(9, 10), drawn(9, 3)
BLOCK = (4, 8)


def apply_fn(params, x):
    x = jax.nn.tanh(x @ params['up']['kernel'] + params['up']['bias'])

    def layer(x, params):
        return jax.nn.tanh(x @ params['kernel'] + params['bias']), None

    x, _ = jax.lax.scan(layer, x, params['layers'])
    return jax.nn.tanh(x @ params['table'].T) @ params['table'] @ params['head']['kernel']


def loss(function, params):
    return jnp.mean((function(params, X) - Y) ** 2)
