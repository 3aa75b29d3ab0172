"""Rules that look at what the other operands are, where these are constants: indices, counters of loops, masks.

With them a view stays exact. Each returns `None` where it does not apply, and the general rule has its turn.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.uses import moves, views
from jaxpruner.uses.moving_rules import Views, shape_of
from jaxpruner.uses.numbers import Counter, Number
from jaxpruner.uses.records import Value
from jaxpruner.uses.views import Move, NoRuleError, View

Rule = Callable[[Any, Sequence[Value]], list[Views] | None]


def _dynamic_slice(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """A slice at indices that are known, maybe other ones in each trip of a loop."""
    operand, *indices = values
    known = [index.number for index in indices if index.number is not None]
    if len(known) < len(indices):
        return None
    try:
        found = [_sliced(equation, view, known) for view in operand.views]
    except NoRuleError:
        return None
    return [tuple(view for view in found if view is not None)]


def _sliced(equation: Any, view: View, indices: Sequence[Number]) -> View | None:
    shape, sizes = shape_of(equation.invars[0]), equation.params['slice_sizes']
    starts, limits = [0] * len(shape), list(shape)
    in_loops: list[tuple[int, Counter]] = []
    for axis, (index, size) in enumerate(zip(indices, sizes, strict=True)):
        last = shape[axis] - size
        if not isinstance(index, Counter):
            starts[axis] = min(max(index, 0), last)
            limits[axis] = starts[axis] + size
        elif last:
            loops = {entry.loop for entry in view.stack} | {counter.loop for _, counter in in_loops}
            if size > 1 or index.loop in loops:
                raise NoRuleError(
                    'no rule for a window that a loop moves, nor for two indices of one loop'
                )
            in_loops.append((axis, index))
    found: View | None = view
    if limits != list(shape) or any(starts):
        step = functools.partial(
            jax.lax.slice, start_indices=tuple(starts), limit_indices=tuple(limits)
        )
        found = moves.cut(view, starts, limits, None, step)
    for axis, index in in_loops:
        found = found and _taken_in_loop(found, axis, shape[axis], index)
    return found


def _taken_in_loop(view: View, axis: int, length: int, index: Counter) -> View | None:
    """An element of an axis for each trip: the axis becomes a stack; an axis of length 1 takes its place."""
    values = tuple(min(max(value, 0), length - 1) for value in index.values)
    low, high = view.region[axis]
    hits = [trip for trip, value in enumerate(values) if low <= value < high]
    if not hits:
        return None
    if hits != list(range(hits[0], hits[-1] + 1)):
        raise NoRuleError('no rule for an index that comes back to a part of a concatenation')
    factors = view.axes[axis]
    if values != tuple(range(length)):
        step = functools.partial(_take, indices=values, axis=axis)
        factors = views.mixed(factors, len(hits))
        view = views.moved(view, view.axes, view.region, step)
    if axis:
        view = views.moved(view, view.axes, view.region, functools.partial(_axis_first, axis=axis))
    entry = views.StackAxis(index.loop, factors, (hits[0], hits[-1] + 1), len(values))
    axes, region = list(view.axes), list(view.region)
    axes[axis], region[axis] = (), (0, 1)
    put_back = functools.partial(jnp.expand_dims, axis=axis)
    return dataclasses.replace(
        views.moved(view, axes, region, views.ENTER_LOOP, put_back), stack=(*view.stack, entry)
    )


def _take(value: jax.Array, indices: tuple[int, ...], axis: int) -> jax.Array:
    return jnp.take(value, np.array(indices), axis=axis)


def _axis_first(value: jax.Array, axis: int) -> jax.Array:
    return jnp.moveaxis(value, axis, 0)


def _gather(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """Elements at indices that are known: permutations, tables of positions, single elements."""
    operand, indices = values
    starts = _array(indices)
    numbers, sizes = equation.params['dimension_numbers'], equation.params['slice_sizes']
    shape, result = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    if starts is None or getattr(numbers, 'operand_batching_dims', ()):
        return None
    last = np.array([shape[axis] - sizes[axis] for axis in numbers.start_index_map])
    if starts.size == 0 or (starts < 0).any() or (starts > last).any():
        return None  # what then happens is said by the mode
    step = Move(equation, others={1: starts})
    rows = [i for i in range(len(result)) if i not in numbers.offset_dims]
    kept = [axis for axis in range(len(shape)) if axis not in numbers.collapsed_slice_dims]
    found = []
    for view in operand.views:
        if not rows:
            at = dict(zip(numbers.start_index_map, starts.tolist(), strict=True))
            lows = [at.get(axis, 0) for axis in range(len(shape))]
            part = moves.cut(
                view, lows, [low + size for low, size in zip(lows, sizes, strict=True)], None
            )
            found.append(part and moves.transpose(part, kept, step))
            continue
        if any(view.region[axis] != (0, shape[axis]) for axis in numbers.start_index_map):
            return None
        axes: list[Any] = [()] * len(result)
        region = [(0, n) for n in result]
        for axis, target in zip(kept, numbers.offset_dims, strict=True):
            whole = shape[axis] == sizes[axis]
            axes[target] = view.axes[axis] if whole else views.mixed(view.axes[axis], sizes[axis])
            region[target] = view.region[axis] if whole else (0, sizes[axis])
        for number, row in enumerate(rows):
            moving = [
                axis
                for place, axis in enumerate(numbers.start_index_map)
                if (np.diff(starts[..., place], axis=number) != 0).any()
            ]
            axes[row] = views.mixed(
                tuple(itertools.chain(*(view.axes[axis] for axis in moving))), result[row]
            )
        found.append(views.moved(view, axes, region, step))
    return [tuple(view for view in found if view is not None)]


def _product(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """A product with a mask of zeros and ones."""
    number, *others = (i for i, value in enumerate(values) if value.views)
    factor = _array(values[1 - number])
    if others or factor is None or not np.isin(factor, (0, 1)).all():
        return None
    return _masked(
        equation, values[number].views, Move(equation, number, others={1 - number: factor}), factor
    )


def _selection(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """Zeros in place of some elements, by a constant mask."""
    which, *cases = values
    viewed = [i for i, value in enumerate(cases) if value.views]
    if len(viewed) != 1 or which.views:  # the predicate itself may be made of a leaf
        return None
    (number,) = viewed
    predicate = _array(which)
    rest = [_array(case) for i, case in enumerate(cases) if i != number]
    if predicate is None or any(array is None or array.any() for array in rest):
        return None
    step = Move(equation, number + 1, others={0: predicate})
    return _masked(equation, cases[number].views, step, predicate.astype(int) == number)


def _array(value: Value) -> np.ndarray | None:
    return None if value.constant is None else value.constant.array()


def _masked(equation: Any, found: Views, step: Move, mask: np.ndarray) -> list[Views]:
    """The same views; but elements that stand in several places may differ from one of these to the next."""
    given, shape = shape_of(equation.invars[step.operand]), shape_of(equation.outvars[0])
    mask, result = np.broadcast_to(mask, shape), []
    for view in found:
        view = moves.broadcast(view, given, shape, range(len(shape) - len(given), len(shape)))
        copied = [
            axis
            for axis in range(len(shape))
            if _has_copies(view, axis) and np.diff(mask, axis=axis).any()
        ]
        if not copied:
            moved = views.moved(view, view.axes, view.region, step)
            result.append(moved if given == shape else views.computed(moved))
            continue
        axes = list(view.axes)  # a diagonal is made of copies of a row
        for axis in copied:
            low, high = view.region[axis]
            axes[axis] = views.mixed(tuple(itertools.chain(*view.axes)), high - low)
        result.append(views.computed(view, axes))
    return [tuple(result)]


def _has_copies(view: View, axis: int) -> bool:
    return any(factor.size > 1 and not factor.axes for factor in view.axes[axis])


RULES: dict[str, Rule] = {
    'dynamic_slice': _dynamic_slice,
    'gather': _gather,
    'mul': _product,
    'select_n': _selection,
}
