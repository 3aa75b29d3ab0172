"""Whether an optimizer treats each weight by itself, read off the program of its update.

Moments of kept weights alone can replace moments of all weights only then. The program of `update` is traced for the
parameters, and each value in it is one of five:

    ZERO     0 for every weight
    EVEN     a scalar, or the same number for every weight: step counts, learning rates
    SILENT   of each weight its own, and 0 where the weight is pruned: masked gradients
    OWN      of each weight its own: parameters, moments
    FOREIGN  any other array, such as the gradient of a dense leaf

What is computed element by element from these is one of them again. A sum over a SILENT array is EVEN, since pruned
weights add nothing to it: clipping by the global norm of masked gradients passes. Any other operation on weights is
refused, as matrix products of muon are. Numbers that depend on the shape, such as the divisor of a mean, show where
the program is traced for compact shapes, too: both programs have to be the same but for shapes.
"""

import enum
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import optax
from optax import tree_utils

from jaxpruner import tree as tree_lib

_KEEP_ZERO = frozenset(
    'neg sign abs sqrt cbrt square real imag conj copy convert_element_type reduce_precision '
    'stop_gradient floor ceil round tanh sin tan asin atan sinh asinh atanh expm1 log1p erf'.split()
)
_KEEP_ZERO_OF_ALL = frozenset('add sub add_any max min'.split())
_ELEMENTWISE = (
    _KEEP_ZERO
    | _KEEP_ZERO_OF_ALL
    | frozenset(
        'mul div rem pow integer_pow rsqrt exp exp2 log cos acos cosh acosh logistic erfc erf_inv '
        'is_finite eq ne lt le gt ge and or xor not select_n clamp nextafter atan2 complex'.split()
    )
)
_MOST_NAMED = 6


class _Flow(enum.Enum):
    ZERO = 'zero'
    EVEN = 'even'
    SILENT = 'silent'
    OWN = 'own'
    FOREIGN = 'foreign'


_OF_WEIGHTS = (_Flow.SILENT, _Flow.OWN)
_EVEN = (_Flow.ZERO, _Flow.EVEN)
_ZERO_WHERE_PRUNED = (_Flow.ZERO, _Flow.SILENT)


class _NotElementwiseError(Exception):
    """The message says what the optimizer does."""


def check_elementwise(
    optimizer: optax.GradientTransformationExtraArgs,
    params: tree_lib.PyTree,
    compact_params: tree_lib.PyTree,
) -> None:
    """Refuses an optimizer that does not treat each weight of some leaves by itself; computes nothing.

    The optimizer sees masked gradients and masked parameters, and has seen no others since its state was made. Sums
    over moments pass, such as the norm of gradients that were accumulated.

    Args:
      optimizer: any.
      params: the parameters, or their shapes.
      compact_params: a tree like them of shapes; other ones where only kept weights have moments.

    Raises:
      ValueError: it looks at shapes or at several weights together, or its update cannot be traced.

    >>> shapes = {'w': jax.ShapeDtypeStruct((4, 2), 'float32')}
    >>> kept = {'w': jax.ShapeDtypeStruct((3,), 'float32')}
    >>> check_elementwise(optax.with_extra_args_support(optax.adam(0.1)), shapes, kept)
    """
    shapes = jax.tree.map(_shape_of, params)
    is_compact = jax.tree.map(lambda p, c: p.shape != c.shape, shapes, compact_params)
    try:
        program = _program(optimizer, shapes)
        flows = _input_flows(optimizer, shapes, is_compact)
        flows = _with_silent_moments(optimizer, shapes, program.jaxpr, flows)
        results = _flows_through(program.jaxpr, jax.tree.leaves(flows))
        for is_checked, flow in zip(jax.tree.leaves(is_compact), results, strict=False):
            if is_checked and flow is _Flow.FOREIGN:
                raise _NotElementwiseError('makes updates that come from no gradient')
        if _outline(program.jaxpr) != _outline(_program(optimizer, compact_params).jaxpr):
            raise _NotElementwiseError('computes something else for other shapes')
    except _NotElementwiseError as reason:
        names = ', '.join(list(_names_of(optimizer.update))[:_MOST_NAMED]) or str(optimizer)
        raise ValueError(
            'moments of kept weights alone (block_sparse, unstructured_sparse) need an optimizer '
            f'that treats each weight by itself, and this one ({names}) {reason}. muon, adafactor, lamb and clipping '
            'by blocks look at more; use sgd, adam, adamw, lion or rmsprop'
        ) from None


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _program(optimizer: optax.GradientTransformationExtraArgs, shapes: tree_lib.PyTree) -> Any:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return optimizer.update(grads, state, params)

    try:
        return jax.make_jaxpr(update)(shapes, jax.eval_shape(optimizer.init, shapes), shapes)
    except TypeError as error:  # extra arguments that are not known before training
        raise _NotElementwiseError(f'cannot be looked at before training ({error})') from None


