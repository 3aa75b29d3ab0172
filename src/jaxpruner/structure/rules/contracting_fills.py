"""What operations that sum over axes make of removed channels, and whether the sum is the same without them."""

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxpruner.structure.analysis.axes import Axis, all_but, pick, sizes_of
from jaxpruner.structure.analysis.fills import NAN, Fill, Flow, Number, is_finite, product
from jaxpruner.uses import contractions
from jaxpruner.uses.contractions import DotAxes

# The number that changes nothing when an operation meets it.
_NEUTRAL: dict[str, Number] = {
    'reduce_and': True,
    'reduce_or': 0,
    'reduce_prod': 1,
    'reduce_sum': 0,
    'reduce_xor': 0,
}

# Reductions along an axis over which the program was mapped -> the same reductions of arrays.
COLLECTIVES = {'pmax': 'reduce_max', 'pmin': 'reduce_min', 'psum': 'reduce_sum'}


def _zero_or_unknown(value: Number) -> Number:
    """A sum of products with this number."""
    if not is_finite(value):
        return NAN
    return 0 if value == 0 else None


def _check_product(flow: Flow, atom: Axis, first: Number, second: Number) -> None:
    """Rejects an atom over which products of these numbers are summed, unless they are zero."""
    if product(first, second) != 0:
        flow.reject(atom, 'sums products of channels that are not zero')


def dot(flow: Flow) -> list[Fill]:
    """A product of two values; of groups of rows, too, whose sizes are the third operand."""
    left, right = flow.fills[:2]
    left_axes, right_axes = flow.operands[:2]
    numbers = contractions.dot_axes(flow.equation)
    for i, k in zip(*numbers.contract, strict=True):
        for atom in flow.candidates(left_axes[i]):
            first = left.at(i, atom)
            second = right.at(k, atom)
            _check_product(flow, atom, first, second)
    sources = _dot_sources(numbers, len(left_axes), len(right_axes))

    def find(axis: int, atom: Axis) -> Number:
        source = sources[axis]
        first = second = None
        if source.left is not None:
            first = left.at(source.left, atom)
        if source.right is not None:
            second = right.at(source.right, atom)
        return _zero_or_unknown(product(first, second))

    return flow.fill_results(find, everywhere=_zero_product(left, right))


class _Source(NamedTuple):
    """The axes of the left and of the right operand that an axis of a product comes from."""

    left: int | None
    right: int | None


def _dot_sources(numbers: DotAxes, left_rank: int, right_rank: int) -> list[_Source]:
    """For each axis of a product the axes that it comes from."""
    summed_left, summed_right = numbers.contract
    batch_left, batch_right = numbers.batch
    free_left = all_but(summed_left + batch_left, range(left_rank))
    free_right = all_but(summed_right + batch_right + numbers.groups, range(right_rank))
    sources = list(map(_Source, batch_left, batch_right))
    for i in free_left:
        sources.append(_Source(i, None))
    for k in free_right:
        sources.append(_Source(None, k))
    return sources


def _zero_product(first: Fill, second: Fill) -> Number:
    """Zero if one of two factors is zero everywhere."""
    is_zero = first.everywhere == 0 or second.everywhere == 0
    return 0 if is_zero else None


def conv(flow: Flow) -> list[Fill]:
    """A convolution sums over the channels of its input; each group of channels meets its own part of the kernel."""
    image, kernel = flow.fills
    image_axes, kernel_axes = flow.operands
    numbers = flow.params['dimension_numbers']
    batch, channels = numbers.lhs_spec[:2]
    outputs, inputs = numbers.rhs_spec[:2]
    batch_of_result, channels_of_result = numbers.out_spec[:2]
    summed = flow.candidates(kernel_axes[inputs])
    for atom in summed:
        first = image.at(channels, atom)
        second = kernel.at(inputs, atom)
        _check_product(flow, atom, first, second)
    grouped: set[Axis] = set()  # atoms of the groups of channels
    if flow.params['feature_group_count'] > 1:
        grouped.update(flow.candidates(image_axes[channels]))
        grouped.difference_update(summed)

    def find(axis: int, atom: Axis) -> Number:
        if axis == batch_of_result:
            return _zero_or_unknown(image.at(batch, atom))
        if axis != channels_of_result:
            return None
        value = kernel.at(outputs, atom)
        if atom in grouped:
            value = product(value, image.at(channels, atom))
        return _zero_or_unknown(value)

    return flow.fill_results(find, everywhere=_zero_product(image, kernel))


