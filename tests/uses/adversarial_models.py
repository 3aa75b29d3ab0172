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

MODELS = {
    # reshape by dimensions
    'grouped convolutions over both': (
        jax.vmap(lambda w, x: layers.conv(x, w, feature_group_count=3), (3, 0)),
        floats(3, 2, 1, 5, 6),
        floats(5, 2, 4, 4, 3),
    ),
    # loops
    'learned states': (layers.learned_states, {'w': floats(4, 4), 'h': floats(4)}, floats(3, 2, 4)),
    'nested scans': (layers.nested, {'w': floats(2, 3, 4, 4)}, X),
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
    'rows beyond the end are zero': (
        lambda p, x: x @ p['w'].at[np.array([0, 9, 1, 2])].get(mode='fill', fill_value=0),
        W,
        X,
    ),
    'padded by ones': (
        lambda p, x: x @ jnp.pad(p['w'], ((1, 0), (0, 2)), constant_values=1),
        {'w': floats(3, 6)},
        X,
    ),
    'custom vjp': (lambda p, x: layers.matmul(x, p['w'].T), {'w': floats(6, 4)}, X),
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
