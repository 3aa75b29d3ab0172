"""Rules for primitives that move, cast or copy elements, so that exact views stay exact.

A primitive that moves the elements of one operand has a function and a row of `MOVING`. The function gets the equation,
a view, and the step that is added to the view.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner.uses import moves, reshaping, views
from jaxpruner.uses.views import Factor, Move, NoRuleError, View, ViewAxis, Views

# The views of each operand of an equation, and of each result.
Operands = Sequence[Views]
Results = list[Views]
Rule = Callable[[Any, Operands], Results]

# Each result is the operand of the same number, at most cast or placed elsewhere.
SAME = frozenset(
    """
    convert_element_type copy device_put mesh_cast name optimization_barrier pbroadcast pvary reduce_precision
    reshard sharding_constraint stop_gradient
    """.split()
)
# These change nothing at all, and have no transpose in some versions of JAX.
_NOTHING = frozenset(('name', 'optimization_barrier'))


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable."""
    return tuple(variable.aval.shape)


def slices(params: Mapping[str, Any]) -> list[range]:
    """The positions that a `slice` with these parameters takes along each axis."""
    starts = params['start_indices']
    limits = params['limit_indices']
    strides = params['strides'] or [1] * len(starts)
    return list(map(range, starts, limits, strides))


def moving(function: Callable[[Any, View, Move], View | None]) -> Rule:
    """Makes a rule for moving the elements of the first operand into the only result.

    `function` gets the equation, a view and the step of the move. It returns the view of the result, or `None` if
    nothing of the parameter is in the result.
    """

    def rule(equation: Any, operands: Operands) -> Results:
        if any(operands[1:]):
            raise NoRuleError(f'no rule for {equation.primitive.name} by a parameter')
        step = Move(equation)

        def move(view: View) -> View | None:
            return function(equation, view, step)

        return [views.map_views(move, operands[0])]

    return rule


def same(equation: Any, operands: Operands) -> Results:
    """The rule for operations that change at most the dtype or place of each operand."""
    results = []
    for i, operand in enumerate(operands):
        step = Move(equation, operand=i, result=i)
        move = functools.partial(_cast, step=step)
        results.append(tuple(map(move, operand)))
    return results


def _cast(view: View, step: Move) -> View:
    """The view of a cast value, which stays exact if elements are at most rounded."""
    equation = step.equation
    if equation.primitive.name in _NOTHING:
        return view
    before = equation.invars[step.operand].aval.dtype
    after = equation.outvars[step.result].aval.dtype
    was_inexact = jnp.issubdtype(before, jnp.inexact)
    is_rounded = was_inexact and jnp.issubdtype(after, jnp.inexact)
    if before == after or is_rounded:
        return view.moved(view.axes, step)
    return view.computed()


def _transpose(equation: Any, view: View, step: Move) -> View:
    return moves.transpose(view, equation.params['permutation'], step)


def _squeeze(equation: Any, view: View, step: Move) -> View:
    kept = views.all_but(equation.params['dimensions'], view.axes)
    return moves.transpose(view, kept, step)


def _reshape(equation: Any, view: View, step: Move) -> View:
    order = equation.params.get('dimensions')
    if order is not None:
        # Elements are read in this order of the axes, which order='F' reverses.
        view = moves.transpose(view, order)
    return reshaping.reshape(view, shape_of(equation.outvars[0]), step)


def _broadcast(equation: Any, view: View, step: Move) -> View:
    new_shape = shape_of(equation.outvars[0])
    return moves.broadcast(view, new_shape, equation.params['broadcast_dimensions'], step)


def _slice(equation: Any, view: View, step: Move) -> View | None:
    return moves.cut(view, slices(equation.params), step)


def _reverse(equation: Any, view: View, step: Move) -> View:
    axes = list(view.axes)
    for i in equation.params['dimensions']:
        start = axes[i].length - axes[i].stop
        axes[i] = axes[i]._replace(start=start)
    return view.moved(axes, step)


def _pad(equation: Any, view: View, step: Move) -> View | None:
    padding = equation.params['padding_config']
    taken = []
    is_spread = False
    for length, (before, after, between) in zip(view.shape, padding, strict=True):
        if between and min(before, after) < 0:
            raise NoRuleError(
                'no rule for padding that puts zeros between elements and takes elements away'
            )
        # Negative padding takes elements away.
        stop = length + min(0, after)
        taken.append(range(max(0, -before), stop))
        is_spread |= between > 0
    inside = moves.cut(view, taken)
    if inside is None:
        return None
    axes = list(map(_padded, inside.axes, padding))
    return inside.computed(axes) if is_spread else inside.moved(axes, step)


