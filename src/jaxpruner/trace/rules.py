"""What each primitive does to views: a table from its name to a rule.

A rule gets the equation and its operands, none of which depends on data. It returns the views of each result. A
primitive without a rule makes its parameters opaque. Most rules that move elements are a function of the equation, a
view, and the step that is added to the view (`_moves`). If indices or masks are known constants, views stay exact.
CONTRIBUTING.md lists where a new primitive goes.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.trace import contractions, views
from jaxpruner.trace.program import ProgramPath, shape_of
from jaxpruner.trace.reshaping import reshape
from jaxpruner.trace.values import Values, has_views
from jaxpruner.trace.views import Factor, Move, NoRuleError, View, ViewAxis, Views, map_views

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


def views_of_results(equation: Any, values: Values) -> Results:
    """The views of the results of an equation without data.

    Raises:
      NoRuleError: there is no rule for the primitive, or the rule cannot follow it.
    """
    name = equation.primitive.name
    if name not in RULES:
        raise NoRuleError(f'no rule for {name}')
    return RULES[name](equation, values)


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
        is_rounded = jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.inexact)
        if before == after or is_rounded:
            results.append(tuple(view.moved(view.axes, step) for view in value.views))
        else:
            results.append(tuple(view.computed() for view in value.views))
    return results


@_moves('transpose')
def _(equation: Any, view: View, step: Move) -> View:
    return views.transpose(view, equation.params['permutation'], step)


@_moves('squeeze')
def _(equation: Any, view: View, step: Move) -> View:
    kept = views.all_but(equation.params['dimensions'], view.axes)
    return views.transpose(view, kept, step)


@_moves('reshape')
def _(equation: Any, view: View, step: Move) -> View:
    order = equation.params.get('dimensions')
    if order is not None:  # elements are read in this order of the axes, which order='F' reverses
        view = views.transpose(view, order)
    return reshape(view, shape_of(equation.outvars[0]), step)


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


@_moves('all_gather')
def _(equation: Any, view: View, step: Move) -> View:
    del step
    i = equation.params['all_gather_dimension']
    if not equation.params['tiled']:
        raise NoRuleError('no rule for all_gather along a new axis')
    _refuse_parts(equation, [view.axes[i]])
    first, *others = view.axes[i].factors or views.copies(1).factors
    longer = first._replace(size=first.size * equation.params['axis_size'])
    return view.with_axis(i, views.axis_of(longer, *others)).computed()


@_moves('pad')
def _(equation: Any, view: View, step: Move) -> View | None:
    padding = equation.params['padding_config']
    is_spread = any(between for *_, between in padding)
    taken = []
    for length, (before, after, between) in zip(view.shape, padding, strict=True):
        if between and min(before, after) < 0:
            raise NoRuleError(
                'no rule for padding that puts zeros between elements and takes elements away'
            )
        # Negative padding takes elements away.
        taken.append(range(max(0, -before), length + min(0, after)))
    inside = views.cut(view, taken)
    if inside is None:
        return None
    axes = []
    for axis, (before, after, between) in zip(inside.axes, padding, strict=True):
        if between:  # zeros between elements are mixed with the elements
            spread = between + 1
            factors = views.mixed(axis.factors, spread * axis.size - between).factors
            length = max(0, spread * (axis.length - 1) + 1)
            axis = ViewAxis(factors, length, spread * axis.start)
        axes.append(axis.between(max(0, before), max(0, after)))
    return inside.computed(axes) if is_spread else inside.moved(axes, step)


def slices(params: Mapping[str, Any]) -> list[range]:
    """The positions that a `slice` with these parameters takes along each axis."""
    starts = params['start_indices']
    strides = params['strides'] or [1] * len(starts)
    return list(map(range, starts, params['limit_indices'], strides))


@_rule('slice', 'split', 'unstack')
def _(equation: Any, values: Values) -> Results:
    """Each result is a part of the operand; those of `unstack` lack an axis."""
    name, params = equation.primitive.name, equation.params
    shape = shape_of(equation.invars[0])
    kept = views.all_but([params['axis']] if name == 'unstack' else [], shape)
    results = []
    stop = 0
    for number, size in enumerate(params.get('sizes', [1] * len(equation.outvars))):
        start, stop = stop, stop + size
        taken = slices(params) if name == 'slice' else list(map(range, shape))
        if name != 'slice':
            taken[params['axis']] = range(start, stop)
        parts = map_views(functools.partial(views.cut, taken=taken), values[0].views)
        step = Move(equation, result=number)
        results.append(tuple(views.transpose(part, kept, step) for part in parts))
    return results


@_rule('concatenate', 'stack')
def _(equation: Any, values: Values) -> Results:
    """Puts values beside each other along an axis; `stack` along a new one."""
    is_stack = equation.primitive.name == 'stack'
    axis = equation.params['axis' if is_stack else 'dimension']
    length = shape_of(equation.outvars[0])[axis]
    joined = []
    before = 0
    for number, value in enumerate(values):
        size = 1 if is_stack else shape_of(equation.invars[number])[axis]
        for view in value.views:
            axes = list(view.axes)
            if is_stack:
                axes.insert(axis, views.axis_of())
            axes[axis] = axes[axis].between(before, length - before - size)
            joined.append(view.moved(axes, Move(equation, operand=number)))
        before += size
    return [tuple(joined)]


@_rule(*ELEMENTWISE)
def _elementwise(equation: Any, values: Values) -> Results:
    if len(equation.outvars) == len(values) > 1:  # a collective over several arrays
        return [views.join(value.views) for value in values]
    shape = shape_of(equation.outvars[0])
    return [views.join(views.align(view, shape) for value in values for view in value.views)]


@_rule('mul')
def _(equation: Any, values: Values) -> Results:
    """A product with a mask of zeros and ones keeps views exact."""
    number = 0 if values[0].views else 1
    mask = None if values[1 - number].views else values[1 - number].array
    if mask is None or not np.isin(mask, (0, 1)).all():
        return _elementwise(equation, values)
    return _masked(values[number].views, Move(equation, number, others={1 - number: mask}), mask)


@_rule('select_n')
def _(equation: Any, values: Values) -> Results:
    """Zeros in place of some elements, by a constant mask, keep views exact."""
    which, *cases = values
    predicate = None if which.views else which.array  # the predicate may be made of a leaf
    numbers = [number for number, case in enumerate(cases) if case.views]
    others = [case.array for case in cases if not case.views]
    are_zero = all(array is not None and not array.any() for array in others)
    if predicate is None or len(numbers) != 1 or not are_zero:
        return _elementwise(equation, values)
    (number,) = numbers
    step = Move(equation, number + 1, others={0: predicate})
    return _masked(cases[number].views, step, predicate.astype(int) == number)


def _masked(operand: Views, step: Move, mask: np.ndarray) -> Results:
    """The views of masked values. Along an axis with copies, the mask may make elements differ."""
    shape = shape_of(step.equation.outvars[0])
    mask = np.broadcast_to(mask, shape)

    def masked(view: View) -> View:
        is_exact = view.shape == shape
        view = views.align(view, shape)
        factors = list(itertools.chain.from_iterable(axis.factors for axis in view.axes))
        for i, axis in enumerate(view.axes):
            has_copies = any(factor.size > 1 and not factor.axes for factor in axis.factors)
            if has_copies and np.diff(mask, axis=i).any():
                # For example, copies of a row may become a diagonal.
                own = views.mixed(factors, axis.size).factors
                view = view.with_axis(i, axis._replace(factors=own))
                is_exact = False
        return view.moved(view.axes, step) if is_exact else view.computed()

    return [tuple(map(masked, operand))]


@_rule('reduce_and', 'reduce_max', 'reduce_min', 'reduce_or', 'reduce_prod', 'reduce_sum')
@_rule('argmax', 'argmin', 'reduce_xor')
def _(equation: Any, values: Values) -> Results:
    def reduced(view: View) -> View:
        return views.transpose(view, views.all_but(equation.params['axes'], view.axes))

    return [views.join(map(reduced, values[0].views))]


@_rule('cumlogsumexp', 'cummax', 'cummin', 'cumprod', 'cumsum', 'sort')
def _(equation: Any, values: Values) -> Results:
    axis = equation.params.get('axis', equation.params.get('dimension'))
    every = [view for value in values for view in value.views]
    _refuse_parts(equation, [view.axes[axis] for view in every])
    return [views.join(every)] * len(equation.outvars)


@_rule('dot_general')
def _(equation: Any, values: Values) -> Results:
    """A contraction of two values that are computed only from parameters."""
    roles = [contractions.roles(equation, k) for k in (0, 1)]
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


@_rule('top_k')
def _(equation: Any, values: Values) -> Results:
    shape = shape_of(equation.outvars[0])
    axis = equation.params.get('axis', -1) % len(shape)  # older JAX only takes the last

    def largest(view: View) -> View:
        _refuse_parts(equation, [view.axes[axis]])
        factors = view.axes[axis].factors
        return view.with_axis(axis, views.mixed(factors, shape[axis])).computed()

    return [map_views(largest, values[0].views)] * 2


def _indexed(equation: Any, view: View, sizes: Sequence[int]) -> View:
    """A slice at an index that is mostly the number of a loop's trip. An axis sliced to one element is a stack."""
    for i, size in enumerate(sizes):
        axis = view.axes[i]
        if axis.length == size:
            continue
        _refuse_parts(equation, [axis])
        if size == 1:
            view = view.stacked((), axis)
        view = view.with_axis(i, views.mixed(axis.factors, size))
    return view.computed()


