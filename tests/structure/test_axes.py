"""Unification of axes: random programs that move elements, against the zeroed ones."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.structure import channel_groups
from structure.doubles import keep_of


def divisors(number):
    return [each for each in range(2, number) if number % each == 0]


@st.composite
def reshaped(draw, shape):
    """Another shape of as many elements: axes are merged or taken apart."""
    shape = list(shape)
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(shape) - 1))
        if divisors(shape[i]) and draw(st.booleans()):
            outer = draw(st.sampled_from(divisors(shape[i])))
            shape[i : i + 1] = [outer, shape[i] // outer]
        elif i + 1 < len(shape):
            shape[i : i + 2] = [shape[i] * shape[i + 1]]
    return tuple(shape)


@st.composite
def step(draw, shape):
    """A function of a value of this shape that moves its elements, or combines parts of it."""
    choice = draw(
        st.sampled_from(['reshape', 'transpose', 'split', 'rejoin', 'double', 'square', 'add'])
    )
    axis = draw(st.integers(0, len(shape) - 1))
    if choice == 'reshape':
        new_shape = draw(reshaped(shape))
        return lambda x: x.reshape(new_shape)
    if choice == 'transpose':
        order = draw(st.permutations(range(len(shape))))
        return lambda x: x.transpose(order)
    if choice == 'square':
        return lambda x: x * jnp.tanh(x)
    if choice == 'add' and len(shape) > 1 and shape[0] == shape[-1]:
        return lambda x: x + x.swapaxes(0, -1)
    if choice == 'double':
        return lambda x: jnp.concatenate([x, 2 * x], axis)
    if shape[axis] > 1:
        place = draw(st.integers(1, shape[axis] - 1))

        def cut(x):
            first, second = jnp.split(x, [place], axis)
            if choice == 'split' and 2 * place == x.shape[axis]:
                return first + jnp.tanh(second)
            return jnp.concatenate([second, first], axis)

        return cut
    return lambda x: x


@st.composite
def programs(draw):
    """A shape, and functions to be called one after the other."""
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3)))
    value = np.zeros(shape, np.float32)
    functions = []
    for _ in range(draw(st.integers(1, 5))):
        function = draw(step(value.shape))
        functions.append(function)
        value = np.asarray(function(value))
        if value.size > 500:
            break
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
