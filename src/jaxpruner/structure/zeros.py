"""Finds the exact groups: what is known of removed channels once their parameters are zero is followed to every sum.

Removing channels is the same as zeroing them if the zeroed channels affect nothing else. An elementwise operation never
mixes channels. A sum over channels does. It is the same without a channel only if it adds zero for that channel. So
each value has a `Fill`. For each axis, and each atom along it, the fill has what is known of the elements at zeroed
indices of the atom: an `Element`.

Parameters are 0 along their groups. An elementwise operation is run on samples: the number of an operand that is known,
and numbers of all sizes for one that is not. What all samples agree on is known of the result. `exp(0)` is 1, so a
softmax over channels is not exact. `0 * logistic(0)` is 0, so SiLU is exact. `0 * x` is 0, whatever x is.

Unknown numbers are activations of a working model. They count as finite, and as not zero in a divisor. Numbers that
come from the zeroing are computed, not assumed: `log(0)` and `0 / 0` are not finite.

An element also has the signs that it may have, whatever the parameters and inputs are. The largest of some channels is
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
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes, Axis, atoms, pick, product, sizes_of
from jaxpruner.structure.traces import has_type_of, indices_of_contraction, pin_at
from jaxpruner.trace.interpreter import Interpreter, Position
from jaxpruner.trace.program import Cond, Program, ProgramPath, Scan, While
from jaxpruner.trace.values import Constant
from jaxpruner.trace.views import all_but
from jaxpruner.tree import Path

if TYPE_CHECKING:
    from jaxpruner.structure.programs import Trace

Fills = list['Fill']
# The leaf and axis of some members of a group.
Members = frozenset[tuple[Path, int]]

# One object for all that may not be finite, so that it equals itself in keys of caches.
NAN = float('nan')


class Element(NamedTuple):
    """What is known of an element of a value.

    Attributes:
      number: that it equals, of any dtype of JAX; `NAN` if it may not be finite; `None` if nothing is known.
      signs: that it may have, besides 0. What is no real number counts as of any sign.
    """

    number: Any = None
    signs: frozenset[int] = frozenset({-1, 1})

    @classmethod
    def of(cls, array: np.ndarray, number: Any = None) -> 'Element':
        """Any element of an array.

        >>> sorted(Element.of(np.array([0, 2, 3])).signs)
        [1]
        """
        if np.iscomplexobj(array):
            return cls(number)
        # NaN may be anything.
        signs = {-1: not (array >= 0).all(), 1: not (array <= 0).all()}
        return cls(number, frozenset([sign for sign, may_be in signs.items() if may_be]))

    @property
    def is_finite(self) -> bool:
        """Whether it is finite. An unknown number counts as finite."""
        return self.number is None or bool(np.isfinite(self.number))

    def times(self, other: 'Element') -> 'Element':
        """What is known of a product of two elements, and of sums of such products: whether it is zero, and signs."""
        signs = frozenset([one * another for one in self.signs for another in other.signs])
        if not (self.is_finite and other.is_finite):
            return Element(NAN, signs)
        is_zero = self.number == 0 or other.number == 0
        return ZERO if is_zero else Element(None, signs)


ANY = Element()
ZERO = Element(0, frozenset())
# (axis, atom) -> the elements at removed indices of the atom along this axis.
Find = Callable[[int, Axis], Element]


def join(elements: Iterable[Element], infinite: Any = NAN) -> Element:
    """What is known of an element that is one of these, with this number if they differ and one may not be finite."""
    first, *others = elements
    signs = first.signs.union(*[other.signs for other in others])
    if all(other.number == first.number or other.number is first.number for other in others):
        return Element(first.number, signs)
    are_finite = all(element.is_finite for element in (first, *others))
    return Element(None if are_finite else infinite, signs)


class Fill(NamedTuple):
    """What is known of the elements of a value in a program whose channels are zeroed.

    Attributes:
      everywhere: of all elements, in the whole model and without the channels.
      channels: (axis, atom) -> of the elements at all removed indices of the atom along this axis, if more is known.
    """

    everywhere: Element = ANY
    channels: Mapping[tuple[int, Axis], Element] = {}

    def at(self, axis: int | None, atom: Axis) -> Element:
        """The elements at removed indices of an atom along an axis; nothing is known of them if there is no axis."""
        return ANY if axis is None else self.channels.get((axis, atom), self.everywhere)

    def joined(self, other: 'Fill') -> 'Fill':
        """The fill of a value that is this one or another one with the same axes."""
        places = {**self.channels, **other.channels}
        channels = {place: join([self.at(*place), other.at(*place)]) for place in places}
        return Fill(join([self.everywhere, other.everywhere], infinite=None), channels)

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

    def result(self, find: Find, everywhere: Element = ANY, number: int = 0) -> Fill:
        """The fill of a result, with what `find(axis, atom)` returns for each of its axes and atoms."""
        places = self.walk.places(self.results[number])
        is_known = everywhere.number is not None
        return Fill(everywhere, {} if is_known else {place: find(*place) for place in places})

    def reject(self, atom: Axis, reason: str, element: Element) -> None:
        """Notes that removing channels of this atom is not the same as zeroing them, which makes them this element."""
        own = str(pin_at(self.position, self.equation, reason))
        cause = own if element.is_finite else self.walk.causes.get(atom, own)
        self.walk.inexact.setdefault(atom, cause)


def computed(equation: Any, elements: Sequence[Element], fills: Sequence[Fill]) -> Element:
    """What is known of the result of an elementwise operation on some elements of operands with these fills."""
    dtypes = [variable.aval.dtype for variable in equation.invars]
    variables = list(map(id, equation.invars))
    # A literal is the model's own number, not made by zeroing.
    are_literals = [fill.everywhere.number is not None for fill in fills]
    firsts = map(variables.index, variables)
    operands = tuple(zip(elements, dtypes, firsts, are_literals, strict=True))
    return _sampled(equation.primitive, tuple(sorted(equation.params.items())), operands)


_COUNT = 512  # of samples, so that all pairs of numbers are among them
# Common operations run in NumPy, since JAX would compile them. These have another name there.
_IN_NUMPY: dict[str, str] = dict(
    zip(
        'div eq ge gt le lt max min mul neg sub'.split(),
        'divide equal greater_equal greater less_equal less maximum minimum multiply negative subtract'.split(),
        strict=True,
    )
)


@functools.lru_cache(4096)
def _sampled(primitive: Any, params: Any, operands: Sequence[tuple[Any, ...]]) -> Element:
    """Runs an operation on samples of its operands.

    Each operand is its element, its dtype, the number of the first operand that is the same variable, and whether it is
    a literal.
    """
    elements, _, _, are_literals = zip(*operands, strict=True)
    known = [element.number for element in elements if element.number is not None]
    own = [each.number for each in itertools.compress(elements, are_literals)]
    is_zeroed = len(known) > len(own)
    is_usual = np.ones(_COUNT, bool)  # neither 0 nor extreme
    arrays: list[Any] = []
    try:
        with np.errstate(all='ignore'), jax.ensure_compile_time_eval():
            for number, (element, dtype, first, _) in enumerate(operands):
                if first < number:
                    arrays.append(arrays[first])
                    continue
                samples, usual = _samples_of(element, dtype, known)
                places = np.random.default_rng(number).integers(len(samples), size=_COUNT)
                arrays.append(samples[places])
                is_usual &= places < usual
            name: str = primitive.name
            function = getattr(np, _IN_NUMPY.get(name, name), None)
            if isinstance(function, np.ufunc) and all(each.dtype.kind == 'f' for each in arrays):
                results = function(*arrays)
            else:
                results = primitive.bind(*arrays, **dict(params))
        array = _of_numpy(results[0] if primitive.multiple_results else results)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return Element(NAN) if is_zeroed else ANY  # nothing is assumed of what cannot be run
    finite = np.isfinite(array)
    result = Element.of(array[finite])
    array = array[finite | is_usual]  # extreme activations do not count
    if array.size and (array == array[0]).all():
        return result._replace(number=_item(array))
    # An infinite literal is the model's own, such as that of a mask.
    is_made = is_zeroed and not np.isin(array[~np.isfinite(array)], own).all()
    return result._replace(number=NAN) if is_made else result


def _samples_of(element: Element, dtype: Any, known: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Numbers that an operand may be: usual ones, how many these are, then 0, extreme ones, and some known ones."""
    number, signs = element
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    if number is not None:
        is_known = number == number
        if not (is_known or is_inexact):
            raise ValueError('a number that is not finite was cast')
        numbers = [number] if is_known else [np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0]
        return np.array(numbers).astype(dtype), len(numbers)
    if dtype.kind == 'b':
        return np.array([False, True]), 2
    info = (jnp.finfo if is_inexact else jnp.iinfo)(dtype)
    sizes = [0.25, 1.0, 2.75, 50.0], [float(info.max) / 2, float(getattr(info, 'tiny', 1))]
    usual, extreme = [[sign * size for sign in signs for size in each] for each in sizes]
    others = [each for each in known if not isinstance(each, complex) and np.isfinite(each)]
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


