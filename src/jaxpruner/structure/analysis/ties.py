"""States that two axes are one: their atoms become one, are taken apart, or are pinned.

`Ties` states that two expressions are one axis. Atoms become one, or are taken apart until both sides are alike:

>>> from jaxpruner.structure.analysis.axes import atom, atoms
>>> heads, features = atom(4), atom(16)
>>> merged = product([heads, features])
>>> fused = total([merged, atom(8), atom(8)])
>>> other = atom(80)
>>> ties = Ties(lambda reason: Pin(reason, '', lambda: 'model.py:1'))
>>> ties.unify(other, fused)
>>> [part.size for part in atoms(other)]
[4, 16, 8, 8]
>>> whole = atom(64)
>>> ties.unify(whole, merged)
>>> atoms(whole) == atoms(merged)
True

What does not fit is pinned, which is always right: none of the indices of a pinned atom is ever removed.

>>> ties.unify(product([atom(3), atom(4)]), total([atom(5), atom(7)]))
>>> ties.pin(heads, 'returned by the model')
>>> atoms(whole)[0].pin.reason
'returned by the model'
"""

import math
from collections.abc import Callable, Iterable, Sequence

from jaxpruner.structure.analysis.axes import (
    Axes,
    Axis,
    Pin,
    flat_parts,
    product,
    set_pin,
    sizes_of,
    total,
)


class Ties:
    """States what one equation of a program says of axes; `make_pin` says why something is pinned there."""

    def __init__(self, make_pin: Callable[[str], Pin]):
        self._make_pin = make_pin

    def pin(self, axis: Axis, reason: str) -> None:
        """States that no index of the axis can be removed."""
        set_pin(axis, self._make_pin(reason))

    def pin_all(self, axes: Iterable[Axis], reason: str) -> None:
        """States that no index of these axes can be removed."""
        for axis in axes:
            self.pin(axis, reason)

    def unify(self, first: Axis, second: Axis) -> None:
        """States that two axes are the same."""
        first, second = first.resolved(), second.resolved()
        has_one_index = max(first.size, second.size) <= 1
        if first is second or has_one_index:
            return
        if first.size != second.size:
            self.pin_all((first, second), f'sizes {first.size} and {second.size} meet')
            return
        match first.form, second.form:
            case 'atom', _:
                first.become(second)
            case _, 'atom':
                second.become(first)
            case 'product', 'sum':
                self._distribute(first, second)
            case 'sum', 'product':
                self._distribute(second, first)
            case 'product', 'product':
                self.align_factors(first.parts, second.parts)
                _make_one(first, second)
            case 'sum', 'sum':
                self._align_segments(first.parts, second.parts)
                _make_one(first, second)

    def unify_each(self, first: Iterable[Axis], second: Iterable[Axis]) -> None:
        """States that the axes of two values are the same, one by one."""
        for axis, other in zip(first, second, strict=True):
            self.unify(axis, other)

    def unify_values(self, first: Iterable[Axes], second: Iterable[Axes]) -> None:
        """States that values have the same axes as others, one by one."""
        for axes, other in zip(first, second, strict=True):
            self.unify_each(axes, other)

    def cut(self, axis: Axis, sizes: Sequence[int]) -> list[Axis]:
        """Cuts an axis into consecutive segments of these sizes."""
        segments = list(map(Axis, sizes))
        self.unify(axis, total(segments))
        return segments

    def align_factors(self, left: Iterable[Axis], right: Iterable[Axis]) -> None:
        """States that two lists of factors have the same product; factors are split where the other list needs it."""
        first = flat_parts('product', left, 1)
        second = flat_parts('product', right, 1)
        while first and second:
            if first[0].size == second[0].size:
                self.unify(first.pop(0), second.pop(0))
            else:
                longer, shorter = _longer_first(first, second)
                whole = longer[0]
                outer = shorter[0].size
                if whole.size % outer:
                    break
                pieces = [Axis(outer), Axis(whole.size // outer)]
                self.unify(whole, product(pieces))
                longer[:1] = pieces
            first = flat_parts('product', first, 1)
            second = flat_parts('product', second, 1)
        while first and second and first[-1].size == second[-1].size:
            self.unify(first.pop(), second.pop())
        self.pin_all((*first, *second), 'the reshape cuts across these sizes')

    def _align_segments(self, left: Iterable[Axis], right: Iterable[Axis]) -> None:
        first = flat_parts('sum', left, 0)
        second = flat_parts('sum', right, 0)
        while first and second:
            if first[0].size == second[0].size:
                self.unify(first.pop(0), second.pop(0))
            else:
                longer, shorter = _longer_first(first, second)
                segment = longer[0]
                size = shorter[0].size
                self.cut(segment, [size, segment.size - size])
                if segment.form != 'sum':  # it could not be cut there, and is pinned
                    self.pin_all((*first, *second), 'segments that do not fit meet')
                    return
            first = flat_parts('sum', first, 0)
            second = flat_parts('sum', second, 0)

    def _distribute(self, factors_axis: Axis, segments_axis: Axis) -> None:
        """States that a product is a sum: `(a + b) * c` is `a*c + b*c`, if the factors c fit into each segment."""
        segments = segments_axis.parts
        common = math.gcd(*sizes_of(segments))
        outer, inner = _split_factors(factors_axis.parts, common)
        if not inner:
            reason = 'a reshape cuts across the parts of a concatenation'
            self.pin_all((factors_axis, segments_axis), reason)
            return
        inner_size = math.prod(sizes_of(inner))
        terms = []
        for segment in segments:
            term = Axis(segment.size // inner_size)
            terms.append(term)
            self.unify(segment, product([term, *inner]))
        self.unify(product(outer), total(terms))
        factors_axis.resolved().become(segments_axis.resolved())


def _make_one(first: Axis, second: Axis) -> None:
    """Makes an axis the same as another, if it has not become so already."""
    first, second = first.resolved(), second.resolved()
    if first is not second:
        first.become(second)


def _longer_first(first: list[Axis], second: list[Axis]) -> tuple[list[Axis], list[Axis]]:
    """Returns two lists of axes, first the one that begins with the longer axis."""
    if first[0].size > second[0].size:
        return first, second
    return second, first


def _split_factors(factors: Sequence[Axis], common: int) -> tuple[list[Axis], list[Axis]]:
    """Splits off the innermost factors whose product divides a number; returns the others, and these."""
    outer, inner = list(factors), []
    while common % outer[-1].size == 0:
        factor = outer.pop()
        common //= factor.size
        inner.insert(0, factor)
    return outer, inner