def _padded(axis: ViewAxis, padding: tuple[int, int, int]) -> ViewAxis:
    """An axis with zeros before and after it. Zeros between elements are mixed with the elements."""
    before, after, between = padding
    step = between + 1
    if between:
        spread_size = step * axis.size - between
        spread_length = step * (axis.length - 1) + 1
        axis = ViewAxis(
            views.mixed(axis.factors, spread_size).factors,
            length=max(0, spread_length),
            start=step * axis.start,
        )
    return moves.shift_axis(axis, max(0, before), max(0, after))


def _tile(equation: Any, view: View, step: Move) -> View:
    axes = list(view.axes)
    for i, count in enumerate(equation.params['reps']):
        if count > 1:
            if not axes[i].is_whole:
                raise NoRuleError('no rule for tile along a concatenation')
            repeats = Factor((), count)
            axes[i] = views.axis_of(repeats, *axes[i].factors)
    return view.moved(axes, step)


def _split(equation: Any, operands: Operands) -> Results:
    axis = equation.params['axis']
    taken = list(map(range, shape_of(equation.invars[0])))
    results = []
    stop = 0
    for i, size in enumerate(equation.params['sizes']):
        start, stop = stop, stop + size
        taken[axis] = range(start, stop)
        step = Move(equation, result=i)
        results.append(_cut_each(operands[0], taken, step))
    return results


def _unstack(equation: Any, operands: Operands) -> Results:
    axis = equation.params['axis']
    taken = list(map(range, shape_of(equation.invars[0])))
    results = []
    for i in range(len(equation.outvars)):
        taken[axis] = range(i, i + 1)
        parts = _cut_each(operands[0], taken)
        step = Move(equation, result=i)
        kept = views.all_but((axis,), taken)
        results.append(tuple(moves.transpose(part, kept, step) for part in parts))
    return results


def _cut_each(operand: Views, taken: Sequence[range], *steps: Move) -> Views:
    def cut(view: View) -> View | None:
        return moves.cut(view, taken, *steps)

    return views.map_views(cut, operand)


def _concatenate(equation: Any, operands: Operands) -> Results:
    axis = equation.params['dimension']
    length = shape_of(equation.outvars[0])[axis]
    joined = []
    before = 0
    for i, operand in enumerate(operands):
        size = shape_of(equation.invars[i])[axis]
        after = length - before - size
        step = Move(equation, operand=i)
        for view in operand:
            joined.append(moves.shift(view, axis, before, after, step))
        before += size
    return [tuple(joined)]


def _stack(equation: Any, operands: Operands) -> Results:
    axis = equation.params['axis']
    stacked = []
    for i, operand in enumerate(operands):
        new_axis = ViewAxis((), length=len(operands), start=i)
        step = Move(equation, operand=i)
        for view in operand:
            axes = list(view.axes)
            axes.insert(axis, new_axis)
            stacked.append(view.moved(axes, step))
    return [tuple(stacked)]


def _all_gather(equation: Any, view: View, step: Move) -> View:
    del step
    params = equation.params
    axes = list(view.axes)
    i = params['all_gather_dimension']
    if not params['tiled'] or not axes[i].is_whole:
        raise NoRuleError('no rule for all_gather along a new axis, or of a concatenation')
    first, *others = axes[i].factors or views.copies(1).factors
    longer = first._replace(size=first.size * params['axis_size'])
    axes[i] = views.axis_of(longer, *others)
    return view.computed(axes)


MOVING: dict[str, Rule] = {
    **dict.fromkeys(SAME, same),
    'all_gather': moving(_all_gather),
    'broadcast_in_dim': moving(_broadcast),
    'concatenate': _concatenate,
    'pad': moving(_pad),
    'reshape': moving(_reshape),
    'rev': moving(_reverse),
    'slice': moving(_slice),
    'split': _split,
    'squeeze': moving(_squeeze),
    'stack': _stack,
    'tile': moving(_tile),
    'transpose': moving(_transpose),
    'unstack': _unstack,
}
