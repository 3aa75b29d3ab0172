"""Views: how the axes of a value lie along the axes of the parameter that it was made of, and how they move.

The view of a value is exact if the value has the parameter's own elements, at most moved (transposed, reshaped, sliced)
or cast. The view of a computed value keeps what is still known of the axes.

`1:6` is an axis of the value with 6 elements along axis 1 of the parameter. Take a stack of 3 kernels with 4 inputs and
2 x 3 outputs, stored as (kernels, outputs, inputs). Its view changes like this:

>>> view = whole(leaf=0, shape=(3, 6, 4))
>>> print(view)
(0:3, 1:6, 2:4)
>>> view = reshape(view, (3, 2, 3, 4))
>>> print(view)  # one axis of the parameter lies along two axes of the value
(0:3, 1:2, 1:3, 2:4)
>>> view = transpose(view, (0, 3, 2, 1))
>>> print(view)
(0:3, 2:4, 1:3, 1:2)
>>> view = enter_loop(view, loop=(2,))
>>> print(view)  # what each trip of a scan gets; equation 2 of the program is the scan
(2:4, 1:3, 1:2), a trip for each of 0:3

A product of data with this value sums over the value's first axis. So it contracts axis 2 of the parameter, axis 1 is
free, and axis 0 is a stack.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.trace.program import ProgramPath


class NoRuleError(Exception):
    """An operation cannot be followed for a view, so the parameter becomes opaque."""


class Factor(NamedTuple):
    """A part of an axis: `size` elements along these axes of the parameter. Copies lie along no axes."""

    axes: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f'{"+".join(map(str, self.axes)) or "copies"}:{self.size}'


# The outermost factor first.
Factors = tuple[Factor, ...]
# From the first element to the one after the last.
Range = tuple[int, int]
Indices = range  # an axis has a property of that name


class ViewAxis(NamedTuple):
    """An axis of a value. A range of its elements is the parameter's; others may come from other values.

    Attributes:
      factors: how the range lies along the parameter's axes.
      length: number of elements of the axis.
      start: where the range begins.
      loop: path of the loop whose trips each get one element of the axis; `()` if the program itself indexes the
        element, by a number that it counts. `None` for an axis of the value itself.
    """

    factors: Factors
    length: int
    start: int = 0
    loop: ProgramPath | None = None

    def take(self, taken: Indices) -> 'ViewAxis | None':
        """The axis of these elements, some of them beyond the ends; `None` if none of them is the parameter's."""
        first = max(0, -((taken.start - self.start) // taken.step))
        after = -((taken.start - self.stop) // taken.step)
        inside = taken[first:after]
        if after <= first or not inside:
            return None
        own = range(inside[0] - self.start, inside[-1] - self.start + 1, taken.step)
        return ViewAxis(_cut(self.factors, own), len(taken), first)

    def resized(self, length: int) -> 'ViewAxis':
        """A whole axis of some of the elements, or of this axis on all devices."""
        return self if self.length == length else mixed(self.factors, length)

    @property
    def size(self) -> int:
        """How many elements are the parameter's."""
        return size_of(self.factors)

    @property
    def stop(self) -> int:
        """The element after the last one that is the parameter's."""
        return self.start + self.size

    @property
    def range(self) -> Range:
        """The elements that are the parameter's."""
        return self.start, self.stop

    @property
    def is_whole(self) -> bool:
        """Whether all elements are the parameter's."""
        return self.size == self.length

    def __str__(self) -> str:
        factors = ' '.join(map(str, self.factors)) or '1'
        return factors if self.is_whole else f'{factors} at {self.start} of {self.length}'


def axis_of(*factors: Factor) -> ViewAxis:
    """A whole axis of these factors."""
    return ViewAxis(factors, size_of(factors))


def copies(size: int) -> ViewAxis:
    """An axis along which the value is the same."""
    return axis_of(Factor((), size))


def mixed(factors: Iterable[Factor], size: int) -> ViewAxis:
    """An axis of which only the parameter's axes are known, not their order."""
    return axis_of(Factor(axes_of(factors), size))


def size_of(factors: Iterable[Factor]) -> int:
    """How many elements some factors have together."""
    return math.prod(factor.size for factor in factors)


def axes_of(factors: Iterable[Factor]) -> tuple[int, ...]:
    """The parameter's axes that some factors lie along, in ascending order."""
    return tuple(sorted({axis for factor in factors for axis in factor.axes}))


def _cut(factors: Factors, taken: range) -> Factors:
    """The factors of the taken elements, the last of which lies before `taken.stop`."""
    count = len(taken)
    if count == size_of(factors):
        return factors
    first, *rest = factors
    others = tuple(rest)
    if not others:
        return (Factor(first.axes, count),)
    inner, step = size_of(others), taken.step
    outer_start, inner_start = divmod(taken.start, inner)
    outer_last, inner_last = divmod(taken.stop - 1, inner)
    if outer_start == outer_last:
        return _cut(others, range(inner_start, inner_last + 1, step))
    if step == 1 and inner_start == 0 and inner_last == inner - 1:
        return (Factor(first.axes, count // inner), *others)
    if step % inner == 0:  # each step takes the same element of the inner factors
        return _cut((first,), range(outer_start, outer_last + 1, step // inner))
    return mixed(factors, count).factors


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A step of an exact view: an equation that moves elements.

    Attributes:
      equation: the equation.
      operand: the number of the operand that is moved.
      result: the number of the result that it is moved to.
      others: number of an operand -> its constant value, such as indices or a mask; zero for all others.
      in_trips: numbers of operands that differ between the trips of a loop, outermost loop first. Their values have
        the trips in front.
      depth: how many axes that loops take apart stand in front of the value.
    """

    equation: Any
    operand: int = 0
    result: int = 0
    others: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    in_trips: tuple[int, ...] = ()
    depth: int = 0

    def __call__(self, value: jax.Array) -> jax.Array:
        """Computes the result. Operands with the dtype of the moved one are cast as it is."""
        equation = self.equation
        moved_dtype = equation.invars[self.operand].aval.dtype

        def run(value: jax.Array, *in_trips: Any) -> jax.Array:
            constants = {**self.others, **dict(zip(self.in_trips, in_trips, strict=True))}
            operands = []
            for number, variable in enumerate(equation.invars):
                aval = variable.aval
                dtype = value.dtype if aval.dtype == moved_dtype else aval.dtype
                constant = jnp.asarray(constants.get(number, 0), dtype)
                is_moved = number == self.operand
                operands.append(value if is_moved else jnp.broadcast_to(constant, aval.shape))
            results = equation.primitive.bind(*operands, **equation.params)
            return results[self.result] if equation.primitive.multiple_results else results

        function: Callable[..., jax.Array] = run
        count = len(self.in_trips)
        for number in reversed(range(count)):
            in_axes = [0 if k == number else None for k in range(count)]
            function = jax.vmap(function, (None, *in_axes))
        for _ in range(self.depth):
            function = jax.vmap(function, (0, *[None] * count))
        return function(value, *[jnp.asarray(self.others[number]) for number in self.in_trips])


@dataclasses.dataclass(frozen=True)
class View:
    """How a value is made of a parameter.

    Attributes:
      leaf: number of the parameter.
      axes: the axes of the value.
      stack: axes of the parameter that loops around the value take one element of.
      exact: whether the value's elements are the parameter's own.
      steps: the moves that make the value from the parameter; empty if not exact.
    """

    leaf: int
    axes: tuple[ViewAxis, ...]
    stack: tuple[ViewAxis, ...] = ()
    exact: bool = True
    steps: tuple[Move, ...] = ()

    @property
    def region(self) -> tuple[Range, ...]:
        """For each axis of the value, the range that is this parameter's."""
        return tuple(axis.range for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape."""
        return tuple(axis.length for axis in self.axes)

    def moved(self, axes: Iterable[ViewAxis], step: Move | None = None) -> 'View':
        """The view after a move of its elements."""
        steps = self.steps
        if step is not None and self.exact:
            steps = (*steps, dataclasses.replace(step, depth=len(self.stack)))
        return dataclasses.replace(self, axes=tuple(axes), steps=steps)

    def with_axis(self, number: int, axis: ViewAxis, step: Move | None = None) -> 'View':
        """The view after a move that changes one axis."""
        return self.moved((*self.axes[:number], axis, *self.axes[number + 1 :]), step)

    def computed(self, axes: Iterable[ViewAxis] | None = None) -> 'View':
        """The view of a value computed from this one, along the same axes or others."""
        axes = self.axes if axes is None else tuple(axes)
        return dataclasses.replace(self, axes=axes, exact=False, steps=())

    def stacked(self, loop: ProgramPath, axis: ViewAxis) -> 'View':
        """The view in a loop that takes one element of an axis in each trip."""
        return dataclasses.replace(self, stack=(*self.stack, axis._replace(loop=loop)))

    def read(self, leaf: jax.Array) -> jax.Array:
        """Makes the value from the parameter. This is a linear function.

        Axes that loops take apart come first. Elements that come from other parameters are zero.

        Raises:
          ValueError: the view is not exact.
        """
        if not self.exact:
            raise ValueError(
                'this value is computed from its parameter, not read from it; see Use.exact'
            )
        value = jnp.asarray(leaf)  # a Python number has no dtype
        for step in self.steps:
            value = step(value)
        return value

    def __str__(self) -> str:
        text = f'({", ".join(map(str, self.axes))})'
        for axis in self.stack:
            text += f', a trip for each of {axis}'
        return text if self.exact else f'~{text}'


Views = tuple[View, ...]


def whole(leaf: int, shape: Sequence[int]) -> View:
    """The view of the parameter itself."""
    axes = (axis_of(Factor((number,), length)) for number, length in enumerate(shape))
    return View(leaf, tuple(axes))


def map_views(function: Callable[[View], View | None], operand: Iterable[View]) -> Views:
    """Applies a function to views, and drops those for which it returns `None`."""
    results = map(function, operand)
    return tuple(result for result in results if result is not None)


def transpose(view: View, permutation: Iterable[int], step: Move | None = None) -> View:
    """The view with its axes in another order, or with some of them."""
    return view.moved([view.axes[i] for i in permutation], step)


def broadcast(
    view: View, new_shape: Sequence[int], dimensions: Iterable[int], step: Move | None = None
) -> View:
    """The view of a value that is copied along new axes and along those of length 1.

    `dimensions` has for each axis of the value the axis of the result.
    """
    axes = list(map(copies, new_shape))
    for axis, target in zip(view.axes, dimensions, strict=True):
        length = new_shape[target]
        is_copied = axis.length != length
        axes[target] = axis_of(*axis.factors, Factor((), length)) if is_copied else axis
    return view.moved(axes, step)


def align(view: View, shape: Sequence[int]) -> View:
    """The view in an elementwise operation of this shape, with copies for scalars and axes of length 1."""
    return broadcast(view, shape, range(len(shape) - len(view.axes), len(shape)))


def reshape(view: View, new_shape: Sequence[int], step: Move | None = None) -> View:
    """The view of a value in another shape."""
    axes: list[ViewAxis] = []
    for old_run, new_run in matching_runs(view.shape, new_shape):
        old, sizes = view.axes[old_run], new_shape[new_run]
        if all(axis.is_whole for axis in old):
            factors = [factor for axis in old for factor in axis.factors]
            axes += [ViewAxis(own, size_of(own)) for own in _deal(factors, sizes)]
        elif len(old) == len(sizes) == 1:
            axes += old
        else:
            raise NoRuleError('no rule for reshape of a concatenation')
    return view.moved(axes, step)


def matching_runs(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """Finds the shortest runs of axes that hold the same elements in two shapes, in pairs, one after the other.

    >>> for old, new in matching_runs((6, 4, 5), (2, 3, 20)):
    ...     print(old, new)
    slice(0, 1, None) slice(0, 2, None)
    slice(1, 3, None) slice(2, 3, None)
    """
    if 0 in shape:
        raise NoRuleError('reshape of an empty array')
    runs: list[tuple[slice, slice]] = []
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
        if new_end == j and runs:  # lengths of 1 at the end
            old, new = runs[-1]
            runs[-1] = slice(old.start, old_end), new
        else:
            runs.append((slice(i, old_end), slice(j, new_end)))
        i, j = old_end, new_end
    return runs


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


def cut(view: View, taken: Sequence[range], step: Move | None = None) -> View | None:
    """The view of a slice, with these elements of each axis; `None` if nothing of the parameter is in it.

    Elements beyond the ends are those of padding, and of what a concatenation puts beside the value.
    """
    parts = [axis.take(indices) for axis, indices in zip(view.axes, taken, strict=True)]
    axes = [part for part in parts if part is not None]
    return view.moved(axes, step) if len(axes) == len(parts) else None


def join(operand: Iterable[View]) -> Views:
    """The views of a value computed from values with these views: one for each parameter and region."""

    def joined_axis(first: ViewAxis, second: ViewAxis) -> ViewAxis:
        if first == second or not axes_of(second.factors):
            return first
        if not axes_of(first.factors):
            return second
        return first._replace(factors=mixed(first.factors + second.factors, first.size).factors)

    joined: dict[Any, View] = {}
    for view in operand:
        key = (view.leaf, view.region, view.stack)
        earlier = joined.get(key, view)
        joined[key] = view.computed(map(joined_axis, earlier.axes, view.axes))
    return tuple(joined.values())


def enter_loop(view: View, loop: ProgramPath) -> View:
    """The view of a value's element in each trip of a scan. Its first axis becomes a stack."""
    first, *others = view.axes
    return view.moved(others).stacked(loop, first)


def leave_loop(view: View, loop: ProgramPath, length: int) -> View:
    """The view of the array that all trips of a scan put together."""
    if view.stack and view.stack[-1].loop == loop:
        *stack, first = view.stack
        outside = view.moved((first._replace(loop=None), *view.axes))
        return dataclasses.replace(outside, stack=tuple(stack))
    view = to_next_trip(view, loop)
    return view.computed((copies(length), *view.axes))


def to_next_trip(view: View, loop: ProgramPath) -> View:
    """The view in the next trip of a loop, which has another element of each stack."""
    stack = tuple(axis for axis in view.stack if axis.loop != loop)
    return view if stack == view.stack else dataclasses.replace(view.computed(), stack=stack)
