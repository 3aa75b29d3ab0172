"""Primitives that multiply and sum, and those that reduce axes: what they say of axes, and of removed channels.

A sum over channels is the same without removed ones only if what it sums is zero there.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.structure.axes import Axes, Axis, drop, new_axes, pick, product, sizes_of
from jaxpruner.structure.cut import EquationCut, Values
from jaxpruner.structure.fills import (
    ANY,
    NAN,
    EquationFills,
    Fill,
    Scalar,
    is_finite,
    multiply,
    signs_of_product,
    zero_or_unknown,
)
from jaxpruner.structure.traces import Contraction, EquationTies
from jaxpruner.trace import contractions
from jaxpruner.trace.views import all_but

# Reduction -> the scalar that changes no result.
NEUTRAL: dict[str, Scalar] = {
    'reduce_and': True,
    'reduce_or': 0,
    'reduce_prod': 1,
    'reduce_sum': 0,
}
# Reduction -> the sign of elements that it takes only if there is no 0.
LESSER = {'reduce_max': -1, 'reduce_min': 1}
# Reductions along an axis over which the program was mapped -> the same reductions of arrays.
COLLECTIVES = {'pmax': 'reduce_max', 'pmin': 'reduce_min', 'psum': 'reduce_sum'}


class _Index(NamedTuple):
    """An index of a contraction, `i`, `j` or `k` in `result[i, j] = sum over k of left[i, k] * right[k, j]`.

    Attributes:
      left, right, result: the axis that has it; `None` if there is none.
    """

    left: int | None
    right: int | None
    result: int | None


def _is_conv(equation: Any) -> bool:
    return contractions.OPERATIONS[equation.primitive.name] == 'conv'


def _indices(equation: Any) -> list[_Index]:
    """The indices of a contraction, but those of the window of a convolution, and of groups of rows."""
    if _is_conv(equation):
        numbers = equation.params['dimension_numbers']
        batch, channels, *_ = numbers.lhs_spec
        outputs, inputs, *_ = numbers.rhs_spec
        batch_of_result, channels_of_result, *_ = numbers.out_spec
        return [
            _Index(channels, inputs, None),
            _Index(batch, None, batch_of_result),
            _Index(None, outputs, channels_of_result),
        ]
    axes = contractions.dot_axes(equation)
    left, right = [contractions.roles(equation, operand).free for operand in (0, 1)]
    kept = [*zip(*axes.batch, strict=True)]
    kept += [(i, None) for i in left] + [(None, k) for k in right]
    summed = [_Index(i, k, None) for i, k in zip(*axes.contract, strict=True)]
    return summed + [_Index(i, k, number) for number, (i, k) in enumerate(kept)]


def contraction(ties: EquationTies) -> Contraction:
    """The axes that a contraction sums over, and those of only one operand."""
    left, right = ties.operands[:2]
    shared, summed, free = [], [], []
    for index in _indices(ties.equation):
        if index.left is None:
            free.append(right[index.right])
        elif index.right is None:
            free.append(left[index.left])
        else:
            shared.append(left[index.left])
            summed += [left[index.left]] if index.result is None else []
    return Contraction(tuple(shared), tuple(summed), tuple(free))


def product_axes(ties: EquationTies) -> list[Axes]:
    """A matrix product, also of groups of rows with a matrix each."""
    left, right = ties.operands[:2]
    if ties.equation.primitive.name in contractions.RAGGED:
        # Group sizes are data, so that no group can be removed.
        is_plain = contractions.dot_axes(ties.equation) == contractions.PLAIN_RAGGED_DOT
        if (len(left), len(right)) != (2, 3) or not is_plain:
            return ties.pin_everything('groups of rows along several axes')
        ties.pin('data say how many rows a group has', left[0], right[0], *ties.operands[2])
    result = []
    for index in _indices(ties.equation):
        if index.left is not None and index.right is not None:
            ties.unify(left[index.left], right[index.right])
        if index.result is not None:
            result.append(right[index.right] if index.left is None else left[index.left])
    return [tuple(result)]


def conv_axes(ties: EquationTies) -> list[Axes]:
    """A convolution. Each group of channels has a kernel of its own."""
    if ties.params['batch_group_count'] != 1:
        return ties.pin_everything('groups of images')
    numbers = ties.params['dimension_numbers']
    result = list(new_axes(ties.shape))
    values = (*ties.operands, result)
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    ends = []
    for axes, spec in zip(values, specs, strict=True):
        first, second, *window = pick(axes, spec)
        ties.pin('the window moves along it', *window)
        ends.append((first, second))
    (batch, channels), (outputs, inputs), _ = ends
    groups = Axis(ties.params['feature_group_count'])
    ties.unify(channels, product([groups, inputs]))
    if groups.size > 1:
        ties.unify(outputs, product([groups, Axis(outputs.size // groups.size)]))
    result[numbers.out_spec[0]], result[numbers.out_spec[1]] = batch, outputs
    return [tuple(result)]


def product_fills(fills: EquationFills) -> list[Fill]:
    """A contraction. Only zeros are known of a sum of products."""
    left, right = fills.of_operands[:2]
    left_axes, right_axes = fills.operands[:2]
    indices = _indices(fills.equation)
    summed: set[Axis] = set()
    for index in indices:
        if index.result is None:
            for atom in fills.candidates(right_axes[index.right]):
                summed.add(atom)
                scalar = multiply(left.at(index.left, atom), right.at(index.right, atom))
                if scalar != 0:
                    fills.reject(atom, 'sums products of channels that are not zero', scalar)
    # Each group of a convolution has channels of the image, and outputs of the kernel.
    channels = indices[0].left if _is_conv(fills.equation) else None
    index_of = {index.result: index for index in indices}

    def find(axis: int, atom: Axis) -> Scalar:
        if axis not in index_of:
            return None
        i, k, _ = index_of[axis]
        if i is None and channels is not None and atom not in summed:
            is_grouped = atom in fills.candidates(left_axes[channels])
            i = channels if is_grouped else None
        return zero_or_unknown(multiply(left.at(i, atom), right.at(k, atom)))

    is_zero = left.everywhere == 0 or right.everywhere == 0
    signs = signs_of_product(left.signs, right.signs)
    return [fills.result(find, 0 if is_zero else None, signs)]


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
    params = ties.params
    if ties.equation.primitive.name in COLLECTIVES:
        # Only over an axis that `vmap` has named is it a reduction of an array.
        has_names = not all(isinstance(axis, int) for axis in params['axes'])
        if has_names or params['axis_index_groups'] is not None:
            return ties.pin_everything('devices, or parts of an axis, exchange values')
    return [drop(axes, params['axes']) for axes in ties.operands]


def index_axes(ties: EquationTies) -> list[Axes]:
    """The index of the largest or smallest along an axis."""
    ties.pin('its result is an index along it', *pick(ties.operands[0], ties.params['axes']))
    return reduce_axes(ties)


def reduce_fills(fills: EquationFills) -> list[Fill]:
    """A reduction of each operand, which has to be neutral at removed channels."""
    primitive: str = fills.equation.primitive.name
    name = COLLECTIVES.get(primitive, primitive)
    results = []
    for number, (fill, axes) in enumerate(zip(fills.of_operands, fills.operands, strict=True)):
        kept = all_but(fills.params['axes'], axes)
        reduced = all_but(kept, axes)
        for i in reduced:
            for atom in fills.candidates(axes[i]):
                value = fill.at(i, atom)
                reason = f'meets {value} at zeroed channels'
                if name in LESSER:
                    is_neutral = value == 0 and LESSER[name] not in fill.signs
                    reason = 'takes channels that are zero into account, where others may have another sign'
                else:
                    is_neutral = value == NEUTRAL[name]
                    reason = 'sums channels that are not zero' if value is None else reason
                if not is_neutral:
                    fills.reject(atom, reason, value)
        count = math.prod(sizes_of(pick(axes, reduced)))

        def find(
            k: int, atom: Axis, fill: Fill = fill, kept: Any = kept, count: int = count
        ) -> Scalar:
            return _reduced(name, count, fill.at(kept[k], atom))

        everywhere = _reduced(name, count, fill.everywhere)
        signs = ANY if name in ('reduce_and', 'reduce_or', 'reduce_prod') else fill.signs
        results.append(fills.result(find, everywhere, signs, number))
    return results


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
