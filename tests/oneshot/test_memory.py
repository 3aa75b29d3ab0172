"""What calibration and pruning take: parameters and statistics once, of all layers or of one block."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.oneshot.followed_leaves import follow_named_leaves
from jaxpruner.oneshot.pruned_leaves import PrunedLeaves
from jaxpruner.oneshot.shared_inputs import input_taps, uses_by_inputs
from jaxpruner.trace.segments import ProgramCut, Segments
from jaxpruner.uses import param_uses

LAYERS, WIDTH = 24, 64


def _apply(params, x):
    def layer(x, taken):
        query, key, value = jnp.split(x @ taken['qkv'], 3, -1)
        weights = jax.nn.softmax(query @ key.T)
        x = x + weights @ value @ taken['out']
        return x + jax.nn.gelu(x @ taken['up']) @ taken['down'], None

    return jax.lax.scan(layer, x, params)[0]


SHAPES = {
    'qkv': (WIDTH, 3 * WIDTH),
    'out': (WIDTH, WIDTH),
    'up': (WIDTH, 4 * WIDTH),
    'down': (4 * WIDTH, WIDTH),
}
PARAMS = {
    name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in SHAPES.items()
}
X = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)


def _bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _peak(function, *arguments):
    found = function.lower(*arguments).compile().memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return held + found.temp_size_in_bytes


@pytest.fixture(scope='module')
def graph():
    return param_uses(_apply, PARAMS, X)


@pytest.fixture(scope='module')
def taps(graph):
    matrices = follow_named_leaves(graph).all_matrices
    return input_taps(uses_by_inputs(matrices).values(), with_gram=True)


def test_of_all_layers_at_once(graph, taps):
    totals = jax.eval_shape(taps.zeros)
    assert _bytes(totals) > LAYERS * 19 * WIDTH**2 * 4
    step = jax.jit(
        lambda totals, *arguments: taps.run(graph, totals, *arguments)[1], donate_argnums=0
    )
    assert _peak(step, totals, PARAMS, X) <= 1.1 * (_bytes(PARAMS) + _bytes(totals))


def test_of_one_layer_after_another(graph, taps):
    segments = Segments(graph, [use for uses in taps.places for use in uses])
    state = segments.begin(X)._replace(carried=[X])
    totals = jax.eval_shape(lambda: taps.zeros((0,)))
    assert _bytes(totals) < 20 * WIDTH**2 * 4
    observe = segments.observe(taps, ProgramCut(0, 0), 1)
    assert _peak(observe, totals, PARAMS, state, 3) <= 1.1 * (_bytes(PARAMS) + _bytes(totals))


def test_layers_of_a_stack_are_replaced_in_place(graph):
    of_up = next(m for m in follow_named_leaves(graph).all_matrices if m.path == ('up',))
    leaves = PrunedLeaves(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), PARAMS), donate=True)
    _, writer = leaves._functions(of_up.at_layer(0), leaves.params['up'])
    packed = jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH // 8), jnp.uint8)
    new = jax.ShapeDtypeStruct(SHAPES['up'], jnp.float32)
    kept = jax.ShapeDtypeStruct(SHAPES['up'], jnp.uint8)
    held = _bytes([PARAMS['up'], packed, new, kept])
    assert _peak(writer, PARAMS['up'], packed, new, kept, 0) <= held + 8 * _bytes(new)
