"""Primitives that take or place elements at indices.

An axis along which an index says where is pinned. A window that is as long as its axis has only one place, so that an
index says nothing there.
"""

from collections.abc import Sequence
from typing import Any

from jaxpruner.structure import moving_fills, resizing
from jaxpruner.structure.axes import Axes, Axis, Ties, atom, new_axes
from jaxpruner.structure.records import Row
from jaxpruner.uses.moving_rules import shape_of

_REASON = 'an index says where along it'


def _window(axes: Axes, shape: Sequence[int], ties: Ties) -> Axes:
    """The axes of a window of this shape: those that it takes as a whole, and new ones."""
    result: list[Axis] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis.size == size:
            result.append(axis)
        else:
            part = atom(size)
            ties.pin_all((axis, part), _REASON)
            result.append(part)
    return tuple(result)


def _dynamic_slice(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    return [_window(operands[0], equation.params['slice_sizes'], ties)]


def _dynamic_update_slice(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    base, update = operands[:2]
    window = _window(base, [axis.size for axis in update], ties)
    ties.unify_each(window, update)
    return [base]


def _all_but(axes: Sequence[int], rank: int) -> list[int]:
    return [i for i in range(rank) if i not in axes]


def _gather(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    base, indices = operands
    numbers = equation.params['dimension_numbers']
    batching = getattr(numbers, 'operand_batching_dims', ())  # older JAX has none
    kept = _all_but((*numbers.collapsed_slice_dims, *batching), len(base))
    result = list(new_axes(shape_of(equation.outvars[0])))
    sizes = [equation.params['slice_sizes'][i] for i in kept]
    window = _window(tuple([base[i] for i in kept]), sizes, ties)
    for k, axis in zip(numbers.offset_dims, window, strict=True):
        result[k] = axis
    ties.pin_all([base[i] for i in numbers.collapsed_slice_dims], _REASON)
    rows = _all_but(numbers.offset_dims, len(result))
    for i, k in enumerate(rows):
        result[k] = indices[i]
    for i, k in zip(batching, getattr(numbers, 'start_indices_batching_dims', ()), strict=True):
        ties.unify(base[i], indices[k])
    ties.pin(indices[-1], 'numbers that make one index lie along it')
    return [tuple(result)]


def _scatter(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    base, indices, updates = operands
    numbers = equation.params['dimension_numbers']
    batching = getattr(numbers, 'operand_batching_dims', ())
    kept = _all_but((*numbers.inserted_window_dims, *batching), len(base))
    sizes = [updates[k].size for k in numbers.update_window_dims]
    window = _window(tuple([base[i] for i in kept]), sizes, ties)
    ties.unify_each(window, [updates[k] for k in numbers.update_window_dims])
    ties.pin_all([base[i] for i in numbers.inserted_window_dims], _REASON)
    rows = _all_but(numbers.update_window_dims, len(updates))
    ties.unify_each(indices[:-1], [updates[k] for k in rows])
    for i, k in zip(batching, getattr(numbers, 'scatter_indices_batching_dims', ()), strict=True):
        ties.unify(base[i], indices[k])
    ties.pin(indices[-1], 'numbers that make one index lie along it')
    return [base]


SCATTERS = frozenset(
    'scatter scatter-add scatter_add scatter_max scatter_min scatter_mul scatter_sub'.split()
)
ROWS: dict[str, Row] = {
    **dict.fromkeys(SCATTERS, Row(_scatter, moving_fills.scatter)),
    'dynamic_slice': Row(_dynamic_slice, moving_fills.part, resizing.dynamic_slice),
    'dynamic_update_slice': Row(_dynamic_update_slice, moving_fills.update),
    'gather': Row(_gather, moving_fills.gather, resizing.gather),
}
