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
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes, Axis, atoms, pick, sizes_of
from jaxpruner.structure.traces import Trace, has_type_of, indices_of_contraction, pin_at
from jaxpruner.trace.interpreter import Interpreter, Position
from jaxpruner.trace.program import Cond, Program, Scan, While
from jaxpruner.trace.values import Constant
from jaxpruner.trace.views import all_but
from jaxpruner.tree import Path

# A known scalar of any dtype of JAX, or `None`.
Scalar = Any
# (axis, atom) -> the scalar at removed indices of the atom along this axis.
Find = Callable[[int, Axis], Scalar]
Fills = list['Fill']
# The leaf and axis of some members of a group.
Members = frozenset[tuple[Path, int]]
# The signs that elements may have, besides 0. Values that are not real numbers count as of any sign.
Signs = frozenset[int]

# One object for all that may not be finite, so that it equals itself in keys of caches.
NAN = float('nan')
ANY: Signs = frozenset({-1, 1})


class Fill(NamedTuple):
    """The scalars at removed channels of a value, as far as they are known.

    Attributes:
      everywhere: the scalar that all elements of the value equal; `None` if there is none.
      channels: for each axis, atom -> the scalar at all removed indices of the atom along this axis.
      signs: of all elements, in the whole model and without the channels.
    """

    everywhere: Scalar
    channels: tuple[dict[Axis, Scalar], ...]
    signs: Signs = ANY

    def at(self, axis: int | None, atom: Axis) -> Scalar:
        """The scalar at removed indices of an atom along an axis; `None` if it is not known, or there is no axis."""
        if axis is None:
            return None
        if self.everywhere is not None or not self.channels:
            return self.everywhere
        return self.channels[axis].get(atom)


def unknown(variable: Any) -> Fill:
    """The fill of a variable of which nothing is known."""
    return Fill(None, ({},) * len(variable.aval.shape))


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
        self.equation, self.params, self.fills = equation, equation.params, fills
        axes = walk.trace.equations[position.path]
        self.operands, self.results = axes.operands, axes.results
        self.candidates = walk.candidates

    def result(
        self, find: Find, everywhere: Scalar = None, signs: Signs = ANY, number: int = 0
    ) -> Fill:
        """The fill of a result, with the scalar that `find(axis, atom)` returns for each of its axes and atoms."""
        channels = []
        for i, axis in enumerate(self.results[number]):
            channels.append({atom: find(i, atom) for atom in self.candidates(axis)})
        known = signs if everywhere is None else signs_of(np.asarray(everywhere))
        return Fill(everywhere, tuple(channels), known)

    def reject(self, atom: Axis, reason: str, scalar: Scalar) -> None:
        """Notes that removing channels of this atom is not the same as zeroing them, which makes them this scalar."""
        own = str(pin_at(self._position, self.equation, reason))
        cause = own if is_finite(scalar) else self._walk.causes.get(atom, own)
        self._walk.inexact.setdefault(atom, cause)

    def note_cause(self, atom: Axis, scalar: Scalar) -> None:
        """Notes that zeroed channels of this atom are not finite from here on."""
        reason = (
            f'{scalar} at zeroed channels; keep what is divided by away from 0, as by '
            'jnp.maximum(divisor, 1e-6)'
        )
        self._walk.causes[atom] = str(pin_at(self._position, self.equation, reason))


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
    channels = []
    for i, (own, others) in enumerate(zip(first.channels, second.channels, strict=True)):
        channels.append(
            {atom: join([first.at(i, atom), second.at(i, atom)]) for atom in own | others}
        )
    everywhere = first.everywhere if first.everywhere == second.everywhere else None
    return Fill(everywhere, tuple(channels), first.signs | second.signs)


def multiply(first: Scalar, second: Scalar = None) -> Scalar:
    """What is known of a product of two scalars, and of sums of such products: whether it is zero."""
    if not (is_finite(first) and is_finite(second)):
        return NAN
    return 0 if first == 0 or second == 0 else None


class _Operand(NamedTuple):
    """What is known of an operand: its scalar, its signs, its dtype, and the first operand that is the same variable.

    A literal has its scalar from the model, not from the zeroing.
    """

    value: Scalar
    signs: Signs
    dtype: Any
    same: int
    is_literal: bool


