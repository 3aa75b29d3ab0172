"""Axes of values as expressions over atoms: how two of them become one, and what an equation says of them.

An atom is one set of indices that several axes share: wherever it occurs, the same indices are kept. An axis is an
expression over atoms. A reshape turns axes into a product of atoms, a concatenation turns them into a sum:

>>> heads, features = Axis(4), Axis(16)
>>> merged = product([heads, features])
>>> fused = total([merged, Axis(8), Axis(8)])  # 4 * 16 + 8 + 8

Two expressions become one axis. Their atoms become one, or are split until both sides are alike:

>>> other = Axis(80)
>>> ties = Ties(Pin)
>>> ties.unify(other, fused)
>>> [part.size for part in atoms(other)]
[4, 16, 8, 8]
>>> whole = Axis(64)
>>> ties.unify(whole, merged)
>>> atoms(whole) == atoms(merged)
True

What does not fit is pinned. That is always right, since no index of a pinned atom is ever removed.

>>> ties.unify(product([Axis(3), Axis(4)]), total([Axis(5), Axis(7)]))
>>> ties.pin('returned by the model', heads)
>>> atoms(whole)[0].pin.reason
'returned by the model'
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np

from jaxpruner.trace.program import Position, all_but, dot_axes, shape_of

Form = Literal['atom', 'product', 'sum']
T = TypeVar('T')


class Pin(NamedTuple):
    """Why no index of an atom can be removed.

    Attributes:
      reason: in words, with the operation and its line of the source.
      mixes: whether elements at different indices meet, as they do along the axis of a sort. If they do not, the atom
        may still own lists of channels: heads that all stay may keep different features.
    """

    reason: str
    mixes: bool = True

    def __str__(self) -> str:
        return self.reason


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
        return tuple([part.resolved() for part in self.resolved()._parts])

    @property
    def pin(self) -> Pin | None:
        """Why no index of this atom can be removed; `None` if indices can be removed."""
        return self.resolved()._pin

    def become(self, other: 'Axis') -> None:
        """Makes this axis the same as another."""
        first, second = self.resolved(), other.resolved()
        if first is not second:
            first._parent = second
            if first._pin is not None:
                set_pin(first._pin, second)


Axes = tuple[Axis, ...]


def new_axes(shape: Iterable[int]) -> Axes:
    """A new atom for each axis of a value."""
    return tuple(map(Axis, shape))


def sizes_of(axes: Iterable[Axis]) -> tuple[int, ...]:
    """The shape of a value of these axes."""
    return tuple([axis.size for axis in axes])


def pick(entries: Sequence[T], numbers: Iterable[int]) -> tuple[T, ...]:
    """Returns the entries with these numbers, in the order of the numbers."""
    return tuple([entries[number] for number in numbers])


def drop(entries: Sequence[T], numbers: Iterable[int]) -> tuple[T, ...]:
    """Returns all entries but those with these numbers."""
    return pick(entries, all_but(numbers, entries))


def product(factors: Iterable[Axis]) -> Axis:
    """Returns the axis that a reshape makes of several; the first is outermost."""
    parts = _flat_parts('product', factors)
    return parts[0] if len(parts) == 1 else Axis(math.prod(sizes_of(parts)), 'product', parts)


def total(segments: Iterable[Axis]) -> Axis:
    """Returns the axis that a concatenation makes of several."""
    parts = _flat_parts('sum', segments)
    return parts[0] if len(parts) == 1 else Axis(sum(sizes_of(parts)), 'sum', parts)


def _flat_parts(form: Form, axes: Iterable[Axis]) -> list[Axis]:
    """Returns factors without nested products and factors of 1, or segments without nested sums and empty segments."""
    neutral_size = 1 if form == 'product' else 0
    parts: list[Axis] = []
    for axis in axes:
        if axis.size != neutral_size:
            is_nested = axis.form == form
            parts += _flat_parts(form, axis.parts) if is_nested else [axis.resolved()]
    return parts


def atoms(*axes: Axis) -> list[Axis]:
    """Lists the atoms of expressions in order. An atom that occurs twice is listed twice."""
    found: list[Axis] = []
    for axis in axes:
        found += [axis.resolved()] if axis.form == 'atom' else atoms(*axis.parts)
    return found


def set_pin(pin: Pin, *axes: Axis) -> None:
    """Pins all atoms of expressions. The first pin of an atom stays, unless only the later one mixes."""
    for atom in atoms(*axes):
        if atom._pin is None or (pin.mixes and not atom._pin.mixes):
            atom._pin = pin


class Ties:
    """States what one equation of a program says of axes. `make_pin` makes a pin of a reason there."""

    def __init__(self, make_pin: Callable[[str], Pin]):
        self._make_pin = make_pin

    def pin(self, reason: str, *axes: Axis) -> None:
        """States that no index of these axes can be removed."""
        if axes:
            set_pin(self._make_pin(reason), *axes)

    def unify(self, first: Axis, second: Axis) -> None:
        """States that two axes are the same."""
        first, second = first.resolved(), second.resolved()
        if first is second or max(first.size, second.size) <= 1:
            return
        if first.size != second.size:
            self.pin(f'sizes {first.size} and {second.size} meet', first, second)
            return
        match first.form, second.form:
            case 'atom', _:
                first.become(second)
            case _, 'atom':
                second.become(first)
            case form, same if form == same:
                self.align(form, first.parts, second.parts)
                first.become(second)
            case form, _:
                self._distribute(*((first, second) if form == 'product' else (second, first)))

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

    def align(self, form: Form, left: Iterable[Axis], right: Iterable[Axis]) -> None:
        """States that two lists of factors have the same product, or two lists of segments the same sum.

        The longer of two first parts is split. What cannot be split is pinned.
        """
        first, second = _flat_parts(form, left), _flat_parts(form, right)
        while first and second:
            longer, shorter = (first, second) if first[0].size > second[0].size else (second, first)
            part, size = longer[0], shorter[0].size
            if part.size == size:
                self.unify(first.pop(0), second.pop(0))
            elif form == 'sum':
                pieces = self.cut(part, [size, part.size - size])
                if part.form != 'sum':  # it had to be pinned
                    break
                longer[:1] = pieces
            elif part.size % size:
                break
            else:
                longer[:1] = [Axis(size), Axis(part.size // size)]
                self.unify(part, product(longer[:2]))
            first, second = _flat_parts(form, first), _flat_parts(form, second)
        while first and second and first[-1].size == second[-1].size:
            self.unify(first.pop(), second.pop())
        self.pin('these sizes cut across one another', *first, *second)

    def _distribute(self, factors_axis: Axis, segments_axis: Axis) -> None:
        """States that a product is a sum: `(a + b) * c` is `a*c + b*c` if the factors c divide each segment."""
        segments = segments_axis.parts
        common = math.gcd(*sizes_of(segments))
        outer, inner = list(factors_axis.parts), []
        # The innermost factors whose product divides each segment.
        while common % outer[-1].size == 0:
            common //= outer[-1].size
            inner.insert(0, outer.pop())
        if not inner:
            reason = 'a reshape cuts across the parts of a concatenation'
            return self.pin(reason, factors_axis, segments_axis)
        inner_size = math.prod(sizes_of(inner))
        terms = [Axis(segment.size // inner_size) for segment in segments]
        for segment, term in zip(segments, terms, strict=True):
            self.unify(segment, product([term, *inner]))
        self.unify(product(outer), total(terms))
        factors_axis.become(segments_axis)


def size_with(axis: Axis, counts: dict[Axis, int]) -> int:
    """How many indices of an axis stay if so many of these atoms do. The size is noted in `counts`.

    >>> heads, features = Axis(2), Axis(3)
    >>> size_with(total([product([heads, features]), Axis(2)]), {features: 2})
    6
    """
    axis = axis.resolved()
    if axis not in counts:
        parts = [size_with(part, counts) for part in axis.parts]
        sizes = {'atom': axis.size, 'product': math.prod(parts), 'sum': sum(parts)}
        counts[axis] = sizes[axis.form]
    return counts[axis]


def occurrences(axis: Axis) -> list[tuple[Axis, np.ndarray]]:
    """The atoms of an expression, each with the positions of its indices: `(atom.size, positions of one index)`.

    >>> for atom, positions in occurrences(product([Axis(2), Axis(3)])):
    ...     print(atom.size, positions.tolist())
    2 [[0, 1, 2], [3, 4, 5]]
    3 [[0, 3], [1, 4], [2, 5]]
    """
    if axis.form == 'atom':
        return [(axis.resolved(), np.arange(axis.size)[:, None])]
    found = []
    sizes = sizes_of(axis.parts)
    for number, (part, end) in enumerate(zip(axis.parts, itertools.accumulate(sizes), strict=True)):
        if axis.form == 'sum':
            of_part = np.arange(end - part.size, end)
        else:
            of_part = np.moveaxis(np.arange(axis.size).reshape(sizes), number, 0)
        of_part = of_part.reshape(part.size, -1)
        for atom, positions in occurrences(part):
            found.append((atom, np.sort(of_part[positions].reshape(atom.size, -1))))
    return found


def indices_of(atom: Axis, axis: Axis) -> list[np.ndarray]:
    """For each occurrence of an atom along an axis, its index at each position, -1 where there is none.

    >>> channels = Axis(2)
    >>> for indices in indices_of(channels, total([Axis(1), channels, product([channels, channels])])):
    ...     print(indices.tolist())
    [-1, 0, 1, -1, -1, -1, -1]
    [-1, -1, -1, 0, 0, 1, 1]
    [-1, -1, -1, 0, 1, 0, 1]
    """
    arrays = []
    for positions in [positions for other, positions in occurrences(axis) if other is atom]:
        arrays.append(np.full(axis.size, -1))
        arrays[-1][positions] = np.arange(atom.size)[:, None]
    return arrays


# The places of a value's elements in a table: arrays in its rank, with one element along axes on which they do not
# depend.
Places = tuple[np.ndarray, ...]


def in_table(axes: Axes, owners: Iterable[Axis], i: int, channels: np.ndarray) -> Places:
    """The places of elements in a table with an axis for each owner, and one for the channels along axis i."""

    def spread(along: int, indices: np.ndarray) -> np.ndarray:
        return indices.reshape([-1 if k == along else 1 for k in range(len(axes))])

    index = []
    for owner in owners:
        along = next(k for k, axis in enumerate(axes) if owner in atoms(axis))
        indices = indices_of(owner, axes[along])  # each in another part of the axis
        index.append(spread(along, np.max(indices, axis=0)))
    return (*index, spread(i, channels))


class Index(NamedTuple):
    """An index of a contraction, `i`, `j` or `k` in `result[i, j] = sum over k of left[i, k] * right[k, j]`.

    Attributes:
      left, right, result: the axis that has it; `None` if there is none.
    """

    left: int | None
    right: int | None
    result: int | None

    @classmethod
    def all_of(cls, equation: Any) -> list[Self]:
        """The indices of a contraction, but those of the window of a convolution, and of groups of rows."""
        if equation.primitive.name == 'conv_general_dilated':
            # Of each first the axis of the batch or the outputs, then that of the channels.
            image, kernel, result = equation.params['dimension_numbers']
            return [
                cls(image[1], kernel[1], None),
                cls(image[0], None, result[0]),
                cls(None, kernel[0], result[1]),
            ]
        axes = dot_axes(equation)
        left, right = axes.free
        kept = [*zip(*axes.batch, strict=True)]
        kept += [(i, None) for i in left] + [(None, k) for k in right]
        summed = [cls(i, k, None) for i, k in zip(*axes.contract, strict=True)]
        return summed + [cls(i, k, number) for number, (i, k) in enumerate(kept)]

    def of(self, operands: Sequence[Axes]) -> list[Axis]:
        """The axes of the operands that have it."""
        places = zip(operands, self[:2], strict=False)
        return [axes[i] for axes, i in places if i is not None]


class EquationTies(Ties):
    """An equation, and what it states of axes.

    Attributes:
      equation: the equation.
      params: its parameters.
      operands: the axes of its operands.
      shape: of its first result.
    """

    def __init__(self, equation: Any, operands: Sequence[Axes], position: Position):
        super().__init__(lambda reason: Pin(position.reason(equation, reason)))
        self.equation = equation
        self.params: Mapping[str, Any] = equation.params
        self.operands = operands
        self.shape = shape_of(equation.outvars[0]) if equation.outvars else ()

    def pin_everything(self, reason: str = 'nothing is known of this operation') -> list[Axes]:
        """Pins the axes of all operands and results; returns those of the results."""
        results = [new_axes(shape_of(variable)) for variable in self.equation.outvars]
        for axes in (*self.operands, *results):
            self.pin(reason, *axes)
        return results
