"""Models in which parameters are easily lost, and axes easily taken for one another: name -> the model and its uses."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from uses.table import conv, floats, scan, tokens


class Row(NamedTuple):
    """A model, shapes of its parameters and inputs, and the uses of its leaves in short form."""

    apply_fn: Callable
    params: dict[str, Any]
    inputs: tuple
    uses: dict[str, str]


def row(apply_fn, *inputs, **leaves):
    """A row of leaves that are pairs of a shape and their uses."""
    params = {name: floats(*shape) for name, (shape, _) in leaves.items()}
    return Row(apply_fn, params, inputs, {name: uses for name, (_, uses) in leaves.items()})


X = floats(2, 4)


def learned_states(p, x):
    """A carry of three, of which the last is the parameter; constants stand before it."""

    def body(carried, taken):
        count, other, state = carried
        return (count + 1, other * 2, jnp.tanh(state @ p['w'] + taken)), state

    (_, other, state), states = lax.scan(body, (0, x[0], jnp.broadcast_to(p['h'], x[0].shape)), x)
    return other + state + states.sum(0)


def nested(p, x):
    """Layers within groups: a scan in a scan, the inner axis first."""

    def group(x, ws):
        return scan(lambda x, w: jnp.tanh(x @ w), x, ws)

    return scan(group, x, jnp.swapaxes(p['w'], 0, 1))


def ring(p, x):
    """Weights that go round in what a loop carries."""

    def body(_, carried):
        x, a, b, c = carried
        return jnp.tanh(x @ a), b, c, a

    return lax.fori_loop(0, 5, body, (x, p['a'], p['b'], p['c']))[0]


def indexed_and_until(p, x):
    """Layers by the counter of a loop, and a loop of which the data say how often it runs."""
    x = lax.fori_loop(0, 3, lambda number, x: jnp.tanh(x @ p['w'][number]), x)

    def is_small(state):
        return (state[0] < 5) & (state[1].sum() < 9)

    return lax.while_loop(is_small, lambda state: (state[0] + 1, state[1] @ p['v']), (0, x))[1]


def by_two_counters(p, x):
    def outer(i, x):
        return lax.fori_loop(0, 3, lambda j, x: jnp.tanh(x @ p['w'][i, j]), x)

    return lax.fori_loop(0, 2, outer, x)


def branches_by_counter(p, x):
    branches = [lambda x: jnp.tanh(x @ p['a']), lambda x: jnp.tanh(x @ p['b'].T)]
    return lax.fori_loop(0, 4, lambda i, x: lax.switch(i % 2, branches, x), x)


def branch_in_scan(p, x):
    def body(x, layer):
        dense = lambda x, layer: jnp.tanh(x @ layer['w'])  # noqa: E731
        return lax.cond(x.sum() > 0, dense, lambda x, layer: x + layer['b'], x, layer)

    return scan(body, x, p)


def shared(p, x):
    """The first layer of a scan is read behind it, too."""
    return scan(lambda x, w: jnp.tanh(x @ w), x, p['w']) @ p['w'][0].T


def inner_update(p, x):
    gradient = jax.grad(lambda w: jnp.tanh(x @ w).sum())(p['w'])
    return x @ (p['w'] - 0.1 * gradient)


def attention(p, x):
    """Projections to and from heads; the query's kernel has its heads last."""
    query = jnp.einsum('btf,fdh->bthd', x, p['q'])
    key = jnp.einsum('btf,hfd->bthd', x, p['k'])
    value = jnp.einsum('btf,dhf->bthd', x, p['v'])
    scores = jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', query, key))
    return jnp.einsum('bhqk,bkhd,dho->bqo', scores, value, p['o'])


def routed(p, x):
    """Tokens to experts, as many as each takes: dispatch and combine."""
    gate = jax.nn.softmax(x @ p['gate'])
    dispatched = jnp.einsum('te,tf->ef', gate, x)
    hidden = jax.vmap(lambda w, x: jnp.tanh(w @ x))(p['up'], dispatched)
    return jnp.einsum('te,eh,efh->tf', gate, hidden, p['down'])


def groups_of_rows(p, x):
    def body(x, w):
        return jnp.tanh(lax.ragged_dot(x, w.swapaxes(1, 2), jnp.array([2, 1, 2])))

    return scan(body, x, p['w'])


def with_cache(p, x, cache):
    cache = lax.dynamic_update_slice(cache, x @ p['k'], (1, 0))
    return x @ p['q'] @ cache.T


def combined_with_constants(p, x):
    changed = p['w'].at[np.array([0, 2])].max(0.1).at[1].min(0.2)
    return x @ changed.at[np.array([3])].multiply(2.0)


@jax.custom_vjp
def matmul(x, w):
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