def computed(
    equation: Any, values: Sequence[Scalar], fills: Sequence[Fill]
) -> tuple[Scalar, Signs]:
    """What is known of the result of an elementwise operation: its scalar, and the signs that it may have.

    Args:
      equation: the operation.
      values: the scalar of each operand.
      fills: of the operands. Those with a scalar everywhere are literals, not made by zeroing.
    """
    variables = [*equation.invars, equation.outvars[0]]
    dtypes = [variable.aval.dtype for variable in variables]
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):  # random keys
        return None, ANY
    identities = list(map(id, equation.invars))
    operands = []
    for number, (value, fill) in enumerate(zip(values, fills, strict=True)):
        same, is_literal = identities.index(identities[number]), fill.everywhere is not None
        operands.append(_Operand(value, fill.signs, dtypes[number], same, is_literal))
    return _sampled(equation.primitive, tuple(sorted(equation.params.items())), tuple(operands))


_COUNT = 512  # of samples, so that all pairs of numbers are among them
# Common operations, which JAX would compile: the names of JAX and NumPy.
_IN_NUMPY: dict[str, str] = {
    name: other
    for name, _, other in (
        pair.partition('=')
        for pair in """
    abs=abs add=add div=divide eq=equal exp=exp ge=greater_equal gt=greater le=less_equal log=log lt=less max=maximum
    min=minimum mul=multiply neg=negative sqrt=sqrt square=square sub=subtract tanh=tanh
    """.split()
    )
}


@functools.lru_cache(4096)
def _sampled(primitive: Any, params: Any, operands: Sequence[_Operand]) -> tuple[Scalar, Signs]:
    """Runs an operation on samples of its operands."""
    known = [operand.value for operand in operands if operand.value is not None]
    is_zeroed = any(each.value is not None and not each.is_literal for each in operands)
    is_usual = np.ones(_COUNT, bool)  # neither 0 nor extreme
    arrays: list[Any] = []
    try:
        with np.errstate(all='ignore'), jax.ensure_compile_time_eval():
            for number, operand in enumerate(operands):
                if operand.same < number:
                    arrays.append(arrays[operand.same])
                    continue
                samples, usual = _samples_of(operand, known)
                places = np.random.default_rng(number).integers(len(samples), size=_COUNT)
                arrays.append(samples[places])
                is_usual &= places < usual
            if primitive.name in _IN_NUMPY and all(array.dtype.kind == 'f' for array in arrays):
                results = getattr(np, _IN_NUMPY[primitive.name])(*arrays)
            else:
                results = primitive.bind(*arrays, **dict(params))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return (NAN if is_zeroed else None), ANY  # nothing is assumed of what cannot be run
    array = _of_numpy(results[0] if primitive.multiple_results else results)
    finite = np.isfinite(array)
    signs = signs_of(array[finite])
    array = array[finite | is_usual]  # extreme activations do not count
    if array.size and (array == array[0]).all():
        return _item(array), signs
    infinite = array[~np.isfinite(array)]
    # An infinite literal is the model's own, such as that of a mask.
    own = [each.value for each in operands if each.is_literal]
    return (NAN if is_zeroed and not np.isin(infinite, own).all() else None), signs


def _samples_of(operand: _Operand, known: Sequence[Scalar]) -> tuple[np.ndarray, int]:
    """Numbers that an operand may be: usual ones, how many these are, then 0, extreme ones, and some known ones."""
    value, dtype = operand.value, operand.dtype
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    if value is not None:
        is_known = value == value
        if not (is_known or is_inexact):
            raise ValueError('a number that is not finite was cast')
        numbers = [value] if is_known else [np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0]
        return np.array(numbers).astype(dtype), len(numbers)
    if dtype.kind == 'b':
        return np.array([False, True]), 2
    info = (jnp.finfo if is_inexact else jnp.iinfo)(dtype)
    sizes = [0.25, 1.0, 2.75, 50.0], [float(info.max) / 2, float(getattr(info, 'tiny', 1))]
    usual, extreme = [[sign * size for sign in operand.signs for size in each] for each in sizes]
    others = [each for each in known if not isinstance(each, complex) and is_finite(each)]
    samples = np.array([*usual, 0.0, *extreme, *others])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        samples = samples * (1 + 0.75j)
    elif not is_inexact:
        samples = np.clip(samples, float(info.min), float(info.max) / 2)
    return samples.astype(dtype), len(usual)


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
    array = Constant(lambda: value).array()
    if array is None:  # such as a key, or an array on another host
        return Fill(None, ({},) * len(candidates))
    array = _of_numpy(array)
    is_one = array.size and (array == array.ravel()[0]).all()
    scalar = None if np.isfinite(array).all() else NAN
    channels = tuple([dict.fromkeys(own, scalar) for own in candidates])
    return Fill(_item(array) if is_one else None, channels, signs_of(array))


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


