"""Finds the exact groups: what is known of removed channels once their parameters are zero is followed to every sum.

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

A group is rejected, and so is not exact, unless zeros are known wherever its channels are summed over. The body of a
loop is visited until the fills of its carried values stay the same. So are programs that pass a state on. Each visit
knows at most what the visit before knew. So an atom that one visit rejects is rejected by all later ones.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis, Pin, atoms, pick, sizes_of
from jaxpruner.structure.traces import Trace, has_type_of, indices_of_contraction, pin_at
from jaxpruner.trace.interpreter import Interpreter, Position
from jaxpruner.trace.program import Cond, Program, Scan, While
from jaxpruner.trace.views import all_but
from jaxpruner.tree import Path

# A known scalar of any dtype of JAX, or `None`.
Scalar = Any
# (axis, atom) -> the scalar at removed indices of the atom along this axis.
Find = Callable[[int, Axis], Scalar]
Fills = list['Fill']
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


class ZeroedEquation:
    """An equation of a program in which channels are zeroed.

    Attributes:
      equation: the equation.
      params: its parameters.
      operands: the axes of its operands.
      results: the axes of its results.
      fills: of its operands.
    """

    def __init__(self, walk: 'ZeroWalk', equation: Any, fills: Fills, position: Position):
        self._walk, self._position = walk, position
        self.equation = equation
        self.params: Mapping[str, Any] = equation.params
        self.operands, self.results, self.row = walk.trace.equations[position.path]
        self.fills = fills
        self.candidates = walk.candidates

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

    def reject(self, atom: Axis, reason: str, scalar: Scalar) -> None:
        """Notes that removing channels of this atom is not the same as zeroing them, which makes them this scalar."""
        pin = pin_at(self._position, self.equation, reason)
        self._walk.reject(atom, pin if is_finite(scalar) else self._walk.causes.get(atom, pin))

    def note_cause(self, atom: Axis, reason: str) -> None:
        """Notes why zeroed channels of this atom are not finite from here on."""
        self._walk.causes[atom] = pin_at(self._position, self.equation, reason)


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


_COUNT = 512  # of samples, so that all pairs of numbers are among them
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
    for number, (operand, dtype) in enumerate(zip(operands, dtypes, strict=True)):
        if operand.value is not None:
            arrays.append(np.full(_COUNT, operand.value, dtype))
        elif operand.same < number:
            arrays.append(arrays[operand.same])
        else:
            samples, usual = _samples_of(dtype, operand.signs, known)
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


# Reduction -> the scalar that changes no result.
NEUTRAL: dict[str, Scalar] = {'reduce_and': 1, 'reduce_or': 0, 'reduce_prod': 1, 'reduce_sum': 0}
# Reduction -> the sign of elements that it takes only if there is no 0.
LESSER = {'reduce_max': -1, 'reduce_min': 1}
# Reductions along an axis over which the program was mapped -> the same reductions of arrays.
COLLECTIVES = {'pmax': 'reduce_max', 'pmin': 'reduce_min', 'psum': 'reduce_sum'}
REDUCTIONS = (*NEUTRAL, *LESSER, *COLLECTIVES)


def unknown_fills(zeroed: ZeroedEquation) -> Fills:
    """Knows nothing of the results, except that scalars that are not finite may spread."""

    def find(axis: int, atom: Axis) -> Scalar:
        scalars = [own.get(atom) for fill in zeroed.fills for own in fill.channels]
        return None if all(map(is_finite, scalars)) else NAN

    return [zeroed.result(find, number=number) for number in range(len(zeroed.results))]


def elementwise_fills(zeroed: ZeroedEquation) -> list[Fill]:
    """Computes the scalars of the result from those of the operands."""
    everywhere = [fill.everywhere for fill in zeroed.fills]
    known, signs = computed(zeroed.equation, everywhere, zeroed.fills)
    is_literal = any(scalar is not None for scalar in everywhere)
    if is_literal and known is not None and (None not in everywhere or is_finite(known)):
        return [zeroed.result(lambda axis, atom: None, known)]

    def find(i: int, atom: Axis) -> Scalar:
        size = zeroed.results[0][i].size
        scalars = []
        for fill, axes in zip(zeroed.fills, zeroed.operands, strict=True):
            is_repeated = not axes or axes[i].size != size
            scalars.append(fill.everywhere if is_repeated else fill.at(i, atom))
        result, _ = computed(zeroed.equation, scalars, zeroed.fills)
        if not is_finite(result) and all(map(is_finite, scalars)):
            reason = f'{result} at zeroed channels'
            if zeroed.equation.primitive.name == 'div' and scalars[1] == 0:
                dividend = 'x' if scalars[0] is None else f'{scalars[0]:g}'
                reason = (
                    f'{dividend} / 0 at zeroed channels; divide by what is never 0, such as '
                    'jnp.maximum(divisor, 1e-6)'
                )
            zeroed.note_cause(atom, reason)
        return result

    return [zeroed.result(find, signs=signs)]


def moved(
    *numbers: int,
    sums: bool = False,
    one_each: bool = False,
    also: Callable[[ZeroedEquation, int], list[Scalar]] = lambda zeroed, axis: [],
) -> Callable[[ZeroedEquation], Fills]:
    """The rule of a primitive each of whose results' elements is one of the operands' elements.

    Args:
      *numbers: of the operands that hold elements, and no indices; all by default.
      sums: whether the elements are sums or products of the operands' elements.
      one_each: whether each result has the elements of one operand.
      also: `(zeroed, axis) -> other scalars` that elements along an axis may be.
    """

    def result(zeroed: ZeroedEquation, number: int) -> Fill:
        chosen = [number] if one_each else numbers or range(len(zeroed.operands))
        sources = [(zeroed.fills[n], zeroed.operands[n]) for n in chosen]

        def find(k: int, atom: Axis) -> Scalar:
            scalars = []
            own = zeroed.results[number][k]
            for fill, axes in sources:
                with_atom = [i for i, axis in enumerate(axes) if atom in zeroed.candidates(axis)]
                same = [i for i in with_atom if axes[i] is own]
                scalars += [fill.at(i, atom) for i in same or with_atom]
            scalar = join([*scalars, *also(zeroed, k)]) if scalars else None
            return zero_or_unknown(scalar) if sums else scalar

        rank = len(zeroed.results[number])
        others = [scalar for k in range(max(rank, 1)) for scalar in also(zeroed, k)]
        everywhere = {*[fill.everywhere for fill, _ in sources], *others}
        known = everywhere.pop() if len(everywhere) == 1 and not sums else None
        signs = [fill.signs for fill, _ in sources]
        signs += [signs_of(np.asarray(scalar)) for scalar in others if scalar is not None]
        return zeroed.result(find, known, ANY if sums else frozenset().union(*signs), number)

    return lambda zeroed: [result(zeroed, number) for number in range(len(zeroed.results))]


def product_fills(zeroed: ZeroedEquation) -> list[Fill]:
    """A contraction. Only zeros are known of a sum of products."""
    left, right = zeroed.fills[:2]
    left_axes, right_axes = zeroed.operands[:2]
    indices = indices_of_contraction(zeroed.equation)
    summed: set[Axis] = set()
    for index in indices:
        if index.result is None and index.right is not None:
            for atom in zeroed.candidates(right_axes[index.right]):
                summed.add(atom)
                scalar = multiply(left.at(index.left, atom), right.at(index.right, atom))
                if scalar != 0:
                    zeroed.reject(atom, 'sums products of channels that are not zero', scalar)
    # Each group of a convolution has channels of the image, and outputs of the kernel.
    is_conv = zeroed.equation.primitive.name == 'conv_general_dilated'
    channels = indices[0].left if is_conv else None
    index_of = {index.result: index for index in indices}

    def find(axis: int, atom: Axis) -> Scalar:
        if axis not in index_of:
            return None
        i, k, _ = index_of[axis]
        if i is None and channels is not None and atom not in summed:
            is_grouped = atom in zeroed.candidates(left_axes[channels])
            i = channels if is_grouped else None
        return zero_or_unknown(multiply(left.at(i, atom), right.at(k, atom)))

    is_zero = left.everywhere == 0 or right.everywhere == 0
    signs = frozenset([one * other for one in left.signs for other in right.signs])
    return [zeroed.result(find, 0 if is_zero else None, signs)]


def reduce_fills(zeroed: ZeroedEquation) -> list[Fill]:
    """A reduction of each operand, which has to be neutral at removed channels."""
    primitive: str = zeroed.equation.primitive.name
    name = COLLECTIVES.get(primitive, primitive)
    results = []
    for number, (fill, axes) in enumerate(zip(zeroed.fills, zeroed.operands, strict=True)):
        kept = all_but(zeroed.params['axes'], axes)
        reduced = all_but(kept, axes)
        for i in reduced:
            for atom in zeroed.candidates(axes[i]):
                value = fill.at(i, atom)
                reason = f'meets {value} at zeroed channels'
                if name in LESSER:
                    is_neutral = value == 0 and LESSER[name] not in fill.signs
                    reason = 'takes channels that are zero into account, where others may have another sign'
                else:
                    is_neutral = value == NEUTRAL[name]
                    reason = 'sums channels that are not zero' if value is None else reason
                if not is_neutral:
                    zeroed.reject(atom, reason, value)
        count = math.prod(sizes_of(pick(axes, reduced)))

        def find(
            k: int, atom: Axis, fill: Fill = fill, kept: Any = kept, count: int = count
        ) -> Scalar:
            return _reduced(name, count, fill.at(kept[k], atom))

        everywhere = _reduced(name, count, fill.everywhere)
        signs = ANY if name in ('reduce_and', 'reduce_or', 'reduce_prod') else fill.signs
        results.append(zeroed.result(find, everywhere, signs, number))
    return results


def _reduced(name: str, count: int, value: Scalar) -> Scalar:
    """The reduction of `count` elements that all equal one scalar."""
    if value is None or not is_finite(value):
        return value if value is None else NAN
    if name == 'reduce_sum':
        return value * count
    return None if name == 'reduce_prod' and value not in (0, 1) else value


def inexact_atoms(traces: Sequence[Trace], leaves: Sequence[Fill] | None = None) -> dict[Axis, str]:
    """Finds the atoms that are not exact, with the reason: removing their channels differs from zeroing them.

    The parameters are zeroed, and so is the state of the first call. The state that a call returns goes into the next
    call of any program, until the fills of the state stay the same.

    Args:
      traces: of the programs of a model.
      leaves: the fills of the parameters, if they are not zeroed. Nothing is known of the state then.
    """
    walks = list(map(ZeroWalk, traces))
    fills = list(map(walks[0].zeroed, traces[0].leaves)) if leaves is None else leaves
    states: dict[Path, Fill] = {}
    for walk in walks:
        for path, axes in walk.trace.named_states:
            states.setdefault(path, walk.zeroed(axes) if leaves is None else nothing_of(len(axes)))
    before = None
    while states != before:
        before = dict(states)
        for walk in walks:
            results = walk.run(fills, states)
            for number, leaf in walk.trace.returned.items():
                path = walk.trace.state_paths[leaf]
                states[path] = join_fills(states[path], results[number])
    inexact: dict[Axis, str] = {}
    for walk in reversed(walks):  # the reason in the first program counts
        inexact |= walk.inexact
    return inexact


class ZeroWalk(Interpreter[Fill]):
    """Follows the fills of values through a program.

    Attributes:
      inexact: the atoms that are not exact, with the reason.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.inexact: dict[Axis, str] = {}
        self.causes: dict[Axis, Pin] = {}  # what last made zeroed channels infinite or NaN
        self._in_leaves = {atom for axes in trace.leaves for atom in atoms(*axes)}
        self._candidates: dict[int, tuple[Axis, ...]] = {}

    def run(self, leaves: Sequence[Fill], states: Mapping[Path, Fill]) -> Fills:
        """Goes through the whole program with these parameters and states; returns the fills of its results."""
        trace = self.trace
        fills = [*leaves, *[states[path] for path in trace.state_paths]]
        inputs = trace.program.jaxpr.invars[len(fills) :]
        fills += map(unknown, inputs)
        position = Position.of_whole(trace.program)
        return self.visit_program(Program.of(trace.program), fills, position)

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        """The atoms of an axis that could be removed."""
        axis = axis.resolved()
        if id(axis) not in self._candidates:
            self._candidates[id(axis)] = tuple(
                [
                    atom
                    for atom in dict.fromkeys(atoms(axis))
                    if atom.pin is None and atom.size > 1 and atom in self._in_leaves
                ]
            )
        return self._candidates[id(axis)]

    def zeroed(self, axes: Axes) -> Fill:
        """The fill of a leaf of the parameters or of the state that is zero along all of its groups."""
        return Fill(None, tuple([dict.fromkeys(self.candidates(axis), 0) for axis in axes]))

    def constant(self, value: Any, aval: Any) -> Fill:
        return value if isinstance(value, Fill) else of_constant(value, ((),) * len(aval.shape))

    def unneeded(self, equation: Any, operands: Any) -> Fills:
        return list(map(unknown, equation.outvars))

    def visit_program(self, program: Program, inputs: Sequence[Fill], position: Position) -> Fills:
        constants = []
        axes_of_constants = self.trace.constants[position.path]
        for value, axes in zip(program.constants, axes_of_constants, strict=True):
            constants.append(of_constant(value, list(map(self.candidates, axes))))
        return super().visit_program(Program(program.jaxpr, tuple(constants)), inputs, position)

    def visit_plain(self, equation: Any, operands: Fills, position: Position) -> Fills:
        zeroed = ZeroedEquation(self, equation, operands, position)
        return zeroed.row.fills(zeroed)

    def reject(self, atom: Axis, pin: Pin) -> None:
        """Notes why an atom is not exact. Its first reason stays."""
        if atom not in self.inexact:
            self.inexact[atom] = str(pin)

    def visit_scan(self, scan: Scan, operands: Fills, position: Position) -> Fills:
        _, carried, sliced = scan.split(operands)
        slices = [fill._replace(channels=fill.channels[1:]) for fill in sliced]
        stacked: Fills = []

        def run(carried: Fills) -> Fills:
            nonlocal stacked
            results = self.visit_body(scan, operands, carried, slices, position)
            carried, stacked = scan.split_results(results)
            return carried

        before, after = _settle(run, carried)
        results = after if scan.length else before
        # The scalars that trips with zeroed parameters stack.
        in_trips: list[dict[Axis, Scalar]] = [{} for _ in stacked]
        for atom in self.candidates(self.trace.trips[position.path]):
            scalars = _run_zeroed_trip(
                self.trace, scan, [fill.at(0, atom) for fill in sliced], position
            )
            if scalars is None:
                reason = 'a trip without its parameters changes what is carried'
                self.reject(atom, pin_at(position, scan.equation, reason))
                continue
            for own, scalar in zip(in_trips, scalars, strict=True):
                if scalar is not None:
                    own[atom] = scalar
        for fill, own in zip(stacked, in_trips, strict=True):
            results.append(fill._replace(channels=(own, *fill.channels)))
        return results

    def visit_while(self, loop: While, operands: Fills, position: Position) -> Fills:
        _, carried, _ = loop.split(operands)

        def run(carried: Fills) -> Fills:
            return self.visit_body(loop, operands, carried, [], position)

        carried, _ = _settle(run, carried)
        self.visit_condition(loop, operands, carried, position)
        return carried

    def visit_cond(self, cond: Cond, operands: Fills, position: Position) -> Fills:
        joined, *others = self.visit_branches(cond, operands, position)
        for results in others:
            joined = list(map(join_fills, joined, results))
        return joined


