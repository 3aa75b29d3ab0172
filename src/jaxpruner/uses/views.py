"""How the axes of a value lie along the axes of the parameter that it was read from.

A `View` says so for one parameter: values that only move its elements (transposed, reshaped, sliced, cast) are exact
views; values computed from it keep what is still known of the axes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class NoRuleError(Exception):
    """An operation does to a view what cannot be followed; the parameter becomes opaque.

    >>> raise NoRuleError('reshape')
    Traceback (most recent call last):
        ...
    jaxpruner.uses.views.NoRuleError: reshape
    """


class Factor(NamedTuple):
    """A part of an axis of a value: `size` elements that lie along these axes of the parameter, none if copies.

    >>> Factor((0,), 8)
    Factor(axes=(0,), size=8)
    """

    axes: tuple[int, ...]
    size: int


# One axis of a value, the outermost factor first.
Factors = tuple[Factor, ...]
Range = tuple[int, int]


class StackAxis(NamedTuple):
    """An axis of which each trip of a loop gets one element.

    Attributes:
      loop: where the loop is, `()` where the program itself takes the element by a number it counts.
      factors: the axis.
      range: the elements of the axis that are the parameter's.
      length: how many elements the axis has.

    >>> StackAxis((3,), (Factor((0,), 4),), (0, 4), 4).share
    1.0
    """

    loop: tuple[int, ...]
    factors: Factors
    range: Range
    length: int

    @property
    def share(self) -> float:
        """The share of the trips that get an element of the parameter."""
        return (self.range[1] - self.range[0]) / self.length


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """A step of an exact view: an equation that moves elements.

    Attributes:
      equation: of a program.
      operand: which of its operands is moved.
      result: to which of its results.
      others: constants that are operands, too, by number: indices, a mask.

    >>> Move(jax.make_jaxpr(jnp.transpose)(jnp.ones((2, 3))).eqns[0])(jnp.ones((2, 3))).shape
    (3, 2)
    """

    equation: Any
    operand: int = 0
    result: int = 0
    others: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def __call__(self, value: jax.Array) -> jax.Array:
        """The result, with zeros for operands that are not known; those of the moved one's dtype are cast with it."""
        operands, moved_dtype = [], self.equation.invars[self.operand].aval.dtype
        for i, variable in enumerate(self.equation.invars):
            if i == self.operand:
                operands.append(value)
                continue
            dtype = value.dtype if variable.aval.dtype == moved_dtype else variable.aval.dtype
            known = self.others.get(i, 0)
            operands.append(jnp.broadcast_to(jnp.asarray(known, dtype), variable.aval.shape))
        results = self.equation.primitive.bind(*operands, **self.equation.params)
        return results[self.result] if self.equation.primitive.multiple_results else results


# The steps in between happen to each element of the first axis.
ENTER_LOOP, LEAVE_LOOP = 'enter', 'leave'


@dataclasses.dataclass(frozen=True)
class View:
    """How a value is read from a parameter.

    Attributes:
      leaf: index of the parameter.
      axes: the factors of each axis of the value.
      region: for each axis of the value, from where to where it is this parameter's.
      stack: the axes that loops have taken apart.
      exact: the value's elements are the parameter's own.
      steps: what was done to the parameter, where exact.

    >>> whole(0, (2, 3)).axes
    ((Factor(axes=(0,), size=2),), (Factor(axes=(1,), size=3),))
    """

    leaf: int
    axes: tuple[Factors, ...]
    region: tuple[Range, ...]
    stack: tuple[StackAxis, ...] = ()
    exact: bool = True
    steps: tuple[Any, ...] = ()

    def read(self, leaf: jax.Array) -> jax.Array:
        """The value, made from the parameter: a linear function of it.

        Axes that loops have taken apart stand in front; what other parameters fill in is zero.

        Args:
          leaf: the parameter.

        Raises:
          ValueError: the view is not exact.
        """
        if not self.exact:
            raise ValueError(
                'this value is computed from its parameter, not read from it; see Use.exact'
            )
        value, depth = jnp.asarray(leaf), 0  # a number of Python has no dtype
        for step in self.steps:
            if step in (ENTER_LOOP, LEAVE_LOOP):
                depth += 1 if step == ENTER_LOOP else -1
                continue
            function: Callable[[jax.Array], jax.Array] = step
            for _ in range(depth):
                function = jax.vmap(function)
            value = function(value)
        return value


def whole(leaf: int, shape: Sequence[int]) -> View:
    """The parameter itself.

    >>> whole(0, (2,)).region
    ((0, 2),)
    """
    return View(
        leaf, tuple((Factor((i,), n),) for i, n in enumerate(shape)), tuple((0, n) for n in shape)
    )


def moved(view: View, axes: Sequence[Factors], region: Sequence[Range], *steps: Any) -> View:
    """A view after a move of its elements.

    >>> moved(whole(0, (1,)), (), ()).axes
    ()
    """
    return dataclasses.replace(
        view,
        axes=tuple(axes),
        region=tuple(region),
        steps=(*view.steps, *steps) if view.exact else (),
    )


def computed(
    view: View, axes: Sequence[Factors] | None = None, region: Sequence[Range] | None = None
) -> View:
    """A view of which values have been computed, along these axes or the same.

    >>> computed(whole(0, (2,))).exact
    False
    """
    axes = view.axes if axes is None else axes
    region = view.region if region is None else region
    return dataclasses.replace(view, axes=tuple(axes), region=tuple(region), exact=False, steps=())


def copies(size: int) -> Factors:
    """An axis along which the value is the same.

    >>> copies(3)
    (Factor(axes=(), size=3),)
    """
    return (Factor((), size),)


def along(factors: Factors) -> tuple[int, ...]:
    """The parameter's axes that have a part in an axis of a value.

    >>> along((Factor((1,), 2), Factor((0,), 3)))
    (0, 1)
    """
    return tuple(sorted({axis for factor in factors for axis in factor.axes}))


def mixed(factors: Factors, size: int) -> Factors:
    """An axis of which only the parameter's axes are known, not their order.

    >>> mixed((Factor((1,), 2), Factor((0,), 3)), 5)
    (Factor(axes=(0, 1), size=5),)
    """
    return (Factor(along(factors), size),)
