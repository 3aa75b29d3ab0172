"""Primitives that move elements, or place them beside others."""

import math
from collections.abc import Sequence
from typing import Any

from jaxpruner.structure.analysis.axes import Axes, Axis, Ties, atom, new_axes, product, total
from jaxpruner.structure.analysis.records import Row
from jaxpruner.structure.rules import moving_fills, resizing
from jaxpruner.uses.moving_rules import shape_of


def _transpose(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    (axes,) = operands
    return [tuple([axes[i] for i in equation.params['permutation']])]


def _squeeze(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    dropped = equation.params['dimensions']
    return [tuple([axis for i, axis in enumerate(operands[0]) if i not in dropped])]


def _broadcast(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """An axis along which a value is repeated is a new one."""
    result = list(new_axes(shape_of(equation.outvars[0])))
    for axis, i in zip(operands[0], equation.params['broadcast_dimensions'], strict=True):
        if axis.size == result[i].size:
            result[i] = axis
    return [tuple(result)]


def _tile(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    result = []
    for axis, count in zip(operands[0], equation.params['reps'], strict=True):
        result.append(product([atom(count), axis]))
    return [tuple(result)]


def _reshape(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    (axes,) = operands
    order = equation.params.get('dimensions')
    if order is not None:  # the elements are read in this order of the axes
        axes = tuple([axes[i] for i in order])
    shape = shape_of(equation.outvars[0])
    if not math.prod(shape):
        ties.pin_all(axes, 'a value without elements is reshaped')
        return [new_axes(shape)]
    return [_reshaped(axes, shape, ties)]


def _reshaped(axes: Axes, shape: Sequence[int], ties: Ties) -> Axes:
    """The axes of a value in another shape; axes that stay are not taken apart."""
    result = list(new_axes(shape))
    sizes = [axis.size for axis in axes]
    i = k = 0
    while i < len(axes) and k < len(shape):  # one group of axes after the other
        old, new = [i], [k]
        before, after = sizes[i], shape[k]
        while before != after:
            if before < after:
                old.append(old[-1] + 1)
                before *= sizes[old[-1]]
            else:
                new.append(new[-1] + 1)
                after *= shape[new[-1]]
        if len(new) == 1:
            result[k] = product([axes[n] for n in old])
        else:
            ties.align_factors([axes[n] for n in old], [result[n] for n in new])
        i, k = old[-1] + 1, new[-1] + 1
    return tuple(result)


def _concatenate(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    i = equation.params['dimension']
    result = list(operands[0])
    for axes in operands[1:]:
        ties.unify_each(result[:i] + result[i + 1 :], axes[:i] + axes[i + 1 :])
    result[i] = total([axes[i] for axes in operands])
    return [tuple(result)]


def _stack(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    result = list(operands[0])
    for axes in operands[1:]:
        ties.unify_each(result, axes)
    result.insert(equation.params['axis'], total(new_axes([1] * len(operands))))
    return [tuple(result)]


def _split(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    i = equation.params['axis']
    results = []
    for segment in ties.cut(operands[0][i], equation.params['sizes']):
        results.append((*operands[0][:i], segment, *operands[0][i + 1 :]))
    return results


def _slice(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    params = equation.params
    strides = params['strides'] or [1] * len(operands[0])
    result = []
    for i, axis in enumerate(operands[0]):
        taken = range(params['start_indices'][i], params['limit_indices'][i], strides[i])
        result.append(_taken(axis, taken, ties))
    return [tuple(result)]


def _taken(axis: Axis, taken: range, ties: Ties) -> Axis:
    """The axis that holds the elements of a slice."""
    if len(taken) == axis.size:
        return axis
    if taken.step == 1:
        sizes = [taken.start, len(taken), axis.size - taken.stop]
        return ties.cut(axis, sizes)[1]
    count = len(taken)
    if taken.start < taken.step and count * taken.step == axis.size:  # one of each few neighbours
        kept, neighbours = atom(count), atom(taken.step)
        ties.unify(axis, product([kept, neighbours]))
        ties.pin(neighbours, 'every few of it are taken')
        return kept
    ties.pin(axis, 'every few of it are taken')
    return _pinned(count, 'every few of another axis lie along it', ties)


def _pinned(size: int, reason: str, ties: Ties) -> Axis:
    axis = atom(size)
    ties.pin(axis, reason)
    return axis


def _pad(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    result = []
    shape = shape_of(equation.outvars[0])
    for i, (before, after, between) in enumerate(equation.params['padding_config']):
        axis = operands[0][i]
        if not (before or after or between):
            result.append(axis)
        elif between or min(before, after) < 0:
            reason = 'padding between elements, or less than none'
            ties.pin(axis, reason)
            result.append(_pinned(shape[i], reason, ties))
        else:
            first = _pinned(before, 'padding', ties)
            last = _pinned(after, 'padding', ties)
            result.append(total([first, axis, last]))
    return [tuple(result)]


def _reverse(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    ties.pin_all([operands[0][i] for i in equation.params['dimensions']], 'it is reversed')
    return [operands[0]]


def _new(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """Values that are made from nothing: what stands at an index is known."""
    return [new_axes(shape_of(variable)) for variable in equation.outvars]


def _random_bits(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """Numbers for each of an array of keys."""
    (keys,) = operands
    shape = shape_of(equation.outvars[0])
    return [keys + new_axes(shape[len(keys) :])]


def _unwrap(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """The numbers that a key is made of lie along a new axis; so do keys that are split off."""
    (keys,) = operands
    parts = new_axes(shape_of(equation.outvars[0])[len(keys) :])
    ties.pin_all(parts, 'parts of keys lie along it')
    return [keys + parts]


def _wrap(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    (numbers,) = operands
    rank = len(shape_of(equation.outvars[0]))
    ties.pin_all(numbers[rank:], 'parts of keys lie along it')
    return [numbers[:rank]]


ROWS: dict[str, Row] = {
    'broadcast_in_dim': Row(_broadcast, moving_fills.broadcast, resizing.broadcast),
    'concatenate': Row(_concatenate, moving_fills.concatenate),
    'empty': Row(_new, moving_fills.nothing, resizing.from_nothing),
    'iota': Row(_new, moving_fills.nothing, resizing.from_nothing),
    'pad': Row(_pad, moving_fills.pad),
    'random_bits': Row(_random_bits, moving_fills.nothing, resizing.from_nothing),
    'random_split': Row(_unwrap, moving_fills.nothing),
    'random_unwrap': Row(_unwrap, moving_fills.nothing),
    'random_wrap': Row(_wrap, moving_fills.nothing),
    'reshape': Row(_reshape, moving_fills.regrouped, resizing.reshape),
    'rev': Row(_reverse, moving_fills.part),
    'slice': Row(_slice, moving_fills.part, resizing.slice_),
    'split': Row(_split, moving_fills.part, resizing.split),
    'squeeze': Row(_squeeze, moving_fills.squeeze),
    'stack': Row(_stack, moving_fills.stack),
    'tile': Row(_tile, moving_fills.regrouped, resizing.tile),
    'transpose': Row(_transpose, moving_fills.transpose),
}