def reduce(flow: Flow) -> list[Fill]:
    """What is reduced has to be neutral at removed channels."""
    name = flow.equation.primitive.name
    return [_reduce(flow, name, 0)]


def collective(flow: Flow) -> list[Fill]:
    """A reduction of each operand along an axis over which the program was mapped."""
    name = COLLECTIVES[flow.equation.primitive.name]
    numbers = range(len(flow.fills))
    return [_reduce(flow, name, number) for number in numbers]


def _reduce(flow: Flow, name: str, number: int) -> Fill:
    """The reduction of one operand."""
    fill = flow.fills[number]
    axes = flow.operands[number]
    kept = all_but(flow.params['axes'], axes)
    reduced = all_but(kept, axes)
    for i in reduced:
        for atom in flow.candidates(axes[i]):
            value = fill.at(i, atom)
            if not _is_neutral(name, value):
                flow.reject(atom, _reduce_reason(name, value))
    sizes = sizes_of(pick(axes, reduced))
    count = math.prod(sizes)

    def find(k: int, atom: Axis) -> Number:
        value = fill.at(kept[k], atom)
        return _reduced(name, value, count)

    everywhere = _reduced(name, fill.everywhere, count)
    return flow.result(everywhere, find, number)


def _is_neutral(name: str, value: Number) -> bool:
    """Whether a reduction is the same without elements of this number."""
    return name in _NEUTRAL and value == _NEUTRAL[name]


def _reduce_reason(name: str, value: Number) -> str:
    if name not in _NEUTRAL:
        return 'takes channels that are zero into account'
    if value is None:
        return 'sums channels that are not zero'
    return f'meets {value} at zeroed channels'


def _reduced(name: str, value: Number, count: int) -> Number:
    """What reducing `count` elements gives that are all the same number."""
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


def _power(value: Number, count: int) -> Number:
    if value in (0, 1):
        return value
    with np.errstate(over='ignore'):
        return float(np.float64(value) ** count)


def _nothing_found(axis: int, atom: Axis) -> Number:
    return None


def arg_reduce(flow: Flow) -> list[Fill]:
    """An index: nothing is known of it, and it is finite."""
    return flow.fill_results(_nothing_found)


def along(flow: Flow) -> list[Fill]:
    """Elements that follow one another: 0 stays 0, and what is sorted or compared stays what it is."""
    name = flow.equation.primitive.name
    results = []
    for number, fill in enumerate(flow.fills):
        find = functools.partial(_accumulated, name, fill)
        results.append(flow.result(None, find, number))
    return results


def _accumulated(name: str, fill: Fill, axis: int, atom: Axis) -> Number:
    value = fill.at(axis, atom)
    if name in ('cummax', 'cummin', 'sort'):
        return value
    value = _zero_or_unknown(value)
    if name == 'cumlogsumexp' and value == 0:
        return None
    return value


def window(flow: Flow) -> list[Fill]:
    """Pooling along other axes."""
    (fill,) = flow.fills
    sums = flow.equation.primitive.name == 'reduce_window_sum'

    def find(i: int, atom: Axis) -> Number:
        value = fill.at(i, atom)
        return _zero_or_unknown(value) if sums else value

    return flow.fill_results(find)


def fourier(flow: Flow) -> list[Fill]:
    """A Fourier transform along other axes: of zeros it is zero."""
    (fill,) = flow.fills

    def find(i: int, atom: Axis) -> Number:
        return _zero_or_unknown(fill.at(i, atom))

    return flow.fill_results(find)


def top_k(flow: Flow) -> list[Fill]:
    """The largest elements, and indices."""
    (fill,) = flow.fills
    largest = flow.result(None, fill.at, 0)
    indices = flow.result(None, _nothing_found, 1)
    return [largest, indices]
