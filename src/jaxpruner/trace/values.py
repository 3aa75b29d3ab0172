"""What the walk knows of a value: whether it is data, how it is made of parameters, and constants, such as masks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.trace.program import ProgramPath
from jaxpruner.trace.views import Views


class Constant:
    """A value that depends on no parameter and no input, computed on demand.

    Attributes:
      compute: computes the value.
      loop: path of the loop in whose trips it differs, such as the number of the trip. Then the array has the trips in
        front, in the order of the scanned axis. `None` if it is one value.
    """

    def __init__(self, compute: Callable[[], Any], loop: ProgramPath | None = None):
        self.compute = functools.cache(compute)
        self.loop = loop

    def array(self) -> np.ndarray | None:
        """The value; `None` if it cannot be computed here, such as a tracer or an array on another host."""
        try:
            with jax.ensure_compile_time_eval():
                return np.asarray(self.compute())
        except (ArithmeticError, NameError, RuntimeError, TypeError, ValueError):
            return None


def results_of_constants(
    equation: Any, operands: Sequence[Constant | None]
) -> list[Constant | None]:
    """The results of an equation with no program inside: `None` unless all operands are constants."""
    known = [operand for operand in operands if operand is not None]
    loops = {operand.loop for operand in known} - {None}
    if len(known) < len(operands) or len(loops) > 1 or equation.effects:
        return [None] * len(equation.outvars)
    loop = next(iter(loops), None)

    def compute(number: int) -> Any:
        function = functools.partial(equation.primitive.bind, **equation.params)
        if loop is not None:
            axes = tuple(None if operand.loop is None else 0 for operand in known)
            function = jax.vmap(function, axes)
        results = function(*[operand.compute() for operand in known])
        return results[number] if equation.primitive.multiple_results else results

    return [
        Constant(functools.partial(compute, number), loop)
        for number in range(len(equation.outvars))
    ]


class Value(NamedTuple):
    """What is known of a value. The default is an unknown constant.

    Attributes:
      data: whether it depends on an input of the model.
      views: how it is read or computed from parameters; empty for data.
      constant: the constant, if it is made only of constants.
    """

    data: bool = False
    views: Views = ()
    constant: Constant | None = None

    @property
    def array(self) -> np.ndarray | None:
        """The constant, if it is one value and known."""
        if self.constant is None or self.constant.loop is not None:
            return None
        return self.constant.array()


Values = Sequence[Value]
DATA = Value(True)


def has_views(values: Values) -> bool:
    """Whether one of these values is made of a parameter."""
    return any(value.views for value in values)