MODELS = {
    # loops
    'learned states': row(
        learned_states, floats(3, 2, 4), w=((4, 4), 'dot 0>1'), h=((4,), 'elementwise >0')
    ),
    'nested scans': row(nested, X, w=((2, 3, 4, 4), 'dot 2>3@01')),
    'ring': row(ring, X, a=((4, 4), '~dot 0>1'), b=((4, 4), '~dot 0>1'), c=((4, 4), '~dot 0>1')),
    'indexed and until': row(
        indexed_and_until, X, w=((3, 4, 4), 'dot 1>2@0'), v=((4, 4), 'dot 0>1')
    ),
    'indexed by two counters': row(by_two_counters, X, w=((2, 3, 4, 4), 'dot 2>3@01')),
    'indexed beyond the end': row(
        lambda p, x: lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ p['w'][i]), x),
        X,
        w=((3, 4, 4), 'dot 1>2@0'),
    ),
    'masked in a loop': row(
        lambda p, x: scan(lambda x, w: jnp.tanh(x @ jnp.tril(w)), x, p['w']),
        X,
        w=((3, 4, 4), 'dot 1>2@0'),
    ),
    'shared between scan and not': row(shared, X, w=((3, 4, 4), 'dot 1>2@0, dot 2>1')),
    # branches
    'layers of two kinds by counter': row(
        branches_by_counter, X, a=((4, 4), 'dot 0>1'), b=((4, 4), 'dot 1>0')
    ),
    'branch in scan': row(
        branch_in_scan, X, w=((3, 4, 4), 'dot 1>2@0'), b=((3, 4), 'elementwise >1@0')
    ),
    'one of two': row(
        lambda p, x: x @ lax.cond(x.sum() > 0, lambda: p['a'], lambda: p['b']),
        X,
        a=((4, 4), 'elementwise >01'),
        b=((4, 4), 'elementwise >01'),
    ),
    # derivatives
    'inner update': row(inner_update, X, w=((4, 3), 'dot 0>1, elementwise >01')),
    'custom vjp': row(lambda p, x: matmul(x, p['w'].T), X, w=((6, 4), 'dot 1>0')),
    # contractions
    'attention': row(
        attention,
        floats(2, 5, 4),
        q=((4, 2, 3), 'dot 0>12'),
        k=((3, 4, 2), 'dot 1>02'),
        v=((2, 3, 4), 'dot 2>01'),
        o=((2, 3, 6), 'dot 01>2'),
    ),
    'routed': row(
        routed,
        floats(7, 4),
        gate=((4, 3), 'dot 0>1'),
        up=((3, 5, 4), 'dot 2>1|0'),
        down=((3, 4, 5), 'dot 2>1|0'),
    ),
    'rows in groups of two layers': row(
        groups_of_rows, floats(5, 4), w=((2, 3, 4, 4), 'dot 3>2|1@0')
    ),
    'ensemble': row(lambda p, x: jax.vmap(lambda w: x @ w)(p['w']), X, w=((5, 4, 3), 'dot 1>02')),
    'batch axes in other order': row(
        lambda p, x: lax.dot_general(x, p['w'], (((3,), (1,)), ((2, 0), (0, 2)))),
        floats(2, 6, 3, 4),
        w=((3, 4, 2, 5), 'dot 1>3|02'),
    ),
    'cache': row(with_cache, X, floats(5, 3), k=((4, 3), 'dot 0>1'), q=((4, 3), 'dot 0>1')),
    'batch groups': row(
        lambda p, x: conv(x, p['w'], batch_group_count=2),
        floats(2, 4, 4, 3),
        w=((2, 3, 3, 6), 'conv 012>3'),
    ),
    'grouped convolutions over both': row(
        lambda p, x: jax.vmap(functools.partial(conv, feature_group_count=3), (0, 3))(x, p['w']),
        floats(5, 2, 4, 4, 3),
        w=((3, 2, 1, 5, 6), 'conv 012>34'),
    ),
    # lookups
    'tied': row(lambda p, x: p['w'][x] @ p['w'].T, tokens(3), w=((5, 4), 'dot 1>0, gather >01')),
    'expert choice': row(
        lambda p, x, i: jnp.einsum('bi,bio->bo', x, p['w'][i]),
        X,
        tokens(2),
        w=((3, 4, 5), 'gather >012'),
    ),
    # moves
    'irregular reshape': row(lambda p, x: x @ p['w'].reshape(4, 3), X, w=((3, 4), 'dot 01>01')),
    'behind a barrier': row(
        lambda p, x: jnp.matmul(*lax.optimization_barrier((x, p['w']))), X, w=((4, 4), 'dot 0>1')
    ),
    'top k': row(lambda p, x: x[:, :2] @ lax.top_k(p['w'], 2)[0].T, X, w=((4, 4), '~dot 1>0')),
    'permuted': row(lambda p, x: x @ p['w'][:, np.array([1, 3, 0, 2])].T, X, w=((4, 4), 'dot 1>0')),
    'combined with constants at indices': row(combined_with_constants, X, w=((4, 6), '~dot 0>1')),
    'rows beyond the end are zero': row(
        lambda p, x: x @ p['w'].at[np.array([0, 9, 1, 2])].get(mode='fill', fill_value=0),
        X,
        w=((4, 6), '~dot 0>1'),
    ),
    'padded by ones': row(
        lambda p, x: x @ jnp.pad(p['w'], ((1, 0), (0, 2)), constant_values=1),
        X,
        w=((3, 6), 'dot 0>1'),
    ),
    'returned': row(lambda p, x: (x, p['w']), X, w=((4, 4), 'output >01')),
}
