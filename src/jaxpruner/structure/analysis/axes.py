"""Axes of values as expressions over atoms, and what makes two of them one.

An atom is a set of indices that are kept or removed together wherever the atom occurs. A reshape makes an axis a
product of others, a concatenation makes it a sum:

>>> heads, features = atom(4), atom(16)
>>> merged = product([heads, features])
>>> fused = total([merged, atom(8), atom(8)])
>>> print(fused)
((4*16) + 8 + 8)

`Ties` states that two expressions are one axis. Atoms become one, or are taken apart until both sides are alike:

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
from typing import Any, Literal, NamedTuple, TypeVar

Form = Literal['atom', 'product', 'sum']
T = TypeVar('T')


class Pin(NamedTuple):
    """Why no index of an atom can be removed.

    Attributes:
      reason: in words.
      primitive: the operation that does it; empty for inputs and results of the model.
      find_line: returns its line of the source, which takes time to look up.
      mixes: whether elements at different indices meet, as they do along the axis of a sort.
    """

    reason: str
    primitive: str
    find_line: Callable[[], str]
    mixes: bool = True

    def __str__(self) -> str:
        text = f'{self.primitive}: {self.reason}' if self.primitive else self.reason
        line = self.find_line()
        return f'{text} ({line})' if line else text


class Axis:
    """An axis of one or more values: an atom, a product (first factor outermost), or a sum.

    Two axes are the same if `resolved` returns the same object for both.

    Attributes:
      size: how many indices it has.
    """

    __slots__ = ('_form', '_parent', '_parts', '_pin', 'size')

    def __init__(self, size: int, form: Form = 'atom', parts: Sequence['Axis'] = ()):
        self.size = size
        self._form: Form = form
        self._parts = tuple(parts)
        self._pin: Pin | None = None
        self._parent: Axis | None = None

    def resolved(self) -> 'Axis':
        """The axis that this one has become."""
        axis = self
        while axis._parent is not None:
            if axis._parent._parent is not None:
                axis._parent = axis._parent._parent
            axis = axis._parent
        return axis

    @property
    def form(self) -> Form:
        """Whether it is an atom, a product or a sum."""
        return self.resolved()._form

    @property
    def parts(self) -> tuple['Axis', ...]:
        """The factors of a product or the segments of a sum; an atom has none."""
        return tuple([part.resolved() for part in self.resolved()._parts])

    @property
    def pin(self) -> Pin | None:
        """Why no index of this atom can be removed; `None` if they can."""
        return self.resolved()._pin

    def become(self, other: 'Axis') -> None:
        """Makes this axis the same as another."""
        self._parent = other
        if self._pin is not None:
            set_pin(other, self._pin)

    def __repr__(self) -> str:
        if self.form == 'atom':
            return str(self.size)
        sign = '*' if self.form == 'product' else ' + '
        parts = sign.join(map(repr, self.parts))
        return f'({parts})'


Axes = tuple[Axis, ...]


def atom(size: int) -> Axis:
    """A new atom."""
    return Axis(size)


def new_axes(shape: Iterable[int]) -> Axes:
    """A new atom for each axis of a value."""
    return tuple(map(Axis, shape))


def sizes_of(axes: Iterable[Axis]) -> tuple[int, ...]:
    """The shape of a value of these axes."""
    return tuple([axis.size for axis in axes])


def pick(entries: Sequence[T], numbers: Iterable[int]) -> tuple[T, ...]:
    """Returns the entries with these numbers, in the order of the numbers."""
    return tuple([entries[number] for number in numbers])


def all_but(numbers: Iterable[int], entries: Sequence[Any]) -> list[int]:
    """Returns the numbers of all entries but some."""
    others = set(range(len(entries))).difference(numbers)
    return sorted(others)


def drop(entries: Sequence[T], numbers: Iterable[int]) -> tuple[T, ...]:
    """Returns all entries but those with these numbers."""
    return pick(entries, all_but(numbers, entries))


def replace(entries: Sequence[T], number: int, entry: T) -> tuple[T, ...]:
    """Returns the entries with another one in the place of one."""
    replaced = list(entries)
    replaced[number] = entry
    return tuple(replaced)


def product(factors: Iterable[Axis]) -> Axis:
    """Returns the axis that a reshape makes of several; the first is outermost."""
    parts = _flat('product', factors, neutral=1)
    if len(parts) == 1:
        return parts[0]
    size = math.prod(sizes_of(parts))
    return Axis(size, 'product', parts)


def total(segments: Iterable[Axis]) -> Axis:
    """Returns the axis that a concatenation makes of several."""
    parts = _flat('sum', segments, neutral=0)
    if len(parts) == 1:
        return parts[0]
    size = sum(sizes_of(parts))
    return Axis(size, 'sum', parts)


def _flat(form: Form, axes: Iterable[Axis], neutral: int) -> list[Axis]:
    """Returns factors without nested products, or segments without nested sums, and without neutral ones."""
    parts: list[Axis] = []
    for axis in axes:
        if axis.size == neutral:
            continue
        if axis.form == form:
            parts += _flat(form, axis.parts, neutral)
        else:
            parts.append(axis.resolved())
    return parts


def atoms(axis: Axis) -> list[Axis]:
    """Lists the atoms of an expression in their order; one that occurs twice is listed twice."""
    axis = axis.resolved()
    if axis.form == 'atom':
        return [axis]
    found: list[Axis] = []
    for part in axis.parts:
        found += atoms(part)
    return found


def set_pin(axis: Axis, pin: Pin) -> None:
    """Pins all atoms of an expression. The first reason stays, unless a later one mixes and it does not."""
    for each in atoms(axis):
        if each._pin is None or (pin.mixes and not each._pin.mixes):
            each._pin = pin


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
        if first is second or max(first.size, second.size) <= 1:
            return
        if first.size != second.size:
            self.pin_all((first, second), f'sizes {first.size} and {second.size} meet')
        elif first.form == 'atom':
            first.become(second)
        elif second.form == 'atom':
            second.become(first)
        elif first.form != second.form:
            if first.form == 'product':
                self._distribute(first, second)
            else:
                self._distribute(second, first)
        else:
            if first.form == 'product':
                self.align_factors(first.parts, second.parts)
            else:
                self._align_segments(first.parts, second.parts)
            first, second = first.resolved(), second.resolved()
            if first is not second:
                first.become(second)

    def unify_each(self, first: Iterable[Axis], second: Iterable[Axis]) -> None:
        """States that the axes of two values are the same, one by one."""
        for one, other in zip(first, second, strict=True):
            self.unify(one, other)

    def unify_values(self, first: Iterable[Axes], second: Iterable[Axes]) -> None:
        """States that values have the same axes as others, one by one."""
        for one, other in zip(first, second, strict=True):
            self.unify_each(one, other)

    def cut(self, axis: Axis, sizes: Sequence[int]) -> list[Axis]:
        """Cuts an axis into consecutive segments of these sizes."""
        segments = list(map(Axis, sizes))
        self.unify(axis, total(segments))
        return segments

    def align_factors(self, left: Iterable[Axis], right: Iterable[Axis]) -> None:
        """States that two lists of factors have the same product; factors are split where the other list needs it."""
        first, second = _flat('product', left, 1), _flat('product', right, 1)
        while first and second:
            if first[0].size == second[0].size:
                self.unify(first.pop(0), second.pop(0))
            else:
                longer, shorter = _longer_first(first, second)
                outer, rest = shorter[0].size, longer[0].size
                if rest % outer:
                    break
                pieces = [Axis(outer), Axis(rest // outer)]
                self.unify(longer[0], product(pieces))
                longer[:1] = pieces
            first, second = _flat('product', first, 1), _flat('product', second, 1)
        while first and second and first[-1].size == second[-1].size:
            self.unify(first.pop(), second.pop())
        self.pin_all((*first, *second), 'the reshape cuts across these sizes')

    def _align_segments(self, left: Iterable[Axis], right: Iterable[Axis]) -> None:
        first, second = _flat('sum', left, 0), _flat('sum', right, 0)
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
            first, second = _flat('sum', first, 0), _flat('sum', second, 0)

    def _distribute(self, factors_axis: Axis, segments_axis: Axis) -> None:
        """States that a product is a sum: `(a + b) * c` is `a*c + b*c`, if the factors c fit into each segment."""
        segments = segments_axis.parts
        sizes = sizes_of(segments)
        outer, inner = _split_factors(factors_axis.parts, math.gcd(*sizes))
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