def _item(array: np.ndarray) -> Any:
    """The first element. All NaNs become the same object."""
    value = array.ravel()[0].item()
    return NAN if value != value else value


def of_constant(value: Any, places: Iterable[tuple[int, Axis]] = ()) -> Fill:
    """The fill of a constant. It says whether all elements are one number, and otherwise whether some are not finite.

    Args:
      value: the constant.
      places: its axes, each with each atom that could be removed.
    """
    array = Constant(lambda: value).array()
    if array is None:  # such as a key, or an array on another host
        return Fill()
    array = _of_numpy(array)
    if array.size and (array == array.ravel()[0]).all():
        return Fill(Element.of(array, _item(array)))
    element = Element.of(array, None if np.isfinite(array).all() else NAN)
    return Fill(element._replace(number=None), dict.fromkeys(places, element))


# Reduction -> the number that changes no result.
NEUTRAL: dict[str, int] = {'reduce_and': 1, 'reduce_or': 0, 'reduce_prod': 1, 'reduce_sum': 0}
# Reduction -> the sign of elements that it takes only if there is no 0.
LESSER = {'reduce_max': -1, 'reduce_min': 1}
# Reductions along an axis over which the program was mapped -> the same reductions of arrays.
COLLECTIVES = {'pmax': 'reduce_max', 'pmin': 'reduce_min', 'psum': 'reduce_sum'}
REDUCTIONS = (*NEUTRAL, *LESSER, *COLLECTIVES)


