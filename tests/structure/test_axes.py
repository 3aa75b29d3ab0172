"""Unification of axes: random programs that move elements, against the same programs with permuted channels."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.structure import channel_groups
from jaxpruner.structure.analysis.axes import Pin, atom, atoms, product, total
from jaxpruner.structure.analysis.positions import kept_positions, occurrences
from jaxpruner.structure.analysis.ties import Ties
from structure import permuted
from structure.doubles import keep_of


def make_ties():
    return Ties(lambda reason: Pin(reason, 'reshape', lambda: 'model.py:1'))


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
def test_any_program_of_moves_is_permuted_as_its_axes_say(program, seed):
    shape, functions = program
    values = jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

    def apply(x):
        for function in functions:
            x = function(x)
        return jnp.sum(x)

    graph = channel_groups(apply, values)
    permuted.check(graph, values, (), seed)
    rng = np.random.default_rng(seed)
    exact = [group for group in graph.groups.values() if group.exact]
    keep = {group.name: keep_of(group, 0.5, rng) for group in exact}
    small, zeroed = graph.shrink(values, keep, verify=False), graph.zeroed(values, keep)
    np.testing.assert_array_equal(graph.expand(small, keep), zeroed)
    small_apply = graph.small_apply(keep)
    np.testing.assert_allclose(small_apply(small), apply(zeroed), rtol=1e-3, atol=1e-3)


def test_products_and_sums_are_flat():
    a, b, c = atom(2), atom(3), atom(4)
    assert product([product([a, b]), atom(1), c]).parts == (a, b, c)
    assert total([total([a, b]), atom(0), c]).parts == (a, b, c)
    assert product([a, atom(1)]) is a
    assert total([a]) is a


def test_atoms_that_are_unified_are_one():
    a, b, c = atom(6), atom(6), atom(6)
    ties = make_ties()
    ties.unify(a, b)
    ties.unify(b, c)
    assert a.resolved() is c.resolved()
    ties.pin(a, 'because')
    assert c.pin.reason == 'because'


def test_an_atom_is_taken_apart_by_what_it_meets():
    whole = atom(24)
    ties = make_ties()
    heads, features = atom(4), atom(6)
    ties.unify(whole, product([heads, features]))
    ties.unify(whole, product([atom(2), atom(12)]))
    assert [each.size for each in atoms(whole)] == [2, 2, 6]
    assert [each.size for each in atoms(heads)] == [2, 2]


def test_a_product_of_a_sum_is_a_sum_of_products():
    ties = make_ties()
    fused = total([atom(8), atom(16)])
    outer, inner = atom(6), atom(4)
    ties.unify(product([outer, inner]), fused)
    assert [[part.size for part in segment.parts] for segment in fused.parts] == [[2, 4], [4, 4]]
    first, second = fused.parts
    assert first.parts[1] is second.parts[1] is inner.resolved()
    assert [part.size for part in outer.parts] == [2, 4]


@pytest.mark.parametrize(
    ('left', 'right', 'reason'),
    [
        (product([atom(4), atom(3)]), product([atom(3), atom(4)]), 'cuts across these sizes'),
        (product([atom(3), atom(4)]), total([atom(5), atom(7)]), 'cuts across the parts'),
        (atom(3), atom(4), 'sizes 3 and 4 meet'),
    ],
)
def test_what_does_not_fit_is_pinned(left, right, reason):
    make_ties().unify(left, right)
    for each in (*atoms(left), *atoms(right)):
        assert reason in str(each.pin)
        assert 'model.py:1' in str(each.pin)


def test_pins_stay_with_parts_and_the_first_reason_holds():
    whole = atom(6)
    ties = make_ties()
    ties.pin(whole, 'first')
    ties.pin(whole, 'second')
    ties.unify(whole, product([atom(2), atom(3)]))
    assert [each.pin.reason for each in atoms(whole)] == ['first', 'first']


def test_a_regular_end_stays_free_of_an_irregular_beginning():
    ties = make_ties()
    last = atom(5)
    ties.align_factors([atom(4), atom(3), last], [atom(3), atom(4), atom(5)])
    assert last.pin is None


@given(st.data())
def test_positions_of_all_atoms_cover_an_axis(data):
    def draw_axis(depth):
        if not depth or data.draw(st.booleans()):
            return atom(data.draw(st.integers(1, 4)))
        parts = [draw_axis(depth - 1) for _ in range(data.draw(st.integers(2, 3)))]
        return data.draw(st.sampled_from([product, total]))(parts)

    axis = draw_axis(2)
    keep = {}
    removed = np.zeros(axis.size, bool)
    for found in occurrences(axis):
        kept = np.flatnonzero(
            data.draw(st.lists(st.booleans(), min_size=found.atom.size, max_size=found.atom.size))
        )
        keep.setdefault(found.atom, kept)
        gone = np.setdiff1d(np.arange(found.atom.size), keep[found.atom])
        removed[found.positions()[gone].ravel()] = True
    assert kept_positions(axis, keep).tolist() == np.flatnonzero(~removed).tolist()
