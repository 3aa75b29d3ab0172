"""Reshapes views: axes are split into factors, which are put together again."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxpruner.uses.views import Factor, Factors, NoRuleError, Range, Step, View, ViewAxis, mixed


def reshape(view: View, new_shape: Sequence[int], *steps: Step) -> View:
    """The view of a value in another shape."""
    axes = []
    for runs in matching_runs(view.shape, new_shape):
        axes += _regrouped(view.axes[runs.old], new_shape[runs.new])
    return view.moved(axes, *steps)


class Runs(NamedTuple):
    """A run of old axes and a run of new ones that hold the same elements."""

    old: slice
    new: slice


def matching_runs(shape: Sequence[int], new_shape: Sequence[int]) -> list[Runs]:
    """Finds the shortest runs of axes that hold the same elements in two shapes, one after the other.

    >>> for runs in matching_runs((6, 4, 5), (2, 3, 20)):
    ...     print(runs.old, runs.new)
    slice(0, 1, None) slice(0, 2, None)
    slice(1, 3, None) slice(2, 3, None)
    """
    if 0 in shape:
        raise NoRuleError('reshape of an empty array')
    all_runs: list[Runs] = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        old_end = min(i + 1, len(shape))
        new_end = min(j + 1, len(new_shape))
        old_size = math.prod(shape[i:old_end])
        new_size = math.prod(new_shape[j:new_end])
        while old_size != new_size:
            if old_size < new_size:
                old_size *= shape[old_end]
                old_end += 1
            else:
                new_size *= new_shape[new_end]
                new_end += 1
        if new_end == j and all_runs:  # lengths of 1 at the end
            start = all_runs[-1].old.start
            all_runs[-1] = all_runs[-1]._replace(old=slice(start, old_end))
        else:
            runs = Runs(slice(i, old_end), slice(j, new_end))
            all_runs.append(runs)
        i, j = old_end, new_end
    return all_runs


def _regrouped(axes: Sequence[ViewAxis], sizes: Sequence[int]) -> list[ViewAxis]:
    """Puts the elements of some axes along axes of other lengths."""
    ranges = _ranges(*_linear_range(axes), sizes)
    factors: Factors = ()
    for axis in axes:
        factors += axis.factors
    dealt = _deal(factors, [stop - start for start, stop in ranges])
    regrouped = []
    for number, length in enumerate(sizes):
        start, _ = ranges[number]
        regrouped.append(ViewAxis(dealt[number], length, start))
    return regrouped


def _linear_range(axes: Sequence[ViewAxis]) -> Range:
    """The range of the parameter's elements, counted through all of these axes. They must be consecutive."""
    first, count = 0, 1
    for axis in axes:
        if count > 1 and not axis.is_whole:
            raise NoRuleError('reshape of a concatenation')
        first = first * axis.length + axis.start
        count *= axis.size
    return first, first + count


def _ranges(start: int, stop: int, sizes: Sequence[int]) -> list[Range]:
    """A range of elements as a region of axes of these sizes."""
    region: list[Range] = []
    inner = math.prod(sizes)
    for size in sizes:
        inner //= size
        low, high = start // inner, -(-stop // inner)
        region.append((low, high))
        if high - low == 1:
            start, stop = start - low * inner, stop - low * inner
        elif start % inner or stop % inner:
            raise NoRuleError('reshape of a concatenation')
        else:
            start, stop = 0, inner
    return region


class _Dealt(NamedTuple):
    """Factors that are dealt out to axes.

    Attributes:
      left: the factors that are left.
      axes: the factors of each axis.
      missing: the size that the last of these axes lacks; 1 if it is complete.
    """

    left: Factors
    axes: list[Factors]
    missing: int


def _deal(factors: Factors, sizes: Sequence[int]) -> list[Factors]:
    """Deals the factors out to axes of these sizes, in order.

    Dealing begins at the front, and stops at the first axis that no factor fits. Take a parameter of shape (4, 6, 5)
    that becomes (3, 8, 5). 3 does not divide the factor of 4, and 4 does not divide the axis of 3. The other axes are
    dealt from the back, which finds that the last axis is the parameter's axis of 5. The axes in between are mixed:
    here the axes of 3 and 8 hold elements along the parameter's axes 0 and 1.

    >>> factors = Factor((0,), 4), Factor((1,), 6), Factor((2,), 5)
    >>> for axis in _deal(factors, [3, 8, 5]):
    ...     print(*axis)
    0+1:3
    0+1:8
    2:5
    """
    left, dealt, missing = _deal_from_front(factors, sizes)
    if missing == 1:
        if left and dealt:  # axes of length 1
            dealt[-1] += left
        return dealt
    first = len(dealt) - 1  # the axis at which dealing from the front has stopped
    sizes_from_back = [*reversed(sizes[first + 1 :]), missing]
    from_behind = _deal_from_front(left[::-1], sizes_from_back)
    last = len(sizes) - len(from_behind.axes)  # the axis at which dealing from the back has stopped
    behind = [axis[::-1] for axis in reversed(from_behind.axes)]
    if last == first:
        dealt[first] += behind.pop(0)
        return [*dealt, *behind]
    dealt[first] += mixed(from_behind.left, missing).factors
    for size in sizes[first + 1 : last]:
        dealt.append(mixed(from_behind.left, size).factors)
    before = mixed(from_behind.left, from_behind.missing)
    behind[0] = before.factors + behind[0]
    return [*dealt, *behind]


def _deal_from_front(factors: Factors, sizes: Sequence[int]) -> _Dealt:
    """Deals factors out as long as a factor divides the size that an axis lacks, or the size divides the factor."""
    left = list(factors)
    dealt = []
    for size in sizes:
        taken: list[Factor] = []
        if size == 1 and left and left[0].size == 1:
            taken.append(left.pop(0))
        while size > 1:
            factor = left[0]
            if size % factor.size == 0:
                taken.append(left.pop(0))
                size //= factor.size
            elif factor.size % size == 0:
                taken.append(Factor(factor.axes, size))
                left[0] = Factor(factor.axes, factor.size // size)
                size = 1
            else:
                return _Dealt(tuple(left), [*dealt, tuple(taken)], size)
        dealt.append(tuple(taken))
    return _Dealt(tuple(left), dealt, 1)
