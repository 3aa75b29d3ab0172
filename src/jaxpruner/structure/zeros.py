"""Finds the exact groups: what is known of removed channels once their parameters are zero is followed to every sum.

Removing channels is the same as zeroing them if the zeroed channels affect nothing else. An elementwise operation never
mixes channels. A sum over channels does. It is the same without a channel only if it adds zero for that channel. So
each value has a `Fill`. For each axis, and each atom along it, the fill has what is known of the elements at zeroed
indices of the atom: an `Element`, the numbers that they may be.

Parameters are 0 along their groups. An elementwise operation runs on the numbers that its operands may be, and what all
results have in common is known: that they are one number, or never negative. `exp(0)` is 1, so a softmax over channels
is not exact. `0 * logistic(0)` is 0, so SiLU is exact. `0 * x` is 0, whatever x is. The largest of some channels is the
same without channels of 0 if no channel is ever negative.

Unknown numbers are activations of a working model. They count as finite, and as not zero in a divisor. Numbers that
come from the zeroing are computed, not assumed: `log(0)` and `0 / 0` are not finite.

A group is rejected, and so is not exact, if a reduction over its channels changes without them. The body of a loop is
visited until the fills of its carried values stay the same. So are programs that pass a state on. Each visit knows at
most what the visit before knew. So an atom that one visit rejects is rejected by all later ones.
"""

import functools
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxpruner.structure.axes import Axes, Axis, Index, atoms, product, sizes_of
from jaxpruner.trace.program import Cond, Interpreter, Loop, Position, Program, Scan, While
from jaxpruner.tree import Path

if TYPE_CHECKING:
    from jaxpruner.structure.programs import Trace

# What is known of an element of a value: the one number that it equals, or numbers of all sizes that stand for all that
# it may be, whatever the parameters and inputs are.
Element = tuple[Any, ...]
Fills = list['Fill']
# The leaf and axis of some members of a group.
Members = frozenset[tuple[Path, int]]

_USUAL = 0.25, 1.0, 2.75, 50.0
_LARGEST = 1e37
ZERO: Element = (0,)
NEVER_NEGATIVE: Element = (0.0, 1 / _LARGEST, *_USUAL, 3e4, _LARGEST)
NEVER_POSITIVE: Element = tuple([-number for number in NEVER_NEGATIVE])
ANY: Element = NEVER_NEGATIVE + NEVER_POSITIVE
NOT_FINITE: Element = (np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0)  # at least not always


def is_finite(element: Element) -> bool:
    """Whether an element is finite."""
    return bool(np.isfinite(element[0]))


def known_of(numbers: Any) -> Element:
    """What is known of an element that is one of these numbers.

    >>> known_of([3, 3.0]), known_of([0, 2]) == NEVER_NEGATIVE
    ((3.0,), True)
    """
    array = np.asarray(numbers)
    if array.dtype.kind not in 'biufc':  # small floats such as bfloat16
        array = array.astype(np.float64)
    if array.size and (array == array.flat[0]).all():
        return (array.flat[0].item(),)
    if not np.isfinite(array).all():
        return NOT_FINITE
    if array.dtype == bool:
        return (False, True)
    if np.iscomplexobj(array) or not ((array >= 0).all() or (array <= 0).all()):
        return ANY
    return NEVER_NEGATIVE if (array >= 0).all() else NEVER_POSITIVE


@functools.lru_cache(4096)
def one_of(*elements: Element) -> Element:
    """What is known of an element that is one of these elements."""
    return elements[0] if len(set(elements)) == 1 else known_of(sum(elements, ()))


@functools.lru_cache(4096)
def repeated(combine: np.ufunc, element: Element) -> Element:
    """What is known of one or several such elements that an operation combines."""
    numbers = np.array(element)
    with np.errstate(all='ignore'):
        return known_of([*numbers, *combine.outer(numbers, numbers).ravel()])


