"""What operations that sum over axes make of removed channels, and whether the sum is the same without them."""

from collections.abc import Sequence

import numpy as np

from jaxpruner.structure.analysis.axes import Axis
from jaxpruner.structure.analysis.fills import NAN, Fill, Flow, Number, is_finite, product
from jaxpruner.uses import contractions

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


def _check_contraction(flow: Flow, axis: Axis, first: Fill, i: int, second: Fill, k: int) -> None:
    for atom in flow.candidates(axis):
        if product(first.at(i, atom), second.at(k, atom)) != 0:
            flow.reject(atom, 'sums products of channels that are not zero')


def dot(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """A product of two values; of groups of rows, too, whose sizes are the third operand."""
    left, right = fills[:2]
    numbers = contractions.dot_axes(flow.equation)
    for i, k in zip(*numbers.contract, strict=True):
        _check_contraction(flow, flow.operands[0][i], left, i, right, k)
    dropped = numbers.contract[0] + numbers.batch[0]
    free = [i for i in range(len(flow.operands[0])) if i not in dropped]
    dropped = numbers.contract[1] + numbers.batch[1] + numbers.groups
    free_right = [k for k in range(len(flow.operands[1])) if k not in dropped]
    sources: list[tuple[int | None, int | None]] = [*zip(*numbers.batch, strict=True)]
    sources += [(i, None) for i in free]
    sources += [(None, k) for k in free_right]

    def find(axis: int, atom: Axis) -> Number:
        i, k = sources[axis]
        first = None if i is None else left.at(i, atom)
        second = None if k is None else right.at(k, atom)
        return _zero_or_unknown(product(first, second))

    is_zero = left.everywhere == 0 or right.everywhere == 0
    return [flow.result(0 if is_zero else None, find)]


def conv(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """A convolution sums over the channels of its input; each group of channels meets its own part of the kernel."""
    image, kernel = fills
    numbers = flow.equation.params['dimension_numbers']
    batch, channels = numbers.lhs_spec[:2]
    outputs, inputs = numbers.rhs_spec[:2]
    summed = flow.candidates(flow.operands[1][inputs])
    _check_contraction(flow, flow.operands[1][inputs], image, channels, kernel, inputs)
    in_image = flow.candidates(flow.operands[0][channels])
    has_groups = flow.equation.params['feature_group_count'] > 1

    def find(axis: int, atom: Axis) -> Number:
        if axis == numbers.out_spec[0]:
            return _zero_or_unknown(image.at(batch, atom))
        if axis != numbers.out_spec[1]:
            return None
        value = kernel.at(outputs, atom)
        if has_groups and atom in in_image and atom not in summed:
            value = product(value, image.at(channels, atom))
        return _zero_or_unknown(value)

    is_zero = image.everywhere == 0 or kernel.everywhere == 0
    return [flow.result(0 if is_zero else None, find)]


def reduce(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """What is reduced has to be neutral at removed channels."""
    return [_reduce(flow, flow.equation.primitive.name, fills[0], 0)]


def collective(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """A reduction of each operand along an axis over which the program was mapped."""
    name = COLLECTIVES[flow.equation.primitive.name]
    return [_reduce(flow, name, fill, number) for number, fill in enumerate(fills)]


def _reduce(flow: Flow, name: str, fill: Fill, number: int) -> Fill:
    operand = flow.operands[number]
    axes = flow.equation.params['axes']
    neutral = _NEUTRAL.get(name)
    count = 1
    kept = []
    for i, axis in enumerate(operand):
        if i not in axes:
            kept.append(i)
            continue
        count *= axis.size
        for atom in flow.candidates(axis):
            if neutral is None or fill.at(i, atom) != neutral:
                flow.reject(atom, _reduce_reason(name, fill.at(i, atom)))

    def find(k: int, atom: Axis) -> Number:
        return _reduced(name, fill.at(kept[k], atom), count)

    return flow.result(_reduced(name, fill.everywhere, count), find, number)


def _reduce_reason(name: str, value: Number) -> str:
    if name not in _NEUTRAL:
        return 'takes channels that are zero into account'
    return (
        'sums channels that are not zero' if value is None else f'meets {value} at zeroed channels'
    )


def _reduced(name: str, value: Number, count: int) -> Number:
    """What reducing as many elements of one number gives."""
    if value is None or not is_finite(value):
        return value if value is None else NAN
    if name == 'reduce_sum':
        return value * count
    if name == 'reduce_prod':
        with np.errstate(over='ignore'):
            return float(np.float64(value) ** count) if value not in (0, 1) else value
    return None if name == 'reduce_xor' and value else value


def arg_reduce(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """An index: nothing is known of it, and it is finite."""
    return [flow.result(None, lambda axis, atom: None)]


def along(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Elements that follow one another: 0 stays 0, and what is sorted or compared stays what it is."""
    name = flow.equation.primitive.name
    keeps_all = name in ('cummax', 'cummin', 'sort')

    def kept(value: Number) -> Number:
        if value is None or keeps_all:
            return value
        if not is_finite(value):
            return NAN
        return 0 if value == 0 and name in ('cumsum', 'cumprod') else None

    results = []
    for number in range(len(flow.results)):
        fill = fills[number]
        results.append(flow.result(None, lambda i, atom, fill=fill: kept(fill.at(i, atom)), number))
    return results


def window(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Pooling along other axes."""
    (fill,) = fills
    sums = flow.equation.primitive.name == 'reduce_window_sum'

    def find(i: int, atom: Axis) -> Number:
        value = fill.at(i, atom)
        return _zero_or_unknown(value) if sums else value

    return [flow.result(None, find)]


def fourier(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """A Fourier transform along other axes: of zeros it is zero."""
    (fill,) = fills
    return [flow.result(None, lambda i, atom: _zero_or_unknown(fill.at(i, atom)))]


def top_k(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """The largest elements, and indices."""
    (fill,) = fills
    return [flow.result(None, fill.at, 0), flow.result(None, lambda axis, atom: None, 1)]
