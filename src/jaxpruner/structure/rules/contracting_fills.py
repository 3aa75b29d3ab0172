"""Fills after operations that sum over axes, and whether the sum is the same without removed channels."""

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxpruner.structure.analysis.axes import Axis, pick, sizes_of
from jaxpruner.structure.analysis.fills import NAN, EquationFills, Fill, Scalar, is_finite, product
from jaxpruner.structure.analysis.signs import Signs
from jaxpruner.trace import contractions
from jaxpruner.trace.contractions import DotAxes
from jaxpruner.trace.views import all_but

# Reduction -> the scalar that changes no result.
_NEUTRAL: dict[str, Scalar] = {
    'reduce_and': True,
    'reduce_or': 0,
    'reduce_prod': 1,
    'reduce_sum': 0,
    'reduce_xor': 0,
}

# Reduction -> the sign of elements that it takes only if there is no 0.
_LESSER = {'reduce_max': -1, 'reduce_min': 1}

# Reductions along an axis over which the program was mapped -> the same reductions of arrays.
COLLECTIVES = {'pmax': 'reduce_max', 'pmin': 'reduce_min', 'psum': 'reduce_sum'}


def _zero_or_unknown(value: Scalar) -> Scalar:
    """The fill of a sum of products with this scalar."""
    if not is_finite(value):
        return NAN
    return 0 if value == 0 else None


def _check_product(fills: EquationFills, atom: Axis, first: Scalar, second: Scalar) -> None:
    """Rejects an atom that is summed over, unless the product of these scalars is zero."""
    scalar = product(first, second)
    if scalar != 0:
        fills.reject(atom, 'sums products of channels that are not zero', scalar)


def dot(fills: EquationFills) -> list[Fill]:
    """A matrix product. The third operand of a product of groups of rows, their sizes, has no part in the fill."""
    left, right = fills.of_operands[:2]
    left_axes, right_axes = fills.operands[:2]
    dot_axes = contractions.dot_axes(fills.equation)
    for i, k in zip(*dot_axes.contract, strict=True):
        for atom in fills.candidates(left_axes[i]):
            first = left.at(i, atom)
            second = right.at(k, atom)
            _check_product(fills, atom, first, second)
    sources = _dot_sources(dot_axes, len(left_axes), len(right_axes))

    def find(axis: int, atom: Axis) -> Scalar:
        source = sources[axis]
        first = second = None
        if source.left is not None:
            first = left.at(source.left, atom)
        if source.right is not None:
            second = right.at(source.right, atom)
        return _zero_or_unknown(product(first, second))

    return fills.fill_results(find, everywhere=_zero_product(left, right))


class _Source(NamedTuple):
    """The axes of the left and of the right operand that an axis of a product comes from."""

    left: int | None
    right: int | None


def _dot_sources(dot_axes: DotAxes, left_rank: int, right_rank: int) -> list[_Source]:
    """For each axis of a product, the axes that it comes from."""
    summed_left, summed_right = dot_axes.contract
    batch_left, batch_right = dot_axes.batch
    free_left = all_but(summed_left + batch_left, range(left_rank))
    free_right = all_but(summed_right + batch_right + dot_axes.groups, range(right_rank))
    sources = list(map(_Source, batch_left, batch_right))
    for i in free_left:
        sources.append(_Source(i, None))
    for k in free_right:
        sources.append(_Source(None, k))
    return sources


def _zero_product(first: Fill, second: Fill) -> Scalar:
    """Zero if one of two factors is zero everywhere."""
    is_zero = first.everywhere == 0 or second.everywhere == 0
    return 0 if is_zero else None


def conv(fills: EquationFills) -> list[Fill]:
    """A convolution, which sums over the channels of its image. Each group of channels has a kernel of its own."""
    image, kernel = fills.of_operands
    image_axes, kernel_axes = fills.operands
    dimension_numbers = fills.params['dimension_numbers']
    batch, channels = dimension_numbers.lhs_spec[:2]
    outputs, inputs = dimension_numbers.rhs_spec[:2]
    batch_of_result, channels_of_result = dimension_numbers.out_spec[:2]
    summed = fills.candidates(kernel_axes[inputs])
    for atom in summed:
        first = image.at(channels, atom)
        second = kernel.at(inputs, atom)
        _check_product(fills, atom, first, second)
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
            value = product(value, image.at(channels, atom))
        return _zero_or_unknown(value)

    return fills.fill_results(find, everywhere=_zero_product(image, kernel))