@functools.lru_cache(4096)
def times(one: Element, other: Element) -> Element:
    """What is known of a product of two elements, and of sums of such products."""
    with np.errstate(all='ignore'):
        return repeated(np.add, known_of(np.multiply.outer(one, other)))


class Fill(NamedTuple):
    """What is known of the elements of a value in a program whose channels are zeroed.

    Attributes:
      everywhere: of all elements, in the whole model and without the channels. If it is one number, the value is the
        model's own literal.
      channels: (axis, atom) -> of the elements at all removed indices of the atom along this axis, if more is known.
    """

    everywhere: Element = ANY
    channels: Mapping[tuple[int, Axis], Element] = {}

    @classmethod
    def of(cls, everywhere: Element, channels: Mapping[tuple[int, Axis], Element]) -> 'Fill':
        """The fill of a value that may have several sources. Some of its elements may be infinite, but not all."""
        return cls(ANY if everywhere == NOT_FINITE else everywhere, channels)

    def at(self, axis: int | None, atom: Axis) -> Element:
        """The elements at removed indices of an atom along an axis; nothing is known of them if there is no axis."""
        return ANY if axis is None else self.channels.get((axis, atom), self.everywhere)

    def joined(self, other: 'Fill') -> 'Fill':
        """The fill of a value that is this one or another one with the same axes."""
        places = {**self.channels, **other.channels}
        channels = {place: one_of(self.at(*place), other.at(*place)) for place in places}
        return Fill.of(one_of(self.everywhere, other.everywhere), channels)

    def along(self, step: int) -> 'Fill':
        """The fill of a value that has more axes in front, or fewer."""
        moved = {(axis + step, atom): own for (axis, atom), own in self.channels.items()}
        return self._replace(channels={place: own for place, own in moved.items() if place[0] >= 0})


class ZeroedEquation(NamedTuple):
    """An equation of a program in which channels are zeroed.

    Attributes:
      walk: through the program.
      equation: the equation.
      fills: of its operands.
      position: of the equation.
      operands: the axes of its operands.
      results: the axes of its results.
    """

    walk: 'ZeroWalk'
    equation: Any
    fills: Fills
    position: Position
    operands: Sequence[Axes]
    results: Sequence[Axes]

    def result(
        self, find: Callable[[int, Axis], Element], everywhere: Element = ANY, number: int = 0
    ) -> Fill:
        """The fill of a result, with what `find(axis, atom)` returns for each of its axes and atoms."""
        is_known = len(everywhere) == 1
        places = [] if is_known else self.walk.places(self.results[number])
        return Fill.of(everywhere, {place: find(*place) for place in places})

    def reject(self, atom: Axis, reason: str, element: Element) -> None:
        """Notes that removing channels of this atom is not the same as zeroing them, which makes them this element."""
        own = self.position.reason(self.equation, reason)
        cause = own if is_finite(element) else self.walk.causes.get(atom, own)
        self.walk.inexact.setdefault(atom, cause)


_COUNT = 512  # of samples, so that most pairs of numbers are among them
# Common operations run in NumPy, since JAX would compile them. These have another name there.
_IN_NUMPY = {
    pair.partition('=')[0]: pair.partition('=')[2]
    for pair in 'and=bitwise_and div=divide eq=equal ge=greater_equal gt=greater le=less_equal lt=less max=maximum '
    'min=minimum mul=multiply neg=negative not=invert or=bitwise_or sub=subtract'.split()
}
# These NumPy does not have.
_FORMULAS: dict[str, Callable[..., Any]] = {
    'erf': lambda x, **_: np.vectorize(math.erf)(x),
    'erfc': lambda x, **_: np.vectorize(math.erfc)(x),
    'integer_pow': lambda x, y: x**y,
    'logistic': lambda x, **_: 1 / (1 + np.exp(-x)),
    'rsqrt': lambda x, **_: 1 / np.sqrt(x),
}


