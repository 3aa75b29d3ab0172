"""Unification of axes: random programs that move elements, against the zeroed ones."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.structure import channel_groups
from structure.doubles import keep_of

SPLITS = {4: (2, 2), 6: (2, 3), 8: (2, 4), 12: (3, 4)}


@st.composite
def step(draw, shape):
    """A function of a value of this shape that moves its elements, or combines parts of it."""
    axis = draw(st.integers(0, len(shape) - 1))
    before, size, after = shape[:axis], shape[axis], shape[axis + 1 :]
    order = draw(st.permutations(range(len(shape))))
    moves = {
        'transpose': lambda x: x.transpose(order),
        'double': lambda x: jnp.concatenate([x, 2 * x], axis),
        'square': lambda x: x * jnp.tanh(x),
    }
    if size in SPLITS:
        moves['take apart'] = lambda x: x.reshape(*before, *SPLITS[size], *after)
    if after:
        moves['merge'] = lambda x: x.reshape(*before, size * after[0], *after[1:])
    if len(shape) > 1 and shape[0] == shape[-1]:
        moves['add'] = lambda x: x + x.swapaxes(0, -1)
    if size % 2 == 0:
        moves['halves'] = lambda x: jnp.split(x, 2, axis)[0] + jnp.tanh(jnp.split(x, 2, axis)[1])
    if size > 1:
        place = draw(st.integers(1, size - 1))
        moves['rejoin'] = lambda x: jnp.concatenate(jnp.split(x, [place], axis)[::-1], axis)
    return moves[draw(st.sampled_from(sorted(moves)))]


@st.composite
def programs(draw):
    """A shape, and functions to be called one after the other."""
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3)))
    value = np.zeros(shape, np.float32)
    functions, count = [], draw(st.integers(1, 5))
    while value.size <= 500 and len(functions) < count:
        functions.append(draw(step(value.shape)))
        value = np.asarray(functions[-1](value))
    return shape, functions


@given(programs(), st.integers(0, 9))
def test_any_program_of_moves_is_cut_as_its_axes_say(program, seed):
    shape, functions = program
    values = jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

    def apply(x):
        for function in functions:
            x = function(x)
        return jnp.sum(x)

    graph = channel_groups(apply, values)
    rng = np.random.default_rng(seed)
    exact = [group for group in graph.groups.values() if group.exact]
    keep = {group.name: keep_of(group, 0.5, rng) for group in exact}
    small, zeroed = graph.shrink(values, keep, verify=False), graph.zeroed(values, keep)
    np.testing.assert_array_equal(np.sort(small[small != 0]), np.sort(zeroed[zeroed != 0]))
    small_apply = graph.small_apply(keep)
    np.testing.assert_allclose(small_apply(small), apply(zeroed), rtol=1e-3, atol=1e-3)