def elementwise_fills(zeroed: ZeroedEquation) -> Fills:
    """Computes the scalars of the result from those of the operands."""
    equation, fills = zeroed.equation, zeroed.fills
    if equation.primitive.name in ('add', 'add_any'):
        for number, other in ((0, 1), (1, 0)):
            is_same = has_type_of(equation.invars[number].aval, equation.outvars[0].aval)
            if fills[other].everywhere == 0 and is_same:
                return [fills[number]]  # itself, by which a scan knows what a trip does not change
    everywhere = [fill.everywhere for fill in fills]
    known, signs = computed(equation, everywhere, fills)
    is_literal = any(scalar is not None for scalar in everywhere)
    if is_literal and known is not None and (None not in everywhere or is_finite(known)):
        return [zeroed.result(lambda axis, atom: None, known)]

    def find(i: int, atom: Axis) -> Scalar:
        size = zeroed.results[0][i].size
        scalars = []
        for fill, axes in zip(fills, zeroed.operands, strict=True):
            is_repeated = not axes or axes[i].size != size
            scalars.append(fill.everywhere if is_repeated else fill.at(i, atom))
        result, _ = computed(equation, scalars, fills)
        if not is_finite(result) and all(map(is_finite, scalars)):
            zeroed.note_cause(atom, result)
        return result

    return [zeroed.result(find, signs=signs)]


def moved(*numbers: int, sums: bool = False) -> Callable[[ZeroedEquation], Fills]:
    """The rule of a primitive each of whose results' elements is one of the operands' elements.

    Args:
      *numbers: of the operands that hold elements, and no indices; all by default.
      sums: whether the elements are sums or products of the operands' elements.
    """

    def result(zeroed: ZeroedEquation, number: int) -> Fill:
        chosen = numbers or range(len(zeroed.operands))
        sources = [(zeroed.fills[n], zeroed.operands[n]) for n in chosen]
        # For an index beyond the end a gather may fill a scalar in. NaN would spoil the whole model anyway.
        if 'fill_value' in zeroed.params and 'FILL' in str(zeroed.params['mode']):
            value, dtype = zeroed.params['fill_value'], zeroed.equation.outvars[0].aval.dtype
            if (value is not None and is_finite(value)) or not jnp.issubdtype(dtype, jnp.inexact):
                sources.append((of_constant(value, ()), ()))

        def find(k: int, atom: Axis) -> Scalar:
            scalars = []
            for fill, axes in sources:
                with_atom = [i for i, axis in enumerate(axes) if atom in zeroed.candidates(axis)]
                same = [i for i in with_atom if axes[i] is zeroed.results[number][k]]
                scalars += [fill.at(i, atom) for i in same or with_atom]
            others = [fill.everywhere for fill, axes in sources if not axes]
            scalar = join([*scalars, *others]) if scalars else None
            return multiply(scalar) if sums else scalar

        everywhere = {fill.everywhere for fill, _ in sources}
        known = everywhere.pop() if len(everywhere) == 1 and not sums else None
        signs = frozenset().union(*[fill.signs for fill, _ in sources])
        return zeroed.result(find, known, ANY if sums else signs, number)

    return lambda zeroed: [result(zeroed, number) for number in range(len(zeroed.results))]


def product_fills(zeroed: ZeroedEquation) -> Fills:
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
        return multiply(left.at(i, atom), right.at(k, atom))

    is_zero = left.everywhere == 0 or right.everywhere == 0
    signs = frozenset([one * other for one in left.signs for other in right.signs])
    return [zeroed.result(find, 0 if is_zero else None, signs)]


def reduce_fills(zeroed: ZeroedEquation) -> Fills:
    """A reduction of each operand, which has to be neutral at removed channels."""
    primitive: str = zeroed.equation.primitive.name
    name = COLLECTIVES.get(primitive, primitive)

    def result(number: int, fill: Fill, axes: Axes) -> Fill:
        kept = all_but(zeroed.params['axes'], axes)
        reduced = all_but(kept, axes)
        is_lesser = name in LESSER and LESSER[name] not in fill.signs
        neutral = NEUTRAL.get(name, 0 if is_lesser else None)
        for i in reduced:
            for atom in zeroed.candidates(axes[i]):
                value = fill.at(i, atom)
                if value is None or value != neutral:
                    scalar = 'unknown' if value is None else value
                    where = ', which may be extreme' if name in LESSER else ''
                    zeroed.reject(atom, f'meets {scalar} at zeroed channels{where}', value)
        count = math.prod(sizes_of(pick(axes, reduced)))

        def reduce(value: Scalar) -> Scalar:
            """The reduction of `count` elements that all equal one scalar."""
            if not is_finite(value):
                return NAN
            if name == 'reduce_prod' and value not in (0, 1):
                return None
            return value * count if name == 'reduce_sum' and value is not None else value

        def find(k: int, atom: Axis) -> Scalar:
            return reduce(fill.at(kept[k], atom))

        signs = fill.signs if name in ('reduce_sum', *LESSER) else ANY
        return zeroed.result(find, reduce(fill.everywhere), signs, number)

    pairs = zip(zeroed.fills, zeroed.operands, strict=True)
    return [result(number, fill, axes) for number, (fill, axes) in enumerate(pairs)]