@functools.lru_cache(4096)
def _sampled(primitive: Any, params: Any, operands: Sequence[tuple[Any, ...]]) -> Element:
    """Runs an operation on numbers that its operands may be.

    Each operand is its element, its dtype, the number of the first operand that is the same variable, and whether it is
    a literal.
    """
    known = [element[0] for element, *_ in operands if len(element) == 1 or not is_finite(element)]
    own = [element[0] for element, *_, is_literal in operands if is_literal]
    is_zeroed = len(known) > len(own)
    is_usual = np.ones(_COUNT, bool)
    arrays: list[Any] = []
    try:
        with np.errstate(all='ignore'), jax.ensure_compile_time_eval():
            for number, (element, dtype, first, _) in enumerate(operands):
                if first < number:
                    arrays.append(arrays[first])
                    continue
                drawn = np.array(element)
                if len(element) > 1:
                    # Numbers that it is compared with are among those that it may be.
                    numbers = [*element, *filter(np.isfinite, known)]
                    drawn = np.random.default_rng(number).choice(np.real(numbers), _COUNT)
                    if dtype.kind in 'iu':
                        info = np.iinfo(dtype)
                        drawn = np.clip(drawn, float(info.min), float(info.max) / 2)
                    elif dtype.kind != 'b' and is_finite(element):
                        is_usual &= np.isin(np.abs(drawn), _USUAL)
                    if dtype.kind == 'c':
                        drawn = drawn * (1 + 0.75j)
                arrays.append(np.broadcast_to(drawn, _COUNT).astype(dtype))
            name: str = primitive.name
            settings = dict(params)
            function = getattr(np, _IN_NUMPY.get(name, name), None)
            kinds = {each.dtype.kind for each in arrays}
            is_alike = kinds == {'f'} or (kinds in ({'b'}, {'i'}) and name != 'div')
            if isinstance(function, np.ufunc) and is_alike:
                results = function(*arrays)
            elif name in _FORMULAS and kinds == {'f'}:
                results = _FORMULAS[name](*arrays, **settings)
            elif name == 'convert_element_type' and settings['new_dtype'].kind == 'f':
                results = arrays[0].astype(settings['new_dtype'])
            elif name == 'select_n' and arrays[0].dtype == bool:
                results = np.where(arrays[0], arrays[2], arrays[1])
            else:
                results = primitive.bind(*arrays, **settings)
        array = np.asarray(results[0] if primitive.multiple_results else results)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return NOT_FINITE if is_zeroed else ANY  # nothing is assumed of what cannot be run
    array = array[np.isfinite(array) | is_usual]  # extreme activations do not count
    made = array[~np.isfinite(array)]
    if 0 < made.size < array.size and (not is_zeroed or set(made.tolist()) <= set(own)):
        # Infinite literals are the model's own, such as that of a mask.
        array = array[array == array].astype(np.result_type(array, np.float64))
        array = np.clip(array, -_LARGEST, _LARGEST)
    return known_of(array)


def of_constant(value: Any, places: Iterable[tuple[int, Axis]] = ()) -> Fill:
    """The fill of a constant.

    Args:
      value: the constant.
      places: its axes, each with each atom that could be removed.
    """
    try:
        element = known_of(value)
    except (RuntimeError, TypeError, ValueError):  # a key, a tracer, or an array on another host
        element = ANY
    return Fill.of(element, dict.fromkeys(places, element))


def unknown_fills(zeroed: ZeroedEquation) -> Fills:
    """Knows nothing of the results."""
    return [Fill()] * len(zeroed.results)


