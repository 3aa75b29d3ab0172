"""Fills: what is known of removed channels once the parameters of their group are zero: scalars, and signs.

Removing channels is the same as zeroing them if the zeroed channels affect nothing else. An elementwise operation never
mixes channels. A sum over channels does. It is the same without a channel only if it adds zero for that channel. So
each value has a `Fill`. For each axis, and each atom along it, the fill is the one scalar at all zeroed indices of the
atom, if that is known.

Parameters have a fill of 0 along their groups. An operation whose operands are known is run on them, so that its result
is known, too. `exp(0)` is 1, so a softmax over channels is not exact. `0 * logistic(0)` is 0, so SiLU is exact.

Unknown scalars are activations of a working model. They count as finite, and as not zero in a divisor. Scalars that
come from the zeroing are computed, not assumed: `log(0)` and `0 / 0` are not finite.

A fill also knows which signs elements may have, whatever the parameters and inputs are. The largest of some channels is
the same without channels of 0 if no channel is ever negative:

    x of any sign       {-1, 1}          abs(x) * -abs(x)    {-1}
    abs(x)              {1}              abs(x) - abs(x)     {-1, 1}
    -abs(x)             {-1}             zeros               {}
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis

# A known scalar of any dtype of JAX, or `None`.
Scalar = Any
# (axis, atom) -> the scalar at removed indices of the atom along this axis.
Find = Callable[[int, Axis], Scalar]
# The signs that elements may have, besides 0. Values that are not real numbers count as of any sign.
Signs = frozenset[int]

NAN = float('nan')  # one object for every NaN, so that it equals itself in keys of caches
ANY: Signs = frozenset({-1, 1})
NEVER_NEGATIVE: Signs = frozenset({1})
NEVER_POSITIVE: Signs = frozenset({-1})


class Fill(NamedTuple):
    """The scalars at removed channels of a value, as far as they are known.

    Attributes:
      everywhere: the scalar that all elements of the value equal; `None` if there is none.
      channels: for each axis, atom -> the scalar at all removed indices of the atom along this axis.
      signs: of all elements, in the whole model and without the channels.
    """

    everywhere: Scalar
    channels: tuple[Mapping[Axis, Scalar], ...]
    signs: Signs = ANY

    def at(self, axis: int, atom: Axis) -> Scalar:
        """The scalar at removed indices of an atom along an axis; `None` if it is not known."""
        if self.everywhere is not None or not self.channels:
            return self.everywhere
        return self.channels[axis].get(atom)


def nothing_of(rank: int) -> Fill:
    """The fill of a value of this rank, if nothing is known."""
    return Fill(None, ({},) * rank)


@dataclasses.dataclass(frozen=True)
class EquationFills:
    """An equation and the fills of its operands.

    Attributes:
      equation: the equation.
      operands: the axes of its operands.
      results: the axes of its results.
      of_operands: the fills of its operands.
      candidates: axis -> the atoms in it that could be removed.
      reject: `(atom, reason, scalar)`: notes that removing channels of this atom is not the same as zeroing them, which
        makes them this scalar.
      note_cause: `(atom, reason)`: notes why zeroed channels of this atom are not finite from here on.
    """

    equation: Any
    operands: Sequence[Axes]
    results: Sequence[Axes]
    of_operands: Sequence[Fill]
    candidates: Callable[[Axis], Sequence[Axis]]
    reject: Callable[[Axis, str, Scalar], None]
    note_cause: Callable[[Axis, str], None]

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the equation."""
        return self.equation.params

    def axes_with(self, atom: Axis, operand: int = 0) -> list[int]:
        """Finds the axes of an operand that have an atom."""
        axes = self.operands[operand]
        return [i for i, axis in enumerate(axes) if atom in self.candidates(axis)]

    def fill_results(self, find: Find, everywhere: Scalar = None) -> list[Fill]:
        """The fills of all results, with the same scalars for each."""
        return [self.result(everywhere, find, index) for index in range(len(self.results))]

    def result(self, everywhere: Scalar, find: Find, index: int = 0) -> Fill:
        """The fill of a result, with the scalar that `find(axis, atom)` returns for each of its axes and atoms."""
        channels = []
        for i, axis in enumerate(self.results[index]):
            scalars = {atom: find(i, atom) for atom in self.candidates(axis)}
            channels.append({atom: value for atom, value in scalars.items() if value is not None})
        return Fill(everywhere, tuple(channels))


