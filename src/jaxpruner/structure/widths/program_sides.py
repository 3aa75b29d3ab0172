"""One of two programs that are compared: its live equations, programs inside them, and the origins of its values."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis import fills
from jaxpruner.trace.program import Call, Cond, Program, Scan, While, live, needed_in_body


class Fixed(NamedTuple):
    """The origin of an operand whose value is known."""

    value: Any


class Side(NamedTuple):
    """One of two programs, with flags of its needed results."""

    program: Program
    needed: Sequence[bool]


class LiveEquation(NamedTuple):
    """An equation that the needed results depend on, with flags of its own needed results."""

    number: int
    equation: Any
    needed: Sequence[bool]


class Origins:
    """The origins of a program's values: an input, a result of an equation, or a `Fixed` value."""

    def __init__(self, constants: Iterable[Any], variables: Iterable[Any]):
        self._by_variable: dict[int, Any] = {}
        self.note(variables, map(Fixed, constants))

    def note(self, variables: Iterable[Any], origins: Iterable[Any]) -> None:
        """Notes the origins of some variables."""
        for variable, origin in zip(variables, origins, strict=True):
            self._by_variable[id(variable)] = origin

    def read(self, variable: Any) -> Any:
        """The origin of an operand; `None` for a value that is not needed."""
        if isinstance(variable, Literal):
            return Fixed(variable.val)
        return self._by_variable.get(id(variable))


def live_equations(side: Side) -> list[LiveEquation]:
    """The equations of a program that its needed results depend on."""
    jaxpr = side.program.jaxpr
    results = live(jaxpr, tuple(side.needed)).results
    equations = []
    for number, needed in enumerate(results):
        if any(needed):
            equations.append(LiveEquation(number, jaxpr.eqns[number], needed))
    return equations


def programs_inside(equation: Any, needed: Any) -> list[Side]:
    """The programs inside an equation, with flags of their needed results."""
    match equation:
        case Call():
            return [Side(equation.program, needed)]
        case Scan():
            needed_of_body = needed_in_body(equation, needed)
            return [Side(equation.body, needed_of_body)]
        case While():
            needed_of_body = needed_in_body(equation, needed)
            condition = Side(equation.condition, (True,))
            return [condition, Side(equation.body, needed_of_body)]
        case Cond():
            return [Side(branch, needed) for branch in equation.branches]
    raise AssertionError(f'{equation} has programs that are not known')


_PLAIN = (bool, int, float, str, np.dtype)


def is_plain(value: Any) -> bool:
    """Whether a parameter of a primitive consists of numbers and strings, which can be compared."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def is_same(first: Any, second: Any) -> bool:
    """Whether two constants are equal. Traced ones count as different."""
    if first is second:
        return True
    if first is None or second is None:
        return False
    if tree_lib.is_traced(first) or tree_lib.is_traced(second):
        return False
    if fills.is_key(first):
        first = jax.random.key_data(first)
        second = jax.random.key_data(second)
    first, second = np.asarray(first), np.asarray(second)
    return bool(np.array_equal(first, second, equal_nan=True))