def elementwise_fills(zeroed: ZeroedEquation) -> Fills:
    """Computes the elements of the result from those of the operands."""
    equation, fills = zeroed.equation, zeroed.fills
    if equation.primitive.name in ('add', 'add_any'):
        for fill, axes, other in zip(fills, zeroed.operands, reversed(fills), strict=True):
            if other.everywhere == ZERO and sizes_of(axes) == sizes_of(zeroed.results[0]):
                return [fill]  # itself, by which a scan knows what a trip does not change
    params = tuple(sorted(equation.params.items()))
    dtypes = [variable.aval.dtype for variable in equation.invars]
    variables = list(map(id, equation.invars))
    firsts = list(map(variables.index, variables))
    are_literals = [len(fill.everywhere) == 1 for fill in fills]

    def compute(elements: Iterable[Element]) -> Element:
        operands = tuple(zip(elements, dtypes, firsts, are_literals, strict=True))
        return _sampled(equation.primitive, params, operands)

    everywhere = compute([fill.everywhere for fill in fills])
    if len(everywhere) == 1:
        if all(are_literals) or (any(are_literals) and is_finite(everywhere)):
            return [Fill(everywhere)]
        everywhere = ANY

    def find(i: int, atom: Axis) -> Element:
        size = zeroed.results[0][i].size
        elements = []
        for fill, axes in zip(fills, zeroed.operands, strict=True):
            is_repeated = not axes or axes[i].size != size
            elements.append(fill.everywhere if is_repeated else fill.at(i, atom))
        element = compute(elements)
        if not is_finite(element) and all(map(is_finite, elements)):
            reason = (
                f'{element[0]} at zeroed channels; keep what is divided by away from 0, as by '
                'jnp.maximum(divisor, 1e-6)'
            )
            zeroed.walk.causes[atom] = zeroed.position.reason(equation, reason)
        return element

    return [zeroed.result(find, everywhere)]


def _times_in(atom: Axis, axis: Axis) -> int:
    """How many indices of an atom each element along an axis has, at most."""
    counts = [_times_in(atom, part) for part in axis.parts]
    return sum(counts) if axis.form == 'product' else max(counts, default=axis.resolved() is atom)


def moved(*numbers: int, sums: bool = False) -> Callable[[ZeroedEquation], Fills]:
    """The rule of a primitive each of whose results' elements is one of the operands' elements.

    Args:
      *numbers: of the operands that hold elements, and no indices; all by default.
      sums: whether the elements are sums or products of the operands' elements.
    """

    def rule(zeroed: ZeroedEquation) -> Fills:
        chosen = numbers or range(len(zeroed.operands))
        sources = [(zeroed.fills[number], zeroed.operands[number]) for number in chosen]
        # What a gather fills in for an index beyond the end. NaN would spoil the whole model anyway.
        value = zeroed.equation.params.get('fill_value')
        if value is not None and value == value:
            sources.append((of_constant(value), ()))

        def find(result: Axes, _: int, atom: Axis) -> Element:
            elements = []
            for fill, axes in sources:
                places = zeroed.walk.places(axes)
                elements += [fill.at(i, atom) for i, other in places if other is atom]
            # Where the result has the atom once more, as when pairs are made, it has other elements at removed indices.
            most = max([_times_in(atom, product(axes)) for _, axes in sources])
            if not elements or _times_in(atom, product(result)) > most:
                return ANY
            element = one_of(*elements, *[fill.everywhere for fill, axes in sources if not axes])
            return times(element, ANY) if sums else element

        everywhere = ANY if sums else one_of(*[fill.everywhere for fill, _ in sources])
        return [
            zeroed.result(functools.partial(find, result), everywhere, number)
            for number, result in enumerate(zeroed.results)
        ]

    return rule


