"""What a reshape does to a view: axes are split into factors and put together again."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from jaxpruner.uses.views import Factor, Factors, NoRuleError, Range, View, mixed, moved


def reshape(view: View, shape: Sequence[int], new_shape: Sequence[int], *steps: Any) -> View:
    """The value in another shape.

    Args:
      view: of a value.
      shape: the value's shape.
      new_shape: that of the result.

    >>> from jaxpruner.uses.views import whole
    >>> reshape(whole(0, (2, 3, 4)), (2, 3, 4), (2, 12)).axes
    ((Factor(axes=(0,), size=2),), (Factor(axes=(1,), size=3), Factor(axes=(2,), size=4)))
    """
    axes, region = [], []
    for old, new in _groups(shape, new_shape):
        sizes = [new_shape[i] for i in new]
        parts = _ranges(
            *_linear_range([view.region[i] for i in old], [shape[i] for i in old]), sizes
        )
        factors = tuple(itertools.chain.from_iterable(view.axes[i] for i in old))
        axes += _deal(factors, [stop - start for start, stop in parts])
        region += parts
    return moved(view, axes, region, *steps)


def _groups(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of old and new axes that hold the same elements."""
    if 0 in shape:
        raise NoRuleError('reshape of an empty array')
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        old, new = (
            list(range(i, min(i + 1, len(shape)))),
            list(range(j, min(j + 1, len(new_shape)))),
        )
        while (
            difference := math.prod(shape[a] for a in old) - math.prod(new_shape[a] for a in new)
        ) != 0:
            if difference < 0:
                old.append(i + len(old))
            else:
                new.append(j + len(new))
        i, j = i + len(old), j + len(new)
        if not new and groups:  # lengths of 1 at the end
            groups[-1][0].extend(old)
        else:
            groups.append((old, new))
    return groups


def _linear_range(region: Sequence[Range], sizes: Sequence[int]) -> Range:
    """The elements of a region, counted through all of its axes; they must follow one another."""
    first = count = 0
    for i, ((low, high), size) in enumerate(zip(region, sizes, strict=True)):
        if i and count > 1 and (low, high) != (0, size):
            raise NoRuleError('reshape of a concatenation')
        first, count = first * size + low, max(count, 1) * (high - low)
    return (first, first + count) if region else (0, 1)


def _ranges(start: int, stop: int, sizes: Sequence[int]) -> list[Range]:
    """A run of elements as a region of axes of these sizes."""
    region: list[Range] = []
    for i in range(len(sizes)):
        inner = math.prod(sizes[i + 1 :])
        low, high = start // inner, -(-stop // inner)
        if high - low > 1 and (start % inner or stop % inner):
            raise NoRuleError('reshape of a concatenation')
        region.append((low, high))
        start, stop = (0, inner) if high - low > 1 else (start - low * inner, stop - low * inner)
    return region


def _deal(factors: Factors, sizes: Sequence[int]) -> list[Factors]:
    """Deals the factors out to axes of these sizes, in order."""
    rest, dealt, missing = _deal_from_front(factors, sizes)
    if missing == 1:
        if rest and dealt:  # axes of length 1
            dealt[-1] = (*dealt[-1], *rest)
        return dealt
    # A factor does not divide what an axis misses. From behind, more may be known.
    first = len(dealt) - 1
    other_sizes = [*sizes[first + 1 :][::-1], missing]
    backwards, from_behind, other_missing = _deal_from_front(tuple(rest[::-1]), other_sizes)
    last = len(sizes) - len(from_behind)
    behind = [factors[::-1] for factors in from_behind[::-1]]
    if last == first:
        dealt[first] = (*dealt[first], *behind.pop(0))
        return [*dealt, *behind]
    between = [mixed(tuple(backwards), n) for n in sizes[first + 1 : last]]
    dealt[first] = (*dealt[first], *mixed(tuple(backwards), missing))
    behind[0] = (*mixed(tuple(backwards), other_missing), *behind[0])
    return [*dealt, *between, *behind]


def _deal_from_front(
    factors: Factors, sizes: Sequence[int]
) -> tuple[list[Factor], list[Factors], int]:
    """Deals factors out as long as they divide what an axis misses, or this divides them.

    Returns:
      The factors that are left, those of each axis, and how much the last of these axes misses: 1 if it is complete.
    """
    rest, dealt = list(factors), []
    for size in sizes:
        taken: list[Factor] = []
        if size == 1 and rest and rest[0].size == 1:
            taken.append(rest.pop(0))
        while size > 1:
            factor = rest[0]
            if size % factor.size == 0:
                taken.append(rest.pop(0))
                size //= factor.size
            elif factor.size % size == 0:
                taken.append(Factor(factor.axes, size))
                rest[0] = Factor(factor.axes, factor.size // size)
                size = 1
            else:
                return rest, [*dealt, tuple(taken)], size
        dealt.append(tuple(taken))
    return rest, dealt, 1
