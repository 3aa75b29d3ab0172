"""What the walk knows of a value: whether it is data, how it is made of parameters, and constants, such as masks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.trace.program import ProgramPath
from jaxpruner.trace.views import Views


class Constant:
    """A value that depends on no parameter and no input, computed on demand.

    Attributes:
      loop: path of the loop in whose trips it differs, such as the number of the trip. Then the array has the trips in
        front, in the order of the scanned axis. `None` if it is one value.
    """

    def __init__(
        self,
        value: Any = None,
        loop: ProgramPath | None = None,
        equation: Any = None,
        operands: Sequence['Constant'] = (),
        result: int = 0,
    ):
        self.loop = loop
        self._value = value
        self._equation = equation
        self._operands = operands
        self._result = result

    @classmethod
    def results_of(
        cls, equation: Any, operands: Sequence['Constant | None']
    ) -> Sequence['Constant | None']:
        """The results of an equation with no program inside: `None` unless all operands are constants."""
        known = [operand for operand in operands if operand is not None]
        loops = {operand.loop for operand in known if operand.loop is not None}
        numbers = range(len(equation.outvars))
        if len(known) < len(operands) or len(loops) > 1 or equation.effects:
            return [None for _ in numbers]
        loop = loops.pop() if loops else None
        return [cls(None, loop, equation, known, number) for number in numbers]

    def in_trips(self, loop: ProgramPath) -> 'Constant | None':
        """The elements of a value that a scan takes apart."""
        return Constant(loop=loop, operands=[self]) if self.loop is None else None

    def array(self) -> np.ndarray | None:
        """The value; `None` if it cannot be computed here, such as a tracer or an array on another host."""
        try:
            with jax.ensure_compile_time_eval():
                return np.asarray(self._compute())
        except (ArithmeticError, NameError, RuntimeError, TypeError, ValueError):
            return None

    def _compute(self) -> Any:
        if self._value is not None:
            return self._value
        operands = [operand._compute() for operand in self._operands]
        equation = self._equation
        if equation is None:
            (self._value,) = operands
            return self._value

        def function(*operands: Any) -> Any:
            return equation.primitive.bind(*operands, **equation.params)

        if self.loop is not None:
            is_stacked = [operand.loop is not None for operand in self._operands]
            axes = tuple(0 if stacked else None for stacked in is_stacked)
            function = jax.vmap(function, axes)
        results = function(*operands)
        self._value = results[self._result] if equation.primitive.multiple_results else results
        return self._value


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