def product_fills(zeroed: ZeroedEquation) -> Fills:
    """A contraction. Only zeros are known of a sum of products."""
    left, right = zeroed.fills[:2]
    indices = Index.all_of(zeroed.equation)
    summed: set[Axis] = set()
    for index in indices:
        if index.result is None and index.right is not None:
            for atom in zeroed.walk.candidates(zeroed.operands[1][index.right]):
                summed.add(atom)
                element = times(left.at(index.left, atom), right.at(index.right, atom))
                if element != ZERO:
                    zeroed.reject(atom, 'sums products of channels that are not zero', element)
    is_conv = zeroed.equation.primitive.name == 'conv_general_dilated'
    index_of = {index.result: index for index in indices}

    def find(axis: int, atom: Axis) -> Element:
        i, k, _ = index_of[axis]
        if is_conv and i is None and atom not in summed:
            i = indices[0].left  # a group of outputs has channels of the image
        return times(left.at(i, atom), right.at(k, atom))

    return [zeroed.result(find, times(left.everywhere, right.everywhere))]


# Reduction -> the operation that it repeats.
REDUCTIONS: dict[str, np.ufunc] = {
    'reduce_and': np.logical_and,
    'reduce_max': np.maximum,
    'reduce_min': np.minimum,
    'reduce_or': np.logical_or,
    'reduce_prod': np.multiply,
    'reduce_sum': np.add,
    'pmax': np.maximum,
    'pmin': np.minimum,
    'psum': np.add,
}


def reduce_fills(zeroed: ZeroedEquation) -> Fills:
    """A reduction of each operand, which has to stay the same without removed channels."""
    combine = REDUCTIONS[zeroed.equation.primitive.name]
    reduced = zeroed.equation.params['axes']
    results = []
    for number, (fill, axes) in enumerate(zip(zeroed.fills, zeroed.operands, strict=True)):
        numbers = np.array(fill.everywhere)
        for i in reduced:
            for atom in zeroed.walk.candidates(axes[i]):
                element = fill.at(i, atom)
                is_known = len(element) == 1
                if not is_known or (combine(numbers, element[0]) != numbers).any():
                    found = element[0] if is_known or not is_finite(element) else 'unknown'
                    reason = f'meets {found} at zeroed channels, which may change it'
                    zeroed.reject(atom, reason, element)
        kept = [i for i in range(len(axes)) if i not in reduced]

        def find(k: int, atom: Axis, fill: Fill = fill, kept: Sequence[int] = kept) -> Element:
            return repeated(combine, fill.at(kept[k], atom))

        results.append(zeroed.result(find, repeated(combine, fill.everywhere), number))
    return results


def inexact_atoms(
    traces: Sequence['Trace'], members: Mapping[Axis, Members] | None = None
) -> dict[Axis, str]:
    """Finds the atoms that are not exact, with the reason: removing their channels differs from zeroing them.

    The parameters are zeroed, and so is the state of the first call. The state that a call returns goes into the next
    call of any program, until the fills of the state stay the same.

    Args:
      traces: of the programs of a model.
      members: atom -> those of its members that are zeroed. Nothing is known of others, and of the state. By default
        all members are zeroed.
    """
    leaves = traces[0].leaves
    in_leaves = [atom for axes in leaves.values() for atom in atoms(*axes)]
    removable = frozenset([atom for atom in in_leaves if atom.pin is None and atom.size > 1])
    walks = [ZeroWalk(trace, removable) for trace in traces]

    def zeroed(path: Path, axes: Axes) -> Fill:
        places = walks[0].places(axes)
        if members is not None:
            places = [(i, atom) for i, atom in places if (path, i) in members.get(atom, ())]
        return Fill(channels=dict.fromkeys(places, ZERO))

    fills = [zeroed(path, axes) for path, axes in leaves.items()]
    states = {path: zeroed(path, axes) for each in traces for path, axes in each.states.items()}
    before = None
    while states != before:
        before = dict(states)
        for walk in walks:
            results = walk.run([*fills, *[states[path] for path in walk.trace.states]])
            for number, path in walk.trace.returned.items():
                states[path] = states[path].joined(results[number])
    # The reason in the first program counts.
    return dict(ChainMap(*[walk.inexact for walk in walks]))


