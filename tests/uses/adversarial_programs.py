"""Whole programs in which parameters are easily lost: derivatives, loops in loops, weights that are made of others.

Like those in `adversarial_models`, but of more than a line.
"""

import jax
import jax.numpy as jnp
from jax import lax

from uses.table import floats, tokens

X = floats(2, 4)
IMAGE = floats(2, 4, 4, 3)
MODELS = {}


def model(params, *inputs):
    """Adds a model to the table, with shapes of its parameters and inputs."""

    def add(apply_fn):
        MODELS[apply_fn.__name__.strip('_').replace('_', ' ')] = (apply_fn, params, *inputs)
        return apply_fn

    return add


@model({'w': floats(4, 3)}, X)
def _inner_update(p, x):
    g = jax.grad(lambda w: jnp.tanh(x @ w).sum())(p['w'])
    return x @ (p['w'] - 0.1 * g)


@model({'w': floats(3, 4, 4)}, X)
def _input_gradient_of_scan(p, x):
    return jax.grad(lambda x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p['w'])[0].sum())(x)


@model({'a': floats(4, 4), 'b': floats(4, 4)}, X)
def _heterogeneous_layers_by_counter(p, x):
    return lax.fori_loop(
        0,
        4,
        lambda i, x: lax.switch(
            i % 2, [lambda x: jnp.tanh(x @ p['a']), lambda x: jnp.tanh(x @ p['b'].T)], x
        ),
        x,
    )


@model({'w': floats(3, 5)}, floats(2, 4))
def _fourier(p, x):
    return jnp.fft.irfft(jnp.einsum('bf,fo->bo', jnp.fft.rfft(x), p['w']), axis=-1)


@model({'w': floats(2, 5, 3, 4, 4)}, X)
def _scan_in_vmap_in_scan(p, x):

    def member(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    return lax.scan(lambda x, w: (jax.vmap(member, (0, None))(w, x).mean(0), None), x, p['w'])[0]


@model({'w': floats(3, 4, 4), 'b': floats(3, 4)}, X)
def _cond_in_scan(p, x):

    def body(x, layer):
        return (
            lax.cond(
                x.sum() > 0,
                lambda x, layer: jnp.tanh(x @ layer['w']),
                lambda x, layer: x + layer['b'],
                x,
                layer,
            ),
            None,
        )

    return lax.scan(body, x, p)[0]


@model({'w': floats(3, 4, 5)}, X, tokens(2))
def _expert_choice(p, x, i):
    return jnp.einsum('bi,bio->bo', x, p['w'][i])


@model({'w': floats(3, 4, 2, 5)}, floats(2, 6, 3, 4))
def _batch_dims_in_other_order(p, x):
    return lax.dot_general(x, p['w'], (((3,), (1,)), ((2, 0), (0, 2))))


@model({'w': floats(3, 4, 4)}, X)
def _shared_between_scan_and_not(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p['w'])[0] @ p['w'][0].T


@model({'w': floats(3, 4, 4)}, X)
def _stack_carried_and_indexed_in_jit(p, x):

    def body(i, c):
        w, x = c
        return (w, jax.jit(lambda w, i, x: jnp.tanh(x @ w[i].T))(w, i, x))

    return lax.fori_loop(0, 3, body, (p['w'], x))[1]


@model({'k': floats(4, 3), 'q': floats(4, 3)}, floats(2, 4), floats(5, 3))
def _kv_cache(p, x, cache):
    cache = lax.dynamic_update_slice(cache, x @ p['k'], (1, 0))
    return x @ p['q'] @ cache.T


@model({'w': floats(4, 4)}, X)
def _product_with_itself(p, x):
    return x @ (p['w'] @ p['w'].T)