@_rule('dynamic_slice')
def _(equation: Any, values: Values) -> Results:
    """A slice at indices that may be known, also if they differ between the trips of a loop."""
    operand, *indices = values
    _refuse_views(equation, indices)
    sizes = equation.params['slice_sizes']
    constants = [index.constant for index in indices if index.constant is not None]
    starts = [(constant.array(), constant.loop) for constant in constants]
    if len(starts) == len(indices) and all(array is not None for array, _ in starts):
        try:
            return [map_views(lambda view: _sliced(view, starts, sizes), operand.views)]
        except NoRuleError:
            pass
    return [map_views(lambda view: _indexed(equation, view, sizes), operand.views)]


def _sliced(
    view: View, starts: Sequence[tuple[Any, ProgramPath | None]], sizes: Sequence[int]
) -> View | None:
    """A slice at known indices: for each axis an array, and the loop in whose trips it differs."""
    everything = list(map(range, view.shape))
    taken = list(everything)
    moving = []
    loops = {entry.loop for entry in view.stack}
    for axis, (size, (start, loop)) in enumerate(zip(sizes, starts, strict=True)):
        last = view.shape[axis] - size
        if loop is None:
            first = min(max(int(start), 0), last)
            taken[axis] = range(first, first + size)
        elif last:
            if size > 1 or loop in loops:
                raise NoRuleError(
                    'no rule for a window that a loop moves, nor for two indices of one loop'
                )
            moving.append((axis, np.clip(start, 0, last), loop))
            loops.add(loop)
    sliced: View | None = view
    if taken != everything:
        first_ones = tuple(indices.start for indices in taken)
        limits = tuple(indices.stop for indices in taken)
        step = functools.partial(jax.lax.slice, start_indices=first_ones, limit_indices=limits)
        sliced = views.cut(view, taken, step)
    for axis, indices, loop in moving:
        sliced = None if sliced is None else _taken_in_loop(sliced, axis, indices, loop)
    return sliced


