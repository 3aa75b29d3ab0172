"""Axes of values as expressions over atoms.

An atom is one set of indices that several axes share: wherever it occurs, the same indices are kept. An axis is an
expression over atoms. A reshape turns axes into a product of atoms, a concatenation turns them into a sum:

>>> heads, features = atom(4), atom(16)
>>> merged = product([heads, features])
>>> fused = total([merged, atom(8), atom(8)])
>>> print(fused)
((4*16) + 8 + 8)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

from jaxpruner.trace.views import all_but

Form = Literal['atom', 'product', 'sum']
T = TypeVar('T')


class Pin(NamedTuple):
    """Why no index of an atom can be removed.

    Attributes:
      reason: in words.
      primitive: the operation that pins it; empty for inputs and results of the model.
      find_line: returns the operation's line of the source. It is called late, since looking it up takes time.
      mixes: whether elements at different indices meet, as they do along the axis of a sort. If they do not, the atom
        may still own lists of channels: heads that all stay may keep different features.
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

    An axis can become another one, as in a union-find. Two axes are the same if `resolved` returns one object for both.

    Attributes:
      size: how many indices it has.
    """

    __slots__ = ('_form', '_parent', '_parts', '_pin', 'size')

    def __init__(self, size: int, form: Form = 'atom', parts: Sequence['Axis'] = ()):
        # `split` has NumPy's numbers among its parameters, which JSON does not take.
        self.size = int(size)
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
        parts = self.resolved()._parts
        return tuple(resolve_each(parts))

    @property
    def pin(self) -> Pin | None:
        """Why no index of this atom can be removed; `None` if indices can be removed."""
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


def resolve_each(axes: Iterable[Axis]) -> list[Axis]:
    """Resolves several axes."""
    return [axis.resolved() for axis in axes]


def sizes_of(axes: Iterable[Axis]) -> tuple[int, ...]:
    """The shape of a value of these axes."""
    return tuple([axis.size for axis in axes])


def pick(entries: Sequence[T], numbers: Iterable[int]) -> tuple[T, ...]:
    """Returns the entries with these numbers, in the order of the numbers."""
    return tuple([entries[number] for number in numbers])


def drop(entries: Sequence[T], numbers: Iterable[int]) -> tuple[T, ...]:
    """Returns all entries but those with these numbers."""
    return pick(entries, all_but(numbers, entries))


def replace(entries: Sequence[T], number: int, entry: T) -> tuple[T, ...]:
    """Returns the entries with one of them replaced."""
    replaced = list(entries)
    replaced[number] = entry
    return tuple(replaced)


def product(factors: Iterable[Axis]) -> Axis:
    """Returns the axis that a reshape makes of several; the first is outermost."""
    parts = flat_parts('product', factors)
    if len(parts) == 1:
        return parts[0]
    size = math.prod(sizes_of(parts))
    return Axis(size, 'product', parts)


def total(segments: Iterable[Axis]) -> Axis:
    """Returns the axis that a concatenation makes of several."""
    parts = flat_parts('sum', segments)
    if len(parts) == 1:
        return parts[0]
    size = sum(sizes_of(parts))
    return Axis(size, 'sum', parts)


def flat_parts(form: Form, axes: Iterable[Axis]) -> list[Axis]:
    """Returns factors without nested products and factors of 1, or segments without nested sums and empty segments."""
    neutral_size = 1 if form == 'product' else 0
    parts: list[Axis] = []
    for axis in axes:
        if axis.size == neutral_size:
            continue
        if axis.form == form:
            parts += flat_parts(form, axis.parts)
        else:
            parts.append(axis.resolved())
    return parts


def atoms(axis: Axis) -> list[Axis]:
    """Lists the atoms of an expression in order. An atom that occurs twice is listed twice."""
    axis = axis.resolved()
    if axis.form == 'atom':
        return [axis]
    atoms_of_parts: list[Axis] = []
    for part in axis.parts:
        atoms_of_parts += atoms(part)
    return atoms_of_parts


def atoms_of_values(values: Iterable[Iterable[Axis]]) -> list[Axis]:
    """Lists the atoms along all axes of some values, in order."""
    atoms_along: list[Axis] = []
    for axes in values:
        for axis in axes:
            atoms_along += atoms(axis)
    return atoms_along


def set_pin(axis: Axis, pin: Pin) -> None:
    """Pins all atoms of an expression. The first pin of an atom stays, unless only the later one mixes."""
    for pinned in atoms(axis):
        earlier = pinned._pin
        if earlier is None or (pin.mixes and not earlier.mixes):
            pinned._pin = pin
