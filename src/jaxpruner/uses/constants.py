"""Values that a program makes only of constants, such as masks and permutations. They are computed on demand."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Constant:
    """A value that depends on no parameter and no input: a result of an equation, or a known value."""

    def __init__(
        self, equation: Any, operands: Sequence['Constant'], result: int = 0, value: Any = None
    ):
        self._equation = equation
        self._operands = operands
        self._result = result
        self._value = value

    def array(self) -> np.ndarray | None:
        """The value; `None` if it cannot be computed here, such as a tracer or an array on another host."""
        try:
            with jax.ensure_compile_time_eval():
                return np.asarray(self._compute())
        except (NameError, RuntimeError, TypeError, ValueError):
            return None

    def _compute(self) -> Any:
        if self._value is None:
            equation = self._equation
            operands = [operand._compute() for operand in self._operands]
            results = equation.primitive.bind(*operands, **equation.params)
            self._value = results[self._result] if equation.primitive.multiple_results else results
        return self._value


def known_integer(constant: Constant | None, aval: Any) -> int | None:
    """The value of a constant if it is an integer or a boolean. `aval` has its shape and dtype."""
    if constant is None or aval.shape or not _is_whole(aval.dtype):
        return None
    array = constant.array()
    return None if array is None else int(array)


def _is_whole(dtype: Any) -> bool:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return is_integer or jnp.issubdtype(dtype, jnp.bool_)


def of_value(value: Any) -> Constant:
    """The constant of a known value."""
    return Constant(None, (), value=value)


def of_results(equation: Any, operands: Sequence[Constant | None]) -> list[Constant | None]:
    """The results of an equation with no program inside: `None` unless all operands are constants."""
    constants = [operand for operand in operands if operand is not None]
    count = len(equation.outvars)
    if len(constants) < len(operands) or equation.effects:
        return [None] * count
    return [Constant(equation, constants, result) for result in range(count)]
