"""What moving or combining values does to their views: one function for each operation.

`steps` is what an exact view adds to how it is read.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpruner.uses.views import Axis, Factor, Factors, View, Views, axis_of, copies, mixed


def transpose(view: View, permutation: Iterable[int], *steps: Any) -> View:
    """The axes in another order, or some of them."""
    return view.moved([view.axes[i] for i in permutation], *steps)


def broadcast(view: View, new_shape: Sequence[int], dimensions: Iterable[int], *steps: Any) -> View:
    """Copies along new axes and along those of length 1.

    `dimensions` says for each axis of the value which axis of the result it is.
    """
    axes = list(map(copies, new_shape))
    for axis, target in zip(view.axes, dimensions, strict=True):
        length = new_shape[target]
        axes[target] = axis if axis.length == length else axis_of(*axis.factors, Factor((), length))
    return view.moved(axes, *steps)


def cut(view: View, taken: Sequence[range], *steps: Any) -> View | None:
    """A slice of the value: the elements that are taken of each axis.

    `None` where the slice holds nothing of the parameter.
    """
    axes = []
    for axis, indices in zip(view.axes, taken, strict=True):
        part = _cut_axis(axis, indices)
        if part is None:
            return None
        axes.append(part)
    return view.moved(axes, *steps)


def _cut_axis(axis: Axis, taken: range) -> Axis | None:
    first = max(0, -(-(axis.start - taken.start) // taken.step))
    after = min(len(taken), -(-(axis.stop - taken.start) // taken.step))
    if first >= after:
        return None
    last = taken[after - 1] - axis.start
    inside = range(taken[first] - axis.start, last + 1, taken.step)
    return Axis(_cut_factors(axis.factors, inside), len(taken), first)


def _cut_factors(factors: Factors, taken: range) -> Factors:
    """The factors of some elements; the last one that is taken stands before `taken.stop`."""
    count = len(taken)
    if count == math.prod(factor.size for factor in factors):
        return factors
    first, *others = factors
    if not others:
        return (Factor(first.axes, count),)
    start, stop, step = taken.start, taken.stop, taken.step
    inner = math.prod(factor.size for factor in others)
    if start // inner == (stop - 1) // inner:
        return _cut_factors(factors[1:], range(start % inner, (stop - 1) % inner + 1, step))
    if step == 1 and start % inner == 0 and stop % inner == 0:
        return (Factor(first.axes, count // inner), *others)
    if step % inner == 0:  # the same element of each turn of the inner factors
        outer = range(start // inner, (stop - 1) // inner + 1, step // inner)
        return _cut_factors((first,), outer)
    return mixed(factors, count).factors


def shift(view: View, axis: int, before: int, after: int, *steps: Any) -> View:
    """The value between other elements of an axis: in a concatenation, or padded."""
    axes = list(view.axes)
    start, length = axes[axis].start, axes[axis].length
    axes[axis] = axes[axis]._replace(length=before + length + after, start=before + start)
    return view.moved(axes, *steps)


def drop(view: View, axes: Sequence[int]) -> View:
    """What is left after a reduction along some axes."""
    return view.computed(axis for i, axis in enumerate(view.axes) if i not in axes)


def join(views: Iterable[View]) -> Views:
    """The views of a value computed from values with these: one for each parameter and region."""
    joined: dict[Any, View] = {}
    for view in views:
        key = (view.leaf, view.region, view.stack)
        axes = view.axes
        if key in joined:
            axes = map(_join_axis, joined[key].axes, view.axes)
        joined[key] = view.computed(axes)
    return tuple(joined.values())


def _join_axis(first: Axis, second: Axis) -> Axis:
    if first == second or not second.along:
        return first
    if not first.along:
        return second
    both = mixed((*first.factors, *second.factors), first.size)
    return first._replace(factors=both.factors)
