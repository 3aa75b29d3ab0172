"""Primitives that multiply and sum, that reduce axes, or that go along an axis.

A sum over channels is the same without removed ones only if what it sums is zero there.
"""

import functools
import math

import numpy as np

from jaxpruner.structure.axes import Axes, Axis, drop, new_axes, pick, product, replace, sizes_of
from jaxpruner.structure.cut import EquationCut, Values
from jaxpruner.structure.fills import NAN, EquationFills, Fill, Scalar, is_finite, multiply
from jaxpruner.structure.traces import Contraction, EquationTies, Row
from jaxpruner.trace import contractions
from jaxpruner.trace.views import all_but

# Reduction -> the scalar that changes no result.
_NEUTRAL: dict[str, Scalar] = {
    'reduce_and': True,
    'reduce_or': 0,
    'reduce_prod': 1,
    'reduce_sum': 0,
}
# Reduction -> the sign of elements that it takes only if there is no 0.
_LESSER = {'reduce_max': -1, 'reduce_min': 1}
# Reductions along an axis over which the program was mapped -> the same reductions of arrays.
_COLLECTIVES = {'pmax': 'reduce_max', 'pmin': 'reduce_min', 'psum': 'reduce_sum'}


def contraction(ties: EquationTies) -> Contraction:
    """The axes that a contraction sums over, and those of only one operand."""
    left, right = ties.operands[:2]
    if contractions.OPERATIONS[ties.equation.primitive.name] == 'conv':
        dimension_numbers = ties.params['dimension_numbers']
        batch, channels, *_ = pick(left, dimension_numbers.lhs_spec)
        return Contraction((channels,), (channels,), (batch, right[dimension_numbers.rhs_spec[0]]))
    dot_axes = contractions.dot_axes(ties.equation)
    summed = pick(left, dot_axes.contract[0])
    return Contraction(pick(left, dot_axes.batch[0]) + summed, summed, _free_axes(ties))


def _free_axes(ties: EquationTies) -> Axes:
    """The axes of a product that only one operand has."""
    (left, right), dot_axes = ties.operands[:2], contractions.dot_axes(ties.equation)
    taken = [
        summed + batch for summed, batch in zip(dot_axes.contract, dot_axes.batch, strict=True)
    ]
    return drop(left, taken[0]) + drop(right, taken[1])


def product_axes(ties: EquationTies) -> list[Axes]:
    """A matrix product."""
    left, right = ties.operands
    dot_axes = contractions.dot_axes(ties.equation)
    for in_left, in_right in (dot_axes.contract, dot_axes.batch):
        ties.unify_each(pick(left, in_left), pick(right, in_right))
    return [pick(left, dot_axes.batch[0]) + _free_axes(ties)]


def ragged_dot_axes(ties: EquationTies) -> list[Axes]:
    """A product of groups of rows with a matrix each. Group sizes are data, so that no group can be removed."""
    left, right, sizes = ties.operands
    is_plain = contractions.dot_axes(ties.equation) == contractions.PLAIN_RAGGED_DOT
    if (len(left), len(right)) != (2, 3) or not is_plain:
        return ties.pin_everything('groups of rows along several axes')
    rows, inputs = left
    groups, inputs_of_matrices, outputs = right
    ties.pin('data say how many rows a group has', rows, groups, *sizes)
    ties.unify(inputs, inputs_of_matrices)
    return [(rows, outputs)]


def _zero_or_unknown(value: Scalar) -> Scalar:
    """The fill of a sum of products with this scalar."""
    if not is_finite(value):
        return NAN
    return 0 if value == 0 else None


def _check_product(fills: EquationFills, atom: Axis, first: Scalar, second: Scalar) -> None:
    """Rejects an atom that is summed over, unless the product of these scalars is zero."""
    scalar = multiply(first, second)
    if scalar != 0:
        fills.reject(atom, 'sums products of channels that are not zero', scalar)


def _zero_product(first: Fill, second: Fill) -> Scalar:
    """Zero if one of two factors is zero everywhere."""
    return 0 if first.everywhere == 0 or second.everywhere == 0 else None


def product_fills(fills: EquationFills) -> list[Fill]:
    """A matrix product. The third operand of a product of groups of rows, their sizes, has no part in the fill."""
    left, right = fills.of_operands[:2]
    left_axes, right_axes = fills.operands[:2]
    dot_axes = contractions.dot_axes(fills.equation)
    for i, k in zip(*dot_axes.contract, strict=True):
        for atom in fills.candidates(left_axes[i]):
            _check_product(fills, atom, left.at(i, atom), right.at(k, atom))
    (summed_left, summed_right), (batch_left, batch_right) = dot_axes.contract, dot_axes.batch
    free_left = all_but(summed_left + batch_left, left_axes)
    free_right = all_but(summed_right + batch_right + dot_axes.groups, right_axes)
    # For each axis of the product, the axes of the left and of the right operand that it comes from.
    sources = [*zip(batch_left, batch_right, strict=True)]
    sources += [(i, None) for i in free_left] + [(None, k) for k in free_right]

    def find(axis: int, atom: Axis) -> Scalar:
        i, k = sources[axis]
        first = None if i is None else left.at(i, atom)
        return _zero_or_unknown(multiply(first, None if k is None else right.at(k, atom)))

    return fills.fill_results(find, everywhere=_zero_product(left, right))


