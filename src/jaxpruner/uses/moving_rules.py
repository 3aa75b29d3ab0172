"""Rules for primitives that move elements, or cast or copy them: exact views stay exact."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner.uses import moves, reshaping, views
from jaxpruner.uses.views import Factor, Move, NoRuleError, View

Views = tuple[View, ...]
Rule = Callable[[Any, Sequence[Views]], list[Views]]

# The operands as they are, cast or placed elsewhere; as many results.
SAME = frozenset(
    """
    convert_element_type copy copy_p device_put mesh_cast name optimization_barrier pbroadcast pvary reduce_precision
    reshard sharding_constraint stop_gradient
    """.split()
)


# These change nothing at all, and have no transpose in some releases of JAX.
_NOTHING = frozenset(('name', 'optimization_barrier'))


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable.

    >>> import jax
    >>> shape_of(jax.make_jaxpr(lambda x: x)(jnp.ones((2, 3))).jaxpr.invars[0])
    (2, 3)
    """
    return tuple(variable.aval.shape)


def moving(function: Callable[[Any, View, Move], View | None]) -> Rule:
    """A rule that moves the elements of the first operand into the only result.

    Args:
      function: `(equation, view, step)` -> the view of the result, `None` where it holds nothing of the parameter.

    >>> moving(lambda equation, view, step: None)(None, [(views.whole(0, ()),)])
    [()]
    """

    def rule(equation: Any, operands: Sequence[Views]) -> list[Views]:
        if any(operands[1:]):
            raise NoRuleError(f'no rule for {equation.primitive.name} by a parameter')
        found = (function(equation, view, Move(equation)) for view in operands[0])
        return [tuple(view for view in found if view is not None)]

    return rule


def _transpose(equation: Any, view: View, step: Move) -> View:
    return moves.transpose(view, equation.params['permutation'], step)


def _squeeze(equation: Any, view: View, step: Move) -> View:
    gone = equation.params['dimensions']
    return moves.transpose(view, [i for i in range(len(view.axes)) if i not in gone], step)


def _reshape(equation: Any, view: View, step: Move) -> View:
    shape = shape_of(equation.invars[0])
    order = equation.params.get('dimensions')
    if (
        order is not None
    ):  # the elements are read in this order of the axes, last one first with order='F'
        view = moves.transpose(view, order)
        shape = tuple(shape[axis] for axis in order)
    return reshaping.reshape(view, shape, shape_of(equation.outvars[0]), step)


def _broadcast(equation: Any, view: View, step: Move) -> View:
    shapes = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    return moves.broadcast(view, *shapes, equation.params['broadcast_dimensions'], step)


def _slice(equation: Any, view: View, step: Move) -> View | None:
    params = equation.params
    return moves.cut(
        view, params['start_indices'], params['limit_indices'], params['strides'], step
    )


def _reverse(equation: Any, view: View, step: Move) -> View:
    region = list(view.region)
    for axis in equation.params['dimensions']:
        length = shape_of(equation.invars[0])[axis]
        region[axis] = (length - region[axis][1], length - region[axis][0])
    return views.moved(view, view.axes, region, step)


def _pad(equation: Any, view: View, step: Move) -> View | None:
    shape, padding = shape_of(equation.invars[0]), equation.params['padding_config']
    if any(between and min(before, after) < 0 for before, after, between in padding):
        raise NoRuleError(
            'no rule for padding that puts zeros between elements and takes elements away'
        )
    # Negative padding takes elements away.
    starts = [max(0, -before) for before, _, _ in padding]
    limits = [n - max(0, -after) for n, (_, after, _) in zip(shape, padding, strict=True)]
    inside = moves.cut(view, starts, limits, None)
    if inside is None:
        return None
    axes, region = list(inside.axes), list(inside.region)
    for axis, (before, _, between) in enumerate(padding):
        # Zeros between elements: from here on the view is that of all in between.
        low, high = ((between + 1) * i for i in region[axis])
        region[axis] = (max(0, before) + low, max(0, before) + high - between)
        if between:
            axes[axis] = views.mixed(axes[axis], high - between - low)
    if any(between for _, _, between in padding):
        return views.computed(view, axes, region)
    return views.moved(view, axes, region, step)


def _tile(equation: Any, view: View, step: Move) -> View:
    axes, region = list(view.axes), list(view.region)
    for axis, (length, count) in enumerate(
        zip(shape_of(equation.invars[0]), equation.params['reps'], strict=True)
    ):
        if count > 1:
            if region[axis] != (0, length):
                raise NoRuleError('no rule for tile along a concatenation')
            axes[axis], region[axis] = (Factor((), count), *axes[axis]), (0, count * length)
    return views.moved(view, axes, region, step)


def _split(equation: Any, operands: Sequence[Views]) -> list[Views]:
    axis, start, results = equation.params['axis'], 0, []
    shape = shape_of(equation.invars[0])
    for i, size in enumerate(equation.params['sizes']):
        starts, limits = [0] * len(shape), list(shape)
        starts[axis], limits[axis] = start, start + size
        parts = (
            moves.cut(view, starts, limits, None, Move(equation, result=i)) for view in operands[0]
        )
        results.append(tuple(view for view in parts if view is not None))
        start += size
    return results


def _concatenate(equation: Any, operands: Sequence[Views]) -> list[Views]:
    axis, start = equation.params['dimension'], 0
    found = []
    for i, (variable, operand) in enumerate(zip(equation.invars, operands, strict=True)):
        found += [moves.shift(view, axis, start, Move(equation, operand=i)) for view in operand]
        start += shape_of(variable)[axis]
    return [tuple(found)]


def _stack(equation: Any, operands: Sequence[Views]) -> list[Views]:
    axis, found = equation.params['axis'], []
    for i, operand in enumerate(operands):
        for view in operand:
            axes = (*view.axes[:axis], (), *view.axes[axis:])
            region = (*view.region[:axis], (i, i + 1), *view.region[axis:])
            found.append(views.moved(view, axes, region, Move(equation, operand=i)))
    return [tuple(found)]


def same(equation: Any, operands: Sequence[Views]) -> list[Views]:
    """A rule of operations that leave each operand as it is, but for its dtype or place.

    Args:
      equation: of as many results as operands.
      operands: their views.

    >>> import jax
    >>> cast = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16))(jnp.ones((2, 3))).eqns[0]
    >>> same(cast, [(views.whole(0, (2, 3)),)])[0][0].exact
    True
    """
    results = []
    for i, operand in enumerate(operands):
        before, after = equation.invars[i].aval.dtype, equation.outvars[i].aval.dtype
        exact = before == after or (
            jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
        )
        steps = () if equation.primitive.name in _NOTHING else (Move(equation, i, i),)
        if exact:
            results.append(
                tuple(views.moved(view, view.axes, view.region, *steps) for view in operand)
            )
        else:
            results.append(tuple(views.computed(view) for view in operand))
    return results


def _all_gather(equation: Any, view: View, step: Move) -> View:
    del step
    params, axis = equation.params, equation.params['all_gather_dimension']
    if not params['tiled'] or view.region[axis] != (0, shape_of(equation.invars[0])[axis]):
        raise NoRuleError('no rule for all_gather along a new axis, or of a concatenation')
    first, *rest = view.axes[axis] or views.copies(1)
    axes, region = list(view.axes), list(view.region)
    axes[axis] = (Factor(first.axes, first.size * params['axis_size']), *rest)
    region[axis] = (0, math.prod(factor.size for factor in axes[axis]))
    return views.computed(view, axes, region)


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
}