def unknown_fills(zeroed: ZeroedEquation) -> Fills:
    """Knows nothing of the results, except that numbers that are not finite may spread."""

    def find(axis: int, atom: Axis) -> Element:
        known = [fill.channels for fill in zeroed.fills]
        own = [each[place] for each in known for place in each if place[1] is atom]
        return ANY if all(element.is_finite for element in own) else Element(NAN)

    return [zeroed.result(find, number=number) for number in range(len(zeroed.results))]


def elementwise_fills(zeroed: ZeroedEquation) -> Fills:
    """Computes the elements of the result from those of the operands."""
    equation, fills = zeroed.equation, zeroed.fills
    if equation.primitive.name in ('add', 'add_any'):
        for number, other in ((0, 1), (1, 0)):
            is_same = has_type_of(equation.invars[number].aval, equation.outvars[0].aval)
            if fills[other].everywhere.number == 0 and is_same:
                return [fills[number]]  # itself, by which a scan knows what a trip does not change
    literals = [fill.everywhere for fill in fills if fill.everywhere.number is not None]
    everywhere = computed(equation, [fill.everywhere for fill in fills], fills)
    is_literal = len(literals) == len(fills) or (literals and everywhere.is_finite)
    if is_literal and everywhere.number is not None:
        return [Fill(everywhere)]

    def find(i: int, atom: Axis) -> Element:
        size = zeroed.results[0][i].size
        elements = []
        for fill, axes in zip(fills, zeroed.operands, strict=True):
            is_repeated = not axes or axes[i].size != size
            elements.append(fill.everywhere if is_repeated else fill.at(i, atom))
        element = computed(equation, elements, fills)
        if not element.is_finite and all(each.is_finite for each in elements):
            reason = (
                f'{element.number} at zeroed channels; keep what is divided by away from 0, as by '
                'jnp.maximum(divisor, 1e-6)'
            )
            zeroed.walk.causes[atom] = str(pin_at(zeroed.position, equation, reason))
        return element

    return [zeroed.result(find, everywhere._replace(number=None))]


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

    def result(zeroed: ZeroedEquation, number: int) -> Fill:
        chosen = numbers or range(len(zeroed.operands))
        sources = [(zeroed.fills[n], zeroed.operands[n]) for n in chosen]
        # For an index beyond the end a gather may fill a number in. NaN would spoil the whole model anyway.
        params = zeroed.equation.params
        if 'fill_value' in params and 'FILL' in str(params['mode']):
            value, dtype = params['fill_value'], zeroed.equation.outvars[0].aval.dtype
            is_finite = value is not None and np.isfinite(value)
            if is_finite or not jnp.issubdtype(dtype, jnp.inexact):
                sources.append((of_constant(value), ()))

        def find(k: int, atom: Axis) -> Element:
            elements = []
            for fill, axes in sources:
                with_atom = [i for i, other in zeroed.walk.places(axes) if other is atom]
                same = [i for i in with_atom if axes[i] is zeroed.results[number][k]]
                elements += [fill.at(i, atom) for i in same or with_atom]
            # Where the result has the atom once more, as when pairs are made, it has other elements at removed indices.
            counts = [_times_in(atom, product(axes)) for _, axes in sources]
            if not elements or _times_in(atom, product(zeroed.results[number])) > max(counts):
                return ANY
            element = join([*elements, *[fill.everywhere for fill, axes in sources if not axes]])
            return element.times(ANY) if sums else element

        everywhere = join([fill.everywhere for fill, _ in sources], infinite=None)
        return zeroed.result(find, ANY if sums else everywhere, number)

    return lambda zeroed: [result(zeroed, number) for number in range(len(zeroed.results))]


