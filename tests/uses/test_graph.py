"""What a graph says of leaves that are used, opaque or unused, and how it says it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxpruner.uses import UnsupportedPrimitive, param_uses, run_with_taps
from uses.adversarial import indexed_and_until
from uses.table import floats, shard_map, short_uses

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
def test_unused_leaves(apply_fn):
    graph = param_uses(apply_fn, DEAD, jnp.arange(8.0).reshape(2, 4))
    assert graph.unused == (('b',), ('w',))
    assert len(graph) == len(graph.opaque) == 0


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
    graph = param_uses(lambda p, x: (function(p['w'], x), x + p['bias']), params, X)
    words = rf'w: .*{reason}.*test_graph.py:\d+.*leave this leaf out'
    with pytest.raises(UnsupportedPrimitive, match=words):
        graph['w']
    assert (list(graph), list(graph.opaque)) == ([('bias',)], [('w',)])


def over_devices(axes):
    """A product of which the devices along `model` sum a part each."""
    data = 'data' if 'data' in axes else None
    in_specs = PartitionSpec('model'), PartitionSpec(data, 'model')
    specs = {'in_specs': in_specs, 'out_specs': PartitionSpec(data)}
    sharded = shard_map(lambda w, x: jax.lax.psum(x @ w, 'model'), axes, **specs)
    return lambda p, x: sharded(p['w'], x)


@pytest.mark.parametrize('axes', [{'model'}, {'model', 'data'}])
def test_shard_map(axes):
    graph = param_uses(over_devices(axes), {'w': floats(8, 6)}, floats(4, 8))
    assert short_uses(graph) == {'w': '~dot 0>1'}
    assert graph['w'][0].flops == graph.flops == 2 * 4 * 8 * 6


# Operands that cannot be observed while a program runs.
UNOBSERVED = [
    (
        lambda p, x: jax.lax.while_loop(lambda x: (x @ p['w']).sum() > 0, lambda x: x - 1, x),
        'condition of a loop',
    ),
    (over_devices({'model'}), 'inside shard_map'),
    (lambda p, x: (x, p['w']), 'no tap'),
]


@pytest.mark.parametrize(('apply_fn', 'message'), UNOBSERVED)
def test_what_cannot_be_observed(apply_fn, message):
    params, x = {'w': jnp.ones((4, 4))}, jnp.ones((2, 4))
    graph = param_uses(apply_fn, params, x)
    with pytest.raises(UnsupportedPrimitive, match=message):
        run_with_taps(graph, graph['w'], lambda use, operands: 0.0, params, x)


def test_names():
    params = {'layer': {'kernel': floats(4, 4), 'old': floats(4)}}
    graph = param_uses(lambda p, x: x @ p['layer']['kernel'], params, X)
    assert graph['layer/kernel'] == graph['layer', 'kernel']
    assert 'layer/kernel' in graph
    with pytest.raises(KeyError, match='zeroing it changes nothing'):
        graph['layer/old']
    with pytest.raises(KeyError, match=r"no parameter 'layer/kernal'; did you mean 'layer/kernel'"):
        graph['layer/kernal']
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


ROWS = jnp.array([2, 0, 3])
FLOPS = [  # of a model of one leaf, of its shape, and the shape of the input
    (lambda w, x: x + w, (4,), (2, 4), 8),
    (lambda w, x: x @ jnp.concatenate([w, jnp.ones((4, 3))], 1), (4, 5), (2, 4), 2 * 2 * 4 * 5),
    (lambda w, x: jax.lax.ragged_dot(x, w, ROWS), (3, 4, 6), (5, 4), 2 * 5 * 4 * 6),
    (lambda w, x: jax.lax.fori_loop(0, 7, lambda _, x: x @ w, x), (4, 4), (2, 4), 7 * 64),
]


def test_flops():
    for apply_fn, shape, of_input, expected in FLOPS:
        assert (
            param_uses(apply_fn, floats(*shape), floats(*of_input))['kernel'][0].flops == expected
        )
    params = {'a': floats(4, 3), 'b': floats(4, 3)}  # an operation that is shared counts once
    graph = param_uses(lambda p, x: (x @ x.T, x @ (p['a'] + p['b'])), params, X)
    assert graph.flops == 2 * 2 * 4 * 2 + 2 * 2 * 4 * 3
    assert graph['a'][0].flops == graph['b'][0].flops == 2 * 2 * 4 * 3
    graph = param_uses(indexed_and_until, {'w': floats(3, 4, 4), 'v': floats(4, 4)}, X)
    assert (graph['w'][0].trips, graph['v'][0].trips) == (3, None)
