"""Primitives that take or place elements at indices.

An axis is pinned if an index says where a window lies along it. A window as long as its axis has only one place, so
such an axis is not pinned.
"""

from collections.abc import Sequence

from jaxpruner.structure.analysis.axes import Axes, Axis, atom, new_axes, pick, sizes_of
from jaxpruner.structure.analysis.records import EquationTies, Row
from jaxpruner.structure.analysis.ties import Ties
from jaxpruner.structure.rules import moving_fills, resizing
from jaxpruner.structure.rules.scatter_axes import ScatterAxes
from jaxpruner.trace.rules import SCATTERS, GatherAxes

_REASON = 'an index says where along it'
_PARTS = 'numbers that make one index lie along it'


def _window(axes: Axes, shape: Sequence[int], ties: Ties) -> Axes:
    """The axes of a window of this shape. Axes that it takes only a part of are pinned, and replaced by new ones."""
    result: list[Axis] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis.size == size:
            result.append(axis)
        else:
            part = atom(size)
            ties.pin_all((axis, part), _REASON)
            result.append(part)
    return tuple(result)


def _dynamic_slice(ties: EquationTies) -> list[Axes]:
    base = ties.operands[0]
    window = _window(base, ties.params['slice_sizes'], ties)
    return [window]


def _dynamic_update_slice(ties: EquationTies) -> list[Axes]:
    base, update = ties.operands[:2]
    window = _window(base, sizes_of(update), ties)
    ties.unify_each(window, update)
    return [base]


def _gather(ties: EquationTies) -> list[Axes]:
    base, indices = ties.operands
    axes = GatherAxes.of(ties.equation)
    sizes = pick(axes.sizes, axes.kept)
    windowed = pick(base, axes.kept)
    window = _window(windowed, sizes, ties)
    result = list(new_axes(ties.shape))
    for k, axis in zip(axes.kept.values(), window, strict=True):
        result[k] = axis
    for i, k in enumerate(axes.rows):
        result[k] = indices[i]
    dimension_numbers = ties.params['dimension_numbers']
    collapsed = pick(base, dimension_numbers.collapsed_slice_dims)
    ties.pin_all(collapsed, _REASON)
    in_base = pick(base, axes.batching)
    in_indices = pick(indices, axes.batching_of_indices)
    ties.unify_each(in_base, in_indices)
    ties.pin(indices[-1], _PARTS)
    return [tuple(result)]


def _scatter(ties: EquationTies) -> list[Axes]:
    base, indices, updates = ties.operands
    axes = ScatterAxes.of(ties.equation)
    in_updates = pick(updates, axes.kept.values())
    windowed = pick(base, axes.kept)
    window = _window(windowed, sizes_of(in_updates), ties)
    ties.unify_each(window, in_updates)
    dimension_numbers = ties.params['dimension_numbers']
    inserted = pick(base, dimension_numbers.inserted_window_dims)
    ties.pin_all(inserted, _REASON)
    *rows, parts = indices
    ties.unify_each(rows, pick(updates, axes.rows))
    in_base = pick(base, axes.batching)
    in_indices = pick(indices, axes.batching_of_indices)
    ties.unify_each(in_base, in_indices)
    ties.pin(parts, _PARTS)
    return [base]


ROWS: dict[str, Row] = {
    **dict.fromkeys(SCATTERS, Row(_scatter, moving_fills.scatter)),
    'dynamic_slice': Row(_dynamic_slice, moving_fills.part, resizing.dynamic_slice),
    'dynamic_update_slice': Row(_dynamic_update_slice, moving_fills.update),
    'gather': Row(_gather, moving_fills.gather, resizing.gather),
}