def product_fills(zeroed: ZeroedEquation) -> Fills:
    """A contraction. Only zeros are known of a sum of products."""
    left, right = zeroed.fills[:2]
    left_axes, right_axes = zeroed.operands[:2]
    candidates = zeroed.walk.candidates
    indices = indices_of_contraction(zeroed.equation)
    summed: set[Axis] = set()
    for index in indices:
        if index.result is None and index.right is not None:
            for atom in candidates(right_axes[index.right]):
                summed.add(atom)
                element = left.at(index.left, atom).times(right.at(index.right, atom))
                if element.number != 0:
                    zeroed.reject(atom, 'sums products of channels that are not zero', element)
    # Each group of a convolution has channels of the image, and outputs of the kernel.
    is_conv = zeroed.equation.primitive.name == 'conv_general_dilated'
    channels = indices[0].left if is_conv else None
    index_of = {index.result: index for index in indices}

    def find(axis: int, atom: Axis) -> Element:
        i, k, _ = index_of.get(axis, (None, None, None))
        if k is not None and channels is not None and atom not in summed:
            i = channels if atom in candidates(left_axes[channels]) else None
        return left.at(i, atom).times(right.at(k, atom))

    return [zeroed.result(find, left.everywhere.times(right.everywhere))]


def reduce_fills(zeroed: ZeroedEquation) -> Fills:
    """A reduction of each operand, which has to be neutral at removed channels."""
    primitive: str = zeroed.equation.primitive.name
    name = COLLECTIVES.get(primitive, primitive)

    def result(number: int, fill: Fill, axes: Axes) -> Fill:
        kept = all_but(zeroed.equation.params['axes'], axes)
        reduced = all_but(kept, axes)
        is_lesser = name in LESSER and LESSER[name] not in fill.everywhere.signs
        neutral = NEUTRAL.get(name, 0 if is_lesser else None)
        for i in reduced:
            for atom in zeroed.walk.candidates(axes[i]):
                element = fill.at(i, atom)
                if element.number is None or element.number != neutral:
                    found = 'unknown' if element.number is None else element.number
                    where = ', which may be extreme' if name in LESSER else ''
                    zeroed.reject(atom, f'meets {found} at zeroed channels{where}', element)
        count = math.prod(sizes_of(pick(axes, reduced)))

        def reduce(element: Element) -> Element:
            """The reduction of `count` elements like this one."""
            value, signs = element
            if not element.is_finite:
                return Element(NAN)
            if name == 'reduce_sum' and value is not None:
                value *= count
            if name in ('reduce_sum', *LESSER):
                return Element(value, signs)
            return ANY if name == 'reduce_prod' and value not in (0, 1) else Element(value)

        def find(k: int, atom: Axis) -> Element:
            return reduce(fill.at(kept[k], atom))

        return zeroed.result(find, reduce(fill.everywhere), number)

    pairs = zip(zeroed.fills, zeroed.operands, strict=True)
    return [result(number, fill, axes) for number, (fill, axes) in enumerate(pairs)]


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
    in_leaves = [atom for axes in traces[0].leaves.values() for atom in atoms(*axes)]
    removable = frozenset([atom for atom in in_leaves if atom.pin is None and atom.size > 1])
    walks = [ZeroWalk(trace, removable) for trace in traces]

    def zeroed(path: Path, axes: Axes) -> Fill:
        places = walks[0].places(axes)
        if members is not None:
            places = [(i, atom) for i, atom in places if (path, i) in members.get(atom, ())]
        return Fill(channels=dict.fromkeys(places, ZERO))

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
                states[path] = states[path].joined(results[number])
    inexact: dict[Axis, str] = {}
    for walk in reversed(walks):  # the reason in the first program counts
        inexact |= walk.inexact
    return inexact


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
        self.operands: dict[ProgramPath, Fills] = {}
        self._candidates: dict[Axis, tuple[Axis, ...]] = {}

    def run(self, fills: Sequence[Fill]) -> Fills:
        """Goes through the whole program with these parameters and states; returns the fills of its results."""
        program = Program.of(self.trace.program)
        inputs = [Fill()] * (len(program.jaxpr.invars) - len(fills))
        position = Position.of_whole(self.trace.program)
        return self.visit_program(program, [*fills, *inputs], position)

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        """The atoms of an axis that could be removed."""
        axis = axis.resolved()
        if axis not in self._candidates:
            own = dict.fromkeys(atoms(axis))
            self._candidates[axis] = tuple([atom for atom in own if atom in self.removable])
        return self._candidates[axis]

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
        _, carried, sliced = scan.split(operands)
        slices = [fill.along(-1) for fill in sliced]
        stacked: Fills = []

        def run(carried: Fills) -> Fills:
            nonlocal stacked
            results = self.visit_body(scan, operands, carried, slices, position)
            carried, stacked = scan.split_results(results)
            return carried

        before, after = _settle(run, carried)
        inside = position.in_body(scan)
        for atom in self.candidates(self.trace.trips[position.path]):
            # Without channels, but with what is known of all elements of the slices.
            first = [Fill() for _ in carried]
            constants = [Fill()] * scan.first_carried
            own = [Fill(fill.at(0, atom)) for fill in sliced]
            inputs = [*constants, *first, *own]
            results = ZeroWalk(self.trace).visit_program(scan.body, inputs, inside)
            returned = zip(first, results, inside.needed, strict=False)
            if not all(last is fill for fill, last, is_needed in returned if is_needed):
                reason = 'a trip without its parameters changes what is carried'
                self.inexact.setdefault(atom, str(pin_at(position, scan.equation, reason)))
        return (after if scan.length else before) + [fill.along(1) for fill in stacked]

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
            joined = list(map(Fill.joined, joined, results))
        return joined


def _settle(run: Callable[[Fills], Fills], carried: Fills) -> tuple[Fills, Fills]:
    """The fills of carried values before every visit of a loop's body, and after the last one."""
    while True:
        after = run(carried)
        joined = list(map(Fill.joined, carried, after))
        if joined == carried:
            return carried, after
        carried = joined
