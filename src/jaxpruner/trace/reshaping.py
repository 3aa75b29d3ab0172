"""Reshapes views: axes are split into factors, which are put together again."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxpruner.trace.views import Factor, Factors, Move, NoRuleError, View, ViewAxis, mixed, size_of


def reshape(view: View, new_shape: Sequence[int], step: Move | None = None) -> View:
    """The view of a value in another shape."""
    axes: list[ViewAxis] = []
    for runs in matching_runs(view.shape, new_shape):
        old, sizes = view.axes[runs.old], new_shape[runs.new]
        if all(axis.is_whole for axis in old):
            factors = [factor for axis in old for factor in axis.factors]
            axes += [ViewAxis(own, size_of(own)) for own in _deal(factors, sizes)]
        elif len(old) == len(sizes) == 1:
            axes += old
        else:
            raise NoRuleError('no rule for reshape of a concatenation')
    return view.moved(axes, step)


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


def _deal(factors: Sequence[Factor], sizes: Sequence[int]) -> list[Factors]:
    """Deals the factors out to axes of these sizes, in order, as long as one divides the other; then axes are mixed.

    >>> factors = Factor((0,), 4), Factor((1,), 6)
    >>> [' '.join(map(str, axis)) for axis in _deal(factors, [2, 12])], [*map(str, _deal(factors, [3, 8])[1])]
    (['0:2', '0:2 1:6'], ['0+1:8'])
    """
    left = list(factors)
    dealt: list[Factors] = []
    for number, size in enumerate(sizes):
        taken: list[Factor] = []
        missing = size
        if size == 1 and left and left[0].size == 1:
            taken.append(left.pop(0))
        while missing > 1:
            factor = left.pop(0)
            if missing % factor.size == 0:
                taken.append(factor)
            elif factor.size % missing == 0:
                taken.append(Factor(factor.axes, missing))
                left.insert(0, Factor(factor.axes, factor.size // missing))
            else:
                left = [factor, *left]
                rest = [mixed(left, other).factors for other in sizes[number + 1 :]]
                return [*dealt, (*taken, *mixed(left, missing).factors), *rest]
            missing //= taken[-1].size
        dealt.append(tuple(taken))
    if left and dealt:  # axes of length 1
        dealt[-1] += tuple(left)
    return dealt