def _settle(run: Callable[[Fills], Fills], carried: Fills) -> tuple[Fills, Fills]:
    """The fills of carried values before every visit of a loop's body, and after the last one."""
    while True:
        after = run(carried)
        joined = list(map(join_fills, carried, after))
        if joined == carried:
            return carried, after
        carried = joined


class _TripProbe(ZeroWalk):
    """Goes through the body of a scan with zeroed parameters.

    Adding zeros returns the fill of the other operand itself. So a carried value that stays the same is known by the
    identity of its fill.
    """

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()

    def visit_plain(self, equation: Any, operands: Fills, position: Position) -> Fills:
        if equation.primitive.name in ('add', 'add_any'):
            for number, other in ((0, 1), (1, 0)):
                is_same = has_type_of(equation.invars[number].aval, equation.outvars[0].aval)
                if operands[other].everywhere == 0 and is_same:
                    return [operands[number]]
        return super().visit_plain(equation, operands, position)


def _run_zeroed_trip(
    trace: Trace, scan: Scan, scalars: Sequence[Scalar], position: Position
) -> list[Scalar] | None:
    """The scalars that a trip with these slices stacks; `None` if the trip changes a carried value."""
    inside = position.in_body(scan)
    constants, carried, sliced = scan.split(list(map(unknown, scan.body.jaxpr.invars)))
    for i, scalar in enumerate(scalars):
        sliced[i] = sliced[i]._replace(everywhere=scalar)
    results = _TripProbe(trace).visit_program(scan.body, [*constants, *carried, *sliced], inside)
    carried_out, stacked = scan.split_results(results)
    for before, after, is_needed in zip(carried, carried_out, inside.needed, strict=False):
        if is_needed and after is not before:
            return None
    return [fill.everywhere for fill in stacked]


def unknown(variable: Any) -> Fill:
    """The fill of a variable of which nothing is known."""
    return nothing_of(len(variable.aval.shape))
