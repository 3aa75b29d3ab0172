"""What is known of a value, and what each primitive does to views: a table from its name to a rule.

A value may be data, be made of parameters, or be a constant such as a mask.

A rule gets the equation and its operands, none of which depends on data. It returns the views of each result. A
primitive without a rule makes its parameters opaque. Most rules that move elements are a function of the equation, a
view, and the step that is added to the view (`_moves`). If indices or masks are known constants, views stay exact.
CONTRIBUTING.md lists where a new primitive goes.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.trace import views
from jaxpruner.trace.graph import roles_of
from jaxpruner.trace.program import ProgramPath, all_but, shape_of
from jaxpruner.trace.views import Factor, Move, NoRuleError, View, ViewAxis, Views, map_views


class Constant:
    """A value that depends on no parameter and no input, computed on demand.

    Attributes:
      compute: computes the value.
      loop: path of the loop in whose trips it differs, such as the number of the trip. Then the array has the trips in
        front, in the order of the scanned axis. `None` if it is one value.
    """

    def __init__(self, compute: Callable[[], Any], loop: ProgramPath | None = None):
        self.compute = functools.cache(compute)
        self.loop = loop

    def array(self) -> np.ndarray | None:
        """The value; `None` if it cannot be computed here, such as a tracer or an array on another host."""
        try:
            with jax.ensure_compile_time_eval():
                return np.asarray(self.compute())
        except (ArithmeticError, NameError, RuntimeError, TypeError, ValueError):
            return None


class Value(NamedTuple):
    """What is known of a value. The default is an unknown constant.

    Attributes:
      data: whether it depends on an input of the model.
      views: how it is read or computed from parameters; empty for data.
      constant: the constant, if it is made only of constants.
    """

    data: bool = False
    views: Views = ()
    constant: Constant | None = None

    @property
    def array(self) -> np.ndarray | None:
        """The constant, if it is one value and known."""
        if self.constant is None or self.constant.loop is not None:
            return None
        return self.constant.array()


Values = Sequence[Value]
DATA = Value(True)


def has_views(values: Values) -> bool:
    """Whether one of these values is made of a parameter."""
    return any(value.views for value in values)


Results = list[Views]
Rule = Callable[[Any, Values], Results]

# Each element of the only result is computed from the operands' elements at the same position.
ARITHMETIC = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le
    le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or
    polynomial population_count pow real rem
    round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()
)
_COLLECTIVES = frozenset('pmax pmin ppermute psum psum2 psum_invariant'.split())
ELEMENTWISE = ARITHMETIC | _COLLECTIVES | {'select_n'}
# Each result is the operand of the same number, at most cast or placed elsewhere.
SAME = frozenset(
    """
    convert_element_type copy device_put mesh_cast name optimization_barrier pbroadcast pvary reduce_precision
    reshard sharding_constraint stop_gradient
    """.split()
)
SCATTERS = frozenset('scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub'.split())

RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    """Adds a rule to the table."""

    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _moves(*names: str) -> Callable[[Callable[[Any, View, Move], View | None]], None]:
    """Adds a rule for moving the elements of the first operand into the only result."""

    def add(function: Callable[[Any, View, Move], View | None]) -> None:
        @_rule(*names)
        def rule(equation: Any, values: Values) -> Results:
            _refuse_views(equation, values[1:])
            step = Move(equation)
            return [map_views(lambda view: function(equation, view, step), values[0].views)]

    return add


def _refuse_views(equation: Any, values: Values) -> None:
    if has_views(values):
        raise NoRuleError(f'no rule for {equation.primitive.name} by a parameter')


def _refuse_parts(equation: Any, axes: Iterable[ViewAxis]) -> None:
    if not all(axis.is_whole for axis in axes):
        raise NoRuleError(f'no rule for {equation.primitive.name} along a concatenation')


@_rule(*SAME)
def same(equation: Any, values: Values) -> Results:
    """The rule of `SAME`, also if some operands are data. A cast stays exact if elements are at most rounded."""
    if equation.primitive.name in ('name', 'optimization_barrier'):
        # They change nothing at all, and have no transpose in some versions of JAX.
        return [value.views for value in values]
    results = []
    for number, value in enumerate(values):
        step = Move(equation, operand=number, result=number)
        before, after = equation.invars[number].aval.dtype, equation.outvars[number].aval.dtype
        are_floats = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
        is_exact = before == after or are_floats
        moved = [
            view.moved(view.axes, step) if is_exact else view.computed() for view in value.views
        ]
        results.append(tuple(moved))
    return results


@_moves('transpose', 'squeeze')
def _(equation: Any, view: View, step: Move) -> View:
    order = equation.params.get('permutation')
    if order is None:
        order = all_but(equation.params['dimensions'], view.axes)
    return views.transpose(view, order, step)


@_moves('reshape')
def _(equation: Any, view: View, step: Move) -> View:
    order = equation.params.get('dimensions')
    if order is not None:  # elements are read in this order of the axes, which order='F' reverses
        view = views.transpose(view, order)
    return views.reshape(view, shape_of(equation.outvars[0]), step)


@_moves('broadcast_in_dim')
def _(equation: Any, view: View, step: Move) -> View:
    new_shape = shape_of(equation.outvars[0])
    return views.broadcast(view, new_shape, equation.params['broadcast_dimensions'], step)


@_moves('rev')
def _(equation: Any, view: View, step: Move) -> View:
    for i in equation.params['dimensions']:
        axis = view.axes[i]
        view = view.with_axis(i, axis._replace(start=axis.length - axis.stop))
    return view.moved(view.axes, step)


@_moves('tile')
def _(equation: Any, view: View, step: Move) -> View:
    for i, count in enumerate(equation.params['reps']):
        axis = view.axes[i]
        if count > 1:
            _refuse_parts(equation, [axis])
            view = view.with_axis(i, views.axis_of(Factor((), count), *axis.factors))
    return view.moved(view.axes, step)


@_moves('pad')
def _(equation: Any, view: View, step: Move) -> View | None:
    taken = []
    for length, (before, after, between) in zip(
        view.shape, equation.params['padding_config'], strict=True
    ):
        if between:
            raise NoRuleError('no rule for padding that puts zeros between elements')
        taken.append(range(-before, length + after))
    return views.cut(view, taken, step)


def slices(params: Mapping[str, Any]) -> list[range]:
    """The positions that a `slice` with these parameters takes along each axis."""
    starts = params['start_indices']
    strides = params['strides'] or [1] * len(starts)
    return list(map(range, starts, params['limit_indices'], strides))


@_moves('slice')
def _(equation: Any, view: View, step: Move) -> View | None:
    return views.cut(view, slices(equation.params), step)


@_rule('split', 'unstack')
def _(equation: Any, values: Values) -> Results:
    """Each result is a part of the operand; those of `unstack` lack an axis."""
    axis, shape = equation.params['axis'], shape_of(equation.invars[0])
    kept = all_but([axis] if equation.primitive.name == 'unstack' else [], shape)
    results = []
    stop = 0
    for number, size in enumerate(equation.params.get('sizes', [1] * len(equation.outvars))):
        start, stop = stop, stop + size
        taken = list(map(range, shape))
        taken[axis] = range(start, stop)
        step = Move(equation, result=number)
        parts = [views.cut(view, taken) for view in values[0].views]
        results.append(tuple(views.transpose(part, kept, step) for part in parts if part))
    return results


@_rule('concatenate', 'stack')
def _(equation: Any, values: Values) -> Results:
    """Puts values beside each other along an axis; `stack` along a new one."""
    is_stack = equation.primitive.name == 'stack'
    axis = equation.params['axis' if is_stack else 'dimension']
    length = shape_of(equation.outvars[0])[axis]
    joined: list[View] = []
    before = 0
    for number, value in enumerate(values):
        for view in value.views:
            axes = list(view.axes)
            if is_stack:
                axes.insert(axis, views.axis_of())
            part = axes[axis]
            axes[axis] = part._replace(length=length, start=before + part.start)
            joined.append(view.moved(axes, Move(equation, operand=number)))
        before += 1 if is_stack else shape_of(equation.invars[number])[axis]
    return [tuple(joined)]


@_rule(*ELEMENTWISE)
def _elementwise(equation: Any, values: Values) -> Results:
    if len(equation.outvars) == len(values) > 1:  # a collective over several arrays
        return [views.join(value.views) for value in values]
    shape = shape_of(equation.outvars[0])
    return [views.join(views.align(view, shape) for value in values for view in value.views)]


@_rule('mul', 'select_n')
def _(equation: Any, values: Values) -> Results:
    """A constant mask that puts zeros in place of some elements keeps views exact."""
    number, *others = [number for number, value in enumerate(values) if value.views]
    constants: dict[int, Any] = {k: v.array for k, v in enumerate(values) if k != number}
    if others or any(array is None for array in constants.values()):
        return _elementwise(equation, values)
    if equation.primitive.name == 'mul':
        mask = np.asarray(constants[1 - number])
        is_mask = bool(np.isin(mask, (0, 1)).all())
    else:  # which case, then the cases
        mask = np.asarray(constants.pop(0, False)).astype(int) == number - 1
        is_mask = number > 0 and not any(np.any(array) for array in constants.values())
        constants = {0: values[0].array}
    if not is_mask:
        return _elementwise(equation, values)
    step = Move(equation, number, others=constants)
    shape = shape_of(equation.outvars[0])
    mask = np.broadcast_to(mask, shape)

    def masked(view: View) -> View:
        aligned = views.align(view, shape)
        axes = list(aligned.axes)
        factors = [factor for axis in axes for factor in axis.factors]
        for i, axis in enumerate(aligned.axes):
            has_copies = any(factor.size > 1 and not factor.axes for factor in axis.factors)
            if has_copies and np.diff(mask, axis=i).any():
                # The mask makes copies differ: those of a row may become a diagonal.
                axes[i] = axis._replace(factors=views.mixed(factors, axis.size).factors)
        is_exact = view.shape == shape and tuple(axes) == aligned.axes
        return view.moved(axes, step) if is_exact else view.computed(axes)

    return [map_views(masked, values[number].views)]


@_rule('reduce_and', 'reduce_max', 'reduce_min', 'reduce_or', 'reduce_prod', 'reduce_sum')
@_rule('argmax', 'argmin', 'reduce_xor')
def _(equation: Any, values: Values) -> Results:
    kept = all_but(equation.params['axes'], shape_of(equation.invars[0]))
    return [views.join(views.transpose(view, kept) for view in values[0].views)]


@_rule('cumlogsumexp', 'cummax', 'cummin', 'cumprod', 'cumsum', 'sort', 'top_k')
def _(equation: Any, values: Values) -> Results:
    """Elements along one axis are mixed; `top_k` has fewer of them."""
    shape, params = shape_of(equation.outvars[0]), equation.params
    # Older JAX takes the largest ones only along the last axis.
    i = params.get('axis', params.get('dimension', -1)) % len(shape)
    results = []
    for view in [view for value in values for view in value.views]:
        _refuse_parts(equation, [view.axes[i]])
        results.append(view.with_axis(i, view.axes[i].resized(shape[i])))
    return [views.join(results)] * len(equation.outvars)


@_rule('dot_general')
def _(equation: Any, values: Values) -> Results:
    """A contraction of two values that are computed only from parameters."""
    roles = [roles_of(equation, k) for k in (0, 1)]
    products = []
    for k, value in enumerate(values):
        other_shape = shape_of(equation.invars[1 - k])
        others = [views.copies(other_shape[i]) for i in roles[1 - k].free]
        for view in value.views:
            batch = views.transpose(view, roles[k].batch).axes
            own = views.transpose(view, roles[k].free).axes
            left, right = (own, others) if k == 0 else (others, own)
            products.append(view.computed([*batch, *left, *right]))
    return [views.join(products)]


@_rule(*SCATTERS, 'dynamic_update_slice')
def _(equation: Any, values: Values) -> Results:
    """Replaces some elements of the first operand by constants, or computes with them."""
    _refuse_views(equation, values[1:])
    return [views.join(values[0].views)]


def _indexed(equation: Any, view: View, sizes: Sequence[int]) -> View:
    """A slice at an unknown index. An axis sliced to one element is a stack, mostly of the layers of a loop."""
    for i, size in enumerate(sizes):
        axis = view.axes[i]
        if axis.length != size:
            _refuse_parts(equation, [axis])
            view = view.stacked((), axis) if size == 1 else view
            view = view.with_axis(i, axis.resized(size))
    return view.computed()


@_rule('dynamic_slice')
def _(equation: Any, values: Values) -> Results:
    """A slice at indices that may be known, also if they differ between the trips of a loop."""
    operand, *indices = values
    _refuse_views(equation, indices)
    sizes = equation.params['slice_sizes']

    known = []
    for index in indices:
        constant = index.constant
        known.append((None, None) if constant is None else (constant.array(), constant.loop))

    def sliced(view: View) -> View | None:
        axes, others, entered = list(view.axes), {}, {}
        for i, (axis, size, (starts, loop)) in enumerate(zip(axes, sizes, known, strict=True)):
            last = axis.length - size
            if last == 0:
                continue
            is_taken_apart = loop in (*entered, *[entry.loop for entry in view.stack])
            if starts is None or is_taken_apart or (loop is not None and size > 1):
                return _indexed(equation, view, sizes)
            others[1 + i] = starts = np.clip(starts, 0, last)
            if loop is None:
                taken = axis.take(range(int(starts), int(starts) + size))
            else:
                taken = _element_in_each_trip(axis, starts)
            if taken is None:
                return None
            axes[i] = taken if loop is None else views.axis_of()
            if loop is not None:
                entered[loop] = 1 + i, taken
        in_trips = tuple(number for number, _ in entered.values())
        moved = view.moved(axes, Move(equation, others=others, in_trips=in_trips))
        for loop, (_, stack) in entered.items():
            moved = moved.stacked(loop, stack)
        return moved

    return [map_views(sliced, operand.views)]


def _element_in_each_trip(axis: ViewAxis, indices: np.ndarray) -> ViewAxis | None:
    """The axis that the trips of a loop take these elements of; `None` if none of them is the parameter's."""
    hits = np.flatnonzero((indices >= axis.start) & (indices < axis.stop))
    if not hits.size:
        return None
    if hits[-1] - hits[0] >= hits.size:
        raise NoRuleError('no rule for an index that comes back to a part of a concatenation')
    if np.array_equal(indices, np.arange(axis.length)):
        return axis
    factors = views.mixed(axis.factors, hits.size).factors
    return ViewAxis(factors, length=indices.size, start=int(hits[0]))