def _input_flows(
    optimizer: optax.GradientTransformationExtraArgs,
    shapes: tree_lib.PyTree,
    is_compact: tree_lib.PyTree,
) -> tuple[list[_Flow], list[_Flow], list[_Flow]]:
    """Tells what gradients, state and parameters are."""

    def among(flow: _Flow) -> tree_lib.PyTree:
        return jax.tree.map(
            lambda shape, compact: flow if compact else _untouched(shape), shapes, is_compact
        )

    def of_moment(moment: Any, param: Any, compact: bool) -> Any:
        if isinstance(moment, optax.MaskedNode):
            return moment
        return _Flow.OWN if compact and moment.shape == param.shape else _untouched(moment)

    state = jax.eval_shape(optimizer.init, shapes)
    try:
        of_state = tree_utils.tree_map_params(
            optimizer,
            of_moment,
            state,
            shapes,
            is_compact,
            transform_non_params=_untouched,
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        raise _NotElementwiseError(
            'has a state of which optax cannot tell what belongs to which parameter'
        ) from None
    grads = params = jax.tree.leaves(among(_Flow.SILENT))
    return grads, jax.tree.leaves(of_state), params


def _with_silent_moments(
    optimizer: optax.GradientTransformationExtraArgs,
    shapes: tree_lib.PyTree,
    program: jax.extend.core.Jaxpr,
    flows: tuple[list[_Flow], list[_Flow], list[_Flow]],
) -> tuple[list[_Flow], list[_Flow], list[_Flow]]:
    """Marks moments as 0 where a weight is pruned, if they start at 0 and each step leaves them so."""
    grads, state, params = flows
    first = _flows_through(jax.make_jaxpr(optimizer.init)(shapes).jaxpr, params)
    state = list(state)
    for number, start in enumerate(first):
        if state[number] is _Flow.OWN and start in _ZERO_WHERE_PRUNED:
            state[number] = _Flow.SILENT
    while True:
        after = _flows_through(program, [*grads, *state, *params])[len(grads) :]
        is_settled = True
        for number, flow in enumerate(after):
            if state[number] is _Flow.SILENT and flow not in _ZERO_WHERE_PRUNED:
                state[number] = _Flow.OWN
                is_settled = False
        if is_settled:
            return grads, state, params


def _untouched(array: Any) -> _Flow:
    return _Flow.FOREIGN if array.shape else _Flow.EVEN


def _flows_through(program: jax.extend.core.Jaxpr, inputs: Sequence[_Flow]) -> list[_Flow]:
    """Tells what a program's results are, given what its inputs are."""
    known = dict(zip(program.invars, inputs, strict=True))
    known |= {variable: _untouched(variable.aval) for variable in program.constvars}

    def flow_of(operand: Any) -> _Flow:
        if not isinstance(operand, jax.extend.core.Literal):
            return known[operand]
        return _Flow.EVEN if operand.val else _Flow.ZERO

    for equation in program.eqns:
        flows = [flow_of(operand) for operand in equation.invars]
        known.update(zip(equation.outvars, _results_of(equation, flows), strict=True))
    return [flow_of(result) for result in program.outvars]


def _results_of(equation: Any, flows: list[_Flow]) -> list[_Flow]:
    name = equation.primitive.name
    bodies = [jaxpr for _, jaxpr in _bodies(equation)]
    has_weights = any(flow in _OF_WEIGHTS for flow in flows)
    if name == 'optimization_barrier':
        return flows
    if name in _ELEMENTWISE:
        return [_elementwise(equation, flows)]
    if name == 'broadcast_in_dim' and flows[0] in _EVEN:
        return flows
    if name == 'cond' and flows[0] not in _OF_WEIGHTS:
        branches = [_flows_through(body, flows[1:]) for body in bodies]
        return [_either(together) for together in zip(*branches, strict=True)]
    if len(bodies) == 1 and len(bodies[0].invars) == len(flows) and name not in ('while', 'scan'):
        return _flows_through(bodies[0], flows)
    if not has_weights:
        return [_untouched(result.aval) for result in equation.outvars]
    operand, result = equation.invars[0].aval, equation.outvars[0].aval
    if name == 'broadcast_in_dim' and operand.shape == result.shape:
        return flows
    if name == 'reduce_sum' and flows[0] is _Flow.SILENT and not result.shape:
        return [_Flow.EVEN]
    raise _NotElementwiseError(f'applies {name} to weights of shape {operand.shape}')


def _elementwise(equation: Any, flows: list[_Flow]) -> _Flow:
    name = equation.primitive.name
    has_weights = any(flow in _OF_WEIGHTS for flow in flows)
    if _Flow.FOREIGN in flows and not has_weights:
        return _Flow.FOREIGN
    if _Flow.FOREIGN in flows:
        shape = equation.outvars[0].aval.shape
        raise _NotElementwiseError(
            f'combines weights of shape {shape} with an array that belongs to no weight ({name})'
        )
    is_zero = [flow in _ZERO_WHERE_PRUNED for flow in flows]
    stays_zero = {
        'mul': any(is_zero),
        'div': is_zero[0],
        'select_n': all(is_zero[1:]),
        'integer_pow': is_zero[0] and equation.params.get('y', 0) > 0,
    }.get(name, name in _KEEP_ZERO | _KEEP_ZERO_OF_ALL and all(is_zero))
    if has_weights:
        return _Flow.SILENT if stays_zero else _Flow.OWN
    return _Flow.ZERO if stays_zero else _Flow.EVEN


def _either(flows: Sequence[_Flow]) -> _Flow:
    """Tells what a value is that comes from one of several branches."""
    if len(set(flows)) == 1:
        return flows[0]
    if _Flow.FOREIGN in flows:
        return _Flow.FOREIGN
    return _Flow.OWN if any(flow in _OF_WEIGHTS for flow in flows) else _Flow.EVEN


def _bodies(equation: Any) -> Iterator[tuple[str, jax.extend.core.Jaxpr]]:
    """Yields the programs inside of an equation."""
    for name, parameter in equation.params.items():
        for entry in parameter if isinstance(parameter, tuple | list) else [parameter]:
            program = getattr(entry, 'jaxpr', entry)
            if isinstance(program, jax.extend.core.Jaxpr):
                yield name, program


def _outline(program: jax.extend.core.Jaxpr) -> list[Any]:
    """Lists the operations of a program and the scalars in it, without shapes."""
    outline: list[Any] = []
    for equation in program.eqns:
        scalars = [str(x) for x in equation.invars if isinstance(x, jax.extend.core.Literal)]
        outline.append((equation.primitive.name, scalars))
        outline.extend(_outline(body) for _, body in _bodies(equation))
    return outline


def _names_of(function: Callable[..., Any], depth: int = 8) -> Iterator[str]:
    """Names the optax functions that made a transformation, such as `scale_by_adam`, by what its update closes over."""
    if not callable(function) or not depth:
        return
    inner = []
    for part in jax.tree.leaves(_reached_by(function)):
        if callable(part) and getattr(part, '__name__', '').startswith('update'):
            inner.append(part)
    for part in inner:
        yield from _names_of(part, depth - 1)
    if not inner and hasattr(function, '__qualname__'):
        yield function.__qualname__.partition('.')[0]


def _reached_by(function: Callable[..., Any]) -> list[Any]:
    """Lists what a function closes over, or what the object of a method holds."""
    if inspect.ismethod(function):
        return list(vars(function.__self__).values())
    return [_contents(cell) for cell in getattr(function, '__closure__', None) or ()]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
