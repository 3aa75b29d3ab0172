"""Models in which axes are easily taken for one another: name -> apply function, shapes of parameters, inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from uses import layers
from uses.table import floats, tokens

HALF = jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
W = {'w': floats(4, 6)}
STACK = {'w': floats(3, 4, 4)}
X = floats(2, 4)
IMAGE = floats(2, 4, 4, 3)
PERMUTATION = np.array([2, 0, 3, 1])

MODELS = {
    # reshape by dimensions
    'order F merged': (
        lambda p, x: x @ p['w'].reshape((6, 4), order='F').T,
        {'w': floats(3, 2, 4)},
        X,
    ),
    'convolutions over the last axis of weights': (
        jax.vmap(lambda w, x: layers.conv(x, w), (4, None)),
        floats(3, 2, 3, 4, 5),
        IMAGE,
    ),
    'grouped convolutions over both': (
        jax.vmap(lambda w, x: layers.conv(x, w, feature_group_count=3), (3, 0)),
        floats(3, 2, 1, 5, 6),
        floats(5, 2, 4, 4, 3),
    ),
    # loops
    'learned states': (layers.learned_states, {'w': floats(4, 4), 'h': floats(4)}, floats(3, 2, 4)),
    'state into a branch': (layers.state_from_branch, {'w': floats(4, 6), 'h': floats(4)}, X),
    'nested scans': (layers.nested, {'w': floats(2, 3, 4, 4)}, X),
    'indexed from behind': (
        lambda p, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p['w'][2 - i]), x),
        STACK,
        X,
    ),
    'layers used twice': (
        lambda p, x: lax.fori_loop(0, 6, lambda i, x: jnp.tanh(x @ p['w'][i // 2]), x),
        STACK,
        X,
    ),
    'indexed beyond the end': (
        lambda p, x: lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ p['w'][i]), x),
        STACK,
        X,
    ),
    'one layer to the next': (
        lambda p, x: layers.scan(
            lambda x, w: jnp.tanh(x @ w[0] @ w[1]), x, (p['w'][:-1], p['w'][1:])
        ),
        STACK,
        X,
    ),
    'indexed by two counters': (
        lambda p, x: lax.fori_loop(
            0, 2, lambda i, x: lax.fori_loop(0, 3, lambda j, x: jnp.tanh(x @ p['w'][i, j]), x), x
        ),
        {'w': floats(2, 3, 4, 4)},
        X,
    ),
    'indexed by while': (
        lambda p, x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p['w'][c[0]])), (0, x)
        )[1],
        STACK,
        X,
    ),
    'windows by a counter': (layers.window, {'w': floats(4, 12)}, X),
    'ring': (layers.ring, {'a': floats(4, 4), 'b': floats(4, 4), 'c': floats(4, 4)}, X),
    # contractions
    'attention': (
        layers.attention,
        {'q': floats(4, 2, 3), 'k': floats(3, 4, 2), 'v': floats(2, 3, 4), 'o': floats(2, 3, 6)},
        floats(2, 5, 4),
    ),
    'routed': (
        layers.routed,
        {'gate': floats(4, 3), 'up': floats(3, 5, 4), 'down': floats(3, 4, 5)},
        floats(7, 4),
    ),
    'kronecker': (
        lambda p, x: x @ jnp.kron(p['a'], p['b']),
        {'a': floats(2, 3), 'b': floats(2, 4)},
        X,
    ),
    'lora': (layers.lora, {'w': floats(4, 6), 'a': floats(4, 2), 'b': floats(2, 6)}, X),
    'rows in groups of two layers': (
        lambda p, x: layers.scan(
            lambda x, w: jnp.tanh(lax.ragged_dot(x, w.swapaxes(1, 2), jnp.array([2, 1, 2]))),
            x,
            p['w'],
        ),
        {'w': floats(2, 3, 4, 4)},
        floats(5, 4),
    ),
    'tied': (lambda p, x: p['w'][x] @ p['w'].T, {'w': floats(5, 4)}, tokens(3)),
    'convolution by letters': (
        lambda p, x: layers.conv(x, p['w'], ('HNCW', 'IWOH', 'CWNH')),
        {'w': floats(3, 2, 5, 3)},
        floats(4, 2, 3, 4),
    ),
    'batch groups': (
        lambda p, x: layers.conv(x, p['w'], batch_group_count=2),
        {'w': floats(2, 3, 3, 6)},
        IMAGE,
    ),
    # moves
    'every other of merged': (
        lambda p, x: x @ lax.slice(p['w'].reshape(4, 6), (0, 1), (4, 6), (1, 2)),
        {'w': floats(4, 3, 2)},
        X,
    ),
    'beside each other': (
        lambda p, x: x @ jnp.concatenate([p['a'], p['b'].T], 1),
        {'a': floats(4, 2), 'b': floats(3, 4)},
        X,
    ),
    'permuted after a merge': (
        lambda p, x: x @ p['w'].reshape(4, 6)[:, np.array([3, 1, 5, 0, 4, 2])],
        {'w': floats(4, 3, 2)},
        X,
    ),
    'windows at places': (
        lambda p, x: jnp.einsum(
            'bi,kio->bko',
            x,
            jax.vmap(lambda i: lax.dynamic_slice(p['w'], (i, 0), (4, 6)))(np.array([0, 2])),
        ),
        {'w': floats(7, 6)},
        X,
    ),
    'unstacked of a concatenation': (
        lambda p, x: x @ sum(tuple(jnp.concatenate([p['a'], p['b']]))[:3]),
        {'a': floats(1, 4, 3), 'b': floats(2, 4, 3)},
        X,
    ),
    'combined with constants at indices': (
        lambda p, x: (
            x @ p['w'].at[np.array([0, 2])].max(0.1).at[1].min(0.2).at[np.array([3])].multiply(2.0)
        ),
        W,
        X,
    ),
    'masked in a loop': (
        lambda p, x: layers.scan(lambda x, w: jnp.tanh(x @ jnp.tril(w)), x, p['w']),
        STACK,
        X,
    ),
    'blocks on a diagonal': (
        lambda p, x: x @ jax.scipy.linalg.block_diag(*p['w']),
        {'w': floats(2, 2, 3)},
        X,
    ),
    'a choice by two masks': (
        lambda p, x: x @ jnp.where(np.tri(4, 6) > 0, p['a'], p['b']),
        {'a': floats(4, 6), 'b': floats(4, 6)},
        X,
    ),
    'rows beyond the end are zero': (
        lambda p, x: x @ p['w'].at[np.array([0, 9, 1, 2])].get(mode='fill', fill_value=0),
        W,
        X,
    ),
    'toeplitz': (
        lambda p, x: x @ p['w'][np.arange(4)[:, None] - np.arange(5) + 4],
        {'w': floats(8)},
        X,
    ),
    'padded by ones': (
        lambda p, x: x @ jnp.pad(p['w'], ((1, 0), (0, 2)), constant_values=1),
        {'w': floats(3, 6)},
        X,
    ),
    'padded between': (
        lambda p, x: x @ lax.pad(p['w'], 0.0, ((0, 1, 1), (0, 0, 0))),
        {'w': floats(2, 6)},
        X,
    ),
    'custom vjp': (lambda p, x: layers.matmul(x, p['w'].T), {'w': floats(6, 4)}, X),
    'weight norm': (
        lambda p, x: x @ (p['v'] / jnp.linalg.norm(p['v'], axis=0) * p['g']),
        {'v': floats(4, 6), 'g': floats(6)},
        X,
    ),
    'switch over layers': (
        lambda p, x: lax.switch(
            jnp.argmax(x[0]),
            [functools.partial(lambda w, x: x @ w, p['w'][i]) for i in range(3)],
            x,
        ),
        STACK,
        X,
    ),
}
