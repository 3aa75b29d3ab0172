"""Costs that are read off a trace, against the true shapes, the smaller program, XLA's count, and counts by hand."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpruner.structure import channel_groups
from uses.table import conv, floats, scan, shard_map


def test_xla_counts_as_many_operations():
    params = {'a': floats(4, 24), 'b': floats(24, 16), 'c': floats(16, 3)}
    graph = channel_groups(lambda p, x: x @ p['a'] @ p['b'] @ p['c'], params, floats(7, 4))
    keep = {'a[1]': [0, 5, 23], 'b[1]': np.arange(0, 16, 2)}
    small = jax.eval_shape(functools.partial(graph.shrink, keep=keep), params)
    lowered = jax.jit(graph.small_apply(keep)).lower(small, floats(7, 4))
    assert graph.cost(keep).flops == lowered.cost_analysis()['flops'] == 2 * 7 * (12 + 24 + 24)


def convolved(p, x):
    x = conv(conv(x, p['in']), p['depthwise'], feature_group_count=12)
    numbers = ('NHWC', 'HWIO', 'NHWC')
    return jax.lax.conv_transpose(x, p['out'], (2, 2), 'VALID', dimension_numbers=numbers)


def test_convolutions_counted_by_hand():
    shapes = {'in': (3, 3, 5, 12), 'depthwise': (3, 3, 1, 12), 'out': (2, 2, 12, 4)}
    params = {name: floats(*shape) for name, shape in shapes.items()}
    graph = channel_groups(convolved, params, floats(2, 8, 8, 5))
    for channels in (12, 7):
        macs = 9 * 5 * channels + 9 * channels + 4 * channels * 4
        assert graph.cost({'in[3]': range(channels)}).flops == 2 * (2 * 8 * 8) * macs


def squares(w, x):
    return x @ w @ w.T


CONTROL_FLOW = {  # the multiplications for `u` channels that stay, each of 5 rows and 4 features
    'called': (lambda p, x: jax.jit(squares)(p['w'], x), lambda u: 2 * u),
    'scanned': (
        lambda p, x: jax.lax.fori_loop(0, 7, lambda _, x: squares(p['w'], x), x),
        lambda u: 14 * u,
    ),
    'in a loop of unknown length': (
        lambda p, x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: squares(p['w'], x), x),
        lambda u: 2 * u,
    ),
    # The fixed branch multiplies by 4 x 4 matrices three times.
    'the dearest branch': (
        lambda p, x: jax.lax.cond(
            x.sum() > 0, lambda x: squares(p['w'], x), lambda x: x @ p['v'] @ p['v'] @ p['v'], x
        ),
        lambda u: max(2 * u, 12),
    ),
    'without part in the results': (
        lambda p, x: (squares(p['w'], x), squares(p['w'], x) + 1)[0],
        lambda u: 2 * u,
    ),
}


@pytest.mark.parametrize(('apply_fn', 'multiplied'), CONTROL_FLOW.values(), ids=CONTROL_FLOW)
def test_control_flow(apply_fn, multiplied):
    graph = channel_groups(apply_fn, {'v': floats(4, 4), 'w': floats(4, 8)}, floats(5, 4))
    for count in (8, 7, 3):
        cost = graph.cost({'w[1]': range(count)})
        assert (cost.flops, cost.parameters) == (2 * 5 * 4 * multiplied(count), 16 + 4 * count)


def test_what_runs_on_each_device_stays_and_counts_for_all():
    def body(x, w, unused):
        return scan(lambda x, _: x @ w, x, length=3), x @ unused

    def apply(p, x):
        data, same = PartitionSpec('data'), PartitionSpec()
        sharded = shard_map(body, {'data'}, in_specs=(data, same, same), out_specs=data)
        return sharded(x @ p['up'] @ p['down'], p['fixed'], p['unused'])[0]

    params = {'up': floats(4, 8), 'down': floats(8, 4)}
    params |= {'fixed': floats(4, 4), 'unused': floats(4, 4)}
    graph = channel_groups(apply, params, floats(6, 4))
    assert (list(graph.groups), graph.unused) == (['up[1]'], (('unused',),))
    assert graph.cost({'up[1]': [2]}).flops == 2 * 6 * (4 + 4 + 3 * 16)


def test_counts_beyond_64_bits_are_exact():
    width = 2**22
    params = {'a': floats(width, width), 'b': floats(width, width)}
    graph = channel_groups(lambda p, x: x @ p['a'] @ p['b'], params, floats(width, width))
    assert graph.cost().flops == 4 * width**3 > 2**63
