"""Primitives that move elements, place them beside others, or make new values."""

import math
from collections.abc import Sequence

from jaxpruner.structure.analysis.axes import (
    Axes,
    Axis,
    atom,
    drop,
    new_axes,
    pick,
    product,
    replace,
    sizes_of,
    total,
)
from jaxpruner.structure.analysis.records import EquationTies, Row
from jaxpruner.structure.rules import moving_fills, resizing
from jaxpruner.trace import reshaping, rules

_PARTS_OF_KEYS = 'parts of keys lie along it'


def _transpose(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    return [pick(axes, ties.params['permutation'])]


def _squeeze(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    return [drop(axes, ties.params['dimensions'])]


def _broadcast(ties: EquationTies) -> list[Axes]:
    """Repeats a value along new axes."""
    axes = ties.operands[0]
    result = list(new_axes(ties.shape))
    for axis, i in zip(axes, ties.params['broadcast_dimensions'], strict=True):
        if axis.size == result[i].size:
            result[i] = axis
    return [tuple(result)]


def _tile(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    result = []
    for axis, count in zip(axes, ties.params['reps'], strict=True):
        repeated = product([atom(count), axis])
        result.append(repeated)
    return [tuple(result)]


def _reshape(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    order = ties.params.get('dimensions')
    if order is not None:  # the elements are read in this order of the axes
        axes = pick(axes, order)
    if math.prod(ties.shape) == 0:
        ties.pin_all(axes, 'a value without elements is reshaped')
        return ties.new_results()
    return [_reshaped(axes, ties)]


def _reshaped(axes: Axes, ties: EquationTies) -> Axes:
    """The axes of a value in another shape. Axes that stay are not split."""
    shape = ties.shape
    result = list(new_axes(shape))
    for runs in reshaping.matching_runs(sizes_of(axes), shape):
        old_axes = axes[runs.old]
        axes_of_result = result[runs.new]
        if not old_axes:  # new axes of one element
            continue
        if len(axes_of_result) == 1:
            result[runs.new] = [product(old_axes)]
        else:
            ties.align_factors(old_axes, axes_of_result)
    return tuple(result)


def _concatenate(ties: EquationTies) -> list[Axes]:
    i = ties.params['dimension']
    first, *others = ties.operands
    segments = [first[i]]
    other_axes = drop(first, [i])
    for axes in others:
        ties.unify_each(other_axes, drop(axes, [i]))
        segments.append(axes[i])
    return [replace(first, i, total(segments))]


def _stack(ties: EquationTies) -> list[Axes]:
    first, *others = ties.operands
    for axes in others:
        ties.unify_each(first, axes)
    segments = new_axes([1] * len(ties.operands))
    result = list(first)
    result.insert(ties.params['axis'], total(segments))
    return [tuple(result)]


def _split(ties: EquationTies) -> list[Axes]:
    axes = ties.operands[0]
    i = ties.params['axis']
    segments = ties.cut(axes[i], ties.params['sizes'])
    results = []
    for segment in segments:
        results.append(replace(axes, i, segment))
    return results


def _unstack(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    i = ties.params['axis']
    ties.cut(axes[i], [1] * axes[i].size)
    return [drop(axes, [i])] * axes[i].size


def _slice(ties: EquationTies) -> list[Axes]:
    (axes,) = ties.operands
    slices = rules.slices(ties.params)
    result = []
    for axis, positions in zip(axes, slices, strict=True):
        sliced = _slice_axis(axis, positions, ties)
        result.append(sliced)
    return [tuple(result)]


def _slice_axis(axis: Axis, positions: range, ties: EquationTies) -> Axis:
    """The axis that holds the elements at these positions of another one."""
    start, stop, step = positions.start, positions.stop, positions.step
    count = len(positions)
    if count == axis.size:
        return axis
    if step == 1:
        sizes = [start, count, axis.size - stop]
        _, segment, _ = ties.cut(axis, sizes)
        return segment
    takes_one_of_each = start < step and count * step == axis.size
    if takes_one_of_each:
        kept, neighbours = atom(count), atom(step)
        ties.unify(axis, product([kept, neighbours]))
        ties.pin(neighbours, 'every few of it are taken')
        return kept
    ties.pin(axis, 'every few of it are taken')
    return _make_pinned(count, 'every few of another axis lie along it', ties)


def _make_pinned(size: int, reason: str, ties: EquationTies) -> Axis:
    axis = atom(size)
    ties.pin(axis, reason)
    return axis


def _pad(ties: EquationTies) -> list[Axes]:
    axes = ties.operands[0]
    config = ties.params['padding_config']
    result = []
    for axis, size, padding in zip(axes, ties.shape, config, strict=True):
        padded = _pad_axis(axis, size, padding, ties)
        result.append(padded)
    return [tuple(result)]


def _pad_axis(axis: Axis, size: int, padding: Sequence[int], ties: EquationTies) -> Axis:
    """An axis with padding, of this size."""
    if not any(padding):
        return axis
    before, after, between = padding
    if between or min(before, after) < 0:
        reason = 'padding between elements, or less than none'
        ties.pin(axis, reason)
        return _make_pinned(size, reason, ties)
    first = _make_pinned(before, 'padding', ties)
    last = _make_pinned(after, 'padding', ties)
    return total([first, axis, last])


def _reverse(ties: EquationTies) -> list[Axes]:
    axes = ties.operands[0]
    reversed_axes = pick(axes, ties.params['dimensions'])
    ties.pin_all(reversed_axes, 'it is reversed')
    return [axes]


def _new(ties: EquationTies) -> list[Axes]:
    """Makes values without operands, so that the value at each index is known."""
    return ties.new_results()


def _random_bits(ties: EquationTies) -> list[Axes]:
    """Random numbers for each key of an array."""
    (keys,) = ties.operands
    sizes = ties.shape[len(keys) :]
    return [keys + new_axes(sizes)]


def _unwrap(ties: EquationTies) -> list[Axes]:
    """The parts of a key, or the keys split from it, lie along new axes."""
    (keys,) = ties.operands
    sizes = ties.shape[len(keys) :]
    parts = new_axes(sizes)
    ties.pin_all(parts, _PARTS_OF_KEYS)
    return [keys + parts]


def _wrap(ties: EquationTies) -> list[Axes]:
    (numbers,) = ties.operands
    rank = len(ties.shape)
    ties.pin_all(numbers[rank:], _PARTS_OF_KEYS)
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
    'unstack': Row(_unstack, moving_fills.unstack),
}
