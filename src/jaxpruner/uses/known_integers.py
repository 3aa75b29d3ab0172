"""Integers that a program computes only from constants, such as the index -1 made positive.

In a loop, the number of the trip is one of them. A `Counter` has its value in each trip.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.uses.bodies import ProgramPath

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
    """A quotient rounded towards zero, as in XLA."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


class Counter(NamedTuple):
    """An integer that is known in each trip of a loop.

    Attributes:
      loop: the loop's path.
      values: one for each trip, in the order of the scanned axis. A reverse scan begins with the last one.
    """

    loop: ProgramPath
    values: tuple[int, ...]

    @staticmethod
    def in_trip(value: 'KnownInteger', trip: int) -> int:
        """The value of a known integer in a trip."""
        return value.values[trip] if isinstance(value, Counter) else value


KnownInteger = int | Counter


def of_result(equation: Any, operands: Sequence[KnownInteger | None]) -> KnownInteger | None:
    """The result of an equation if it is an integer and all operands are known."""
    function = _FUNCTIONS.get(equation.primitive.name)
    known = [value for value in operands if value is not None]
    if function is None or len(known) < len(operands):
        return None
    counters = [value for value in known if isinstance(value, Counter)]
    result = equation.outvars[0].aval
    is_whole = not result.shape and np.dtype(result.dtype).kind in 'bui'
    if not is_whole or len({counter.loop for counter in counters}) > 1:
        return None

    def evaluate(trip: int = 0) -> int:
        operands = [Counter.in_trip(value, trip) for value in known]
        value = np.array(int(function(*operands)))
        return int(value.astype(result.dtype))  # overflow wraps around

    try:
        if not counters:
            return evaluate()
        trips = range(len(counters[0].values))
        return Counter(counters[0].loop, tuple(map(evaluate, trips)))
    except (ArithmeticError, ValueError):  # division by zero
        return None
