"""What moving or combining values does to their views: one function for each operation."""

import math
from collections.abc import Sequence
from typing import Any

from jaxpruner.uses.views import Factor, Factors, View, along, computed, copies, mixed, moved


def transpose(view: View, permutation: Sequence[int], *steps: Any) -> View:
    """The axes in another order, or some of them.

    >>> from jaxpruner.uses.views import whole
    >>> transpose(whole(0, (2, 3)), (1,)).region
    ((0, 3),)
    """
    return moved(
        view, [view.axes[i] for i in permutation], [view.region[i] for i in permutation], *steps
    )


def broadcast(
    view: View,
    shape: Sequence[int],
    new_shape: Sequence[int],
    dimensions: Sequence[int],
    *steps: Any,
) -> View:
    """Copies along new axes and along those of length 1.

    Args:
      view: of a value.
      shape: the value's shape.
      new_shape: that of the result.
      dimensions: for each axis of the value, which axis of the result it is.

    >>> from jaxpruner.uses.views import whole
    >>> broadcast(whole(0, (3,)), (3,), (2, 3), (1,)).axes
    ((Factor(axes=(), size=2),), (Factor(axes=(0,), size=3),))
    """
    axes, region = [copies(n) for n in new_shape], [(0, n) for n in new_shape]
    for i, target in enumerate(dimensions):
        if shape[i] == new_shape[target]:
            axes[target], region[target] = view.axes[i], view.region[i]
        else:
            axes[target] = (*view.axes[i], *copies(new_shape[target]))
    return moved(view, axes, region, *steps)


def cut(
    view: View,
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int] | None,
    *steps: Any,
) -> View | None:
    """A slice of the value; `None` where it holds nothing of the parameter.

    >>> from jaxpruner.uses.views import whole
    >>> cut(whole(0, (8,)), (2,), (4,), None).axes
    ((Factor(axes=(0,), size=2),),)
    """
    axes, region = [], []
    strides = strides or [1] * len(starts)
    for factors, (low, high), start, limit, stride in zip(
        view.axes, view.region, starts, limits, strides, strict=True
    ):
        taken = range(start, limit, stride)
        first = max(0, -(-(low - start) // stride))
        after = min(len(taken), -(-(high - start) // stride))
        if first >= after:
            return None
        axes.append(_cut_factors(factors, taken[first] - low, taken[after - 1] - low + 1, stride))
        region.append((first, after))
    return moved(view, axes, region, *steps)


def _cut_factors(factors: Factors, start: int, stop: int, stride: int) -> Factors:
    count = len(range(start, stop, stride))
    if count == math.prod(factor.size for factor in factors):
        return factors
    if len(factors) == 1:
        return (Factor(factors[0].axes, count),)
    inner = math.prod(factor.size for factor in factors[1:])
    if start // inner == (stop - 1) // inner:
        return _cut_factors(factors[1:], start % inner, (stop - 1) % inner + 1, stride)
    if stride == 1 and start % inner == 0 and stop % inner == 0:
        return (Factor(factors[0].axes, count // inner), *factors[1:])
    if stride % inner == 0:  # the same element of each turn of the inner factors
        return _cut_factors(factors[:1], start // inner, (stop - 1) // inner + 1, stride // inner)
    return mixed(factors, count)


def shift(view: View, axis: int, by: int, *steps: Any) -> View:
    """The value stands further along an axis: in a concatenation, or padded.

    >>> from jaxpruner.uses.views import whole
    >>> shift(whole(0, (8,)), 0, 2).region
    ((2, 10),)
    """
    low, high = view.region[axis]
    region = [*view.region[:axis], (low + by, high + by), *view.region[axis + 1 :]]
    return moved(view, view.axes, region, *steps)


def drop(view: View, axes: Sequence[int]) -> View:
    """What is left after a reduction along some axes.

    >>> from jaxpruner.uses.views import whole
    >>> drop(whole(0, (2, 3)), (0,)).axes
    ((Factor(axes=(1,), size=3),),)
    """
    kept = [i for i in range(len(view.axes)) if i not in axes]
    return computed(view, [view.axes[i] for i in kept], [view.region[i] for i in kept])


def joined(views: Sequence[View]) -> tuple[View, ...]:
    """The views of a value computed from values with these: one for each parameter and region.

    >>> from jaxpruner.uses.views import whole
    >>> joined([whole(0, (2,)), computed(whole(0, (2,)), [copies(2)])])[0].axes
    ((Factor(axes=(0,), size=2),),)
    """
    found: dict[Any, View] = {}
    for view in views:
        key = (view.leaf, view.region, view.stack)
        known = found.get(key)
        axes = view.axes if known is None else map(_join_axis, known.axes, view.axes)
        found[key] = computed(view, tuple(axes))
    return tuple(found.values())


def _join_axis(first: Factors, second: Factors) -> Factors:
    if first == second or not along(second):
        return first
    if not along(first):
        return second
    return mixed((*first, *second), math.prod(factor.size for factor in first))