def is_finite(value: Scalar) -> bool:
    """Whether a scalar is finite. An unknown scalar counts as finite."""
    return value is None or bool(np.isfinite(value))


def join(values: Iterable[Scalar]) -> Scalar:
    """The scalar of an element that is one of these. If they differ it is unknown, or NaN if one is not finite."""
    first, *others = values
    if all(value == first or value is first for value in others):
        return first
    return None if all(map(is_finite, (first, *others))) else NAN


def join_fills(first: Fill, second: Fill) -> Fill:
    """The fill of a value that is one of two values with the same axes."""
    everywhere = first.everywhere if first.everywhere == second.everywhere else None
    channels = []
    for i, pair in enumerate(zip(first.channels, second.channels, strict=True)):
        joined = {
            atom: join((first.at(i, atom), second.at(i, atom))) for own in pair for atom in own
        }
        channels.append({atom: value for atom, value in joined.items() if value is not None})
    return Fill(everywhere, tuple(channels), first.signs | second.signs)


def multiply(first: Scalar, second: Scalar) -> Scalar:
    """The product of two scalars; each may be unknown."""
    if not is_finite(first) or not is_finite(second):
        return NAN
    if first == 0 or second == 0:
        return 0
    return None if first is None or second is None else first * second


def computed(equation: Any, values: Sequence[Scalar], literals: Sequence[bool]) -> Scalar:
    """The result of an elementwise operation on scalars.

    Args:
      equation: the operation.
      values: the scalar of each operand.
      literals: for each operand whether it equals this scalar in the whole model, without any zeroing.
    """
    name = equation.primitive.name
    if name == 'select_n':
        predicate, *cases = values
        if predicate is not None:
            return cases[int(predicate)] if np.isfinite(predicate) else NAN
        if len(set(cases)) == 1:
            return cases[0]
        # A literal that is not finite is the model's own.
        pairs = zip(cases, literals[1:], strict=True)
        return None if all(is_literal or is_finite(case) for case, is_literal in pairs) else NAN
    if None not in values:
        result = _evaluated(equation, values)
        # NaN is whatever may not be finite: `isfinite` of it is unknown.
        is_unsure = any(value != value for value in values) and is_finite(result)
        return None if is_unsure else result
    if name in ('mul', 'and'):
        return multiply(*values)
    if name in ('max', 'min', 'clamp'):
        return NAN if any(value != value for value in values) else None
    if name in ('pow', 'rem') and 0 in values:
        return NAN
    if not all(map(is_finite, values)) or (name == 'div' and values[1] == 0):
        return NAN
    return 0 if name == 'div' and values[0] == 0 else None


def _evaluated(equation: Any, values: Sequence[Scalar]) -> Scalar:
    """Runs the operation on scalars of its dtypes."""
    dtypes = [variable.aval.dtype for variable in (*equation.invars, equation.outvars[0])]
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):  # random keys
        return None
    params = tuple(sorted(equation.params.items()))
    try:
        return _run(equation.primitive, params, tuple(dtypes[:-1]), tuple(values))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return NAN  # it cannot be run on scalars, and nothing is assumed of them


@functools.lru_cache(4096)
def _run(primitive: Any, params: Any, dtypes: Any, values: tuple[Scalar, ...]) -> Scalar:
    with jax.ensure_compile_time_eval():
        result = primitive.bind(*map(jnp.asarray, values, dtypes), **dict(params))
    return _scalar_of(np.asarray(result[0] if primitive.multiple_results else result))


def _scalar_of(array: np.ndarray) -> Scalar:
    """The element of an array of size one. All NaNs become the same object."""
    if array.dtype.kind not in 'biufc':  # small floats such as bfloat16
        array = array.astype(np.float64)
    value = array.item()
    return NAN if value != value else value


