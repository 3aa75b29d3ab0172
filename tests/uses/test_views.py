"""A chain of moves of a parameter: the graph reads it as JAX computes it, and knows along which axes elements lie."""

import functools
import math

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpruner.uses import param_uses


@st.composite
def _chains(draw):
    """A shape, and functions that move the elements of an array of that shape."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    value, chain = np.zeros(shape), []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(['transpose', 'reshape', 'cut', 'broadcast', 'pad']))
        if name == 'transpose':
            order = draw(st.permutations(range(value.ndim)))
            chain.append(functools.partial(jnp.transpose, axes=order))
        elif name == 'reshape':
            sizes, rest = [], value.size
            for _ in range(draw(st.integers(0, 3))):
                sizes.append(
                    draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
                )
                rest //= sizes[-1]
            chain.append(functools.partial(jnp.reshape, shape=(*sizes, rest)))
        elif name == 'cut':
            starts = [draw(st.integers(0, n - 1)) for n in value.shape]
            steps = [draw(st.integers(1, 3)) for _ in value.shape]
            cuts = tuple(map(slice, starts, value.shape, steps))
            chain.append(lambda array, cuts=cuts: array[cuts])
        elif name == 'broadcast':
            chain.append(lambda array: jnp.broadcast_to(array, (2, *array.shape)))
        else:
            widths = [draw(st.tuples(*[st.integers(0, 2)] * 2)) for _ in value.shape]
            chain.append(functools.partial(jnp.pad, pad_width=widths))
        value = np.asarray(chain[-1](value))
    return shape, lambda array: functools.reduce(lambda array, move: move(array), chain, array)


@settings(deadline=None, max_examples=60)
@given(_chains())
def test_moves(drawn):
    shape, move = drawn
    w = jnp.arange(1.0, math.prod(shape) + 1).reshape(shape)
    moved = np.asarray(move(w))
    graph = param_uses(lambda p, x: move(p['w']) * x, {'w': w}, jnp.ones(()))
    if graph.opaque:  # such as a reshape of padding
        return
    assert (('w',) in graph.unused) == (not moved.any())
    for use in graph.get('w', ()):
        np.testing.assert_array_equal(use.read(w), moved)
        view = use.site.view
        inside = tuple(slice(*bounds) for bounds in view.region)
        indices = [np.asarray(move(jnp.asarray(index)))[inside] for index in np.indices(shape)]
        for k, axis in enumerate(view.axes):
            varying = {i for i, index in enumerate(indices) if np.diff(index, axis=k).any()}
            said = {i for factor in axis.factors if factor.size > 1 for i in factor.axes}
            assert varying <= said
            assert varying == said or any(len(factor.axes) > 1 for factor in axis.factors)
