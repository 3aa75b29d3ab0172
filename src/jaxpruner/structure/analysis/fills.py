"""Fills: the scalars at channels once the parameters of their group are zero.

Removing channels is the same as zeroing them if the zeroed channels affect nothing else. An elementwise operation never
mixes channels. A sum over channels does. It is the same without a channel only if it adds zero for that channel. So
each value has a `Fill`. For each axis, and each atom along it, the fill is the one scalar at all zeroed indices of the
atom, if that is known.

It also knows which signs the elements of the value may have: a maximum is the same without zeros if nothing is
negative.

Parameters have a fill of 0 along their groups. An operation whose operands are known is run on them, so that its result
is known, too. `exp(0)` is 1, so a softmax over channels is not exact. `0 * logistic(0)` is 0, so SiLU is exact.

Unknown scalars are activations of a working model. They count as finite, and as not zero in a divisor. Scalars that
come from the zeroing are computed, not assumed: `log(0)` and `0 / 0` are not finite.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis
from jaxpruner.structure.analysis.records import EquationAxes
from jaxpruner.structure.analysis.signs import ANY, Signs, signs_of

# A known scalar of any dtype of JAX, or `None`.
Scalar = Any

# (axis, atom) -> the scalar at removed indices of the atom along this axis.
Find = Callable[[int, Axis], Scalar]

NAN = float('nan')  # one object for every NaN, so that it equals itself in keys of caches


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
        if self.everywhere is not None:
            return self.everywhere
        return self.channels[axis].get(atom)


def nothing_of(rank: int) -> Fill:
    """The fill of a value of this rank, if nothing is known."""
    return Fill(None, ({},) * rank)


class EquationFills:
    """An equation and the fills of its operands.

    Attributes:
      equation: the equation.
      operands: the axes of its operands.
      results: the axes of its results.
      of_operands: the fills of its operands.
      candidates: axis -> the atoms in it that could be removed.
    """

    def __init__(
        self,
        equation: Any,
        axes: EquationAxes,
        of_operands: Sequence[Fill],
        candidates: Callable[[Axis], Sequence[Axis]],
        reject: Callable[[Axis, str, Scalar], None],
        note_cause: Callable[[Axis, str], None],
    ):
        self.equation = equation
        self.operands = axes.operands
        self.results = axes.results
        self.of_operands = of_operands
        self.candidates = candidates
        self._reject = reject
        self._note_cause = note_cause

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the equation."""
        return self.equation.params

    def reject(self, atom: Axis, reason: str, scalar: Scalar) -> None:
        """Notes that removing channels of this atom is not the same as zeroing them, which makes them this scalar."""
        self._reject(atom, reason, scalar)

    def note_cause(self, atom: Axis, reason: str) -> None:
        """Notes why zeroed channels of this atom are not finite from here on."""
        self._note_cause(atom, reason)

    def axes_with(
        self, atom: Axis, among: Iterable[int] | None = None, operand: int = 0
    ) -> list[int]:
        """Finds the axes of an operand that have an atom, among these or among all."""
        axes = self.operands[operand]
        if among is None:
            among = range(len(axes))
        with_atom = []
        for i in among:
            if atom in self.candidates(axes[i]):
                with_atom.append(i)
        return with_atom

    def constant(self, scalar: Scalar) -> Fill:
        """The fill of a result whose elements all equal one scalar."""
        nothing = nothing_of(len(self.results[0]))
        return nothing._replace(everywhere=scalar)

    def fill_results(self, find: Find, everywhere: Scalar = None) -> list[Fill]:
        """The fills of all results, with the same scalars for each."""
        indices = range(len(self.results))
        return [self.result(everywhere, find, index) for index in indices]

    def result(self, everywhere: Scalar, find: Find, index: int = 0) -> Fill:
        """The fill of a result, with the scalar that `find(axis, atom)` returns for each of its axes and atoms."""
        channels = []
        for i, axis in enumerate(self.results[index]):
            scalars = {}
            for atom in self.candidates(axis):
                scalar = find(i, atom)
                if scalar is not None:
                    scalars[atom] = scalar
            channels.append(scalars)
        return Fill(everywhere, tuple(channels))


def is_finite(value: Scalar) -> bool:
    """Whether a scalar is finite. An unknown scalar counts as finite."""
    return value is None or bool(np.isfinite(value))


