"""Views: how the axes of a value lie along the axes of the parameter that it was made of.

The view of a value is exact if the value has the parameter's own elements, at most moved (transposed, reshaped, sliced)
or cast. The view of a computed value keeps what is still known of the axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.uses.bodies import ProgramPath


class NoRuleError(Exception):
    """An operation cannot be followed for a view, so the parameter becomes opaque."""


class Factor(NamedTuple):
    """A part of an axis: `size` elements along these axes of the parameter. Copies lie along no axes."""

    axes: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        axes = '+'.join(map(str, self.axes))
        return f'{axes or "copies"}:{self.size}'


# The outermost factor first.
Factors = tuple[Factor, ...]
# From the first element to the one after the last.
Range = tuple[int, int]


class ViewAxis(NamedTuple):
    """An axis of a value. A range of its elements is the parameter's; others may come from other values.

    Attributes:
      factors: how the range lies along the parameter's axes.
      length: number of elements of the axis.
      start: where the range begins.
    """

    factors: Factors
    length: int
    start: int = 0

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

    @property
    def along(self) -> tuple[int, ...]:
        """The parameter's axes that this axis lies along."""
        return axes_of(self.factors)

    def __str__(self) -> str:
        factors = ' '.join(map(str, self.factors)) or '1'
        return factors if self.is_whole else f'{factors} at {self.start} of {self.length}'


def all_but(numbers: Iterable[int], entries: Sequence[Any]) -> list[int]:
    """Returns the numbers of all entries but these."""
    others = set(range(len(entries))).difference(numbers)
    return sorted(others)


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
    axes: set[int] = set()
    for factor in factors:
        axes.update(factor.axes)
    return tuple(sorted(axes))


class StackAxis(NamedTuple):
    """An axis that each trip of a loop gets one element of.

    Attributes:
      loop: path of the loop; `()` if the program itself indexes the element, by a number that it counts.
      axis: the axis.
    """

    loop: ProgramPath
    axis: ViewAxis

    @property
    def range(self) -> Range:
        """The trips that get an element of the parameter."""
        return self.axis.range

    @property
    def length(self) -> int:
        """The number of trips."""
        return self.axis.length

    @property
    def share(self) -> float:
        """The share of the trips that get an element of the parameter."""
        return self.axis.size / self.axis.length


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A step of an exact view: an equation that moves elements.

    Attributes:
      equation: the equation.
      operand: the number of the operand that is moved.
      result: the number of the result that it is moved to.
      others: number of an operand -> its constant value, such as indices or a mask.
    """

    equation: Any
    operand: int = 0
    result: int = 0
    others: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def __call__(self, value: jax.Array) -> jax.Array:
        """Computes the result, with zeros for unknown operands.

        Operands with the dtype of the moved one are cast as it is.
        """
        operands = []
        moved_dtype = self.equation.invars[self.operand].aval.dtype
        for number, variable in enumerate(self.equation.invars):
            if number == self.operand:
                operands.append(value)
                continue
            aval = variable.aval
            dtype = value.dtype if aval.dtype == moved_dtype else aval.dtype
            constant = jnp.asarray(self.others.get(number, 0), dtype)
            operands.append(jnp.broadcast_to(constant, aval.shape))
        results = self.equation.primitive.bind(*operands, **self.equation.params)
        return results[self.result] if self.equation.primitive.multiple_results else results


# Steps between `ENTER_LOOP` and `LEAVE_LOOP` are vmapped over the first axis.
ENTER_LOOP: Literal['enter'] = 'enter'
LEAVE_LOOP: Literal['leave'] = 'leave'
# A step is a `Move`, `ENTER_LOOP`, `LEAVE_LOOP`, or a function of an array (made in `constant_rules`).
Step = Move | Literal['enter', 'leave'] | Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class View:
    """How a value is made of a parameter.

    Attributes:
      leaf: number of the parameter.
      axes: the axes of the value.
      stack: axes of the parameter that loops around the value take one element of.
      exact: whether the value's elements are the parameter's own.
      steps: the steps that make the value from the parameter; empty if not exact.
    """

    leaf: int
    axes: tuple[ViewAxis, ...]
    stack: tuple[StackAxis, ...] = ()
    exact: bool = True
    steps: tuple[Step, ...] = ()

    @functools.cached_property
    def region(self) -> tuple[Range, ...]:
        """For each axis of the value, the range that is this parameter's."""
        return tuple(axis.range for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape."""
        return tuple(axis.length for axis in self.axes)

    def moved(self, axes: Iterable[ViewAxis], *steps: Step) -> 'View':
        """The view after a move of its elements."""
        all_steps = (*self.steps, *steps) if self.exact else ()
        return dataclasses.replace(self, axes=tuple(axes), steps=all_steps)

    def computed(self, axes: Iterable[ViewAxis] | None = None) -> 'View':
        """The view of a value computed from this one, along the same axes or others."""
        axes = self.axes if axes is None else tuple(axes)
        return dataclasses.replace(self, axes=axes, exact=False, steps=())

    def stacked(self, entry: StackAxis) -> 'View':
        """The view in a loop that takes one element of an axis in each trip."""
        return dataclasses.replace(self, stack=(*self.stack, entry))

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
        depth = 0
        for step in self.steps:
            if step == ENTER_LOOP:
                depth += 1
            elif step == LEAVE_LOOP:
                depth -= 1
            else:
                value = _mapped(step, depth)(value)
        return value

    def __str__(self) -> str:
        text = f'({", ".join(map(str, self.axes))})'
        for entry in self.stack:
            text += f', a trip for each of {entry.axis}'
        return text if self.exact else f'~{text}'


Views = tuple[View, ...]


def whole(leaf: int, shape: Sequence[int]) -> View:
    """The view of the parameter itself."""
    axes = []
    for number, length in enumerate(shape):
        axes.append(axis_of(Factor((number,), length)))
    return View(leaf, tuple(axes))


def map_views(function: Callable[[View], View | None], views: Iterable[View]) -> Views:
    """Applies a function to views, and drops those for which it returns `None`."""
    results = []
    for view in views:
        result = function(view)
        if result is not None:
            results.append(result)
    return tuple(results)


def _mapped(function: Callable[..., Any], depth: int) -> Callable[..., Any]:
    for _ in range(depth):
        function = jax.vmap(function)
    return function
