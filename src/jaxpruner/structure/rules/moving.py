"""Primitives that move elements, place them beside others, take them at indices, or make new values.

An axis is pinned if an index says where a window lies along it. A window as long as its axis has only one place, so
such an axis is not pinned.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpruner.structure.axes import (
    Axes,
    Axis,
    drop,
    new_axes,
    pick,
    product,
    replace,
    sizes_of,
    total,
)
from jaxpruner.structure.cut import EquationCut, Values
from jaxpruner.structure.fills import NAN, EquationFills, Fill, Scalar, is_finite, join
from jaxpruner.structure.traces import EquationTies, Row, new_results
from jaxpruner.trace import reshaping, rules
from jaxpruner.trace.program import shape_of
from jaxpruner.trace.rules import SCATTERS, GatherAxes
from jaxpruner.trace.views import all_but

_INDEXED = 'an index says where along it'
_PARTS = 'numbers that make one index lie along it'


def nothing_known(fills: EquationFills) -> list[Fill]:
    """Knows nothing of the results, except that scalars that are not finite may spread."""

    def find(axis: int, atom: Axis) -> Scalar:
        scalars = [own.get(atom) for fill in fills.of_operands for own in fill.channels]
        return None if all(map(is_finite, scalars)) else NAN

    return fills.fill_results(find)


def _moves(choose: Callable[[Mapping[str, Any], Any], Any]) -> Row:
    """The row of a primitive that puts axes in another order, or drops some: `(params, entries) -> entries`."""

    def axes(ties: EquationTies) -> list[Axes]:
        return [choose(ties.params, ties.operands[0])] * len(ties.equation.outvars)

    def fills(fills: EquationFills) -> list[Fill]:
        fill = fills.of_operands[0]
        return [Fill(fill.everywhere, choose(fills.params, fill.channels))] * len(fills.results)

    return Row(axes, fills)


_UNSTACK = _moves(lambda params, entries: drop(entries, [params['axis']]))


def _joins(
    sources: Callable[[EquationFills, int, Axis], Iterable[tuple[int, int]]],
    count: int | None = None,
) -> Callable[[EquationFills], list[Fill]]:
    """The rule of a primitive each of whose results' elements is one of the operands' elements.

    Args:
      sources: `(fills, axis of a result, atom) -> pairs of an operand and its axis` that the atom comes from.
      count: how many operands hold elements, and no indices; all by default.
    """

    def rule(fills: EquationFills) -> list[Fill]:
        operands = fills.of_operands[:count]

        def find(k: int, atom: Axis) -> Scalar:
            scalars = [operands[number].at(i, atom) for number, i in sources(fills, k, atom)]
            return join(scalars) if scalars else None

        common = {fill.everywhere for fill in operands}
        return fills.fill_results(find, everywhere=common.pop() if len(common) == 1 else None)

    return rule


def broadcast_axes(ties: EquationTies) -> list[Axes]:
    """Repeats a value along new axes."""
    result = list(new_axes(ties.shape))
    for axis, i in zip(ties.operands[0], ties.params['broadcast_dimensions'], strict=True):
        if axis.size == result[i].size:
            result[i] = axis
    return [tuple(result)]


def reshape_axes(ties: EquationTies) -> list[Axes]:
    """The axes of a value in another shape. Axes that stay are not split."""
    axes = ties.operands[0]
    order = ties.params.get('dimensions')
    if order is not None:  # the elements are read in this order of the axes
        axes = pick(axes, order)
    if math.prod(ties.shape) == 0:
        ties.pin('a value without elements is reshaped', *axes)
        return new_results(ties.equation)
    result = list(new_axes(ties.shape))
    for runs in reshaping.matching_runs(sizes_of(axes), ties.shape):
        old, new = axes[runs.old], result[runs.new]
        if old and len(new) == 1:
            result[runs.new] = [product(old)]
        elif old:  # otherwise they are new axes of one element
            ties.align_factors(old, new)
    return [tuple(result)]


def concatenate_axes(ties: EquationTies) -> list[Axes]:
    """Places values one after the other along an axis."""
    i = ties.params['dimension']
    first, *others = ties.operands
    for axes in others:
        ties.unify_each(drop(first, [i]), drop(axes, [i]))
    return [replace(first, i, total([axes[i] for axes in ties.operands]))]


def stack_axes(ties: EquationTies) -> list[Axes]:
    """Places values along a new axis."""
    first, *others = ties.operands
    for axes in others:
        ties.unify_each(first, axes)
    result = list(first)
    result.insert(ties.params['axis'], total(new_axes([1] * len(ties.operands))))
    return [tuple(result)]


def split_axes(ties: EquationTies) -> list[Axes]:
    """Cuts an axis into segments."""
    axes, i = ties.operands[0], ties.params['axis']
    return [replace(axes, i, segment) for segment in ties.cut(axes[i], ties.params['sizes'])]


def unstack_axes(ties: EquationTies) -> list[Axes]:
    """Takes the elements along an axis apart."""
    axis = ties.operands[0][ties.params['axis']]
    ties.cut(axis, [1] * axis.size)
    return _UNSTACK.axes(ties)


def slice_axes(ties: EquationTies) -> list[Axes]:
    """Takes a range of an axis, or one of each few neighbours."""
    result = []
    for axis, positions in zip(ties.operands[0], rules.slices(ties.params), strict=True):
        start, step, count = positions.start, positions.step, len(positions)
        if count == axis.size:
            sliced = axis
        elif step == 1:
            _, sliced, _ = ties.cut(axis, [start, count, axis.size - positions.stop])
        else:
            sliced = Axis(count)
            if start < step and count * step == axis.size:  # one of each few neighbours
                neighbours = Axis(step)
                ties.unify(axis, product([sliced, neighbours]))
                ties.pin('every few of it are taken', neighbours)
            else:
                ties.pin('every few of it are taken', axis, sliced)
        result.append(sliced)
    return [tuple(result)]


def slice_resized(small: EquationCut, operands: Values) -> Values:
    """The bounds of a slice are parameters. They move with their elements."""
    moved = []
    counts = small.result_shape
    slices = rules.slices(small.equation.params)
    for axis, old, count in zip(small.axes.operands[0], slices, counts, strict=True):
        if not small.cut.shortens(axis):
            moved.append((old.start, old.stop))
        elif old.step > 1:  # it takes one of every few neighbours, and all of these stay
            moved.append((old.start, old.start + (count - 1) * old.step + 1))
        else:
            bounds = [small.cut.size_before(axis, end) for end in (old.start, old.stop)]
            moved.append(tuple(bounds))
    starts, limits = zip(*moved, strict=True)
    return small.run(operands, start_indices=starts, limit_indices=limits)


def pad_axes(ties: EquationTies) -> list[Axes]:
    """Puts padding before and after the elements of an axis."""
    result = []
    config = ties.params['padding_config']
    for axis, size, (before, after, between) in zip(
        ties.operands[0], ties.shape, config, strict=True
    ):
        if between or min(before, after) < 0:
            result.append(Axis(size))
            ties.pin('padding between elements, or less than none', axis, result[-1])
        elif before or after:
            first, last = Axis(before), Axis(after)
            ties.pin('padding', first, last)
            result.append(total([first, axis, last]))
        else:
            result.append(axis)
    return [tuple(result)]


def _pad_sources(fills: EquationFills, k: int, atom: Axis) -> list[tuple[int, int]]:
    """Removed channels are padded like others, along all other axes."""
    others = drop(fills.params['padding_config'], [k])
    return [(0, k), (1, 0)] if any(max(amounts) > 0 for amounts in others) else [(0, k)]


def _concatenate_sources(fills: EquationFills, k: int, atom: Axis) -> list[tuple[int, int]]:
    """All operands; along the axis of the concatenation, those with the atom."""
    numbers = range(len(fills.operands))
    if k == fills.params['dimension']:
        numbers = [n for n in numbers if atom in fills.candidates(fills.operands[n][k])]
    return [(number, k) for number in numbers]


def _stack_sources(fills: EquationFills, k: int, atom: Axis) -> list[tuple[int, int]]:
    """All operands; none along the new axis."""
    along = fills.params['axis']
    numbers = [] if k == along else range(len(fills.operands))
    return [(number, k - (k > along)) for number in numbers]


def tile_axes(ties: EquationTies) -> list[Axes]:
    """Repeats a value along its axes."""
    pairs = zip(ties.operands[0], ties.params['reps'], strict=True)
    return [tuple([product([Axis(count), axis]) for axis, count in pairs])]


def reverse_axes(ties: EquationTies) -> list[Axes]:
    """Reverses axes."""
    axes = ties.operands[0]
    ties.pin('it is reversed', *pick(axes, ties.params['dimensions']))
    return [axes]


def made_axes(ties: EquationTies) -> list[Axes]:
    """Makes values without operands, or with keys for some of their axes, so that the value at each index is known."""
    keys = ties.operands[0] if ties.operands else ()
    return [keys + new_axes(ties.shape[len(keys) :])]


def made_resized(small: EquationCut, operands: Values) -> Values:
    """New values are made in the old size and then cut, so that each index keeps its value."""
    rank_of_keys = operands[0].ndim if operands else 0  # axes of keys are cut already
    take = functools.partial(small.cut.take, first=rank_of_keys)
    return list(map(take, small.run(operands), small.axes.results))


def window_axes(axes: Axes, shape: Sequence[int], ties: EquationTies) -> Axes:
    """The axes of a window of this shape. Axes that it takes only a part of are pinned, and replaced by new ones."""
    parts = {}
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        if axis.size != size:
            parts[i] = Axis(size)
            ties.pin(_INDEXED, axis, parts[i])
    return tuple([parts.get(i, axis) for i, axis in enumerate(axes)])


def dynamic_update_slice_axes(ties: EquationTies) -> list[Axes]:
    """Replaces a window of the first operand by the second."""
    base, update = ties.operands[:2]
    ties.unify_each(window_axes(base, sizes_of(update), ties), update)
    return [base]


def gather_axes(ties: EquationTies) -> list[Axes]:
    """Takes windows at indices."""
    base, indices = ties.operands
    axes = GatherAxes.of(ties.equation)
    window = window_axes(pick(base, axes.kept), pick(axes.sizes, axes.kept), ties)
    result = list(new_axes(ties.shape))
    for k, axis in (
        *zip(axes.kept.values(), window, strict=True),
        *zip(axes.rows, indices, strict=False),
    ):
        result[k] = axis
    dimension_numbers = ties.params['dimension_numbers']
    ties.pin(_INDEXED, *pick(base, dimension_numbers.collapsed_slice_dims))
    ties.unify_each(pick(base, axes.batching), pick(indices, axes.batching_of_indices))
    ties.pin(_PARTS, indices[-1])
    return [tuple(result)]


def gather_fills(fills: EquationFills) -> list[Fill]:
    """Takes windows at indices. For an index beyond the end a scalar may be filled in."""
    base, params = fills.of_operands[0], fills.params
    axes = GatherAxes.of(fills.equation)
    source = {after: before for before, after in axes.kept.items()}
    value = params.get('fill_value')
    # NaN would spoil the whole model anyway.
    is_inexact = jnp.issubdtype(fills.equation.outvars[0].aval.dtype, jnp.inexact)
    is_scalar = value is not None and is_finite(value)
    fills_in = 'FILL' in str(params.get('mode')) and (is_scalar or not is_inexact)

    def find(k: int, atom: Axis) -> Scalar:
        gone = [i for i in fills.axes_with(atom) if i in axes.gone]
        sources = [source[k]] if k in source else gone
        scalars = [base.at(i, atom) for i in sources]
        return join(scalars + [value] * fills_in) if scalars else None

    return fills.fill_results(find, everywhere=None if fills_in else base.everywhere)


def gather_resized(small: EquationCut, operands: Values) -> Values:
    """The sizes of windows are a parameter. A window as long as its axis stays so."""
    sizes = []
    old_sizes = small.equation.params['slice_sizes']
    for axis, old_size in zip(small.axes.operands[0], old_sizes, strict=True):
        is_whole = old_size == axis.size and old_size > 1
        sizes.append(small.cut.size(axis) if is_whole else old_size)
    return small.run(operands, slice_sizes=tuple(sizes))


class _ScatterAxes(NamedTuple):
    """What a scatter does with axes.

    Attributes:
      kept: axis of the operand that a window has -> axis of the updates.
      batching: axes that the operand shares with the indices.
    """

    kept: dict[int, int]
    batching: Sequence[int]

    @classmethod
    def of(cls, equation: Any) -> '_ScatterAxes':
        """Reads the equation."""
        numbers = equation.params['dimension_numbers']
        batching = tuple(getattr(numbers, 'operand_batching_dims', ()))
        gone = (*numbers.inserted_window_dims, *batching)
        kept = all_but(gone, shape_of(equation.invars[0]))
        return cls(dict(zip(kept, numbers.update_window_dims, strict=True)), batching)


def scatter_axes(ties: EquationTies) -> list[Axes]:
    """Replaces elements of the first operand by windows of the third, or combines both."""
    base, indices, updates = ties.operands
    axes = _ScatterAxes.of(ties.equation)
    numbers = ties.params['dimension_numbers']
    in_updates = pick(updates, axes.kept.values())
    ties.unify_each(window_axes(pick(base, axes.kept), sizes_of(in_updates), ties), in_updates)
    ties.pin(_INDEXED, *pick(base, numbers.inserted_window_dims))
    *rows, parts = indices
    ties.unify_each(rows, drop(updates, numbers.update_window_dims))
    in_indices = getattr(numbers, 'scatter_indices_batching_dims', ())
    ties.unify_each(pick(base, axes.batching), pick(indices, in_indices))
    ties.pin(_PARTS, parts)
    return [base]


def scatter_fills(fills: EquationFills) -> list[Fill]:
    """Replaces elements of the first operand by windows of the third, or combines both."""
    base, _, updates = fills.of_operands
    kept = _ScatterAxes.of(fills.equation).kept
    chooses = fills.equation.primitive.name in ('scatter', 'scatter-max', 'scatter-min')

    def find(i: int, atom: Axis) -> Scalar:
        in_updates = [kept[i]] if i in kept else fills.axes_with(atom, operand=2)
        scalar = join([base.at(i, atom), *[updates.at(k, atom) for k in in_updates]])
        return scalar if chooses or scalar == 0 or not is_finite(scalar) else None

    return fills.fill_results(find)


def tile_resized(small: EquationCut, operands: Values) -> Values:
    """The number of repetitions of each axis is a parameter."""
    sizes = zip(small.result_shape, operands[0].shape, strict=True)
    return small.run(operands, reps=tuple([after // before for after, before in sizes]))


def split_resized(small: EquationCut, operands: Values) -> Values:
    """The sizes of the parts are a parameter."""
    i = small.equation.params['axis']
    sizes = [small.cut.size(axes[i]) for axes in small.axes.results]
    return small.run(operands, sizes=tuple(sizes))


_PART = _joins(lambda fills, k, atom: [(0, k)], count=1)
_REGROUPED = _joins(lambda fills, k, atom: [(0, i) for i in fills.axes_with(atom)], count=1)
ROWS: dict[str, Row] = {
    'broadcast_in_dim': Row(
        broadcast_axes,
        _joins(
            lambda fills, k, atom: [
                (0, i) for i, after in enumerate(fills.params['broadcast_dimensions']) if after == k
            ],
            count=1,
        ),
        lambda small, operands: small.run(operands, shape=small.result_shape),
    ),
    'concatenate': Row(concatenate_axes, _joins(_concatenate_sources)),
    'dynamic_slice': Row(
        lambda ties: [window_axes(ties.operands[0], ties.params['slice_sizes'], ties)],
        _PART,
        lambda small, operands: small.run(operands, slice_sizes=small.result_shape),
    ),
    'dynamic_update_slice': Row(
        dynamic_update_slice_axes, _joins(lambda fills, k, atom: [(0, k), (1, k)], count=2)
    ),
    'gather': Row(gather_axes, gather_fills, gather_resized),
    'pad': Row(pad_axes, _joins(_pad_sources)),
    'reshape': Row(
        reshape_axes,
        _REGROUPED,
        lambda small, operands: small.run(operands, new_sizes=small.result_shape),
    ),
    'rev': Row(reverse_axes, _PART),
    'slice': Row(slice_axes, _PART, slice_resized),
    'split': Row(split_axes, _PART, split_resized),
    'squeeze': _moves(lambda params, entries: drop(entries, params['dimensions'])),
    'stack': Row(stack_axes, _joins(_stack_sources)),
    'tile': Row(tile_axes, _REGROUPED, tile_resized),
    'transpose': _moves(lambda params, entries: pick(entries, params['permutation'])),
    'unstack': Row(unstack_axes, _UNSTACK.fills),
    **dict.fromkeys(SCATTERS, Row(scatter_axes, scatter_fills)),
    **dict.fromkeys(('empty', 'iota', 'random_bits'), Row(made_axes, nothing_known, made_resized)),
}
