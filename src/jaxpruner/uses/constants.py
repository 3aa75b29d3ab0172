"""Values that a program makes of constants alone: masks, permutations. They are computed when a rule asks for them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Constant:
    """A value that no parameter and no input has a part in: a result of an equation, or a value that is known."""

    def __init__(
        self, equation: Any, operands: Sequence['Constant'], result: int = 0, value: Any = None
    ):
        self._equation = equation
        self._operands = operands
        self._result = result
        self._value = value

    def array(self) -> np.ndarray | None:
        """The value; `None` where it cannot be computed here, such as a tracer, or what another host has."""
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
    """The value where it is a whole number or a truth value; `aval` has its shape and dtype."""
    if constant is None or aval.shape or not _is_whole(aval.dtype):
        return None
    array = constant.array()
    return None if array is None else int(array)


def _is_whole(dtype: Any) -> bool:
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return is_integer or jnp.issubdtype(dtype, jnp.bool_)


def of_value(value: Any) -> Constant:
    """A constant that is known."""
    return Constant(None, (), value=value)


def of_results(equation: Any, operands: Sequence[Constant | None]) -> list[Constant | None]:
    """The results of an equation that runs no other program: `None` unless all operands are constants."""
    constants = [operand for operand in operands if operand is not None]
    count = len(equation.outvars)
    if len(constants) < len(operands) or equation.effects:
        return [None] * count
    return [Constant(equation, constants, result) for result in range(count)]
