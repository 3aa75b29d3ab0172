"""Rules for primitives that take or replace elements at indices which do not depend on data, and are not known."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpruner.uses import moves, views
from jaxpruner.uses.moving_rules import Rule, Views, moving, shape_of
from jaxpruner.uses.views import Factor, Move, NoRuleError, View


def _dynamic_slice(equation: Any, view: View, step: Move) -> View:
    del step
    return _indexed(view, shape_of(equation.invars[0]), equation.params['slice_sizes'])


def _indexed(view: View, shape: Sequence[int], sizes: Sequence[int]) -> View:
    """A slice that begins where the program says, mostly at the number of a loop's trip: that axis is a stack."""
    axes, region = list(view.axes), list(view.region)
    for i, (n, size) in enumerate(zip(shape, sizes, strict=True)):
        if n == size:
            continue
        if region[i] != (0, n):
            raise NoRuleError('no rule for a slice of a concatenation at an index that is computed')
        if size == 1:
            entry = views.StackAxis((), axes[i], (0, n), n)
            view = dataclasses.replace(view, stack=(*view.stack, entry))
        axes[i], region[i] = views.mixed(axes[i], size), (0, size)
    return views.computed(view, axes, region)


def _gather(equation: Any, view: View, step: Move) -> View:
    """Rows of a parameter at indices that do not depend on data, such as a table of relative positions."""
    del step
    numbers, sizes = equation.params['dimension_numbers'], equation.params['slice_sizes']
    shape, result = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    gone = (*numbers.collapsed_slice_dims, *getattr(numbers, 'operand_batching_dims', ()))
    rows = [i for i in range(len(result)) if i not in numbers.offset_dims]
    if not rows:
        view = _indexed(view, shape, sizes)
    if any(view.region[i] != (0, shape[i]) for i in numbers.start_index_map if rows):
        raise NoRuleError('no rule for gather from a concatenation')
    picked = tuple(Factor(factor.axes, 1) for i in gone for factor in view.axes[i])
    axes = [views.mixed(picked, n) for n in result]
    region = [(0, n) for n in result]
    for i, target in zip(
        (i for i in range(len(shape)) if i not in gone), numbers.offset_dims, strict=True
    ):
        full = shape[i] == sizes[i]
        axes[target] = view.axes[i] if full else views.mixed(view.axes[i], sizes[i])
        region[target] = view.region[i] if full else (0, sizes[i])
    return views.computed(view, axes, region)


def _update(equation: Any, operands: Sequence[Views]) -> list[Views]:
    """Some elements of the first operand are replaced by constants."""
    if any(operands[1:]):
        raise NoRuleError(f'no rule for {equation.primitive.name} of a parameter')
    return [moves.joined(operands[0])]


def _top_k(equation: Any, operands: Sequence[Views]) -> list[Views]:
    shape, found = shape_of(equation.invars[0]), []
    axis = equation.params.get('axis', -1) % len(shape)  # older JAX knows the last alone
    size = shape_of(equation.outvars[0])[axis]
    for view in operands[0]:
        if view.region[axis] != (0, shape[axis]):
            raise NoRuleError('no rule for top_k along a concatenation')
        axes, region = list(view.axes), list(view.region)
        axes[axis], region[axis] = views.mixed(axes[axis], size), (0, size)
        found.append(views.computed(view, axes, region))
    return [tuple(found)] * 2


SCATTERS = frozenset('scatter scatter-add scatter_add scatter_mul'.split())
INDEXING: dict[str, Rule] = {
    **dict.fromkeys(SCATTERS | {'dynamic_update_slice'}, _update),
    'dynamic_slice': moving(_dynamic_slice),
    'gather': moving(_gather),
    'top_k': _top_k,
}
