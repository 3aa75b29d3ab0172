"""Contractions, the operations that multiply and sum: which axes of an operand they contract, and what they cost."""

import math
from typing import Any, NamedTuple

from jaxpruner.uses.views import NoRuleError

# Primitives, and the name of the operation in a `Use`.
OPERATIONS = {'dot_general': 'dot', 'conv_general_dilated': 'conv'}


class Roles(NamedTuple):
    """What a contraction does with the axes of one of its operands.

    >>> Roles(contract=(0,), free=(1,), batch=()).free
    (1,)
    """

    contract: tuple[int, ...]
    free: tuple[int, ...]
    batch: tuple[int, ...]


def roles(equation: Any, operand: int) -> Roles:
    """The roles of an operand's axes.

    Args:
      equation: a contraction.
      operand: 0 or 1.

    Raises:
      NoRuleError: the operand is the image of a convolution.

    >>> import jax, jax.numpy as jnp
    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> roles(equation, 1)
    Roles(contract=(0,), free=(1,), batch=())
    """
    numbers = equation.params['dimension_numbers']
    if equation.primitive.name == 'dot_general':
        contracted, batched = (tuple(axes[operand]) for axes in numbers)
        rank = len(equation.invars[operand].aval.shape)
        return Roles(contracted, tuple(i for i in range(rank) if i not in (*contracted, *batched)), batched)
    if operand == 0:
        raise NoRuleError('no rule for a convolution with a parameter as its image')
    output, *inputs = numbers.rhs_spec
    return Roles(tuple(inputs), (output,), ())


def flops(equation: Any) -> int:
    """Floating point operations of a contraction: two for each product that is summed.

    A convolution counts each output with each element of the window, padding included; where the image is dilated, as
    in a transposed convolution, each input with each element of the window.

    >>> import jax, jax.numpy as jnp
    >>> flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0])
    48
    """
    left, right = (variable.aval.shape for variable in equation.invars)
    result = equation.outvars[0].aval.shape
    numbers = equation.params['dimension_numbers']
    if equation.primitive.name == 'dot_general':
        return 2 * math.prod(result) * math.prod(left[i] for i in numbers[0][0])
    positions = [result[i] for i in numbers.out_spec]
    for k, dilation in enumerate(equation.params['lhs_dilation']):
        if dilation > 1 and equation.params['window_strides'][k] == 1:
            positions[2 + k] = left[numbers.lhs_spec[2 + k]]
    return 2 * math.prod(positions) * math.prod(right[i] for i in numbers.rhs_spec[1:])


def innermost(equation: Any, operand: int) -> int:
    """Which of an operand's contracted axes lies innermost where they are laid out as the rows of a matrix.

    Args:
      equation: a contraction.
      operand: 0 or 1.

    >>> import jax, jax.numpy as jnp
    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> innermost(equation, 1)
    0
    """
    numbers = equation.params['dimension_numbers']
    if equation.primitive.name == 'dot_general':
        return max(numbers[0][operand])
    return numbers.rhs_spec[1]