def reduce(fills: EquationFills) -> list[Fill]:
    """A reduction. Its operand has to be neutral at removed channels."""
    name = fills.equation.primitive.name
    return [_reduce(fills, name, 0)]


def collective(fills: EquationFills) -> list[Fill]:
    """A reduction of each operand along an axis that `vmap` has named."""
    name = COLLECTIVES[fills.equation.primitive.name]
    indices = range(len(fills.of_operands))
    return [_reduce(fills, name, index) for index in indices]


def _reduce(fills: EquationFills, name: str, index: int) -> Fill:
    """The reduction of one operand."""
    fill = fills.of_operands[index]
    axes = fills.operands[index]
    kept = all_but(fills.params['axes'], axes)
    reduced = all_but(kept, axes)
    for i in reduced:
        for atom in fills.candidates(axes[i]):
            value = fill.at(i, atom)
            if not _is_neutral(name, value, fill.signs):
                fills.reject(atom, _reduce_reason(name, value), value)
    sizes = sizes_of(pick(axes, reduced))
    count = math.prod(sizes)

    def find(k: int, atom: Axis) -> Scalar:
        value = fill.at(kept[k], atom)
        return _reduced(name, value, count)

    everywhere = _reduced(name, fill.everywhere, count)
    return fills.result(everywhere, find, index)


def _is_neutral(name: str, value: Scalar, signs: Signs) -> bool:
    """Whether a reduction of elements with these signs is the same without elements of this scalar."""
    if name in _LESSER and value == 0:
        return _LESSER[name] not in signs
    return name in _NEUTRAL and value == _NEUTRAL[name]


def _reduce_reason(name: str, value: Scalar) -> str:
    if name not in _NEUTRAL:
        return 'takes channels that are zero into account, where others may have another sign'
    if value is None:
        return 'sums channels that are not zero'
    return f'meets {value} at zeroed channels'


def _reduced(name: str, value: Scalar, count: int) -> Scalar:
    """The reduction of `count` elements that all equal one scalar."""
    if value is None:
        return None
    if not is_finite(value):
        return NAN
    if name == 'reduce_sum':
        return value * count
    if name == 'reduce_prod':
        return _power(value, count)
    if name == 'reduce_xor' and value:
        return None
    return value


def _power(value: Scalar, count: int) -> Scalar:
    if value in (0, 1):
        return value
    with np.errstate(over='ignore'):
        return float(np.float64(value) ** count)


def _nothing_found(axis: int, atom: Axis) -> Scalar:
    return None


def arg_reduce(fills: EquationFills) -> list[Fill]:
    """An index, which is finite and otherwise unknown."""
    return fills.fill_results(_nothing_found)


def along(fills: EquationFills) -> list[Fill]:
    """A scan or sort along an axis: sums and products of 0 stay 0, and sorted or compared elements stay the same."""
    name = fills.equation.primitive.name
    results = []
    for index, fill in enumerate(fills.of_operands):
        find = functools.partial(_accumulated, name, fill)
        results.append(fills.result(None, find, index))
    return results


def _accumulated(name: str, fill: Fill, axis: int, atom: Axis) -> Scalar:
    value = fill.at(axis, atom)
    if name in ('cummax', 'cummin', 'sort'):
        return value
    value = _zero_or_unknown(value)
    if name == 'cumlogsumexp' and value == 0:
        return None
    return value


def window(fills: EquationFills) -> list[Fill]:
    """Pooling or a Fourier transform along other axes. A sum of zeros is zero; a maximum stays what it is."""
    (fill,) = fills.of_operands
    sums = fills.equation.primitive.name in ('fft', 'reduce_window_sum')

    def find(i: int, atom: Axis) -> Scalar:
        value = fill.at(i, atom)
        return _zero_or_unknown(value) if sums else value

    return fills.fill_results(find)


def top_k(fills: EquationFills) -> list[Fill]:
    """The largest elements, and their indices, which are unknown."""
    (fill,) = fills.of_operands
    largest = fills.result(None, fill.at, 0)
    indices = fills.result(None, _nothing_found, 1)
    return [largest, indices]