def _taken_in_loop(view: View, number: int, indices: np.ndarray, loop: ProgramPath) -> View | None:
    """An element of an axis for each trip. The axis becomes a stack, and an axis of length 1 takes its place."""
    axis = view.axes[number]
    hits = np.flatnonzero((indices >= axis.start) & (indices < axis.stop))
    if not hits.size:
        return None
    if (np.diff(hits) != 1).any():
        raise NoRuleError('no rule for an index that comes back to a part of a concatenation')
    if not np.array_equal(indices, np.arange(axis.length)):
        factors = views.mixed(axis.factors, hits.size).factors
        axis = ViewAxis(factors, length=indices.size, start=int(hits[0]))
        take = functools.partial(jnp.take, indices=indices, axis=number)
        view = view.moved(view.axes, take)
    if number:
        to_front = functools.partial(jnp.moveaxis, source=number, destination=0)
        view = view.moved(view.axes, to_front)
    put_back = functools.partial(jnp.expand_dims, axis=number)
    return view.with_axis(number, views.axis_of(), views.ENTER_LOOP, put_back).stacked(loop, axis)


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


@_rule('gather')
def _(equation: Any, values: Values) -> Results:
    """Elements at indices that are no data: permutations, tables of positions, single elements, or unknown ones."""
    operand, indices = values
    _refuse_views(equation, [indices])
    gather = GatherAxes.of(equation)
    new_shape = shape_of(equation.outvars[0])
    starts = None if gather.batching else indices.array
    if starts is not None:
        last = np.subtract(shape_of(equation.invars[0]), gather.sizes)[list(gather.indexed)]
        # The mode of the gather says what happens outside.
        if not starts.size or ((starts < 0) | (starts > last)).any():
            starts = None
    step = Move(equation, others={} if starts is None else {1: starts})

    def window(view: View) -> View | None:
        if starts is None:
            return views.transpose(_indexed(equation, view, gather.sizes), gather.kept)
        taken = list(map(range, gather.sizes))
        for axis, start in zip(gather.indexed, starts.tolist(), strict=True):
            taken[axis] = range(start, start + gather.sizes[axis])
        part = views.cut(view, taken)
        return None if part is None else views.transpose(part, gather.kept, step)

    def rows(view: View) -> View:
        _refuse_parts(equation, [view.axes[axis] for axis in gather.indexed])
        axes = list(map(views.copies, new_shape))
        for number, target in enumerate(gather.rows):
            picked = gather.gone
            if starts is not None:  # those whose indices differ along these rows
                differs = np.diff(starts, axis=number).any(tuple(range(starts.ndim - 1)))
                picked = list(itertools.compress(gather.indexed, differs))
            factors = [factor for axis in picked for factor in view.axes[axis].factors]
            axes[target] = views.mixed(factors, new_shape[target])
        for i, target in gather.kept.items():
            whole, size = view.axes[i], gather.sizes[i]
            axes[target] = whole if whole.length == size else views.mixed(whole.factors, size)
        return view.computed(axes) if starts is None else view.moved(axes, step)

    return [map_views(rows if gather.rows else window, operand.views)]


# Primitives that `UseGraph.uncounted` does not name: contractions, which are counted; arithmetic, which is counted
# where a parameter meets data; and others that cost a few operations for each element. All others may cost anything.
CHEAP = (
    frozenset(RULES)
    | frozenset(contractions.OPERATIONS)
    | frozenset(
        """
    addupdate all_to_all approx_top_k axis_index bitcast_convert_type create_token debug_callback debug_print
    empty get igamma igamma_grad_a igammac iota pgather platform_index polygamma
    ragged_all_to_all random_bits random_clone random_fold_in random_gamma random_seed random_split
    random_unwrap random_wrap reduce reduce_scatter reduce_window reduce_window_max reduce_window_min
    reduce_window_sum regularized_incomplete_beta rng_bit_generator rng_uniform
    select_and_gather_add select_and_scatter select_and_scatter_add swap threefry2x32 zeta
    """.split()
    )
)
