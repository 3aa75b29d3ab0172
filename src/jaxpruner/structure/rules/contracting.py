"""Primitives that multiply and sum, and those that reduce axes or go along them."""

from collections.abc import Sequence
from typing import Any

from jaxpruner.structure.analysis.axes import Axes, Ties, atom, new_axes, product
from jaxpruner.structure.analysis.records import Contraction, Row
from jaxpruner.structure.rules import contracting_fills, resizing
from jaxpruner.uses import contractions
from jaxpruner.uses.moving_rules import shape_of


def _without(axes: Axes, dropped: Sequence[int]) -> Axes:
    return tuple([axis for i, axis in enumerate(axes) if i not in dropped])


def contraction(equation: Any, operands: Sequence[Axes]) -> Contraction:
    """Which axes a contraction sums over, and which only one of its operands has."""
    left, right = operands[:2]
    if contractions.OPERATIONS[equation.primitive.name] == 'conv':
        numbers = equation.params['dimension_numbers']
        channels = (left[numbers.lhs_spec[1]],)
        return Contraction(
            channels, channels, (left[numbers.lhs_spec[0]], right[numbers.rhs_spec[0]])
        )
    numbers = contractions.dot_axes(equation)
    summed = tuple([left[i] for i in numbers.contract[0]])
    batch = tuple([left[i] for i in numbers.batch[0]])
    free = _without(left, numbers.contract[0] + numbers.batch[0])
    free_right = _without(right, numbers.contract[1] + numbers.batch[1])
    return Contraction(batch + summed, summed, free + free_right)


def _dot(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    left, right = operands
    numbers = contractions.dot_axes(equation)
    for kind in (numbers.contract, numbers.batch):
        for i, k in zip(*kind, strict=True):
            ties.unify(left[i], right[k])
    batch = tuple([left[i] for i in numbers.batch[0]])
    free_left = _without(left, numbers.contract[0] + numbers.batch[0])
    free_right = _without(right, numbers.contract[1] + numbers.batch[1])
    return [batch + free_left + free_right]


def _ragged_dot(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """Groups of rows, with a matrix for each group: the sizes of groups are data, so no group can be removed."""
    left, right, sizes = operands
    numbers = contractions.dot_axes(equation)
    result = new_axes(shape_of(equation.outvars[0]))
    is_plain = (
        len(left) == 2
        and len(right) == 3
        and numbers == contractions.DotAxes(((1,), (1,)), ((), ()), (0,))
    )
    if not is_plain:
        ties.pin_all((*left, *right, *sizes, *result), 'groups of rows along several axes')
        return [result]
    ties.pin_all((left[0], right[0], *sizes), 'data say how many rows a group has')
    ties.unify(left[1], right[1])
    return [(left[0], right[2])]


def _conv(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    params = equation.params
    numbers = params['dimension_numbers']
    image, kernel = operands
    result = list(new_axes(shape_of(equation.outvars[0])))
    if params['batch_group_count'] != 1:
        ties.pin_all((*image, *kernel, *result), 'groups of images')
        return [tuple(result)]
    for axes, spec in (
        (image, numbers.lhs_spec),
        (kernel, numbers.rhs_spec),
        (result, numbers.out_spec),
    ):
        ties.pin_all([axes[i] for i in spec[2:]], 'the window moves along it')
    batch, channels = (image[i] for i in numbers.lhs_spec[:2])
    outputs, inputs = (kernel[i] for i in numbers.rhs_spec[:2])
    groups = params['feature_group_count']
    if groups == 1:
        ties.unify(channels, inputs)
    else:
        group = atom(groups)
        ties.unify(channels, product([group, inputs]))
        ties.unify(outputs, product([group, atom(outputs.size // groups)]))
    result[numbers.out_spec[0]] = batch
    result[numbers.out_spec[1]] = outputs
    return [tuple(result)]


def _reduce(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    return [_without(operands[0], equation.params['axes'])]


def _collective(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """`vmap` with a name for its axis, over which the program then sums."""
    axes = equation.params['axes']
    is_plain = equation.params['axis_index_groups'] is None
    if is_plain and all(isinstance(axis, int) for axis in axes):
        return [_without(operand, axes) for operand in operands]
    results = [new_axes(shape_of(variable)) for variable in equation.outvars]
    for each in (*operands, *results):
        ties.pin_all(each, 'devices, or parts of an axis, exchange values')
    return results


def _arg_reduce(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    axes = equation.params['axes']
    ties.pin_all([operands[0][i] for i in axes], 'its result is an index along it')
    return [_without(operands[0], axes)]


def _along(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    params = equation.params
    i = params['axis'] if 'axis' in params else params['dimension']
    for axes in operands:
        ties.unify_each(operands[0], axes)
    ties.pin(operands[0][i], 'elements follow one another along it')
    return [operands[0]] * len(equation.outvars)


def _fourier(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    (axes,) = operands
    first = len(axes) - len(equation.params['fft_lengths'])
    frequencies = new_axes(shape_of(equation.outvars[0])[first:])
    ties.pin_all((*axes[first:], *frequencies), 'a Fourier transform goes along it')
    return [axes[:first] + frequencies]


def _top_k(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    (axes,) = operands
    i = equation.params.get('axis', -1) % len(axes)
    ties.pin(axes[i], 'the largest along it are taken')
    largest = atom(shape_of(equation.outvars[0])[i])
    ties.pin(largest, 'the largest along another axis lie along it')
    return [(*axes[:i], largest, *axes[i + 1 :])] * len(equation.outvars)


def _reduce_window(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    (axes,) = operands
    shape = shape_of(equation.outvars[0])
    result = list(new_axes(shape))
    window = equation.params['window_dimensions']
    for i, axis in enumerate(axes):
        if window[i] == 1 and axis.size == shape[i] and _is_plain(equation.params, i):
            result[i] = axis
        else:
            ties.pin_all((axis, result[i]), 'the window moves along it')
    return [tuple(result)]


def _is_plain(params: Any, i: int) -> bool:
    """Whether windows of one element just copy an axis."""
    base = params.get('base_dilation')
    return (
        params['window_strides'][i] == 1
        and tuple(params['padding'][i]) == (0, 0)
        and (base is None or base[i] == 1)
    )


REDUCTIONS = frozenset(
    'reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor'.split()
)
ALONG = frozenset('cumlogsumexp cummax cummin cumprod cumsum sort'.split())
WINDOWS = frozenset('reduce_window_max reduce_window_min reduce_window_sum'.split())

ROWS: dict[str, Row] = {
    'dot_general': Row(_dot, contracting_fills.dot),
    'conv_general_dilated': Row(_conv, contracting_fills.conv, resizing.conv),
    'fft': Row(_fourier, contracting_fills.fourier),
    'top_k': Row(_top_k, contracting_fills.top_k),
    **dict.fromkeys(contractions.RAGGED, Row(_ragged_dot, contracting_fills.dot)),
    **dict.fromkeys(REDUCTIONS, Row(_reduce, contracting_fills.reduce)),
    **dict.fromkeys(contracting_fills.COLLECTIVES, Row(_collective, contracting_fills.collective)),
    **dict.fromkeys(('argmax', 'argmin'), Row(_arg_reduce, contracting_fills.arg_reduce)),
    **dict.fromkeys(ALONG, Row(_along, contracting_fills.along)),
    **dict.fromkeys(WINDOWS, Row(_reduce_window, contracting_fills.window)),
}
