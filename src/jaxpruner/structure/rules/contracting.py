"""Primitives that multiply and sum, and those that reduce axes or go along them."""

from collections.abc import Mapping
from typing import Any

from jaxpruner.structure.analysis.axes import (
    Axes,
    atom,
    drop,
    new_axes,
    pick,
    product,
    replace,
)
from jaxpruner.structure.analysis.records import Contraction, EquationTies, Row
from jaxpruner.structure.rules import contracting_fills, resizing
from jaxpruner.uses import contractions
from jaxpruner.uses.contractions import DotAxes


def contraction(ties: EquationTies) -> Contraction:
    """Which axes a contraction sums over, and which only one of its operands has."""
    left, right = ties.operands[:2]
    name = ties.equation.primitive.name
    if contractions.OPERATIONS[name] == 'conv':
        numbers = ties.params['dimension_numbers']
        images, channels = pick(left, numbers.lhs_spec[:2])
        outputs = right[numbers.rhs_spec[0]]
        return Contraction((channels,), (channels,), (images, outputs))
    numbers = contractions.dot_axes(ties.equation)
    summed = pick(left, numbers.contract[0])
    batch = pick(left, numbers.batch[0])
    return Contraction(batch + summed, summed, _free_axes(left, right, numbers))


def _free_axes(left: Axes, right: Axes, numbers: DotAxes) -> Axes:
    """The axes of a product that only one of its operands has."""
    shared_left = numbers.contract[0] + numbers.batch[0]
    shared_right = numbers.contract[1] + numbers.batch[1]
    return drop(left, shared_left) + drop(right, shared_right)


def _dot(ties: EquationTies) -> list[Axes]:
    left, right = ties.operands
    numbers = contractions.dot_axes(ties.equation)
    for in_left, in_right in (numbers.contract, numbers.batch):
        ties.unify_each(pick(left, in_left), pick(right, in_right))
    batch = pick(left, numbers.batch[0])
    return [batch + _free_axes(left, right, numbers)]


# Rows of a matrix, and for each group of them a matrix.
_PLAIN_RAGGED_DOT = DotAxes(contract=((1,), (1,)), batch=((), ()), groups=(0,))


def _ragged_dot(ties: EquationTies) -> list[Axes]:
    """Groups of rows, with a matrix for each group: the sizes of groups are data, so no group can be removed."""
    left, right, sizes = ties.operands
    numbers = contractions.dot_axes(ties.equation)
    ranks = len(left), len(right)
    if ranks != (2, 3) or numbers != _PLAIN_RAGGED_DOT:
        results = ties.new_results()
        for axes in (*ties.operands, *results):
            ties.pin_all(axes, 'groups of rows along several axes')
        return results
    rows, inputs = left
    groups, inputs_of_matrices, outputs = right
    ties.pin_all((rows, groups, *sizes), 'data say how many rows a group has')
    ties.unify(inputs, inputs_of_matrices)
    return [(rows, outputs)]


def _conv(ties: EquationTies) -> list[Axes]:
    numbers = ties.params['dimension_numbers']
    image, kernel = ties.operands
    result = list(new_axes(ties.shape))
    if ties.params['batch_group_count'] != 1:
        ties.pin_all((*image, *kernel, *result), 'groups of images')
        return [tuple(result)]
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    for axes, spec in zip((image, kernel, result), specs, strict=True):
        ties.pin_all(pick(axes, spec[2:]), 'the window moves along it')
    batch, channels = pick(image, numbers.lhs_spec[:2])
    outputs, inputs = pick(kernel, numbers.rhs_spec[:2])
    groups = ties.params['feature_group_count']
    if groups == 1:
        ties.unify(channels, inputs)
    else:
        group = atom(groups)
        outputs_of_group = atom(outputs.size // groups)
        ties.unify(channels, product([group, inputs]))
        ties.unify(outputs, product([group, outputs_of_group]))
    result[numbers.out_spec[0]] = batch
    result[numbers.out_spec[1]] = outputs
    return [tuple(result)]


def _reduce(ties: EquationTies) -> list[Axes]:
    return [drop(ties.operands[0], ties.params['axes'])]


def _collective(ties: EquationTies) -> list[Axes]:
    """`vmap` with a name for its axis, over which the program then sums."""
    axes = ties.params['axes']
    is_plain = ties.params['axis_index_groups'] is None
    if is_plain and all(isinstance(axis, int) for axis in axes):
        return [drop(operand, axes) for operand in ties.operands]
    results = ties.new_results()
    for each in (*ties.operands, *results):
        ties.pin_all(each, 'devices, or parts of an axis, exchange values')
    return results


def _arg_reduce(ties: EquationTies) -> list[Axes]:
    axes = ties.operands[0]
    reduced = ties.params['axes']
    ties.pin_all(pick(axes, reduced), 'its result is an index along it')
    return [drop(axes, reduced)]


def _along(ties: EquationTies) -> list[Axes]:
    params = ties.params
    i = params['axis'] if 'axis' in params else params['dimension']
    first = ties.operands[0]
    for axes in ties.operands:
        ties.unify_each(first, axes)
    ties.pin(first[i], 'elements follow one another along it')
    return [first] * len(ties.equation.outvars)


def _fourier(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    first = len(axes) - len(ties.params['fft_lengths'])
    frequencies = new_axes(ties.shape[first:])
    ties.pin_all(axes[first:] + frequencies, 'a Fourier transform goes along it')
    return [axes[:first] + frequencies]


def _top_k(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    i = ties.params.get('axis', -1) % len(axes)
    ties.pin(axes[i], 'the largest along it are taken')
    largest = atom(ties.shape[i])
    ties.pin(largest, 'the largest along another axis lie along it')
    result = replace(axes, i, largest)
    return [result] * len(ties.equation.outvars)


def _reduce_window(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    result = list(new_axes(ties.shape))
    for i, axis in enumerate(axes):
        if axis.size == result[i].size and _copies(ties.params, i):
            result[i] = axis
        else:
            ties.pin_all((axis, result[i]), 'the window moves along it')
    return [tuple(result)]


def _copies(params: Mapping[str, Any], i: int) -> bool:
    """Whether windows of one element just copy an axis."""
    base = params.get('base_dilation')
    return (
        params['window_dimensions'][i] == 1
        and params['window_strides'][i] == 1
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