@_rule('gather')
def _(equation: Any, values: Values) -> Results:
    """Elements at indices that are no data: permutations, tables of positions, single elements, or unknown ones."""
    operand, indices = values
    _refuse_views(equation, [indices])
    numbers, sizes = equation.params['dimension_numbers'], equation.params['slice_sizes']
    shape, new_shape = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    # Axes that the operand shares with the indices; older JAX has none.
    batching = getattr(numbers, 'operand_batching_dims', ())
    gone = (*numbers.collapsed_slice_dims, *batching)
    # Axis of the operand -> axis of the result. Along the other axes of the result lie the indices.
    kept = dict(zip(all_but(gone, shape), numbers.offset_dims, strict=True))
    targets = all_but(numbers.offset_dims, new_shape)
    indexed = numbers.start_index_map  # where indices say at which element a window begins
    starts = None if batching else indices.array
    if starts is not None:
        last = np.subtract(shape, sizes)[list(indexed)]
        # The mode of the gather says what happens outside.
        if not starts.size or ((starts < 0) | (starts > last)).any():
            starts = None
    step = Move(equation, others={} if starts is None else {1: starts})

    def window(view: View) -> View | None:
        if starts is None:
            return views.transpose(_indexed(equation, view, sizes), kept)
        taken = list(map(range, sizes))
        for axis, start in zip(indexed, starts.tolist(), strict=True):
            taken[axis] = range(start, start + sizes[axis])
        part = views.cut(view, taken)
        return None if part is None else views.transpose(part, kept, step)

    def rows(view: View) -> View:
        _refuse_parts(equation, [view.axes[axis] for axis in indexed])
        axes = list(map(views.copies, new_shape))
        picked = sorted({*gone, *indexed})
        factors = [factor for axis in picked for factor in view.axes[axis].factors]
        for target in targets:
            axes[target] = views.mixed(factors, new_shape[target])
        for i, target in kept.items():
            axes[target] = view.axes[i].resized(sizes[i])
        return view.computed(axes) if starts is None else view.moved(axes, step)

    return [map_views(rows if targets else window, operand.views)]
