"""Rules that look at what the other operands are, where these are constants: indices, counters of loops, masks.

With them a view stays exact. Each returns `None` where it does not apply, and the general rule has its turn.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.uses import moves, views
from jaxpruner.uses.indexing_rules import GatherAxes
from jaxpruner.uses.moving_rules import shape_of
from jaxpruner.uses.numbers import Counter, Number
from jaxpruner.uses.records import Value
from jaxpruner.uses.views import Axis, Factor, Move, NoRuleError, View, Views

Rule = Callable[[Any, Sequence[Value]], list[Views] | None]


def _dynamic_slice(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """A slice at indices that are known, maybe other ones in each trip of a loop."""
    operand, *indices = values
    starts = [index.number for index in indices if index.number is not None]
    if len(starts) < len(indices):
        return None
    sizes = equation.params['slice_sizes']
    try:
        return [views.map_views(lambda view: _sliced(view, starts, sizes), operand.views)]
    except NoRuleError:
        return None


def _sliced(view: View, starts: Sequence[Number], sizes: Sequence[int]) -> View | None:
    taken = list(map(range, view.shape))
    by_loops: dict[int, Counter] = {}
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        last = view.shape[number] - size
        if not isinstance(start, Counter):
            first = min(max(start, 0), last)
            taken[number] = range(first, first + size)
        elif last:
            _check_counter(start, size, view, by_loops.values())
            by_loops[number] = start
    sliced: View | None = view
    if taken != list(map(range, view.shape)):
        step = functools.partial(
            jax.lax.slice,
            start_indices=tuple(indices.start for indices in taken),
            limit_indices=tuple(indices.stop for indices in taken),
        )
        sliced = moves.cut(view, taken, step)
    for number, counter in by_loops.items():
        if sliced is None:
            return None
        sliced = _taken_in_loop(sliced, number, counter)
    return sliced


def _check_counter(counter: Counter, size: int, view: View, others: Iterable[Counter]) -> None:
    loops = {entry.loop for entry in view.stack} | {other.loop for other in others}
    if size > 1 or counter.loop in loops:
        raise NoRuleError('no rule for a window that a loop moves, nor for two indices of one loop')


def _taken_in_loop(view: View, number: int, counter: Counter) -> View | None:
    """An element of an axis for each trip: the axis becomes a stack; an axis of length 1 takes its place."""
    axis = view.axes[number]
    indices = tuple(min(max(value, 0), axis.length - 1) for value in counter.values)
    hits = [trip for trip, index in enumerate(indices) if axis.start <= index < axis.stop]
    if not hits:
        return None
    if hits != list(range(hits[0], hits[-1] + 1)):
        raise NoRuleError('no rule for an index that comes back to a part of a concatenation')
    if indices != tuple(range(axis.length)):
        factors = views.mixed(axis.factors, len(hits)).factors
        axis = Axis(factors, length=len(indices), start=hits[0])
        view = view.moved(view.axes, functools.partial(_take, indices=indices, axis=number))
    if number:
        view = view.moved(view.axes, functools.partial(jnp.moveaxis, source=number, destination=0))
    axes = list(view.axes)
    axes[number] = views.axis_of()
    put_back = functools.partial(jnp.expand_dims, axis=number)
    entry = views.StackAxis(counter.loop, axis)
    inside = view.moved(axes, views.ENTER_LOOP, put_back)
    return dataclasses.replace(inside, stack=(*view.stack, entry))


def _take(value: jax.Array, indices: tuple[int, ...], axis: int) -> jax.Array:
    return jnp.take(value, np.array(indices), axis=axis)


def _gather(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """Elements at indices that are known: permutations, tables of positions, single elements."""
    operand, indices = values
    starts = _array(indices)
    numbers = equation.params['dimension_numbers']
    if starts is None or getattr(numbers, 'operand_batching_dims', ()):
        return None
    gather = GatherAxes.of(equation)
    shape = shape_of(equation.invars[0])
    last = np.array([shape[axis] - gather.sizes[axis] for axis in gather.indexed])
    if starts.size == 0 or (starts < 0).any() or (starts > last).any():
        return None  # what then happens is said by the mode
    step = Move(equation, others={1: starts})
    if not gather.rows:
        return [views.map_views(lambda view: _window(view, gather, starts, step), operand.views)]
    if any(gather.reads_part_of(view) for view in operand.views):
        return None
    new_shape = shape_of(equation.outvars[0])
    return [tuple(_rows(view, gather, starts, new_shape, step) for view in operand.views)]


def _window(view: View, gather: GatherAxes, starts: np.ndarray, step: Move) -> View | None:
    """The one window of a gather."""
    first = dict.fromkeys(range(len(view.axes)), 0)
    first.update(zip(gather.indexed, starts.tolist(), strict=True))
    taken = [range(first[i], first[i] + size) for i, size in enumerate(gather.sizes)]
    window = moves.cut(view, taken)
    return None if window is None else moves.transpose(window, gather.kept, step)


def _rows(
    view: View, gather: GatherAxes, starts: np.ndarray, new_shape: Sequence[int], step: Move
) -> View:
    """The windows of a gather, along the axes of its indices."""
    axes = list(map(views.copies, new_shape))
    for i, target in gather.kept.items():
        axes[target] = gather.window_axis(view, i)
    for row_axis, target in enumerate(gather.rows):
        varying: list[Factor] = []
        for column, indexed in enumerate(gather.indexed):
            if np.diff(starts[..., column], axis=row_axis).any():
                varying += view.axes[indexed].factors
        axes[target] = views.mixed(varying, new_shape[target])
    return view.moved(axes, step)


def _product(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """A product with a mask of zeros and ones."""
    number = 0 if values[0].views else 1
    other = 1 - number
    mask = _array(values[other])
    if values[other].views or mask is None or not np.isin(mask, (0, 1)).all():
        return None
    return _masked(values[number].views, Move(equation, number, others={other: mask}), mask)


def _selection(equation: Any, values: Sequence[Value]) -> list[Views] | None:
    """Zeros in place of some elements, by a constant mask."""
    which, *cases = values
    viewed = [i for i, case in enumerate(cases) if case.views]
    predicate = _array(which)
    # The predicate itself may be made of a leaf.
    if len(viewed) != 1 or which.views or predicate is None:
        return None
    (number,) = viewed
    for i, case in enumerate(cases):
        array = _array(case)
        if i != number and (array is None or array.any()):
            return None
    step = Move(equation, number + 1, others={0: predicate})
    return _masked(cases[number].views, step, predicate.astype(int) == number)


def _array(value: Value) -> np.ndarray | None:
    return None if value.constant is None else value.constant.array()


def _masked(operand: Views, step: Move, mask: np.ndarray) -> list[Views]:
    """The same views; but elements that stand in several places may differ from one of these to the next."""
    shape = shape_of(step.equation.outvars[0])
    rank = len(shape_of(step.equation.invars[step.operand]))
    mask = np.broadcast_to(mask, shape)

    def masked(view: View) -> View:
        is_same_shape = view.shape == shape
        view = moves.broadcast(view, shape, range(len(shape) - rank, len(shape)))
        axes = list(view.axes)
        every_factor: list[Factor] = []
        for axis in view.axes:
            every_factor += axis.factors
        differs = False
        for i, axis in enumerate(view.axes):
            if _has_copies(axis) and np.diff(mask, axis=i).any():
                # A diagonal is made of copies of a row.
                axes[i] = axis._replace(factors=views.mixed(every_factor, axis.size).factors)
                differs = True
        if differs or not is_same_shape:
            return view.computed(axes)
        return view.moved(axes, step)

    return [tuple(map(masked, operand))]


def _has_copies(axis: Axis) -> bool:
    return any(factor.size > 1 and not factor.axes for factor in axis.factors)


RULES: dict[str, Rule] = {
    'dynamic_slice': _dynamic_slice,
    'gather': _gather,
    'mul': _product,
    'select_n': _selection,
}
