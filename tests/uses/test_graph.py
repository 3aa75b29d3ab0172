"""What a graph says of leaves that are used, opaque or unused, and how it says it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.uses import UnsupportedPrimitive, param_uses
from uses.table import floats, short_uses, tokens

DEAD = {'w': floats(4, 4), 'b': floats(4)}


def _dead_carry(params, x):
    def body(carried, _):
        x, y = carried
        return (x * 2, y @ params['w'] + params['b']), None

    return jax.lax.scan(body, (x, x), length=3)[0][0]


def _dead_in_branch(params, x):
    return jax.lax.cond(
        x.sum() > 0, lambda x: (x, x @ params['w'] + params['b']), lambda x: (x, x), x
    )[0]


def _no_trip(params, x):
    def body(carried, layer):
        return carried @ layer + params['b'], carried.sum() * layer

    return jax.lax.scan(body, x, params['w'].reshape(-1, 4, 4)[:0])


@pytest.mark.parametrize('apply_fn', [_dead_carry, _dead_in_branch, _no_trip])
def test_unused_leaves_change_nothing(apply_fn):
    x = jnp.arange(8.0).reshape(2, 4)
    graph = param_uses(apply_fn, DEAD, x)
    assert graph.unused == (('b',), ('w',))
    assert len(graph) == len(graph.opaque) == 0
    ones, zeros = (
        jax.tree.map(lambda leaf, value=value: jnp.full(leaf.shape, value), DEAD)
        for value in (1.0, 0.0)
    )
    jax.tree.map(np.testing.assert_array_equal, apply_fn(ones, x), apply_fn(zeros, x))


SQUARE, X = {'w': floats(4, 4)}, floats(2, 4)
OPAQUE = {
    'no rule for svd': lambda w, x: x @ jnp.linalg.svd(w)[0],
    'no rule for scatter': lambda w, x: x + jnp.zeros(9).at[jnp.arange(4)].set(w[0])[:4],
    'no rule for (gather|dynamic_slice)': lambda w, x: x[jnp.argmax(w[0])],
    'a parameter as its image': lambda w, x: jax.lax.conv(
        w[None, None], x[None, None], (1, 1), 'SAME'
    ),
    'which branch runs': lambda w, x: jax.lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, x),
    'how often a loop runs': lambda w, x: jax.lax.while_loop(
        lambda x: w.sum() > 0, lambda x: x * 2, x
    ),
    'puts zeros between elements': lambda w, x: x + jax.lax.pad(w[0, :3], 0.0, ((-1, 0, 1),))[0],
}


@pytest.mark.parametrize(('reason', 'function'), OPAQUE.items(), ids=OPAQUE)
def test_what_has_no_rule_is_opaque(reason, function):
    params = {'w': floats(4, 4), 'bias': floats(4)}

    def apply(p, x):
        return function(p['w'], x), x + p['bias']

    graph = param_uses(apply, params, X)
    with pytest.raises(
        UnsupportedPrimitive, match=rf'w: .*{reason}.*test_graph.py:\d+.*leave this leaf out'
    ):
        graph['w']
    assert (list(graph), list(graph.opaque)) == ([('bias',)], [('w',)])


def test_names():
    params = {'layer': {'kernel': floats(4, 4), 'old': floats(4)}}
    graph = param_uses(lambda p, x: x @ p['layer']['kernel'], params, X)
    assert graph['layer/kernel'] == graph['layer', 'kernel']
    assert 'layer/kernel' in graph
    assert ('layer', 'kernel') in graph
    with pytest.raises(KeyError, match='zeroing it changes nothing'):
        graph['layer/old']
    with pytest.raises(KeyError, match=r"no parameter 'layer/kernal'; did you mean 'layer/kernel'"):
        graph['layer/kernal']


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match='needs the inputs of the model'):
        param_uses(lambda p: p['w'], SQUARE)
    with pytest.raises(TypeError, match=r'layer/activation is no array but <.*equinox.partition'):
        param_uses(lambda p, x: x, {'layer': {'activation': jnp.tanh}}, X)


def test_table():
    params = {'old': floats(3), 'w': floats(4, 4), 'q': floats(4, 4)}
    graph = param_uses(lambda p, x: x @ p['w'] @ jnp.linalg.qr(p['q'])[0], params, X)
    lines = str(graph).splitlines()
    assert lines[1].split() == ['w', 'dot', '0', '1', '-', '-', 'yes', '64', '1']
    assert lines[2].startswith('q  opaque: no rule for')
    assert lines[3:5] == ['old  unused', f'{graph.flops:,} FLOPs in all']
    assert repr(graph) == f'UseGraph(1 used, 1 opaque, 1 unused, {graph.flops:,} FLOPs)'


def _looped(params, x):
    def body(number, x):
        return jnp.tanh(x @ params['w'][number])

    x = jax.lax.fori_loop(0, 3, body, x)
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ params['v'], x)


def _learned_state(params, x):
    return jax.lax.scan(lambda h, x: (jnp.tanh(h + x @ params['w']), None), params['h'], x)[0]


def _use(function, expected, *shape, x=X):
    """A model of one leaf."""
    return lambda p, x: function(p['w'], x), {'w': floats(*(shape or (4, 4)))}, x, {'w': expected}


USES = {
    'indexed in a loop': (
        _looped,
        {'w': floats(3, 4, 4), 'v': floats(4, 4)},
        X,
        {'w': 'dot 1>2@0', 'v': 'dot 0>1'},
    ),
    'first state': (
        _learned_state,
        {'w': floats(4, 4), 'h': floats(4)},
        X,
        {'w': 'dot 0>1', 'h': 'elementwise >0'},
    ),
    'one of two': (
        lambda p, x: x @ jax.lax.cond(x.sum() > 0, lambda: p['a'], lambda: p['b']),
        {'a': floats(4, 4), 'b': floats(4, 4)},
        X,
        {'a': 'elementwise >01', 'b': 'elementwise >01'},
    ),
    'ensemble': _use(jax.vmap(lambda w, x: x @ w, (0, None)), 'dot 1>02', 5, 4, 3),
    'irregular reshape': _use(lambda w, x: x @ w.reshape(4, 3), 'dot 01>01', 3, 4),
    'behind a barrier': _use(
        lambda w, x: jnp.matmul(*jax.lax.optimization_barrier((x, w))), 'dot 0>1'
    ),
    'top k': _use(lambda w, x: x[:, :2] @ jax.lax.top_k(w, 2)[0].T, '~dot 1>0'),
    'masked': _use(lambda w, x: x @ jnp.where(np.tri(4) > 0, w, 0), 'dot 0>1'),
    'permuted': _use(lambda w, x: x @ w[:, np.array([1, 3, 0, 2])].T, 'dot 1>0'),
    'rows in groups': _use(
        lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([2, 0, 3])),
        'dot 1>2|0',
        *(3, 4, 6),
        x=floats(5, 4),
    ),
    'lookup': _use(lambda w, x: w[x], 'gather >01', x=tokens(3)),
    'returned': _use(lambda w, x: (x, w), 'output >01'),
}


@pytest.mark.parametrize(('apply_fn', 'params', 'x', 'expected'), USES.values(), ids=USES)
def test_uses(apply_fn, params, x, expected):
    graph = param_uses(apply_fn, params, x)
    assert short_uses(graph) == expected
    assert not graph.opaque
    assert not graph.unused


def test_flops():
    def flops(apply_fn, *shape, x=X):
        return param_uses(apply_fn, floats(*shape), x)['kernel'][0].flops

    assert flops(lambda w, x: x + w, 4) == 8
    assert flops(lambda w, x: x @ jnp.concatenate([w, jnp.ones((4, 3))], 1), 4, 5) == 2 * 2 * 4 * 5
    rows = jnp.array([2, 0, 3])
    ragged = flops(lambda w, x: jax.lax.ragged_dot(x, w, rows), 3, 4, 6, x=floats(5, 4))
    assert ragged == 2 * 5 * 4 * 6
    in_loop = flops(lambda w, x: jax.lax.fori_loop(0, 7, lambda _, x: x @ w, x), 4, 4)
    assert in_loop == 7 * 64
    params = {'a': floats(4, 3), 'b': floats(4, 3)}  # an operation that is shared counts once
    graph = param_uses(lambda p, x: (x @ x.T, x @ (p['a'] + p['b'])), params, X)
    assert graph.flops == 2 * 2 * 4 * 2 + 2 * 2 * 4 * 3
    assert graph['a'][0].flops == graph['b'][0].flops == 2 * 2 * 4 * 3
    graph = param_uses(_looped, {'w': floats(3, 4, 4), 'v': floats(4, 4)}, X)
    assert (graph['w'][0].trips, graph['v'][0].trips) == (3, None)