def conv_axes(ties: EquationTies) -> list[Axes]:
    """A convolution. Each group of channels has a kernel of its own."""
    if ties.params['batch_group_count'] != 1:
        return ties.pin_everything('groups of images')
    numbers = ties.params['dimension_numbers']
    image, kernel = ties.operands
    result = list(new_axes(ties.shape))
    ends = []
    for axes, spec in zip(
        (image, kernel, result), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True
    ):
        first, second, *window = pick(axes, spec)
        ties.pin('the window moves along it', *window)
        ends.append((first, second))
    (batch, channels), (outputs, inputs), _ = ends
    count = ties.params['feature_group_count']
    if count == 1:
        ties.unify(channels, inputs)
    else:
        groups = Axis(count)
        ties.unify(channels, product([groups, inputs]))
        ties.unify(outputs, product([groups, Axis(outputs.size // count)]))
    batch_of_result, channels_of_result = numbers.out_spec[:2]
    result[batch_of_result], result[channels_of_result] = batch, outputs
    return [tuple(result)]


def conv_fills(fills: EquationFills) -> list[Fill]:
    """A convolution sums over the channels of its image."""
    image, kernel = fills.of_operands
    image_axes, kernel_axes = fills.operands
    dimension_numbers = fills.params['dimension_numbers']
    batch, channels = dimension_numbers.lhs_spec[:2]
    outputs, inputs = dimension_numbers.rhs_spec[:2]
    batch_of_result, channels_of_result = dimension_numbers.out_spec[:2]
    summed = fills.candidates(kernel_axes[inputs])
    for atom in summed:
        _check_product(fills, atom, image.at(channels, atom), kernel.at(inputs, atom))
    grouped: set[Axis] = set()  # atoms of the groups of channels
    if fills.params['feature_group_count'] > 1:
        grouped.update(fills.candidates(image_axes[channels]))
        grouped.difference_update(summed)

    def find(axis: int, atom: Axis) -> Scalar:
        if axis == batch_of_result:
            return _zero_or_unknown(image.at(batch, atom))
        if axis != channels_of_result:
            return None
        value = kernel.at(outputs, atom)
        if atom in grouped:
            value = multiply(value, image.at(channels, atom))
        return _zero_or_unknown(value)

    return fills.fill_results(find, everywhere=_zero_product(image, kernel))


def conv_resized(small: EquationCut, operands: Values) -> Values:
    """The number of groups is a parameter. A group has as many channels as the kernel has inputs."""
    if small.equation.params['feature_group_count'] == 1:
        return small.run(operands)
    dimension_numbers = small.equation.params['dimension_numbers']
    channels = operands[0].shape[dimension_numbers.lhs_spec[1]]
    inputs = operands[1].shape[dimension_numbers.rhs_spec[1]]
    return small.run(operands, feature_group_count=channels // inputs)


def reduce_axes(ties: EquationTies) -> list[Axes]:
    """A reduction of each operand."""
    return [drop(axes, ties.params['axes']) for axes in ties.operands]


def collective_axes(ties: EquationTies) -> list[Axes]:
    """A reduction over an axis that `vmap` has named."""
    has_names = not all(isinstance(axis, int) for axis in ties.params['axes'])
    if has_names or ties.params['axis_index_groups'] is not None:
        return ties.pin_everything('devices, or parts of an axis, exchange values')
    return reduce_axes(ties)


def reduce_fills(fills: EquationFills) -> list[Fill]:
    """A reduction of each operand."""
    return [_reduce_operand(fills, index) for index in range(len(fills.operands))]


def _reduce_operand(fills: EquationFills, index: int) -> Fill:
    """A reduction, whose operand has to be neutral at removed channels."""
    primitive: str = fills.equation.primitive.name
    name = _COLLECTIVES.get(primitive, primitive)
    fill, axes = fills.of_operands[index], fills.operands[index]
    kept = all_but(fills.params['axes'], axes)
    reduced = all_but(kept, axes)
    for i in reduced:
        for atom in fills.candidates(axes[i]):
            value = fill.at(i, atom)
            if name in _LESSER:
                is_neutral = value == 0 and _LESSER[name] not in fill.signs
                reason = (
                    'takes channels that are zero into account, where others may have another sign'
                )
            else:
                is_neutral = value == _NEUTRAL[name]
                reason = f'meets {value} at zeroed channels'
                reason = 'sums channels that are not zero' if value is None else reason
            if not is_neutral:
                fills.reject(atom, reason, value)
    count = math.prod(sizes_of(pick(axes, reduced)))
    everywhere = _reduced(name, count, fill.everywhere)
    return fills.result(
        everywhere, lambda k, atom: _reduced(name, count, fill.at(kept[k], atom)), index
    )


def _reduced(name: str, count: int, value: Scalar) -> Scalar:
    """The reduction of `count` elements that all equal one scalar."""
    if value is None or not is_finite(value):
        return value if value is None else NAN
    if name == 'reduce_sum':
        return value * count
    if name == 'reduce_prod' and value not in (0, 1):
        with np.errstate(over='ignore'):
            return float(np.float64(value) ** count)
    return value


def unknown_fills(fills: EquationFills) -> list[Fill]:
    """Results that are finite and otherwise unknown, such as indices."""
    return fills.fill_results(lambda axis, atom: None)


def arg_reduce_axes(ties: EquationTies) -> list[Axes]:
    """The index of the largest or smallest along an axis."""
    ties.pin('its result is an index along it', *pick(ties.operands[0], ties.params['axes']))
    return reduce_axes(ties)


def along_axes(ties: EquationTies) -> list[Axes]:
    """A scan or sort along an axis."""
    params = ties.params
    first = ties.operands[0]
    for axes in ties.operands:
        ties.unify_each(first, axes)
    i = params['axis'] if 'axis' in params else params['dimension']
    ties.pin('elements follow one another along it', first[i])
    return [first] * len(ties.equation.outvars)


def along_fills(fills: EquationFills) -> list[Fill]:
    """A scan or sort along an axis: sums and products of 0 stay 0, and sorted or compared elements stay the same."""
    name = fills.equation.primitive.name

    def accumulated(fill: Fill, axis: int, atom: Axis) -> Scalar:
        value = fill.at(axis, atom)
        if name in ('cummax', 'cummin', 'sort'):
            return value
        return _zero_or_unknown(value)

    return [
        fills.result(None, functools.partial(accumulated, fill), index)
        for index, fill in enumerate(fills.of_operands)
    ]


def fourier_axes(ties: EquationTies) -> list[Axes]:
    """A Fourier transform along the last axes."""
    (axes,) = ties.operands
    count = len(axes) - len(ties.params['fft_lengths'])
    frequencies = new_axes(ties.shape[count:])
    ties.pin('a Fourier transform goes along it', *axes[count:], *frequencies)
    return [axes[:count] + frequencies]


def top_k_axes(ties: EquationTies) -> list[Axes]:
    """The largest along an axis, and their indices."""
    (axes,) = ties.operands
    i = ties.params.get('axis', -1) % len(axes)
    ties.pin('the largest along it are taken', axes[i])
    largest = new_axes(ties.shape)[i]
    ties.pin('the largest along another axis lie along it', largest)
    return [replace(axes, i, largest)] * len(ties.equation.outvars)


def top_k_fills(fills: EquationFills) -> list[Fill]:
    """The largest elements, and their indices, which are unknown."""
    (fill,) = fills.of_operands
    return [fills.result(None, fill.at), unknown_fills(fills)[1]]


def reduce_window_axes(ties: EquationTies) -> list[Axes]:
    """Pooling."""
    (axes,) = ties.operands
    result = list(new_axes(ties.shape))
    for i, axis in enumerate(axes):
        # Whether the windows along the axis have one element each, and so copy the axis.
        names = 'window_dimensions', 'window_strides', 'base_dilation'
        steps = [ties.params[name][i] for name in names if ties.params.get(name) is not None]
        copies = set(steps) == {1} and not any(ties.params['padding'][i])
        if copies and axis.size == result[i].size:
            result[i] = axis
        else:
            ties.pin('the window moves along it', axis, result[i])
    return [tuple(result)]


def window_fills(fills: EquationFills) -> list[Fill]:
    """Pooling or a Fourier transform along other axes. A sum of zeros is zero; a maximum stays what it is."""
    (fill,) = fills.of_operands
    sums = fills.equation.primitive.name in ('fft', 'reduce_window_sum')
    return fills.fill_results(
        lambda i, atom: _zero_or_unknown(fill.at(i, atom)) if sums else fill.at(i, atom)
    )


ROWS: dict[str, Row] = {
    'dot_general': Row(product_axes, product_fills),
    'conv_general_dilated': Row(conv_axes, conv_fills, conv_resized),
    'fft': Row(fourier_axes, window_fills),
    'top_k': Row(top_k_axes, top_k_fills),
    **dict.fromkeys(contractions.RAGGED, Row(ragged_dot_axes, product_fills)),
    **dict.fromkeys((*_NEUTRAL, *_LESSER), Row(reduce_axes, reduce_fills)),
    **dict.fromkeys(_COLLECTIVES, Row(collective_axes, reduce_fills)),
    **dict.fromkeys(('argmax', 'argmin'), Row(arg_reduce_axes, unknown_fills)),
    **dict.fromkeys('cummax cummin cumprod cumsum sort'.split(), Row(along_axes, along_fills)),
    **dict.fromkeys(
        'reduce_window_max reduce_window_min reduce_window_sum'.split(),
        Row(reduce_window_axes, window_fills),
    ),
}