class ZeroWalk(Interpreter[Fill]):
    """Follows the fills of values through a program.

    Attributes:
      removable: the atoms of which channels are zeroed.
      inexact: those that are not exact, with the reason.
      causes: what last made zeroed channels infinite or NaN.
      operands: path of an equation -> the fills of its operands.
    """

    def __init__(self, trace: 'Trace', removable: frozenset[Axis] = frozenset()):
        self.trace = trace
        self.removable = removable
        self.inexact: dict[Axis, str] = {}
        self.causes: dict[Axis, str] = {}
        self.operands: dict[tuple[int, ...], Fills] = {}

    def run(self, fills: Sequence[Fill]) -> Fills:
        """Goes through the whole program with these parameters and states; returns the fills of its results."""
        inputs = [Fill()] * (len(self.trace.program.jaxpr.invars) - len(fills))
        return self.visit_all(self.trace.program, [*fills, *inputs])

    def candidates(self, axis: Axis) -> list[Axis]:
        """The atoms of an axis that could be removed."""
        return [atom for atom in atoms(axis) if atom in self.removable]

    def places(self, axes: Axes) -> list[tuple[int, Axis]]:
        """The axes of a value, each with each of its atoms that could be removed."""
        return [(i, atom) for i, axis in enumerate(axes) for atom in self.candidates(axis)]

    def constant(self, value: Any, aval: Any) -> Fill:
        return of_constant(value)

    def unneeded(self, equation: Any, operands: Any) -> Fills:
        return [Fill()] * len(equation.outvars)

    def visit_constants(self, program: Program, position: Position) -> Fills:
        axes = map(self.places, self.trace.constants[position.path])
        return list(map(of_constant, program.constants, axes))

    def visit_plain(self, equation: Any, operands: Fills, position: Position) -> Fills:
        axes = self.trace.equations[position.path]
        self.operands[position.path] = operands
        zeroed = ZeroedEquation(self, equation, operands, position, axes.operands, axes.results)
        return axes.row.fills(zeroed)

    def visit_scan(self, scan: Scan, operands: Fills, position: Position) -> Fills:
        _, before, sliced = scan.split(operands)
        slices = [fill.along(-1) for fill in sliced]
        _, results = self._settle(scan, operands, slices, position)
        after, stacked = scan.split_results(results)
        inside = position.in_body(scan)
        for atom in self.candidates(self.trace.trips[position.path]):
            # Without channels, but with what is known of all elements of the slices.
            first = [Fill() for _ in before]
            own = [Fill(fill.at(0, atom)) for fill in sliced]
            inputs = [*[Fill()] * scan.first_carried, *first, *own]
            results = ZeroWalk(self.trace).visit_program(scan.body, inputs, inside)
            returned = zip(first, results, inside.needed, strict=False)
            if not all(last is fill for fill, last, is_needed in returned if is_needed):
                reason = 'a trip without its parameters changes what is carried'
                self.inexact.setdefault(atom, position.reason(scan.equation, reason))
        return (after if scan.length else before) + [fill.along(1) for fill in stacked]

    def visit_while(self, loop: While, operands: Fills, position: Position) -> Fills:
        carried, _ = self._settle(loop, operands, [], position)
        self.visit_condition(loop, operands, carried, position)
        return carried

    def _settle(
        self, loop: Loop, operands: Fills, slices: Fills, position: Position
    ) -> tuple[Fills, Fills]:
        """The fills of carried values before every visit of a loop's body, and of the last visit's results."""
        _, carried, _ = loop.split(operands)
        while True:
            results = self.visit_body(loop, operands, carried, slices, position)
            joined = list(map(Fill.joined, carried, results))
            if joined == carried:
                return carried, results
            carried = joined

    def visit_cond(self, cond: Cond, operands: Fills, position: Position) -> Fills:
        joined, *others = self.visit_branches(cond, operands, position)
        for results in others:
            joined = list(map(Fill.joined, joined, results))
        return joined
