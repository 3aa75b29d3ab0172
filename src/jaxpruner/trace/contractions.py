"""Contractions, the operations that multiply and sum: the axes that they contract, and their FLOPs."""

from typing import Any, NamedTuple

from jaxpruner.trace.views import NoRuleError, all_but

# Products of groups of rows with a matrix each, as in a mixture of experts. Older JAX only has the first one.
RAGGED = frozenset(('ragged_dot', 'ragged_dot_general'))
# Primitive -> the name of the operation in a `Use`.
OPERATIONS = {'dot_general': 'dot', 'conv_general_dilated': 'conv', **dict.fromkeys(RAGGED, 'dot')}

AxisNumbers = tuple[int, ...]


class DotAxes(NamedTuple):
    """The axes of a product: pairs for its left and its right operand.

    Attributes:
      contract: axes that are summed over.
      batch: axes that both operands and the result have.
      groups: axes of the right operand with an element for each group of rows of the left one.
    """

    contract: tuple[AxisNumbers, AxisNumbers]
    batch: tuple[AxisNumbers, AxisNumbers]
    groups: AxisNumbers = ()


# Of `ragged_dot`: rows (rows, inputs), and a matrix for each group of rows (groups, inputs, outputs).
PLAIN_RAGGED_DOT = DotAxes(contract=((1,), (1,)), batch=((), ()), groups=(0,))


def dot_axes(equation: Any) -> DotAxes:
    """Reads the axes of a product that is no convolution."""
    name, params = equation.primitive.name, equation.params
    if name == 'ragged_dot':
        return PLAIN_RAGGED_DOT
    groups: AxisNumbers = ()
    if name in RAGGED:
        ragged = params['ragged_dot_dimension_numbers']
        dimension_numbers = ragged.dot_dimension_numbers
        groups = tuple(ragged.rhs_group_dimensions)
    else:
        dimension_numbers = params['dimension_numbers']
    (left_contract, right_contract), (left_batch, right_batch) = dimension_numbers
    contract = tuple(left_contract), tuple(right_contract)
    return DotAxes(contract, (tuple(left_batch), tuple(right_batch)), groups)


class Roles(NamedTuple):
    """The axes of one operand, by what an operation does with them."""

    contract: AxisNumbers
    free: AxisNumbers
    batch: AxisNumbers


def roles(equation: Any, operand: int) -> Roles:
    """The roles of an operand's axes in a contraction. An axis of groups counts as a batch.

    Raises:
      NoRuleError: the operand is the image of a convolution, or the sizes of groups.
    """
    if operand > 1:
        raise NoRuleError('no rule for groups whose sizes are made of a parameter')
    if OPERATIONS[equation.primitive.name] == 'dot':
        axes = dot_axes(equation)
        contract, batch = axes.contract[operand], axes.batch[operand]
        if operand == 1:
            batch += axes.groups
        free = all_but(contract + batch, equation.invars[operand].aval.shape)
        return Roles(contract, tuple(free), batch)
    if operand == 0:
        raise NoRuleError('no rule for a convolution with a parameter as its image')
    output, *inputs = equation.params['dimension_numbers'].rhs_spec
    return Roles(tuple(inputs), (output,), ())


def flops(equation: Any) -> int:
    """Floating point operations of a contraction: two for each product that is summed.

    A convolution multiplies each output position by each element of the window, padding included. If the image is
    dilated, as in a transposed convolution, it multiplies each input position. In groups of rows each row counts once.
    """
    variables = (*equation.invars[:2], equation.outvars[0])
    products = 1
    for number, axis in factors(equation):
        products *= variables[number].aval.shape[axis]
    return 2 * products


def factors(equation: Any) -> list[tuple[int, int]]:
    """The axes whose sizes are multiplied to count the products that a contraction sums; see `flops`.

    Each is a pair: the number of a value, 0 and 1 for the operands and 2 for the result, and the number of its axis.
    """
    params, numbers = equation.params, equation.params.get('dimension_numbers')
    of_result = [(2, axis) for axis in range(len(equation.outvars[0].aval.shape))]
    for k, dilation in enumerate(params.get('lhs_dilation', ())):
        if dilation > 1 and params['window_strides'][k] == 1:
            of_result[numbers.out_spec[2 + k]] = 0, numbers.lhs_spec[2 + k]
    return of_result + [(1, axis) for axis in roles(equation, 1).contract]


def input_axes(equation: Any, operand: int) -> AxisNumbers:
    """An operand's contracted axes in the order in which they form the rows of a matrix, innermost last.

    For a convolution these are the axes of the window, then that of the channels.
    """
    if OPERATIONS[equation.primitive.name] == 'dot':
        return tuple(sorted(dot_axes(equation).contract[operand]))
    _, channels, *window = equation.params['dimension_numbers'].rhs_spec
    return (*window, channels)
