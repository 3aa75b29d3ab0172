"""Contractions, the operations that multiply and sum: which axes of an operand they contract, and what they cost."""

import math
from typing import Any, NamedTuple

from jaxpruner.uses.views import NoRuleError

# Products of groups of rows with a matrix each, as a mixture of experts has them; older JAX has the first alone.
RAGGED = frozenset(('ragged_dot', 'ragged_dot_general'))
# Primitives, and the name of the operation in a `Use`.
OPERATIONS = {'dot_general': 'dot', 'conv_general_dilated': 'conv', **dict.fromkeys(RAGGED, 'dot')}


class DotAxes(NamedTuple):
    """The axes of a product, of its left and its right operand.

    Attributes:
      contract: that are summed over.
      batch: that both have.
      groups: of the right operand: each group of rows of the left one meets one element of them.

    >>> DotAxes(((1,), (1,)), ((), ()), (0,)).groups
    (0,)
    """

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    groups: tuple[int, ...] = ()


def dot_axes(equation: Any) -> DotAxes:
    """The axes of a product that is no convolution.

    >>> import jax, jax.numpy as jnp
    >>> dot_axes(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0])
    DotAxes(contract=((1,), (0,)), batch=((), ()), groups=())
    """
    name, params = equation.primitive.name, equation.params
    if name == 'ragged_dot':
        return DotAxes(((1,), (1,)), ((), ()), (0,))
    ragged = params['ragged_dot_dimension_numbers'] if name in RAGGED else None
    contract, batch = (
        params['dimension_numbers'] if ragged is None else ragged.dot_dimension_numbers
    )
    groups = () if ragged is None else tuple(ragged.rhs_group_dimensions)
    return DotAxes(
        (tuple(contract[0]), tuple(contract[1])), (tuple(batch[0]), tuple(batch[1])), groups
    )


class Roles(NamedTuple):
    """What a contraction does with the axes of one of its operands.

    >>> Roles(contract=(0,), free=(1,), batch=()).free
    (1,)
    """

    contract: tuple[int, ...]
    free: tuple[int, ...]
    batch: tuple[int, ...]


def roles(equation: Any, operand: int) -> Roles:
    """The roles of an operand's axes; an axis of groups counts as a batch.

    Args:
      equation: a contraction.
      operand: 0 or 1.

    Raises:
      NoRuleError: the operand is the image of a convolution, or the sizes of groups.

    >>> import jax, jax.numpy as jnp
    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> roles(equation, 1)
    Roles(contract=(0,), free=(1,), batch=())
    """
    if operand > 1:
        raise NoRuleError('no rule for groups whose sizes are made of a parameter')
    if OPERATIONS[equation.primitive.name] == 'dot':
        axes = dot_axes(equation)
        contracted = axes.contract[operand]
        batched = axes.batch[operand] + (axes.groups if operand else ())
        rank = len(equation.invars[operand].aval.shape)
        return Roles(
            contracted, tuple(i for i in range(rank) if i not in (*contracted, *batched)), batched
        )
    if operand == 0:
        raise NoRuleError('no rule for a convolution with a parameter as its image')
    output, *inputs = equation.params['dimension_numbers'].rhs_spec
    return Roles(tuple(inputs), (output,), ())


def flops(equation: Any) -> int:
    """Floating point operations of a contraction: two for each product that is summed.

    A convolution counts each output with each element of the window, padding included; where the image is dilated, as
    in a transposed convolution, each input with each element of the window. Of groups of rows each row counts once.

    >>> import jax, jax.numpy as jnp
    >>> flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0])
    48
    """
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    if OPERATIONS[equation.primitive.name] == 'dot':
        free = roles(equation, 1).free
        return 2 * math.prod(left) * math.prod(right[i] for i in free)
    result, numbers = equation.outvars[0].aval.shape, equation.params['dimension_numbers']
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
    if OPERATIONS[equation.primitive.name] == 'dot':
        return max(dot_axes(equation).contract[operand])
    return equation.params['dimension_numbers'].rhs_spec[1]
