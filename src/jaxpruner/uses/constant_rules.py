"""Rules for operations whose other operands are constants: indices, counters of loops, masks.

They keep views exact. Each rule returns `None` if it does not apply. Then the general rule of the primitive is asked,
so each primitive here needs a rule in `rules.RULES`, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.uses import moves, views
from jaxpruner.uses.indexing_rules import GatherAxes
from jaxpruner.uses.known_integers import Counter, KnownInteger
from jaxpruner.uses.moving_rules import Results, shape_of
from jaxpruner.uses.records import Value
from jaxpruner.uses.views import Factor, Move, NoRuleError, View, ViewAxis, Views

Values = Sequence[Value]
Rule = Callable[[Any, Values], Results | None]


def _dynamic_slice(equation: Any, values: Values) -> Results | None:
    """A slice at known indices, which may differ between the trips of a loop."""
    operand, *indices = values
    known = [index.known_integer for index in indices]
    starts = [start for start in known if start is not None]
    if len(starts) < len(indices):
        return None
    sizes = equation.params['slice_sizes']
    slice_view = functools.partial(_sliced, starts=starts, sizes=sizes)
    try:
        return [views.map_views(slice_view, operand.views)]
    except NoRuleError:
        return None


def _sliced(view: View, starts: Sequence[KnownInteger], sizes: Sequence[int]) -> View | None:
    everything = list(map(range, view.shape))
    taken = list(everything)
    counters: dict[int, Counter] = {}
    loops = {entry.loop for entry in view.stack}
    for axis, size in enumerate(sizes):
        start = starts[axis]
        last = view.shape[axis] - size
        if not isinstance(start, Counter):
            first = min(max(start, 0), last)
            taken[axis] = range(first, first + size)
        elif last:
            if size > 1 or start.loop in loops:
                raise NoRuleError(
                    'no rule for a window that a loop moves, nor for two indices of one loop'
                )
            counters[axis] = start
            loops.add(start.loop)
    sliced: View | None = view
    if taken != everything:
        step = functools.partial(
            jax.lax.slice,
            start_indices=tuple(indices.start for indices in taken),
            limit_indices=tuple(indices.stop for indices in taken),
        )
        sliced = moves.cut(view, taken, step)
    for axis, counter in counters.items():
        if sliced is None:
            return None
        sliced = _taken_in_loop(sliced, axis, counter)
    return sliced


def _taken_in_loop(view: View, number: int, counter: Counter) -> View | None:
    """An element of an axis for each trip. The axis becomes a stack, and an axis of length 1 takes its place."""
    axis = view.axes[number]
    indices = np.clip(counter.values, 0, axis.length - 1)
    is_hit = (indices >= axis.start) & (indices < axis.stop)
    hits = np.flatnonzero(is_hit)
    if not hits.size:
        return None
    if (np.diff(hits) != 1).any():
        raise NoRuleError('no rule for an index that comes back to a part of a concatenation')
    if not np.array_equal(indices, np.arange(axis.length)):
        factors = views.mixed(axis.factors, hits.size).factors
        first_hit = int(hits[0])
        axis = ViewAxis(factors, length=indices.size, start=first_hit)
        take = functools.partial(jnp.take, indices=indices, axis=number)
        view = view.moved(view.axes, take)
    if number:
        to_front = functools.partial(jnp.moveaxis, source=number, destination=0)
        view = view.moved(view.axes, to_front)
    axes = list(view.axes)
    axes[number] = views.axis_of()
    put_back = functools.partial(jnp.expand_dims, axis=number)
    entry = views.StackAxis(counter.loop, axis)
    inside = view.moved(axes, views.ENTER_LOOP, put_back)
    return inside.stacked(entry)


def _gather(equation: Any, values: Values) -> Results | None:
    """Elements at known indices: permutations, tables of positions, single elements."""
    operand, indices = values
    starts = _array(indices)
    gather = GatherAxes.of(equation)
    if starts is None or gather.batching:
        return None
    last = np.subtract(shape_of(equation.invars[0]), gather.sizes)
    last = last[list(gather.indexed)]
    is_outside = (starts < 0) | (starts > last)
    if starts.size == 0 or is_outside.any():
        return None  # the mode of the gather says what happens then
    if gather.rows and any(map(gather.reads_part_of, operand.views)):
        return None
    gathered = functools.partial(
        _rows if gather.rows else _window,
        gather=gather,
        step=Move(equation, others={1: starts}),
    )
    return [views.map_views(gathered, operand.views)]


def _window(view: View, gather: GatherAxes, step: Move) -> View | None:
    """The one window of a gather."""
    taken = list(map(range, gather.sizes))
    starts = step.others[1].tolist()
    for axis, start in zip(gather.indexed, starts, strict=True):
        taken[axis] = range(start, start + gather.sizes[axis])
    window = moves.cut(view, taken)
    return None if window is None else moves.transpose(window, gather.kept, step)


def _rows(view: View, gather: GatherAxes, step: Move) -> View:
    """The windows of a gather, along the axes of its indices."""
    starts = step.others[1]
    new_shape = shape_of(step.equation.outvars[0])
    axes = list(map(views.copies, new_shape))
    for i, target in gather.kept.items():
        axes[target] = gather.window_axis(view, i)
    for row_axis, target in enumerate(gather.rows):
        varying: list[Factor] = []
        differences = np.diff(starts, axis=row_axis)
        for column, indexed in enumerate(gather.indexed):
            if differences[..., column].any():
                varying += view.axes[indexed].factors
        axes[target] = views.mixed(varying, new_shape[target])
    return view.moved(axes, step)


def _product(equation: Any, values: Values) -> Results | None:
    """A product with a mask of zeros and ones."""
    number = 0 if values[0].views else 1
    other = 1 - number
    mask = _array(values[other])
    if values[other].views or mask is None:
        return None
    if not np.isin(mask, (0, 1)).all():
        return None
    step = Move(equation, number, others={other: mask})
    return _masked(values[number].views, step, mask)


def _selection(equation: Any, values: Values) -> Results | None:
    """Zeros in place of some elements, by a constant mask."""
    which, *cases = values
    predicate = _array(which)
    numbers = []
    for number, case in enumerate(cases):
        if case.views:
            numbers.append(number)
        elif not _is_zero(case):
            return None
    # The predicate may be made of a leaf.
    if len(numbers) != 1 or which.views or predicate is None:
        return None
    (number,) = numbers
    step = Move(equation, number + 1, others={0: predicate})
    is_chosen = predicate.astype(int) == number
    return _masked(cases[number].views, step, is_chosen)


def _is_zero(value: Value) -> bool:
    array = _array(value)
    return array is not None and not array.any()


def _array(value: Value) -> np.ndarray | None:
    return None if value.constant is None else value.constant.array()


def _masked(operand: Views, step: Move, mask: np.ndarray) -> Results:
    """The views of masked values. Along an axis with copies, the mask may make elements differ."""
    shape = shape_of(step.equation.outvars[0])
    mask = np.broadcast_to(mask, shape)

    def masked(view: View) -> View:
        is_same_shape = view.shape == shape
        view = moves.align(view, shape)
        axes = list(view.axes)
        every_factor: list[Factor] = []
        for axis in view.axes:
            every_factor += axis.factors
        differs = False
        for i, axis in enumerate(view.axes):
            is_varying = np.diff(mask, axis=i).any()
            if is_varying and _has_copies(axis):
                # For example, copies of a row may become a diagonal.
                factors = views.mixed(every_factor, axis.size).factors
                axes[i] = axis._replace(factors=factors)
                differs = True
        if differs or not is_same_shape:
            return view.computed(axes)
        return view.moved(axes, step)

    return [tuple(map(masked, operand))]


def _has_copies(axis: ViewAxis) -> bool:
    return any(factor.size > 1 and not factor.axes for factor in axis.factors)


RULES: dict[str, Rule] = {
    'dynamic_slice': _dynamic_slice,
    'gather': _gather,
    'mul': _product,
    'select_n': _selection,
}