def inexact_atoms(
    traces: Sequence[Trace], members: Mapping[Axis, Members] | None = None
) -> dict[Axis, str]:
    """Finds the atoms that are not exact, with the reason: removing their channels differs from zeroing them.

    The parameters are zeroed, and so is the state of the first call. The state that a call returns goes into the next
    call of any program, until the fills of the state stay the same.

    Args:
      traces: of the programs of a model.
      members: atom -> those of its members that are zeroed. Nothing is known of others, and of the state. By default
        all members are zeroed.
    """
    walks = list(map(ZeroWalk, traces))

    def zeroed(path: Path, axes: Axes) -> Fill:
        channels = []
        for i, axis in enumerate(axes):
            own = walks[0].candidates(axis)
            if members is not None:
                own = [atom for atom in own if (path, i) in members.get(atom, ())]
            channels.append(dict.fromkeys(own, 0))
        return Fill(None, tuple(channels))

    fills = list(itertools.starmap(zeroed, traces[0].leaves.items()))
    states: dict[Path, Fill] = {}
    for trace in traces:
        for path, axes in trace.states.items():
            states.setdefault(path, zeroed(path, axes))
    before = None
    while states != before:
        before = dict(states)
        for walk in walks:
            results = walk.run([*fills, *[states[path] for path in walk.trace.states]])
            for number, path in walk.trace.returned.items():
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
        self.causes: dict[Axis, str] = {}  # what last made zeroed channels infinite or NaN
        in_leaves = [atom for axes in trace.leaves.values() for atom in atoms(*axes)]
        self._removable = {atom for atom in in_leaves if atom.pin is None and atom.size > 1}
        self._candidates: dict[Axis, tuple[Axis, ...]] = {}

    def run(self, fills: Sequence[Fill]) -> Fills:
        """Goes through the whole program with these parameters and states; returns the fills of its results."""
        inputs = map(unknown, self.trace.program.jaxpr.invars[len(fills) :])
        position = Position.of_whole(self.trace.program)
        return self.visit_program(Program.of(self.trace.program), [*fills, *inputs], position)

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        """The atoms of an axis that could be removed."""
        axis = axis.resolved()
        if axis not in self._candidates:
            own = dict.fromkeys(atoms(axis))
            self._candidates[axis] = tuple(filter(self._removable.__contains__, own))
        return self._candidates[axis]

    def constant(self, value: Any, aval: Any) -> Fill:
        return of_constant(value, ((),) * len(aval.shape))

    def unneeded(self, equation: Any, operands: Any) -> Fills:
        return list(map(unknown, equation.outvars))

    def visit_constants(self, program: Program, position: Position) -> Fills:
        pairs = zip(program.constants, self.trace.constants[position.path], strict=True)
        return [of_constant(value, list(map(self.candidates, axes))) for value, axes in pairs]

    def visit_plain(self, equation: Any, operands: Fills, position: Position) -> Fills:
        row = self.trace.equations[position.path].row
        return row.fills(ZeroedEquation(self, equation, operands, position))

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
        for atom in self.candidates(self.trace.trips[position.path]):
            scalars = [fill.at(0, atom) for fill in sliced]
            if not _keeps_what_is_carried(self.trace, scan, scalars, position):
                reason = 'a trip without its parameters changes what is carried'
                self.inexact.setdefault(atom, str(pin_at(position, scan.equation, reason)))
        stacked = [fill._replace(channels=({}, *fill.channels)) for fill in stacked]
        return (after if scan.length else before) + stacked

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
    """Goes through a program in which no channel is zeroed, but all of some values."""

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()


def _keeps_what_is_carried(
    trace: Trace, scan: Scan, scalars: Sequence[Scalar], position: Position
) -> bool:
    """Whether a trip returns all carried values as they are if the elements of its slices are these scalars."""
    inside = position.in_body(scan)
    constants, carried, sliced = scan.split(list(map(unknown, scan.body.jaxpr.invars)))
    slices = [
        fill._replace(everywhere=scalar) for fill, scalar in zip(sliced, scalars, strict=True)
    ]
    results = _TripProbe(trace).visit_program(scan.body, [*constants, *carried, *slices], inside)
    returned = zip(carried, results, inside.needed, strict=False)
    return all(after is before for before, after, is_needed in returned if is_needed)
