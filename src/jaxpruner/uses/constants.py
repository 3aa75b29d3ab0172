"""Values that a program makes of constants alone: masks, permutations. They are computed when a rule asks for them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Constant:
    """A value that no parameter and no input has a part in.

    Args:
      equation: what makes it; `None` for `value`.
      operands: of the equation.
      result: which of its results.
      value: a value that is known already.

    >>> equation = jax.make_jaxpr(lambda: jax.numpy.arange(3))().eqns[0]
    >>> Constant(equation, ()).array()
    array([0, 1, 2], dtype=int32)
    """

    def __init__(
        self, equation: Any, operands: Sequence['Constant'], result: int = 0, value: Any = None
    ):
        self._equation, self._operands, self._result = equation, operands, result
        self._value = value

    def array(self) -> np.ndarray | None:
        """The value; `None` where it cannot be computed here, such as a tracer, or what another host has."""
        try:
            with jax.ensure_compile_time_eval():
                return np.asarray(self._computed())
        except (NameError, RuntimeError, TypeError, ValueError):
            return None

    def _computed(self) -> Any:
        if self._value is None:
            equation = self._equation
            operands = [operand._computed() for operand in self._operands]
            results = equation.primitive.bind(*operands, **equation.params)
            self._value = results[self._result] if equation.primitive.multiple_results else results
        return self._value


def whole_number(constant: Constant | None, aval: Any) -> int | None:
    """The value where it is a whole number.

    Args:
      constant: maybe one.
      aval: its shape and dtype.

    >>> import jax.numpy as jnp
    >>> whole_number(of_value(jnp.int32(3)), jax.ShapeDtypeStruct((), jnp.int32))
    3
    """
    if constant is None or aval.shape or not jnp.issubdtype(aval.dtype, jnp.integer):
        return None
    array = constant.array()
    return None if array is None else int(array)


def of_value(value: Any) -> Constant:
    """A constant that is known.

    >>> int(of_value(3).array())
    3
    """
    return Constant(None, (), value=value)


def of_results(equation: Any, operands: Sequence[Constant | None]) -> list[Constant | None]:
    """The results of an equation, where all of its operands are constants.

    Args:
      equation: of a program; it runs no other program.
      operands: `None` for those that are no constants.

    >>> equation = jax.make_jaxpr(lambda x: x + 1)(2).eqns[0]
    >>> [result.array().tolist() for result in of_results(equation, [of_value(2), of_value(1)])]
    [3]
    """
    known = [operand for operand in operands if operand is not None]
    if len(known) < len(operands) or equation.effects:
        return [None] * len(equation.outvars)
    return [Constant(equation, known, result) for result in range(len(equation.outvars))]
