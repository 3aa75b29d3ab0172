"""Rules for primitives that take or replace elements at indices that do not depend on data, but are unknown."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.uses import moves, views
from jaxpruner.uses.moving_rules import Operands, Results, Rule, moving, shape_of
from jaxpruner.uses.views import Factor, Move, NoRuleError, View, ViewAxis


class GatherAxes(NamedTuple):
    """What a gather does with axes.

    Attributes:
      indexed: axes of the operand along which indices say where a window begins.
      gone: axes of the operand that the result does not have.
      kept: axis of the operand that the result has -> axis of the result.
      rows: axes of the result along which the indices lie.
      sizes: of the window, for each axis of the operand.
      batching: axes that the operand shares with the indices.
      batching_of_indices: these axes in the indices.
    """

    indexed: Sequence[int]
    gone: Sequence[int]
    kept: dict[int, int]
    rows: Sequence[int]
    sizes: Sequence[int]
    batching: Sequence[int]
    batching_of_indices: Sequence[int]

    @classmethod
    def of(cls, equation: Any) -> 'GatherAxes':
        """Reads the equation."""
        dimension_numbers = equation.params['dimension_numbers']
        offset_dims = dimension_numbers.offset_dims
        # Older JAX has no shared axes.
        batching = getattr(dimension_numbers, 'operand_batching_dims', ())
        gone = (*dimension_numbers.collapsed_slice_dims, *batching)
        kept = views.all_but(gone, shape_of(equation.invars[0]))
        return cls(
            indexed=dimension_numbers.start_index_map,
            gone=gone,
            kept=dict(zip(kept, offset_dims, strict=True)),
            rows=views.all_but(offset_dims, shape_of(equation.outvars[0])),
            sizes=equation.params['slice_sizes'],
            batching=batching,
            batching_of_indices=getattr(dimension_numbers, 'start_indices_batching_dims', ()),
        )

    def window_axis(self, view: View, axis: int) -> ViewAxis:
        """The window's axis along an axis of the operand."""
        whole = view.axes[axis]
        size = self.sizes[axis]
        return whole if whole.length == size else views.mixed(whole.factors, size)

    def reads_part_of(self, view: View) -> bool:
        """Whether the indices lie along a concatenation."""
        return not all(view.axes[axis].is_whole for axis in self.indexed)


def _dynamic_slice(equation: Any, view: View, step: Move) -> View:
    del step
    return _indexed(view, equation.params['slice_sizes'])


def _indexed(view: View, sizes: Sequence[int]) -> View:
    """A slice at an index that is mostly the number of a loop's trip. An axis sliced to one element is a stack."""
    axes = list(view.axes)
    for i, size in enumerate(sizes):
        axis = axes[i]
        if axis.length == size:
            continue
        if not axis.is_whole:
            raise NoRuleError('no rule for a slice of a concatenation at an index that is computed')
        if size == 1:
            view = view.stacked(views.StackAxis((), axis))
        axes[i] = views.mixed(axis.factors, size)
    return view.computed(axes)


def _gather(equation: Any, view: View, step: Move) -> View:
    """Rows of a parameter at indices that are no data, such as those of relative positions."""
    del step
    gather = GatherAxes.of(equation)
    if not gather.rows:
        view = _indexed(view, gather.sizes)
    elif gather.reads_part_of(view):
        raise NoRuleError('no rule for gather from a concatenation')
    picked: list[Factor] = []
    for i in gather.gone:
        picked += view.axes[i].factors
    axes = []
    for length in shape_of(equation.outvars[0]):
        axes.append(views.mixed(picked, length))
    for i, target in gather.kept.items():
        axes[target] = gather.window_axis(view, i)
    return view.computed(axes)


def _update(equation: Any, operands: Operands) -> Results:
    """Replaces some elements of the first operand by constants, or computes with them."""
    if any(operands[1:]):
        raise NoRuleError(f'no rule for {equation.primitive.name} of a parameter')
    return [moves.join(operands[0])]


def _top_k(equation: Any, operands: Operands) -> Results:
    shape = shape_of(equation.outvars[0])
    axis = equation.params.get('axis', -1) % len(shape)  # older JAX only takes the last

    def largest(view: View) -> View:
        axes = list(view.axes)
        if not axes[axis].is_whole:
            raise NoRuleError('no rule for top_k along a concatenation')
        axes[axis] = views.mixed(axes[axis].factors, shape[axis])
        return view.computed(axes)

    return [views.map_views(largest, operands[0])] * 2


SCATTERS = frozenset('scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub'.split())
INDEXING: dict[str, Rule] = {
    **dict.fromkeys(SCATTERS | {'dynamic_update_slice'}, _update),
    'dynamic_slice': moving(_dynamic_slice),
    'gather': moving(_gather),
    'top_k': _top_k,
}
