"""A chain of moves, followed by a view, against the same moves of NumPy on arrays of indices."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.uses import moves, reshaping, views
from jaxpruner.uses.views import NoRuleError


@st.composite
def _factorizations(draw, size):
    sizes = []
    for _ in range(draw(st.integers(0, 3))):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        size //= sizes[-1]
    return [*sizes, size]


@st.composite
def _chains(draw):
    """A shape and some moves: name -> function on a view with its shape, and the same on an array."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    start, chain = tuple(shape), []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(['transpose', 'reshape', 'cut', 'broadcast', 'shift']))
        if kind == 'transpose':
            order = draw(st.permutations(range(len(shape))))
            chain.append((kind, order))
            shape = [shape[i] for i in order]
        elif kind == 'reshape':
            shape = draw(_factorizations(math.prod(shape)))
            chain.append((kind, tuple(shape)))
        elif kind == 'cut':
            taken = []
            for n in shape:
                first = draw(st.integers(0, n - 1))
                limit = draw(st.integers(first + 1, n))
                taken.append(range(first, limit, draw(st.integers(1, 3))))
            chain.append((kind, taken))
            shape = list(map(len, taken))
        elif kind == 'broadcast':
            chain.append((kind, 2))
            shape = [2, *shape]
        else:
            axis, before, after = (
                draw(st.integers(0, len(shape) - 1)),
                draw(st.integers(0, 4)),
                draw(st.integers(0, 4)),
            )
            chain.append((kind, (axis, before, after)))
            shape[axis] += before + after
    return start, chain


def _on_view(view, kind, given):
    if kind == 'transpose':
        return moves.transpose(view, given)
    if kind == 'reshape':
        return reshaping.reshape(view, given)
    if kind == 'cut':
        return moves.cut(view, given)
    if kind == 'broadcast':
        return moves.broadcast(view, (given, *view.shape), range(1, len(view.axes) + 1))
    return moves.shift(view, *given)


def _on_array(array, kind, given):
    if kind == 'transpose':
        return array.transpose(given)
    if kind == 'reshape':
        return array.reshape(given)
    if kind == 'cut':
        return array[np.ix_(*given)]
    if kind == 'broadcast':
        return np.broadcast_to(array, (given, *array.shape))
    axis, before, after = given
    padding = [(0, 0)] * array.ndim
    padding[axis] = (before, after)
    return np.pad(array, padding, constant_values=-1)


@given(_chains())
def test_moves(drawn):
    shape, chain = drawn
    view = views.whole(0, shape)
    indices = list(np.indices(shape))
    for kind, values in chain:
        try:
            view = _on_view(view, kind, values)
        except NoRuleError:
            return
        indices = [_on_array(array, kind, values) for array in indices]
        if view is None:
            assert (indices[0] == -1).all()
            return
    assert view.shape == indices[0].shape
    # Inside the region, and only there, the elements are the parameter's.
    inside = np.zeros(indices[0].shape, bool)
    inside[tuple(slice(*bounds) for bounds in view.region)] = True
    np.testing.assert_array_equal(indices[0] >= 0, inside)
    part = [array[tuple(slice(*bounds) for bounds in view.region)] for array in indices]
    for k, axis_of_view in enumerate(view.axes):
        factors = axis_of_view.factors
        assert axis_of_view.size == part[0].shape[k]
        varying = {axis for axis, array in enumerate(part) if (np.diff(array, axis=k) != 0).any()}
        said = {axis for factor in factors if factor.size > 1 for axis in factor.axes}
        assert varying <= said
        if all(len(factor.axes) < 2 for factor in factors):
            assert varying == said
