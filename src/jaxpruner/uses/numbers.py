"""Whole numbers that a program computes from constants alone, such as the index -1 made positive."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    'add': operator.add,
    'convert_element_type': int,
    'eq': operator.eq,
    'ge': operator.ge,
    'gt': operator.gt,
    'le': operator.le,
    'lt': operator.lt,
    'max': max,
    'min': min,
    'mul': operator.mul,
    'select_n': lambda which, *cases: cases[which],
    'sub': operator.sub,
}


def of_literal(literal: Any) -> int | None:
    """The whole number that stands in a program.

    >>> import jax
    >>> of_literal(jax.make_jaxpr(lambda x: x + 1)(2).eqns[0].invars[1])
    1
    """
    value = np.asarray(literal.val)
    return int(value) if value.ndim == 0 and value.dtype.kind in 'bui' else None


def of_result(equation: Any, operands: Sequence[int | None]) -> int | None:
    """The result of an equation where all operands are known and it is a whole number.

    >>> import jax
    >>> of_result(jax.make_jaxpr(lambda x: x + 1)(2).eqns[0], [2, 1])
    3
    """
    function = _FUNCTIONS.get(equation.primitive.name)
    known = [number for number in operands if number is not None]
    if function is None or len(known) < len(operands):
        return None
    result = equation.outvars[0].aval
    is_whole = not result.shape and np.dtype(result.dtype).kind in 'bui'
    return int(function(*known)) if is_whole else None
