"""Numbers of old widths: found by their values, and by comparing with a program of the new widths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner.structure import channel_groups
from structure import widths
from uses.table import floats

SHAPES = {'up': floats(3, 6), 'down': floats(6, 2)}
KEEP = {'up[1]': [0, 2, 3]}


def graph_of(function, shapes=SHAPES):
    def apply(p, x):
        return function(x @ p['up']) @ p['down']

    return channel_groups(apply, shapes, floats(5, 3)), apply


def rms_norm(h):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


def from_source(make):
    """A function that computes numbers from the width of what it gets."""
    return lambda h: h * make(h.shape[-1])


def scanned(h):
    def body(state, row):
        return state + row / h.shape[-1], None

    return lax.scan(body, jnp.zeros(h.shape[-1]), h)[0] + h


def branches(h):
    def first(h):
        return h * (1 / h.shape[-1])

    return lax.cond(h.sum() > 0, first, lambda h: h, h)


def looped(h):
    return lax.fori_loop(0, 3, lambda _, h: h / h.shape[-1] ** 0.5, h)


# Function, (operation, number, number with the new width), all of which are found by value.
CASES = {
    'mean': (rms_norm, [('div', 6, 3)]),
    'scale': (from_source(lambda width: width**-0.5), [('mul', 6**-0.5, 3**-0.5)]),
    'computed': (lambda h: h / jnp.sqrt(h.shape[-1]), None),
    'jit': (jax.jit(rms_norm), [('div', 6, 3)]),
    'scan': (scanned, [('div', 6, 3)]),
    'branches': (branches, [('mul', 1 / 6, 1 / 3)]),
    'loop': (looped, [('div', 6**0.5, 3**0.5)]),
    'none': (jnp.tanh, []),
    'fill with NaN': (lambda h: h + jnp.take(h, jnp.arange(1), axis=0), []),
}


def short(numbers):
    return [(each.primitive, float(each.old), float(each.new)) for each in numbers]


@pytest.mark.parametrize(('function', 'expected'), CASES.values(), ids=CASES)
def test_numbers_are_found(function, expected):
    graph, apply = graph_of(function)
    compared = graph.old_numbers(KEEP, apply, allow_inexact=True)
    likely = graph.old_numbers(KEEP, allow_inexact=True)
    assert compared.is_compared
    assert not likely.is_compared
    assert not compared.other_difference
    if expected is None:  # the program computes the root itself
        assert short(compared.numbers) == [('sqrt', 6.0, 3.0)]
        expected = [('div', 6**0.5, 3**0.5)]
    else:
        np.testing.assert_array_equal(
            [n[0] for n in short(compared.numbers)], [n[0] for n in expected]
        )
    for found in (likely, compared):
        for number in found.numbers:
            assert number.groups == ('up[1]',)
            assert 'test_old_numbers.py' in number.line
    for found, wanted in zip(short(likely.numbers), expected, strict=True):
        assert found == (wanted[0], pytest.approx(wanted[1]), pytest.approx(wanted[2]))


TABLE = np.linspace(0.5, 1, 6)

# Function of hidden channels, whether the kept channels 0, 2, 3 of 6 get another table than 3 channels have.
TABLES = {
    'iota': (lambda h: h * jnp.arange(h.shape[-1]), [0.0, 2.0, 3.0]),
    'constant': (
        lambda h: h * np.linspace(0.5, 1, h.shape[-1], dtype=np.float32),
        TABLE[[0, 2, 3]],
    ),
}


@pytest.mark.parametrize(('function', 'kept'), TABLES.values(), ids=TABLES)
def test_tables_are_found(function, kept):
    graph, apply = graph_of(function)
    (number,) = graph.old_numbers(KEEP, apply).numbers
    assert number.is_table
    np.testing.assert_allclose(number.old, kept, rtol=1e-6)
    assert number.new.shape == (3,)
    assert 'table (3,)' in str(graph.old_numbers(KEEP, apply))
    (likely,) = graph.old_numbers(KEEP).numbers
    assert likely.is_table
    assert likely.groups == ('up[1]',)


def test_indices_that_stay_the_first_ones_are_no_old_numbers():
    graph, apply = graph_of(TABLES['iota'][0])
    keep = {'up[1]': [0, 1, 2]}
    assert not graph.old_numbers(keep, apply).numbers
    assert str(graph.old_numbers(keep)) == 'no number has the value of an old width'
    assert str(graph.old_numbers(keep, apply)) == 'no number differs'


def test_heads_and_features_are_told_apart():
    build, arguments, smaller = widths.LIBRARIES['nnx']
    graph = channel_groups(*build(**arguments), widths.X)
    keep = {name: np.arange(group.size // 2) for name, group in graph.groups.items()}
    apply_small, _ = build(**smaller)
    found = graph.old_numbers(keep, apply_small)
    assert {number.groups for number in found.numbers} == {
        ('embed/kernel[1]',),
        ('attention/query/kernel[2]',),
    }
    assert 'normalization' in str(found)


OTHER_PROGRAMS = {
    'operation': (lambda h: jnp.sin(h), 'tanh in place of sin'),
    'more': (lambda h: jnp.tanh(h) + h, 'in place of'),
    'order': (lambda h: jnp.tanh(h) - 1, 'another'),
    'parameter': (lambda h: jnp.tanh(h) ** 3, 'y=2 in place of 3'),
}


@pytest.mark.parametrize(('function', 'text'), OTHER_PROGRAMS.values(), ids=OTHER_PROGRAMS)
def test_programs_that_differ_in_more_say_where(function, text):
    originals = {'order': lambda h: 1 - jnp.tanh(h), 'parameter': lambda h: jnp.tanh(h) ** 2}
    for name, row in OTHER_PROGRAMS.items():
        if row[0] is function:
            graph, _ = graph_of(originals.get(name, jnp.tanh))
    found = graph.old_numbers(KEEP, graph_of(function)[1], allow_inexact=True)
    assert text in found.other_difference
    assert 'the programs differ in more than numbers' in str(found)
