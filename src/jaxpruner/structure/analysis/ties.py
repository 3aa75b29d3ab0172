"""Ties state that two axes are one: their atoms become one, are split, or are pinned.

Two expressions become one axis. Their atoms become one, or are split until both sides are alike:

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

What does not fit is pinned. That is always right, since no index of a pinned atom is ever removed.

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
    Form,
    Pin,
    flat_parts,
    product,
    set_pin,
    sizes_of,
    total,
)

# (part, size of its first piece) -> both pieces; nothing if it cannot be split there.
Split = Callable[[Axis, int], list[Axis]]


class Ties:
    """States what one equation of a program says of axes. `make_pin` makes a pin of a reason there."""

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
        """States that two values have the same axes, one by one."""
        for axis, other in zip(first, second, strict=True):
            self.unify(axis, other)

    def unify_values(self, first: Iterable[Axes], second: Iterable[Axes]) -> None:
        """States that each value has the same axes as the other value in its place."""
        for axes, other in zip(first, second, strict=True):
            self.unify_each(axes, other)

    def cut(self, axis: Axis, sizes: Sequence[int]) -> list[Axis]:
        """Cuts an axis into consecutive segments of these sizes."""
        segments = list(map(Axis, sizes))
        self.unify(axis, total(segments))
        return segments

    def align_factors(self, left: Iterable[Axis], right: Iterable[Axis]) -> None:
        """States that two lists of factors have the same product. Factors are split where the other list needs it."""
        first, second = self._align_from_front('product', left, right, self._split_factor)
        while first and second and first[-1].size == second[-1].size:
            self.unify(first.pop(), second.pop())
        self.pin_all((*first, *second), 'the reshape cuts across these sizes')

    def _align_segments(self, left: Iterable[Axis], right: Iterable[Axis]) -> None:
        first, second = self._align_from_front('sum', left, right, self._split_segment)
        self.pin_all((*first, *second), 'segments that do not fit meet')

    def _align_from_front(
        self, form: Form, left: Iterable[Axis], right: Iterable[Axis], split: Split
    ) -> tuple[list[Axis], list[Axis]]:
        """Unifies two lists of parts, and splits the longer of two first parts; returns those that cannot be split."""
        first = flat_parts(form, left)
        second = flat_parts(form, right)
        while first and second:
            if first[0].size == second[0].size:
                self.unify(first.pop(0), second.pop(0))
            else:
                longer, shorter = _longer_first(first, second)
                pieces = split(longer[0], shorter[0].size)
                if not pieces:
                    break
                longer[:1] = pieces
            first = flat_parts(form, first)
            second = flat_parts(form, second)
        return first, second

    def _split_factor(self, factor: Axis, outer: int) -> list[Axis]:
        """Splits a factor after an outer one of this size; returns nothing if it does not divide the factor."""
        if factor.size % outer:
            return []
        pieces = [Axis(outer), Axis(factor.size // outer)]
        self.unify(factor, product(pieces))
        return pieces

    def _split_segment(self, segment: Axis, size: int) -> list[Axis]:
        """Splits a segment after this many elements; returns nothing if it had to be pinned."""
        pieces = self.cut(segment, [size, segment.size - size])
        return pieces if segment.form == 'sum' else []

    def _distribute(self, factors_axis: Axis, segments_axis: Axis) -> None:
        """States that a product is a sum: `(a + b) * c` is `a*c + b*c` if the factors c divide each segment."""
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
    """Makes an axis the same as another, unless it is so already."""
    first, second = first.resolved(), second.resolved()
    if first is not second:
        first.become(second)


def _longer_first(first: list[Axis], second: list[Axis]) -> tuple[list[Axis], list[Axis]]:
    """Returns two lists of axes. The first one begins with the longer axis."""
    if first[0].size > second[0].size:
        return first, second
    return second, first


def _split_factors(factors: Sequence[Axis], common: int) -> tuple[list[Axis], list[Axis]]:
    """Splits off the innermost factors whose product divides a number; returns the other factors, then these."""
    outer, inner = list(factors), []
    while common % outer[-1].size == 0:
        factor = outer.pop()
        common //= factor.size
        inner.insert(0, factor)
    return outer, inner