def of_constant(value: Any, candidates: Sequence[Sequence[Axis]]) -> Fill:
    """The fill of a constant. It says whether all elements are one scalar, and otherwise whether some are not finite.

    Args:
      value: the constant.
      candidates: for each of its axes, the atoms that could be removed.
    """
    nothing = nothing_of(len(candidates))
    is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
    if tree_lib.is_traced(value) or is_key:
        return nothing
    try:
        array = np.asarray(value)
    except RuntimeError:  # an array on another host
        return nothing
    nothing = nothing._replace(signs=signs_of(array))
    first = array.ravel()[:1]
    if array.size and (array == first).all():
        return nothing._replace(everywhere=_scalar_of(first))
    if not jnp.issubdtype(array.dtype, jnp.inexact) or np.isfinite(array).all():
        return nothing
    return nothing._replace(channels=tuple([dict.fromkeys(atoms, NAN) for atoms in candidates]))


def signs_of(array: Any) -> Signs:
    """The signs of an array of real numbers.

    >>> sorted(signs_of(np.array([0, 2, 3])))
    [1]
    """
    if np.iscomplexobj(array):
        return ANY
    # NaN may be anything.
    signs = {-1: not (array >= 0).all(), 1: not (array <= 0).all()}
    return frozenset([sign for sign, may_be in signs.items() if may_be])


_POSITIVE = frozenset('abs cosh erfc exp exp2 iota logistic rsqrt sqrt square'.split())
# The result has signs that the first operand has.
_AS_FIRST = frozenset(
    """
    asinh atan broadcast_in_dim cbrt ceil cummax cummin cumsum dynamic_slice erf expm1 floor log1p
    reduce_max reduce_min reduce_precision reduce_sum reduce_window_max reduce_window_min reduce_window_sum reshape rev
    round sinh slice split squeeze tanh tile transpose unstack
    """.split()
)
# The result has signs that one of the operands has.
_AS_ALL = frozenset('add add_any concatenate pad pmax pmin psum sort stack'.split())
_PRODUCTS = frozenset(
    'conv_general_dilated div dot_general mul ragged_dot ragged_dot_general'.split()
)


def signs_of_results(equation: Any, operands: Sequence[Signs]) -> Signs:
    """The signs of the results of an equation with operands of these signs."""
    dtype = equation.outvars[0].aval.dtype
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        return ANY
    name = equation.primitive.name
    if name in _POSITIVE or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return NEVER_NEGATIVE
    if name in _AS_FIRST:
        return operands[0]
    if name in _AS_ALL:
        return frozenset().union(*operands)
    if name in _PRODUCTS:
        is_square = name == 'mul' and equation.invars[0] is equation.invars[1]
        return NEVER_NEGATIVE if is_square else _products(*operands[:2])
    match name, operands:
        case 'neg', [signs]:
            return _products(signs, NEVER_POSITIVE)
        case 'sub', [first, second]:
            return first | _products(second, NEVER_POSITIVE)
        case 'max', [first, second]:
            return _chosen(first, second, NEVER_NEGATIVE)
        case 'min', [first, second]:
            return _chosen(first, second, NEVER_POSITIVE)
        case 'clamp', [least, signs, most]:
            return _chosen(_chosen(signs, least, NEVER_NEGATIVE), most, NEVER_POSITIVE)
        case 'select_n', [_, *cases]:
            return frozenset().union(*cases)
        case 'integer_pow', [signs]:
            return NEVER_NEGATIVE if equation.params['y'] % 2 == 0 else signs
        case 'pow', [signs, _]:
            return ANY if -1 in signs else NEVER_NEGATIVE
        case 'convert_element_type', [signs]:
            before = equation.invars[0].aval.dtype
            may_wrap = jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(dtype, jnp.integer)
            return ANY if may_wrap else signs
    return ANY


def _products(first: Signs, second: Signs) -> Signs:
    return frozenset(one * other for one in first for other in second)


def _chosen(first: Signs, second: Signs, preferred: Signs) -> Signs:
    """The signs of the larger of two, if positive signs are preferred, or of the smaller."""
    return ((first | second) & preferred) | (first & second)
