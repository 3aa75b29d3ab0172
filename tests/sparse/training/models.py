"""Models that tests train on compact weights, in blocks and in CSR."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse, tree
from jaxpruner.sparse import csr_matrix

RNG = np.random.default_rng(0)
MISSING = csr_matrix.why_missing(jnp.float32)
needs_csr = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
KINDS = ['blocks', pytest.param('weights', marks=needs_csr)]


def drawn(*shape):
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


# The layers are stacked, and the output is transposed.
PARAMS = {
    'up': {'kernel': drawn(12, 24), 'bias': jnp.zeros(24)},
    'layers': {'kernel': drawn(2, 24, 24), 'bias': jnp.zeros((2, 24))},
    'table': drawn(8, 24),
    'head': {'kernel': drawn(24, 3)},
}
X, Y = drawn(9, 12), drawn(9, 3)
BLOCK = (4, 8)
PRUNED = {'up/kernel': 'up', 'layers/kernel': 'layers'}


def apply_fn(params, x):
    x = jax.nn.tanh(x @ params['up']['kernel'] + params['up']['bias'])

    def layer(x, params):
        return jax.nn.tanh(x @ params['kernel'] + params['bias']), None

    x, _ = jax.lax.scan(layer, x, params['layers'])
    return jax.nn.tanh(x @ params['table'].T) @ params['table'] @ params['head']['kernel']


def loss(function, params):
    return jnp.mean((function(params, X) - Y) ** 2)


def made(kind, sparsity=0.6, only=tuple(PRUNED), **settings):
    if only and not isinstance(sparsity, dict):
        sparsity = dict.fromkeys((only,) if isinstance(only, str) else only, sparsity)
    settings['sparsity'] = sparsity
    if kind == 'blocks':
        return sparse.block_sparse(apply_fn, PARAMS, X, **{'block': BLOCK, **settings})
    return sparse.unstructured_sparse(apply_fn, PARAMS, X, **settings)


def probed_loss(model, weights, topology, probe=None):
    return loss(lambda w, x: model.apply(w, topology, x, probe=probe), weights)


def masked(params, masks):
    return tree.map_with_missing(lambda p, m: p if m is None else p * m, params, masks)


def stored(weights, name):
    """What is trained of a pruned leaf."""
    arrays = weights[PRUNED[name]]['kernel']
    return np.asarray(arrays.get('values', arrays.get('compressed')))
