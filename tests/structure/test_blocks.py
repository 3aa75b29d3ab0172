"""Residual blocks are left out as a whole, where that is the same as zeroing them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpruner.structure import channel_groups
from structure.values import values_like
from uses.models import MODELS
from uses.table import floats

WEIGHT = floats(8, 8)


def make(*layers):
    """A stream of width 8 with these layers, functions of the stream and of a leaf `w0`, `w1`, …"""
    shapes = {f'w{number}': WEIGHT for number in range(len(layers))}
    shapes |= {'up': floats(3, 8), 'down': floats(8, 2)}

    def apply(p, x):
        x = x @ p['up']
        for number, layer in enumerate(layers):
            x = layer(x, p[f'w{number}'])
        return x @ p['down']

    params, inputs = values_like(shapes, (floats(5, 3),))
    return channel_groups(apply, params, *inputs), params, inputs


def residual(x, w):
    return x + jnp.tanh(x @ w)


# A layer, and whether leaving it out is the same as zeroing it; `None` where it is no block.
LAYERS = {
    'residual': (residual, True),
    'normed': (lambda x, w: x + (x / jnp.sqrt((x * x).mean(-1, keepdims=True))) @ w, True),
    'in two additions': (lambda x, w: x + jnp.tanh(x @ w) + jnp.sin(x) @ w, None),
    'gate that is open': (lambda x, w: x + jax.nn.sigmoid(x @ w), False),
    'no residual': (lambda x, w: jnp.tanh(x @ w), None),
    'of another value': (lambda x, w: jnp.sin(x) + jnp.tanh(x) @ w, None),
    'repeated': (lambda x, w: x + (x @ w)[:1], None),
}


@pytest.mark.parametrize(('layer', 'exact'), LAYERS.values(), ids=LAYERS)
def test_a_layer_is_a_block_if_it_adds_to_the_stream(layer, exact):
    graph, params, inputs = make(residual, layer, residual)
    assert list(graph.blocks) == ['w0', *['w1'] * (exact is not None), 'w2']
    if exact is None:
        return
    assert graph.blocks['w1'].exact == exact
    small = graph.drop_blocks(params, ['w1'], allow_inexact=not exact)
    small_apply = graph.without_blocks(['w1'], allow_inexact=not exact).small_apply({})
    expected = graph.trace.source.apply_fn({**params, 'w1': jnp.zeros((8, 8))}, *inputs)
    is_close = np.allclose(small_apply(small, *inputs), expected, rtol=1e-5, atol=1e-5)
    assert is_close == exact


def parallel(p, x):
    x = x @ p['up']
    return (x + jnp.tanh(x @ p['a']) + jnp.sin(x @ p['b'])) @ p['down']


def nested(p, x):
    x = x @ p['up']
    inner = x + jnp.tanh(x @ p['a'])
    return (x + jnp.sin(inner @ p['b'])) @ p['down']


def activated(p, x):
    x = jax.nn.relu(residual(x @ p['up'], p['a']))
    return jax.nn.relu(residual(x, p['b'])) @ p['down']


# A model, and the leaves of each of its blocks.
FORMS = [
    (parallel, {'a': ['a'], 'b': ['b']}),
    (nested, {'a': ['a'], 'b': ['a', 'b']}),
    (activated, {'a': ['a'], 'b': ['b']}),
]


@pytest.mark.parametrize(('apply_fn', 'blocks'), FORMS)
def test_other_forms_of_streams(apply_fn, blocks):
    shapes = {'up': floats(3, 8), 'a': WEIGHT, 'b': WEIGHT, 'down': floats(8, 2)}
    params, inputs = values_like(shapes, (floats(5, 3),))
    graph = channel_groups(apply_fn, params, *inputs)
    found = {name: sorted(path[0] for path in block.paths) for name, block in graph.blocks.items()}
    assert found == blocks
    for name, leaves in blocks.items():
        found = graph.without_blocks([name]).small_apply({})(
            graph.drop_blocks(params, [name]), *inputs
        )
        zeroed = params | {leaf: jnp.zeros((8, 8)) for leaf in leaves}
        np.testing.assert_allclose(found, apply_fn(zeroed, *inputs), rtol=1e-5, atol=1e-5)


def test_blocks_of_a_framework():
    apply_fn, params, inputs = MODELS['linen transformer'].make()
    blocks = channel_groups(apply_fn, params, *inputs).blocks
    of_norms = {name.split('/')[2]: block.parameters for name, block in blocks.items()}
    assert of_norms == {'LayerNorm_0': 304, 'LayerNorm_1': 296}


def test_models_without_blocks_are_trained_cut_and_made_shallower_again():
    graph, params, inputs = make(residual, residual, residual)
    tx = optax.adam(1e-2)
    state = tx.init(params)
    shallow = graph.without_blocks(['w1'])
    small, small_state = graph.drop_blocks((params, state), ['w1'])
    assert jax.tree.structure(small_state) == jax.tree.structure(tx.init(small))
    assert small['w1'] is None

    gradients = jax.grad(lambda p: jnp.sum(shallow.small_apply({})(p, *inputs) ** 2))(small)
    updates, _ = tx.update(gradients, small_state, small)
    assert updates['w1'] is None

    (group,) = shallow.groups
    keep = {group: [0, 3, 5]}
    narrow = shallow.shrink(small, keep)
    assert narrow['w0'].shape == (3, 3)
    again = shallow.without_blocks(['w0'])
    assert list(again.blocks) == ['w2']
    less = again.shrink(shallow.drop_blocks(small, ['w0']), keep)
    assert len(jax.tree.leaves(less)) == 3
    other = jnp.ones((2, 7, 3))
    assert again.small_apply(keep)(less, other).shape == (2, 7, 2)


def test_what_is_no_exact_block_is_refused():
    graph, params, _ = make(residual, lambda x, w: x + jnp.cos(x @ w))
    with pytest.raises(KeyError, match=r"no residual block 'w3'.*w"):
        graph.without_blocks(['w3'])
    with pytest.raises(ValueError, match=r"'w1' .*add: the branch is not zero .*test_blocks\.py"):
        graph.drop_blocks(params, ['w1'])
