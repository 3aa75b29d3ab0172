"""N:M along the axis over which the model sums, and what else is counted by uses: distributions and summaries."""

import jax
import jax.numpy as jnp
import pytest

import jaxpruner
from jaxpruner import NByM, uses
from uses.table import conv, floats

TWO_OF_FOUR = NByM(2, 4, axis='input')
# Order of a kernel's axes, its shape and groups -> the axes; those of windows where the inputs alone do not divide.
KERNELS = [
    ('HWIO', (3, 3, 8, 4), 1, -2),
    ('HWIO', (3, 3, 2, 8), 4, (-4, -3, -2)),
    ('OIHW', (4, 8, 3, 3), 1, -3),
    ('OIHW', (8, 2, 3, 3), 4, (-2, -1, -3)),
]


@pytest.mark.parametrize(('order', 'shape', 'groups', 'axis'), KERNELS)
def test_kernels_of_convolutions(order, shape, groups, axis):
    def apply(p, x):
        return conv(x, p['w'], ('NHWC', order, 'NHWC'), feature_group_count=groups)

    params = {'w': floats(*shape)}
    graph = uses.param_uses(apply, params, floats(2, 6, 6, 8))
    assert uses.with_input_axes(TWO_OF_FOUR, graph)(('w',), params['w']).axis == axis


@pytest.mark.parametrize('shape', [(3, 3, 8, 1), (3, 3, 8, 2)])
def test_depthwise_kernels_without_an_axis_of_inputs_stay_dense(shape, caplog):
    """Keras has the channels and the outputs of each last, others an axis of length 1 for the inputs."""
    outputs = shape[2] * shape[3]
    params = {'depthwise': floats(*shape), 'pointwise': floats(1, 1, outputs, 4)}

    def apply(p, x):
        depthwise = p['depthwise'].reshape(3, 3, 1, outputs)
        return conv(conv(x, depthwise, feature_group_count=8), p['pointwise'])

    graph = uses.param_uses(apply, params, floats(2, 6, 6, 8))
    setting = uses.with_input_axes(TWO_OF_FOUR, graph)
    with caplog.at_level('INFO'):
        assert setting(('depthwise',), params['depthwise']) is None
    assert 'depthwise stays dense' in caplog.text
    assert setting(('pointwise',), params['pointwise']).axis == -2


def _attention(p, x):
    heads = jnp.einsum('bi,ihd->bhd', x, p['query'])
    return jnp.einsum('bhd,hdo->bo', heads, p['out'])


AS_ONE = [
    (_attention, (4, 6, 8), (-3, -2)),
    (_attention, (4, 8, 8), -2),  # 4 divides the innermost, where groups end with it
    (lambda p, x: _attention({**p, 'out': p['out'].transpose(2, 1, 0)}, x), (8, 6, 4), (-1, -2)),
    (lambda p, x: _attention({**p, 'out': p['out'].reshape(4, 6, 8)}, x), (2, 12, 8), -2),
    (lambda p, x: _attention({**p, 'out': p['out'][:, :6]}, x), (4, 7, 8), -2),  # refused later
]


@pytest.mark.parametrize(('apply', 'shape', 'axis'), AS_ONE)
def test_several_contracted_axes_are_one_where_groups_do_not_fit_the_innermost(apply, shape, axis):
    features = 8 if shape == (4, 8, 8) else 6
    params = {'query': floats(8, 4, features), 'out': floats(*shape)}
    graph = uses.param_uses(apply, params, floats(2, 8))
    setting = uses.with_input_axes(TWO_OF_FOUR, graph)
    assert setting(('out',), params['out']) == NByM(2, 4, axis)
    assert setting(('query',), params['query']) == NByM(2, 4, -3)


def test_what_has_no_one_axis_is_refused():
    params = {'tied': floats(4, 4), 'opaque': floats(4, 4), 'old': floats(4, 4)}

    def apply(p, x):
        return x @ p['tied'] @ p['tied'].T @ jnp.linalg.svd(p['opaque'])[0]

    graph = uses.param_uses(apply, params, floats(2, 4))
    setting = uses.with_input_axes(TWO_OF_FOUR, graph)
    with pytest.raises(
        ValueError, match=r"tied: the model sums it along several axes, \[0, 1\] .*'tied': None"
    ):
        setting(('tied',), params['tied'])
    with pytest.raises(uses.UnsupportedPrimitive, match='no rule for svd'):
        setting(('opaque',), params['opaque'])
    assert setting(('old',), params['old']) is None
    with pytest.raises(ValueError, match='c is no leaf of the model'):
        setting(('c',), floats(4))
    setting = uses.with_input_axes({'tied': '1:2', '*': TWO_OF_FOUR}, graph)
    assert setting(('tied',), floats(4, 4)) == NByM(1, 2)


PARAMS = {
    'first': jnp.arange(1.0, 33.0).reshape(4, 8),
    'second': jnp.arange(1.0, 17.0).reshape(2, 8),
}


def _apply(params, x):
    return x @ params['first'] @ params['second'].T


def test_summaries_count_by_operations():
    graph = uses.param_uses(_apply, PARAMS, floats(3, 4))
    assert graph.leaf_flops == {('first',): 2 * 3 * 4 * 8, ('second',): 2 * 3 * 8 * 2}
    half = jax.tree.map(lambda leaf: leaf.at[:, ::2].set(0), PARAMS)
    summary = jaxpruner.summarize_sparsity(half, only_total_sparsity=True, flops=graph.leaf_flops)
    assert (summary['_flops'], summary['_flops_nnz']) == (graph.flops, graph.flops / 2)
