"""Whole numbers that a program computes from constants alone, such as the index -1 made positive.

Within a loop the number of the trip is one of them: a `Counter` knows what it is in each trip.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    'abs': abs,
    'add': operator.add,
    'and': operator.and_,
    'clamp': lambda low, value, high: min(max(low, value), high),
    'convert_element_type': int,
    'div': lambda a, b: _quotient(a, b),
    'eq': operator.eq,
    'ge': operator.ge,
    'gt': operator.gt,
    'le': operator.le,
    'lt': operator.lt,
    'max': max,
    'min': min,
    'mul': operator.mul,
    'ne': operator.ne,
    'neg': operator.neg,
    'or': operator.or_,
    'rem': lambda a, b: a - b * _quotient(a, b),
    'select_n': lambda which, *cases: cases[which],
    'sign': lambda value: (value > 0) - (value < 0),
    'sub': operator.sub,
}


def _quotient(dividend: int, divisor: int) -> int:
    """Rounded towards zero, as XLA has it."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


class Counter(NamedTuple):
    """A whole number that is known in each trip of a loop.

    Attributes:
      loop: the loop's path.
      values: one for each trip, in the order in which the loop's stacks are; a loop in reverse begins with the last.

    >>> Counter((3,), (0, 1, 2)).values[1]
    1
    """

    loop: tuple[int, ...]
    values: tuple[int, ...]


Number = int | Counter


def of_literal(literal: Any) -> int | None:
    """The whole number that stands in a program.

    >>> import jax
    >>> of_literal(jax.make_jaxpr(lambda x: x + 1)(2).eqns[0].invars[1])
    1
    """
    value = np.asarray(literal.val)
    return int(value) if value.ndim == 0 and value.dtype.kind in 'bui' else None


def of_result(equation: Any, operands: Sequence[Number | None]) -> Number | None:
    """The result of an equation where all operands are known and it is a whole number.

    >>> import jax
    >>> equation = jax.make_jaxpr(lambda x: x + 1)(2).eqns[0]
    >>> of_result(equation, [2, 1]), of_result(equation, [Counter((0,), (2, 4)), 1])
    (3, Counter(loop=(0,), values=(3, 5)))
    """
    function = _FUNCTIONS.get(equation.primitive.name)
    known = [number for number in operands if number is not None]
    if function is None or len(known) < len(operands):
        return None
    result = equation.outvars[0].aval
    counters = [number for number in known if isinstance(number, Counter)]
    is_whole = not result.shape and np.dtype(result.dtype).kind in 'bui'
    if not is_whole or len({counter.loop for counter in counters}) > 1:
        return None

    def evaluated(numbers: Sequence[int]) -> int:
        return int(
            np.array(int(function(*numbers))).astype(result.dtype)
        )  # what does not fit wraps round

    try:
        if not counters:
            return evaluated([number for number in known if isinstance(number, int)])
        trips = len(counters[0].values)
        rows = [
            number.values if isinstance(number, Counter) else (number,) * trips for number in known
        ]
        return Counter(counters[0].loop, tuple(map(evaluated, zip(*rows, strict=True))))
    except (ArithmeticError, ValueError):  # divided by zero
        return None
