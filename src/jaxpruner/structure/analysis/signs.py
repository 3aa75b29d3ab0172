"""Signs: the signs that elements of a value may have, whatever the parameters and inputs are.

The largest of some channels is the same without channels of 0 if no channel is ever negative, as after a ReLU.

    x of any sign       {-1, 1}
    abs(x)              {1}
    -abs(x)             {-1}
    abs(x) * -abs(x)    {-1}
    abs(x) - abs(x)     {-1, 1}
    zeros               {}
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# The signs that elements may have, besides 0. Values that are not real numbers count as of any sign.
Signs = frozenset[int]

ANY: Signs = frozenset({-1, 1})
NEVER_NEGATIVE: Signs = frozenset({1})
NEVER_POSITIVE: Signs = frozenset({-1})

_POSITIVE = frozenset('abs cosh erfc exp exp2 iota logistic rsqrt sqrt square'.split())
# The result has signs that the first operand has.
_AS_FIRST = frozenset(
    """
    asinh atan broadcast_in_dim cbrt ceil cummax cummin cumsum dynamic_slice erf expm1 floor log1p
    reduce_max reduce_min reduce_precision reduce_sum reduce_window_max reduce_window_min reduce_window_sum reshape rev
    round sinh slice split squeeze tanh tile transpose unstack
    """.split()
)
# The result has signs that one of the operands has.
_AS_ALL = frozenset('add add_any concatenate pad pmax pmin psum sort stack'.split())
_PRODUCTS = frozenset(
    'conv_general_dilated div dot_general mul ragged_dot ragged_dot_general'.split()
)


def signs_of(array: Any) -> Signs:
    """The signs of an array of real numbers.

    >>> sorted(signs_of(np.array([0, 2, 3])))
    [1]
    """
    if np.iscomplexobj(array):
        return ANY
    signs = set()
    if not (array >= 0).all():  # NaN may be anything
        signs.add(-1)
    if not (array <= 0).all():
        signs.add(1)
    return frozenset(signs)


def signs_of_results(equation: Any, operands: Sequence[Signs]) -> Signs:
    """The signs of the results of an equation with operands of these signs."""
    dtype = equation.outvars[0].aval.dtype
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not is_real:
        return ANY
    name = equation.primitive.name
    if name in _POSITIVE or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return NEVER_NEGATIVE
    if name in _AS_FIRST:
        return operands[0]
    if name in _AS_ALL:
        return _union(operands)
    if name in _PRODUCTS:
        is_square = name == 'mul' and equation.invars[0] is equation.invars[1]
        return NEVER_NEGATIVE if is_square else _products(*operands[:2])
    match name, operands:
        case 'neg', [signs]:
            return _products(signs, NEVER_POSITIVE)
        case 'sub', [first, second]:
            return first | _products(second, NEVER_POSITIVE)
        case 'max', [first, second]:
            return _largest(first, second)
        case 'min', [first, second]:
            return _smallest(first, second)
        case 'clamp', [least, signs, most]:
            return _smallest(_largest(signs, least), most)
        case 'select_n', [_, *cases]:
            return _union(cases)
        case 'integer_pow', [signs]:
            return NEVER_NEGATIVE if equation.params['y'] % 2 == 0 else signs
        case 'pow', [signs, _]:
            return ANY if -1 in signs else NEVER_NEGATIVE
        case 'convert_element_type', [signs]:
            before = equation.invars[0].aval.dtype
            may_wrap = jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(dtype, jnp.integer)
            return ANY if may_wrap else signs
    return ANY


def _union(operands: Sequence[Signs]) -> Signs:
    return frozenset().union(*operands)


def _products(first: Signs, second: Signs) -> Signs:
    return frozenset(one * other for one in first for other in second)


def _largest(first: Signs, second: Signs) -> Signs:
    return ((first | second) & NEVER_NEGATIVE) | (first & second & NEVER_POSITIVE)


def _smallest(first: Signs, second: Signs) -> Signs:
    return ((first | second) & NEVER_POSITIVE) | (first & second & NEVER_NEGATIVE)
