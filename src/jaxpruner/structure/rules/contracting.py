"""Primitives that multiply and sum, that reduce axes, or that go along an axis."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpruner.structure.analysis.axes import (
    Axes,
    Axis,
    atom,
    drop,
    new_axes,
    pick,
    product,
    replace,
)
from jaxpruner.structure.analysis.records import Contraction, EquationTies, Row
from jaxpruner.structure.rules import contracting_fills, resizing
from jaxpruner.trace import contractions
from jaxpruner.trace.contractions import DotAxes


def contraction(ties: EquationTies) -> Contraction:
    """The axes that a contraction sums over, and those of only one operand."""
    left, right = ties.operands[:2]
    name = ties.equation.primitive.name
    if contractions.OPERATIONS[name] == 'conv':
        dimension_numbers = ties.params['dimension_numbers']
        batch, channels, *_ = pick(left, dimension_numbers.lhs_spec)
        outputs, *_ = pick(right, dimension_numbers.rhs_spec)
        return Contraction(shared=(channels,), summed=(channels,), free=(batch, outputs))
    dot_axes = contractions.dot_axes(ties.equation)
    summed, _ = dot_axes.contract
    batch, _ = dot_axes.batch
    summed_axes = pick(left, summed)
    shared_axes = pick(left, batch) + summed_axes
    return Contraction(shared_axes, summed_axes, _free_axes(left, right, dot_axes))


def _free_axes(left: Axes, right: Axes, dot_axes: DotAxes) -> Axes:
    """The axes of a product that only one operand has."""
    summed_left, summed_right = dot_axes.contract
    batch_left, batch_right = dot_axes.batch
    free_left = drop(left, summed_left + batch_left)
    free_right = drop(right, summed_right + batch_right)
    return free_left + free_right


def _dot(ties: EquationTies) -> list[Axes]:
    left, right = ties.operands
    dot_axes = contractions.dot_axes(ties.equation)
    for in_left, in_right in (dot_axes.contract, dot_axes.batch):
        left_axes = pick(left, in_left)
        right_axes = pick(right, in_right)
        ties.unify_each(left_axes, right_axes)
    batch, _ = dot_axes.batch
    batch_axes = pick(left, batch)
    return [batch_axes + _free_axes(left, right, dot_axes)]


def _ragged_dot(ties: EquationTies) -> list[Axes]:
    """A product of groups of rows with a matrix each. Group sizes are data, so that no group can be removed."""
    left, right, sizes = ties.operands
    dot_axes = contractions.dot_axes(ties.equation)
    ranks = len(left), len(right)
    if ranks != (2, 3) or dot_axes != contractions.PLAIN_RAGGED_DOT:
        return ties.pin_everything('groups of rows along several axes')
    rows, inputs = left
    groups, inputs_of_matrices, outputs = right
    ties.pin_all((rows, groups, *sizes), 'data say how many rows a group has')
    ties.unify(inputs, inputs_of_matrices)
    return [(rows, outputs)]


def _conv(ties: EquationTies) -> list[Axes]:
    if ties.params['batch_group_count'] != 1:
        return ties.pin_everything('groups of images')
    dimension_numbers = ties.params['dimension_numbers']
    image, kernel = ties.operands
    result = list(new_axes(ties.shape))
    batch, channels = _pin_window(image, dimension_numbers.lhs_spec, ties)
    outputs, inputs = _pin_window(kernel, dimension_numbers.rhs_spec, ties)
    _pin_window(result, dimension_numbers.out_spec, ties)
    count = ties.params['feature_group_count']
    if count == 1:
        ties.unify(channels, inputs)
    else:
        groups = atom(count)
        outputs_of_group = atom(outputs.size // count)
        ties.unify(channels, product([groups, inputs]))
        ties.unify(outputs, product([groups, outputs_of_group]))
    batch_of_result, channels_of_result = dimension_numbers.out_spec[:2]
    result[batch_of_result] = batch
    result[channels_of_result] = outputs
    return [tuple(result)]


def _pin_window(axes: Sequence[Axis], spec: Sequence[int], ties: EquationTies) -> Axes:
    """Pins the axes along which a window moves, and returns the two others."""
    first, second, *window = spec
    ties.pin_all(pick(axes, window), 'the window moves along it')
    return axes[first], axes[second]


def _reduce(ties: EquationTies) -> list[Axes]:
    axes = ties.operands[0]
    return [drop(axes, ties.params['axes'])]


def _collective(ties: EquationTies) -> list[Axes]:
    """A reduction over an axis that `vmap` has named."""
    reduced = ties.params['axes']
    has_names = not all(isinstance(axis, int) for axis in reduced)
    has_groups = ties.params['axis_index_groups'] is not None
    if has_names or has_groups:
        return ties.pin_everything('devices, or parts of an axis, exchange values')
    return [drop(axes, reduced) for axes in ties.operands]


def _arg_reduce(ties: EquationTies) -> list[Axes]:
    axes = ties.operands[0]
    reduced = ties.params['axes']
    reduced_axes = pick(axes, reduced)
    ties.pin_all(reduced_axes, 'its result is an index along it')
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
    count = len(axes) - len(ties.params['fft_lengths'])
    kept, transformed = axes[:count], axes[count:]
    frequencies = new_axes(ties.shape[count:])
    ties.pin_all(transformed + frequencies, 'a Fourier transform goes along it')
    return [kept + frequencies]


def _top_k(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    axis = ties.params.get('axis', -1)
    i = axis % len(axes)
    ties.pin(axes[i], 'the largest along it are taken')
    largest = atom(ties.shape[i])
    ties.pin(largest, 'the largest along another axis lie along it')
    result = replace(axes, i, largest)
    return [result] * len(ties.equation.outvars)


def _reduce_window(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    result = list(new_axes(ties.shape))
    for i, axis in enumerate(axes):
        is_same_size = axis.size == result[i].size
        if is_same_size and _copies(ties.params, i):
            result[i] = axis
        else:
            ties.pin_all((axis, result[i]), 'the window moves along it')
    return [tuple(result)]


def _copies(params: Mapping[str, Any], i: int) -> bool:
    """Whether the windows along an axis have one element each, and so copy the axis."""
    dilations = params.get('base_dilation')
    is_dilated = dilations is not None and dilations[i] != 1
    is_padded = any(params['padding'][i])
    size = params['window_dimensions'][i]
    stride = params['window_strides'][i]
    return size == stride == 1 and not is_padded and not is_dilated


REDUCTIONS = frozenset(
    'reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor'.split()
)
ALONG = frozenset('cumlogsumexp cummax cummin cumprod cumsum sort'.split())
WINDOWS = frozenset('reduce_window_max reduce_window_min reduce_window_sum'.split())

ROWS: dict[str, Row] = {
    'dot_general': Row(_dot, contracting_fills.dot),
    'conv_general_dilated': Row(_conv, contracting_fills.conv, resizing.conv),
    'fft': Row(_fourier, contracting_fills.window),
    'top_k': Row(_top_k, contracting_fills.top_k),
    **dict.fromkeys(contractions.RAGGED, Row(_ragged_dot, contracting_fills.dot)),
    **dict.fromkeys(REDUCTIONS, Row(_reduce, contracting_fills.reduce)),
    **dict.fromkeys(contracting_fills.COLLECTIVES, Row(_collective, contracting_fills.collective)),
    **dict.fromkeys(('argmax', 'argmin'), Row(_arg_reduce, contracting_fills.arg_reduce)),
    **dict.fromkeys(ALONG, Row(_along, contracting_fills.along)),
    **dict.fromkeys(WINDOWS, Row(_reduce_window, contracting_fills.window)),
}
