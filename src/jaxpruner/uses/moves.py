"""Moves and combines views, with one function for each operation on values.

`steps` are added to the steps by which an exact view is read.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpruner.uses.views import (
    Factor,
    Factors,
    Step,
    View,
    ViewAxis,
    Views,
    all_but,
    axis_of,
    copies,
    mixed,
    size_of,
)


def transpose(view: View, permutation: Iterable[int], *steps: Step) -> View:
    """The view with its axes in another order, or with some of them."""
    axes = [view.axes[i] for i in permutation]
    return view.moved(axes, *steps)


def broadcast(
    view: View, new_shape: Sequence[int], dimensions: Iterable[int], *steps: Step
) -> View:
    """The view of a value that is copied along new axes and along those of length 1.

    `dimensions` has for each axis of the value the axis of the result.
    """
    axes = list(map(copies, new_shape))
    for axis, target in zip(view.axes, dimensions, strict=True):
        length = new_shape[target]
        if axis.length == length:
            axes[target] = axis
        else:
            axes[target] = axis_of(*axis.factors, Factor((), length))
    return view.moved(axes, *steps)


def align(view: View, shape: Sequence[int]) -> View:
    """The view in an elementwise operation of this shape, with copies for scalars and axes of length 1."""
    rank = len(shape)
    last_axes = range(rank - len(view.axes), rank)
    return broadcast(view, shape, last_axes)


def cut(view: View, taken: Sequence[range], *steps: Step) -> View | None:
    """The view of a slice, with these elements of each axis; `None` if nothing of the parameter is in it."""
    axes = []
    for axis, indices in zip(view.axes, taken, strict=True):
        part = _cut_axis(axis, indices)
        if part is None:
            return None
        axes.append(part)
    return view.moved(axes, *steps)


def _cut_axis(axis: ViewAxis, taken: range) -> ViewAxis | None:
    first = max(0, _ceil_div(axis.start - taken.start, taken.step))
    after = _ceil_div(axis.stop - taken.start, taken.step)
    inside = taken[first:after]
    if after <= first or not inside:
        return None
    start = inside[0] - axis.start
    stop = inside[-1] - axis.start + 1
    factors = _cut_factors(axis.factors, range(start, stop, taken.step))
    return ViewAxis(factors, len(taken), first)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _cut_factors(factors: Factors, taken: range) -> Factors:
    """The factors of the taken elements, the last of which lies before `taken.stop`."""
    count = len(taken)
    if count == size_of(factors):
        return factors
    first = factors[0]
    others = factors[1:]
    if not others:
        return (Factor(first.axes, count),)
    inner = size_of(others)
    step = taken.step
    outer_start, inner_start = divmod(taken.start, inner)
    outer_last, inner_last = divmod(taken.stop - 1, inner)
    if outer_start == outer_last:
        return _cut_factors(others, range(inner_start, inner_last + 1, step))
    if step == 1 and inner_start == 0 and inner_last == inner - 1:
        return (Factor(first.axes, count // inner), *others)
    if step % inner == 0:  # each step takes the same element of the inner factors
        outer = range(outer_start, outer_last + 1, step // inner)
        return _cut_factors((first,), outer)
    return mixed(factors, count).factors


def shift(view: View, axis: int, before: int, after: int, *steps: Step) -> View:
    """The view of a value between other elements of an axis, as in a concatenation or padding."""
    axes = list(view.axes)
    axes[axis] = shift_axis(axes[axis], before, after)
    return view.moved(axes, *steps)


def shift_axis(axis: ViewAxis, before: int, after: int) -> ViewAxis:
    """An axis with `before` more elements in front of it and `after` more behind it."""
    length = before + axis.length + after
    return axis._replace(length=length, start=before + axis.start)


def drop(view: View, axes: Sequence[int]) -> View:
    """The view after a reduction along some axes."""
    kept = [view.axes[i] for i in all_but(axes, view.axes)]
    return view.computed(kept)


def join(views: Iterable[View]) -> Views:
    """The views of a value computed from values with these views: one for each parameter and region."""
    joined: dict[Any, View] = {}
    for view in views:
        key = (view.leaf, view.region, view.stack)
        axes = view.axes
        if key in joined:
            axes = map(_join_axis, joined[key].axes, view.axes)
        joined[key] = view.computed(axes)
    return tuple(joined.values())


def _join_axis(first: ViewAxis, second: ViewAxis) -> ViewAxis:
    if first == second or not second.along:
        return first
    if not first.along:
        return second
    both = mixed((*first.factors, *second.factors), first.size)
    return first._replace(factors=both.factors)