def join(values: Iterable[Scalar]) -> Scalar:
    """The scalar of an element that is one of these. If they differ it is unknown, or NaN if one is not finite."""
    values = list(values)
    first = values[0]
    if all(value == first or value is first for value in values):
        return first
    return None if all(map(is_finite, values)) else NAN


def join_fills(first: Fill, second: Fill) -> Fill:
    """The fill of a value that is one of two values with the same axes."""
    is_same = first.everywhere == second.everywhere
    everywhere = first.everywhere if is_same else None
    channels = []
    for i in range(len(first.channels)):
        scalars = {}
        atoms = [*first.channels[i], *second.channels[i]]
        for atom in dict.fromkeys(atoms):
            values = first.at(i, atom), second.at(i, atom)
            value = join(values)
            if value is not None:
                scalars[atom] = value
        channels.append(scalars)
    return Fill(everywhere, tuple(channels), first.signs | second.signs)


def product(first: Scalar, second: Scalar) -> Scalar:
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
    if name == 'select_n' and values[0] is not None:
        return _selected(values)
    if None not in values:
        result = _evaluated(equation, values)
        # NaN is whatever may not be finite: `isfinite` of it is unknown.
        is_unsure = any(value != value for value in values) and is_finite(result)
        return None if is_unsure else result
    if name == 'select_n':
        return _one_of(values[1:], literals[1:])
    if name in ('mul', 'and'):
        return product(*values)
    if name == 'div':
        return _quotient(*values)
    if name in ('max', 'min', 'clamp'):
        has_nan = any(value != value for value in values)
        return NAN if has_nan else None
    if name in ('pow', 'rem') and 0 in values:
        return NAN
    return None if all(map(is_finite, values)) else NAN


def _selected(values: Sequence[Scalar]) -> Scalar:
    """The result of a selection whose predicate, the first value, is known."""
    predicate, *cases = values
    if not np.isfinite(predicate):
        return NAN
    return cases[int(predicate)]


def _one_of(cases: Sequence[Scalar], literals: Sequence[bool]) -> Scalar:
    """The result of a selection with an unknown predicate. A literal that is not finite is the model's own."""
    if len(set(cases)) == 1:
        return cases[0]
    for case, is_literal in zip(cases, literals, strict=True):
        if not is_literal and not is_finite(case):
            return NAN
    return None


def _quotient(dividend: Scalar, divisor: Scalar) -> Scalar:
    """The quotient of two scalars, one of which is unknown."""
    if divisor == 0 or not is_finite(dividend) or not is_finite(divisor):
        return NAN
    return 0 if dividend == 0 else None


def _evaluated(equation: Any, values: Sequence[Scalar]) -> Scalar:
    """Runs the operation on scalars of its dtypes."""
    dtypes = []
    result = equation.outvars[0]
    for variable in (*equation.invars, result):
        dtype = variable.aval.dtype
        if _is_dtype_of_keys(dtype):
            return None
        dtypes.append(dtype)
    *operand_dtypes, _ = dtypes
    params = tuple(sorted(equation.params.items()))
    try:
        return _run(equation.primitive, params, tuple(operand_dtypes), tuple(values))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return NAN  # it cannot be run on scalars, and nothing is assumed of them


@functools.lru_cache(4096)
def _run(primitive: Any, params: Any, dtypes: Any, values: tuple[Scalar, ...]) -> Scalar:
    with jax.ensure_compile_time_eval():
        operands = map(jnp.asarray, values, dtypes)
        result = primitive.bind(*operands, **dict(params))
    if primitive.multiple_results:
        result = result[0]
    return scalar_of(np.asarray(result))


def is_key(value: Any) -> bool:
    """Whether a value consists of random keys."""
    return _is_dtype_of_keys(jnp.result_type(value))


def _is_dtype_of_keys(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def scalar_of(array: np.ndarray) -> Scalar:
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
    if tree_lib.is_traced(value) or is_key(value):
        return nothing
    try:
        array = np.asarray(value)
    except RuntimeError:  # an array on another host
        return nothing
    nothing = nothing._replace(signs=signs_of(array))
    first = array.ravel()[:1]
    if array.size and (array == first).all():
        return nothing._replace(everywhere=scalar_of(first))
    is_inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    if not is_inexact or np.isfinite(array).all():
        return nothing
    channels = [dict.fromkeys(atoms, NAN) for atoms in candidates]
    return nothing._replace(channels=tuple(channels))
