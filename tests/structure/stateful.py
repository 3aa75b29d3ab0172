"""Models with a state: name -> (apply function, parameters, state, inputs), in the dtype of the moment."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape))


def linen_programs():
    """Training and evaluation with batch normalization."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Conv(6, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            return nn.Dense(2)(x.mean((1, 2)))

    network = Network()
    x = normal(2, 4, 4, 3)
    variables = network.init(jax.random.key(0), x, False)

    def train(params, state, x):
        variables = {'params': params, **state}
        return network.apply(variables, x, True, mutable=['batch_stats'])

    def evaluate(params, state, x):
        return network.apply({'params': params, **state}, x, False)

    state = {'batch_stats': variables['batch_stats'], 'unread': {'count': normal(3)}}
    return (train, evaluate), variables['params'], state, (x,)


def linen():
    (train, _), *rest = linen_programs()
    return train, *rest


def cache():
    """One token of attention with grouped queries: 2 heads of keys and values, 3 queries for each."""
    params = {
        'query': normal(5, 2, 3, 4),
        'key': normal(5, 2, 4),
        'value': normal(5, 2, 6),
        'out': normal(2, 3, 6, 5),
    }
    state = {'key': normal(2, 7, 2, 4), 'value': normal(2, 7, 2, 6), 'count': jnp.int32(3)}
    return decode, params, {'cache': state}, (normal(2, 5),)


def decode(params, state, x):
    cache = state['cache']
    query = jnp.einsum('bd,dkgh->bkgh', x, params['query'])
    new = {'count': cache['count'] + 1}
    for name in ('key', 'value'):
        row = jnp.einsum('bd,dkh->bkh', x, params[name])[:, None]
        new[name] = lax.dynamic_update_slice_in_dim(cache[name], row, cache['count'], axis=1)
    scores = jnp.einsum('bkgh,btkh->bkgt', query, new['key'])
    is_past = jnp.arange(7) <= cache['count']
    weights = jax.nn.softmax(jnp.where(is_past, scores, -1e9))
    mixed = jnp.einsum('bkgt,btkh->bkgh', weights, new['value'])
    return jnp.einsum('bkgh,kghd->bd', mixed, params['out']), {'cache': new}


def recurrent():
    """The hidden values are a state that is one bare array; the results have another shape."""
    params = {'in': normal(3, 6), 'hidden': normal(6, 6), 'out': normal(6, 2)}

    def apply(params, hidden, x):
        hidden = jnp.tanh(x @ params['in'] + hidden @ params['hidden'])
        return hidden, hidden @ params['out']

    return apply, params, normal(4, 6), (normal(4, 3),)


def scanned():
    """Layers of a scan, each with the running mean of its hidden units."""
    params = {'up': normal(3, 4, 6), 'down': normal(3, 6, 4)}

    def apply(params, means, x):
        def layer(x, arrays):
            p, mean = arrays
            hidden = x @ p['up']
            mean = 0.9 * mean + 0.1 * hidden.mean(0)
            return x + jnp.tanh(hidden - mean) @ p['down'], mean

        return lax.scan(layer, x, (params, means))

    return apply, params, normal(3, 6), (normal(5, 4),)


class Row(NamedTuple):
    """A model, the groups that it must have, and where the state is in its results.

    Of each group it says where it lies in the state, and the sizes of what owns lists.
    """

    make: Callable
    groups: dict
    state_at: int = 1


STATISTICS = ['batch_stats/BatchNorm_0/mean[0]', 'batch_stats/BatchNorm_0/var[0]']
MODELS = {
    'linen': Row(linen, {'Conv_0/kernel[3]': (STATISTICS, [])}),
    'cache': Row(
        cache,
        {
            'query[3]': (['cache/key[3]'], [2]),
            'query[2]': ([], [2]),
            'query[1]': (['cache/key[2]', 'cache/value[2]'], []),
            'value[2]': (['cache/value[3]'], [2]),
        },
    ),
    'recurrent': Row(recurrent, {'in[1]': (['kernel[1]'], [])}, state_at=0),
    'scanned': Row(scanned, {'up[2]': (['kernel[1]'], [3]), 'up[0]': (['kernel[0]'], [])}),
}
