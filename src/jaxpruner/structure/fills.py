"""Fills: what is known of removed channels once the parameters of their group are zero: scalars, and signs.

Removing channels is the same as zeroing them if the zeroed channels affect nothing else. An elementwise operation never
mixes channels. A sum over channels does. It is the same without a channel only if it adds zero for that channel. So
each value has a `Fill`. For each axis, and each atom along it, the fill is the one scalar at all zeroed indices of the
atom, if that is known.

Parameters have a fill of 0 along their groups. An elementwise operation is run on samples: the scalar of an operand
that is known, and numbers of all sizes for one that is not. What all samples agree on is known of the result. `exp(0)`
is 1, so a softmax over channels is not exact. `0 * logistic(0)` is 0, so SiLU is exact. `0 * x` is 0, whatever x is.

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
import itertools
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

    def at(self, axis: int | None, atom: Axis) -> Scalar:
        """The scalar at removed indices of an atom along an axis; `None` if it is not known, or there is no axis."""
        if axis is None:
            return None
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

    def result(
        self, find: Find, everywhere: Scalar = None, signs: Signs = ANY, number: int = 0
    ) -> Fill:
        """The fill of a result, with the scalar that `find(axis, atom)` returns for each of its axes and atoms."""
        channels = []
        for i, axis in enumerate(self.results[number]):
            scalars = {atom: find(i, atom) for atom in self.candidates(axis)}
            channels.append({atom: value for atom, value in scalars.items() if value is not None})
        known = signs if everywhere is None else signs_of(np.asarray(everywhere))
        return Fill(everywhere, tuple(channels), known)


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


def zero_or_unknown(value: Scalar) -> Scalar:
    """The scalar of a sum of products with this scalar."""
    if not is_finite(value):
        return NAN
    return 0 if value == 0 else None


def computed(
    equation: Any, values: Sequence[Scalar], fills: Sequence[Fill]
) -> tuple[Scalar, Signs]:
    """What is known of the result of an elementwise operation: its scalar, and the signs that it may have.

    Args:
      equation: the operation.
      values: the scalar of each operand.
      fills: of the operands. Those with a scalar everywhere are literals, not made by zeroing.
    """
    if equation.primitive.name == 'select_n':
        predicate, *cases = values
        signs = frozenset[int]().union(*[fill.signs for fill in fills[1:]])
        if predicate is not None:
            return (cases[int(predicate)] if is_finite(predicate) else NAN), signs
        if len(set(cases)) == 1:
            return cases[0], signs
        # A literal that is not finite is the model's own.
        pairs = zip(cases, fills[1:], strict=True)
        is_safe = all(is_finite(case) or fill.everywhere is not None for case, fill in pairs)
        return (None if is_safe else NAN), signs
    variables = [*equation.invars, equation.outvars[0]]
    dtypes = [variable.aval.dtype for variable in variables]
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):  # random keys
        return None, ANY
    operands = []
    for variable, value, fill in zip(equation.invars, values, fills, strict=True):
        same = next(i for i, other in enumerate(equation.invars) if other is variable)
        is_literal = fill.everywhere is not None
        operands.append(_Operand(value, fill.signs, is_literal, same))
    params = tuple(sorted(equation.params.items()))
    return _sampled(equation.primitive, params, tuple(dtypes[:-1]), tuple(operands))


class _Operand(NamedTuple):
    """What is known of an operand: its scalar, its signs, and the number of the first operand that it equals."""

    value: Scalar
    signs: Signs
    is_literal: bool
    same: int


_COUNT = 256  # of samples
# Common operations, which JAX would compile.
_OF_NUMPY: dict[str, Any] = {
    'abs': np.abs,
    'add': np.add,
    'div': np.divide,
    'eq': np.equal,
    'exp': np.exp,
    'ge': np.greater_equal,
    'gt': np.greater,
    'le': np.less_equal,
    'log': np.log,
    'lt': np.less,
    'max': np.maximum,
    'min': np.minimum,
    'mul': np.multiply,
    'neg': np.negative,
    'sqrt': np.sqrt,
    'square': np.square,
    'sub': np.subtract,
    'tanh': np.tanh,
}


@functools.lru_cache(4096)
def _sampled(
    primitive: Any, params: Any, dtypes: Sequence[Any], operands: Sequence[_Operand]
) -> tuple[Scalar, Signs]:
    """Runs an operation on samples of its operands."""
    known = [operand.value for operand in operands if operand.value is not None]
    is_zeroed = any(each.value is not None and not each.is_literal for each in operands)
    is_usual = np.ones(_COUNT, bool)  # neither 0 nor extreme
    arrays: list[Any] = []
    stride = 1
    for number, (operand, dtype) in enumerate(zip(operands, dtypes, strict=True)):
        if operand.value is not None:
            arrays.append(np.full(_COUNT, operand.value, dtype))
        elif operand.same < number:
            arrays.append(arrays[operand.same])
        else:
            samples, usual = _samples_of(dtype, operand.signs, known)
            if stride * len(samples) <= _COUNT:  # all pairs of samples of two operands
                places = np.arange(_COUNT) // stride % len(samples)
                stride *= len(samples)
            else:
                places = np.random.default_rng(number).integers(len(samples), size=_COUNT)
            arrays.append(samples[places].astype(dtype))
            is_usual &= usual[places]
    try:
        if primitive.name in _OF_NUMPY and all(array.dtype.kind == 'f' for array in arrays):
            with np.errstate(all='ignore'):
                results = _OF_NUMPY[primitive.name](*arrays)
        else:
            with jax.ensure_compile_time_eval():
                results = primitive.bind(*arrays, **dict(params))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return (NAN if is_zeroed else None), ANY  # nothing is assumed of what cannot be run
    array = _of_numpy(results[0] if primitive.multiple_results else results)
    finite = np.isfinite(array)
    signs = signs_of(array[finite])
    if len(known) == len(operands):
        value = _item(array)
        # NaN is whatever may not be finite: `isfinite` of it is unknown.
        is_unsure = any(each != each for each in known) and is_finite(value)
        return (None if is_unsure else value), signs
    if is_zeroed and not finite[is_usual].all():
        return NAN, signs
    array = array[finite]
    is_one = array.size and (array == array[0]).all() and all(each == each for each in known)
    return (_item(array) if is_one else None), signs


def _samples_of(dtype: Any, signs: Signs, known: Sequence[Scalar]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of these signs that an unknown operand may be, 0 and some known ones among them; flags of usual ones."""
    if dtype.kind == 'b':
        return np.array([False, True]), np.ones(2, bool)
    known = [each for each in known if not isinstance(each, complex) and is_finite(each)]
    if not jnp.issubdtype(dtype, jnp.inexact):
        info = jnp.iinfo(dtype)
        numbers = {0, *map(int, known)}
        numbers.update([sign * number for sign in signs for number in (1, 2, 3, 50, info.max)])
        clipped = {min(max(number, info.min), info.max) for number in numbers}
        return np.array(sorted(clipped), dtype), np.ones(len(clipped), bool)
    info = jnp.finfo(dtype)
    usual = [sign * number for sign in signs for number in (0.25, 1.0, 2.75, 50.0)]
    extreme = [sign * float(number) for sign in signs for number in (info.max, info.tiny)]
    samples = np.array([*usual, *extreme, 0.0, *map(float, known)])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        samples = samples * (1 + 0.75j)
    return samples, np.arange(len(samples)) < len(usual)


def _of_numpy(array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind not in 'biufc':  # small floats such as bfloat16
        array = array.astype(np.float64)
    return array


def _item(array: np.ndarray) -> Scalar:
    """The first element. All NaNs become the same object."""
    value = array.ravel()[0].item()
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
        array = _of_numpy(value)
    except RuntimeError:  # an array on another host
        return nothing
    nothing = nothing._replace(signs=signs_of(array))
    if array.size and (array == array.ravel()[0]).all():
        return nothing._replace(everywhere=_item(array))
    if np.isfinite(array).all():
        return nothing
    return nothing._replace(channels=tuple([dict.fromkeys(atoms, NAN) for atoms in candidates]))


def signs_of(array: np.ndarray) -> Signs:
    """The signs of an array of real numbers.

    >>> sorted(signs_of(np.array([0, 2, 3])))
    [1]
    """
    if np.iscomplexobj(array):
        return ANY
    # NaN may be anything.
    signs = {-1: not (array >= 0).all(), 1: not (array <= 0).all()}
    return frozenset([sign for sign, may_be in signs.items() if may_be])


def signs_of_product(first: Signs, second: Signs) -> Signs:
    """The signs of products, and of sums of products."""
    return frozenset([one * other for one, other in itertools.product(first, second)])
