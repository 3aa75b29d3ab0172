"""Traced programs: the programs inside an equation, what of a program is live, and the one interpreter.

`jit`, `scan`, `while`, `cond` and `shard_map` run programs on their operands. `inside(equation)` reads such an
equation into a record of its programs and of the operands that go into each. JAX renames these primitives and their
parameters between versions: this is the only file that reads them.

An interpreter goes through a program equation by equation. A subclass says what it knows of a value, and what an
equation without a program inside does to it (`visit_plain`).

    Interpreter  goes through the live equations; calls are entered, loops and branches are asked of the subclass
    Run          computes values, and enters loops and branches, too
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, Literal

# The numbers of an equation, of a program inside it, of an equation in that program, …; see `graph.Site`. In a while
# loop, program 0 is the condition and program 1 is the body.
ProgramPath = tuple[int, ...]
# For each of some values, whether it is needed.
Needed = tuple[bool, ...]


class Program(NamedTuple):
    """A program and its constants."""

    jaxpr: Jaxpr
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, jaxpr: Any) -> 'Program':
        """The program of a jaxpr, closed or not."""
        if hasattr(jaxpr, 'jaxpr'):
            return cls(jaxpr.jaxpr, tuple(jaxpr.consts))
        return cls(jaxpr, ())


@dataclasses.dataclass(frozen=True)
class Call:
    """An equation that runs one program on its operands."""

    equation: Any
    program: Program

    def run(self, function: Callable[..., Any], state: Any, operands: Sequence[Any]) -> Any:
        """`function(state, *operands) -> results, state` in the program's place, checkpointed like it."""
        if self.equation.primitive.name == 'remat2':
            settings = {key: self.equation.params[key] for key in ('prevent_cse', 'policy')}
            function = jax.checkpoint(function, **settings)
        return function(state, *operands)


@dataclasses.dataclass(frozen=True)
class ShardMap(Call):
    """A call whose program each device runs on its part of each axis.

    Attributes:
      devices: how many parts there are. Axes of the mesh that are left to the compiler do not count.
    """

    devices: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop. Its operands are constants of its condition, constants of its body, carried values, and sliced ones.

    Attributes:
      first_constant: the number of the first constant of the body.
      first_carried: the number of the first operand that is carried.
      carried: how many are.
    """

    equation: Any
    body: Program
    first_constant: int
    first_carried: int
    carried: int

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits operands into constants of the body, carried and sliced ones."""
        operands, end = list(operands), self.first_carried + self.carried
        constants = operands[self.first_constant : self.first_carried]
        return constants, operands[self.first_carried : end], operands[end:]

    def split_results(self, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits results into carried and stacked ones."""
        return list(results[: self.carried]), list(results[self.carried :])


@dataclasses.dataclass(frozen=True)
class Scan(Loop):
    """A scan."""

    length: int
    reverse: bool
    unroll: int


@dataclasses.dataclass(frozen=True)
class While(Loop):
    """A while loop, in which nothing is sliced."""

    condition: Program


@dataclasses.dataclass(frozen=True)
class Cond:
    """An equation that runs one of its branches. The first operand says which, the others go into the branch."""

    equation: Any
    branches: tuple[Program, ...]


# Calls with a derivative rule of their own.
RULED_BACKWARDS = frozenset(('custom_vjp_call', 'custom_vjp_call_jaxpr'))
RULED = RULED_BACKWARDS | {'custom_jvp_call'}
_CALLS = RULED | frozenset('call closed_call composite jit pjit remat2 shard_map'.split())


def inside(equation: Any) -> Call | Cond | Scan | While | None:
    """The record of the programs inside an equation; `None` if there are none.

    Raises:
      NotImplementedError: this version of JAX writes the primitive in a way that is not known here.
    """
    name, params = equation.primitive.name, equation.params
    try:
        if name == 'scan':
            if 'num_consts' in params:
                constants, carried = params['num_consts'], params['num_carry']
            else:  # JAX 0.12 has groups of constants, carried and sliced operands
                constants, carried, _ = map(len, params['ft_in'].unpack())
            body, length = Program.of(params['jaxpr']), params['length']
            reverse, unroll = params['reverse'], params['unroll']
            return Scan(equation, body, 0, constants, carried, length, reverse, unroll)
        if name == 'while':
            first = params['cond_nconsts']
            first_carried, carried = first + params['body_nconsts'], len(equation.outvars)
            body, condition = Program.of(params['body_jaxpr']), Program.of(params['cond_jaxpr'])
            return While(equation, body, first, first_carried, carried, condition)
        if name == 'cond':
            return Cond(equation, tuple(map(Program.of, params['branches'])))
        if name not in _CALLS:
            return None
        (key,) = params.keys() & {'jaxpr', 'call_jaxpr', 'fun_jaxpr'}
        program = Program.of(params[key])
        if name != 'shard_map':
            return Call(equation, program)
        sizes = dict(params['mesh'].shape)
        if 'auto' in params:
            manual = sizes.keys() - params['auto']
        else:
            (key,) = params.keys() & {'manual_axes', 'newly_manual_axes'}
            manual = params[key]
        return ShardMap(equation, program, math.prod(sizes[axis] for axis in manual))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        line = source_info_util.summarize(equation.source_info)
        raise NotImplementedError(
            f'JAX {jax.__version__} writes {name} ({line}) in a way that jaxpruner does not know; upgrade jaxpruner'
        ) from error


def bind(
    equation: Any, operands: Sequence[Any], changed: Mapping[str, Any] | None = None
) -> list[Any]:
    """Runs an equation on values, with some of its parameters changed. `None` is a value that is not needed."""
    values = []
    for variable, operand in zip(equation.invars, operands, strict=True):
        values.append(jnp.zeros_like(variable.aval) if operand is None else operand)
    # Older JAX keeps the functions of a call apart from its other parameters.
    bound = equation.primitive.get_bind_params({**equation.params, **(changed or {})})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable."""
    return tuple(variable.aval.shape)


def all_but(numbers: Iterable[int], entries: Sequence[Any]) -> list[int]:
    """Returns the numbers of all entries but these."""
    return sorted(set(range(len(entries))).difference(numbers))


AxisNumbers = tuple[int, ...]
# Products of groups of rows with a matrix each, as in a mixture of experts. Older JAX only has the first one.
RAGGED = frozenset(('ragged_dot', 'ragged_dot_general'))
# The operations that multiply and sum: primitive -> the name in a `Use`.
CONTRACTIONS = {'conv_general_dilated': 'conv', **dict.fromkeys(['dot_general', *RAGGED], 'dot')}


class DotAxes(NamedTuple):
    """The axes of a product: pairs for its left and its right operand.

    Attributes:
      contract: axes that are summed over.
      batch: axes that both operands and the result have.
      free: axes that one operand and the result have.
      groups: axes of the right operand with an element for each group of rows of the left one.
    """

    contract: Sequence[AxisNumbers]
    batch: Sequence[AxisNumbers]
    free: Sequence[AxisNumbers]
    groups: AxisNumbers = ()


# Of `ragged_dot`: rows (rows, inputs), and a matrix for each group of rows (groups, inputs, outputs).
PLAIN_RAGGED_DOT = DotAxes(((1,), (1,)), ((), ()), ((0,), (2,)), groups=(0,))


def dot_axes(equation: Any) -> DotAxes:
    """Reads the axes of a product that is no convolution."""
    name, params, groups = equation.primitive.name, equation.params, ()
    if name == 'ragged_dot':
        return PLAIN_RAGGED_DOT
    if name in RAGGED:
        ragged = params['ragged_dot_dimension_numbers']
        pairs, groups = ragged.dot_dimension_numbers, tuple(ragged.rhs_group_dimensions)
    else:
        pairs = params['dimension_numbers']
    contract, batch = [tuple(map(tuple, pair)) for pair in pairs]
    gone = contract[0] + batch[0], contract[1] + batch[1] + groups
    free = map(all_but, gone, map(shape_of, equation.invars))
    return DotAxes(contract, batch, tuple(map(tuple, free)), groups)


class Live(NamedTuple):
    """What a program needs for some of its results: which inputs, and for each equation which of its results."""

    inputs: Needed
    results: tuple[Needed, ...]


# Callbacks that only show something change no result.
_SHOWS = frozenset({'debug_callback', 'debug_print'})


@functools.lru_cache(4096)
def live(jaxpr: Any, needed: Needed | None = None, shown: bool = False) -> Live:
    """Finds what a program needs for some of its results, by default all; and if `shown`, for what callbacks show."""
    needed = needed or (True,) * len(jaxpr.outvars)
    live_ids: set[int] = set()  # literals are not hashable in some versions of JAX

    def add(variables: Sequence[Any], flags: Sequence[bool]) -> None:
        pairs = zip(variables, flags, strict=True)
        live_ids.update([id(variable) for variable, is_needed in pairs if is_needed])

    add(jaxpr.outvars, needed)
    results = []
    for equation in reversed(jaxpr.eqns):
        has_effect = bool(equation.effects) and (shown or equation.primitive.name not in _SHOWS)
        flags = tuple([has_effect or id(result) in live_ids for result in equation.outvars])
        if equation.primitive.name in RULED:  # the rule may read what the program does not
            flags = (any(flags),) * len(flags)
        results.append(flags)
        if has_effect or any(flags):
            add(equation.invars, _needed_operands(equation, flags))
    inputs = tuple(id(variable) in live_ids for variable in jaxpr.invars)
    return Live(inputs, tuple(reversed(results)))


def _needed_operands(equation: Any, needed: Needed) -> Sequence[bool]:
    """Which operands of an equation its needed results depend on."""
    match inside(equation):
        case Call() as call if equation.primitive.name not in RULED:
            return live(call.program.jaxpr, needed).inputs
        case Cond() as cond:
            of_branches = [live(branch.jaxpr, needed).inputs for branch in cond.branches]
            return [True, *map(any, zip(*of_branches, strict=True))]
        case Scan(length=0) as scan:  # only carried values are passed through
            constants, _, sliced = scan.split([False] * len(equation.invars))
            return [*constants, *needed[: scan.carried], *sliced]
        case Scan() as scan:
            inputs = live(scan.body.jaxpr, needed_in_body(scan, needed)).inputs
            constants, carried, sliced = scan.split(inputs)
            # A carried value may be returned without having gone through the body.
            return [*constants, *map(max, carried, needed), *sliced]
    return [True] * len(equation.invars)


def needed_in_body(loop: Loop, needed: Needed) -> Needed:
    """Finds the results of a loop's body that some results of the loop need. A while loop needs all of them."""
    if isinstance(loop, While):
        return (True,) * len(needed)
    first, carried = loop.first_carried, loop.carried
    while True:
        inputs = live(loop.body.jaxpr, needed).inputs[first : first + carried]
        after = (*map(max, needed, inputs), *needed[carried:])
        if after == needed:
            return needed
        needed = after


class Position(NamedTuple):
    """Where an interpreter is.

    Attributes:
      path: of the equation, or of a program inside one; see `graph.Site`.
      needed: which results of the equation or program the model's results depend on.
      callers: the equations around it, the innermost last.
    """

    path: ProgramPath = ()
    needed: Needed = ()
    callers: tuple[Any, ...] = ()

    def at(self, number: int) -> Self:
        """An equation in this program, or a program in this equation."""
        return self._replace(path=(*self.path, number))

    def inside(self, equation: Any, number: int, needed: Sequence[bool]) -> Self:
        """A program in this equation, with these of its results needed."""
        callers = (*self.callers, equation)
        return self._replace(path=(*self.path, number), needed=tuple(needed), callers=callers)

    def in_body(self, loop: Loop) -> Self:
        """The body of this loop."""
        number = 1 if isinstance(loop, While) else 0
        return self.inside(loop.equation, number, needed_in_body(loop, self.needed))

    def line(self, equation: Any) -> str:
        """The line of the source that an equation comes from. For an equation made by JAX, the line of the call."""
        for candidate in (equation, *reversed(self.callers)):
            line = source_info_util.summarize(candidate.source_info)
            if line:
                return line
        return ''

    def reason(self, equation: Any, words: str) -> str:
        """Why something holds: these words about an equation, with its line."""
        line = self.line(equation)
        return f'{equation.primitive.name}: {words}' + (f' ({line})' if line else '')


T = TypeVar('T')
Values = list[Any]


class Interpreter(abc.ABC, Generic[T]):
    """Goes through a program from its inputs to its results. `T` is what is known of a value.

    Methods get what is known of the operands, and return what is known of the results.

    Attributes:
      shows: whether values are needed that are only printed.
    """

    shows = False

    @abc.abstractmethod
    def constant(self, value: Any, aval: Any) -> T:
        """What is known of a constant in a program. `aval` has its shape and dtype."""

    @abc.abstractmethod
    def visit_plain(self, equation: Any, operands: list[T], position: Any) -> list[T]:
        """Visits an equation with no program inside, or one whose programs are not entered."""

    @abc.abstractmethod
    def unneeded(self, equation: Any, operands: list[T]) -> list[T]:
        """Stands for the results of an equation that the model's results do not depend on."""

    def visit_constants(self, program: Program, position: Any) -> list[T]:
        """What is known of the constants that a program holds."""
        avals = [variable.aval for variable in program.jaxpr.constvars]
        return list(map(self.constant, program.constants, avals))

    def visit_all(self, traced: Any, inputs: Sequence[T], callers: Sequence[Any] = ()) -> list[T]:
        """Goes through a whole traced program, all of whose results are needed."""
        position = Position((), (True,) * len(traced.jaxpr.outvars), tuple(callers))
        return self.visit_program(Program.of(traced), inputs, position)

    def visit_program(self, program: Program, inputs: Sequence[T], position: Any) -> list[T]:
        """Visits each equation of a program that its needed results depend on."""
        jaxpr = program.jaxpr
        values = dict(zip(map(id, jaxpr.invars), inputs, strict=True))
        constants = self.visit_constants(program, position)
        values.update(zip(map(id, jaxpr.constvars), constants, strict=True))

        def read(variable: Any) -> T:
            if isinstance(variable, Literal):
                return self.constant(variable.val, variable.aval)
            return values[id(variable)]

        needed = live(jaxpr, position.needed, self.shows).results
        for number, equation in enumerate(jaxpr.eqns):
            operands = list(map(read, equation.invars))
            if any(needed[number]):
                path = (*position.path, number)
                here = position._replace(path=path, needed=needed[number])
                results = self.visit_equation(equation, operands, here)
            else:
                results = self.unneeded(equation, operands)
            values.update(zip(map(id, equation.outvars), results, strict=True))
        return list(map(read, jaxpr.outvars))

    def visit_equation(self, equation: Any, operands: list[T], position: Any) -> list[T]:
        """Visits an equation, by the method for the programs inside it."""
        match inside(equation):
            case ShardMap() as shard_map:
                return self.visit_shard_map(shard_map, operands, position)
            case Call() as call:
                return self.visit_call(call, operands, position)
            case Scan() as scan:
                return self.visit_scan(scan, operands, position)
            case While() as loop:
                return self.visit_while(loop, operands, position)
            case Cond() as cond:
                return self.visit_cond(cond, operands, position)
        return self.visit_plain(equation, operands, position)

    def visit_call(self, call: Call, operands: list[T], position: Any) -> list[T]:
        """Visits a call."""
        inner = position.inside(call.equation, 0, position.needed)
        return self.visit_program(call.program, operands, inner)

    def visit_whole(self, record: Any, operands: list[T], position: Any) -> list[T]:
        """Visits an equation without entering the programs inside it."""
        return self.visit_plain(record.equation, operands, position)

    # A subclass enters those that it can.
    visit_shard_map = visit_scan = visit_while = visit_cond = visit_whole

    def visit_body(
        self, loop: Loop, operands: list[T], carried: list[T], slices: list[T], position: Any
    ) -> list[T]:
        """Goes through the body of a loop, with these carried values and slices."""
        constants, _, _ = loop.split(operands)
        inputs = [*constants, *carried, *slices]
        return self.visit_program(loop.body, inputs, position.in_body(loop))

    def visit_condition(
        self, loop: While, operands: list[T], carried: list[T], position: Any
    ) -> list[T]:
        """Goes through the condition of a loop, with these carried values."""
        inputs = operands[: loop.first_constant] + carried
        inner = position.inside(loop.equation, 0, (True,))
        return self.visit_program(loop.condition, inputs, inner)

    def visit_branch(self, cond: Cond, number: int, values: Sequence[T], position: Any) -> list[T]:
        """Goes through a branch, with these values of the operands that go into branches."""
        inner = position.inside(cond.equation, number, position.needed)
        return self.visit_program(cond.branches[number], values, inner)

    def visit_branches(self, cond: Cond, operands: list[T], position: Any) -> Iterator[list[T]]:
        """Goes through each branch in turn, and yields its results."""
        for number in range(len(cond.branches)):
            yield self.visit_branch(cond, number, operands[1:], position)


class Run(Interpreter[Any]):
    """Computes the values of a program. A value that is not needed is `None`, an empty tree for loops of JAX.

    Each equation runs as it was traced. A subclass says in `visit_equation` which ones it enters instead. It may have a
    state of its own: arrays that loops carry along, and arrays that scans take apart.
    """

    def visit_equation(self, equation: Any, operands: Values, position: Any) -> Values:
        return bind(equation, operands)

    def enter(self, equation: Any, operands: Values, position: Any) -> Values:
        """Goes through the programs inside an equation."""
        return super().visit_equation(equation, operands, position)

    def state(self, position: Any) -> Any:
        """The arrays of this run that the program inside an equation may change."""

    def update(self, state: Any) -> None:
        """Takes the changed arrays back."""

    def slices(self, scan: Scan, position: Any) -> tuple[Any, int]:
        """Arrays of which each trip of a scan gets one element, and how many trips run."""
        return None, scan.length

    def inside(self, position: Any, state: Any, element: Any = None) -> 'Run':
        """The run of a program inside an equation, with this state and the elements of this trip."""
        return self

    def constant(self, value: Any, aval: Any) -> Any:
        return value

    def unneeded(self, equation: Any, operands: Values) -> Values:
        # It may still print, or call Python.
        if equation.effects and not any(operand is None for operand in operands):
            return bind(equation, operands)
        return [None] * len(equation.outvars)

    def visit_plain(self, equation: Any, operands: Values, position: Any) -> Values:
        return bind(equation, operands)

    def visit_call(self, call: Call, operands: Values, position: Any) -> Values:
        inner = position.inside(call.equation, 0, position.needed)

        def run(state: Any, *operands: Any) -> tuple[Values, Any]:
            inside = self.inside(position, state)
            results = inside.visit_program(call.program, operands, inner)
            return keep(results, inner.needed), inside.state(position)

        results, state = call.run(run, self.state(position), operands)
        self.update(state)
        return results

    def visit_scan(self, scan: Scan, operands: Values, position: Any) -> Values:
        _, carried, sliced = scan.split(operands)
        needed = position.in_body(scan).needed

        def body(carry: Any, elements: Any) -> Any:
            carried, state = carry
            slices, own_elements = elements
            inside = self.inside(position, state, own_elements)
            results = inside.visit_body(scan, operands, carried, slices, position)
            carried, stacked = scan.split_results(keep(results, needed))
            return (carried, inside.state(position)), stacked

        own_slices, length = self.slices(scan, position)
        first = keep(carried, needed[: scan.carried]), self.state(position)
        xs = sliced, own_slices
        (carried, state), stacked = lax.scan(body, first, xs, length, scan.reverse, scan.unroll)
        self.update(state)
        return carried + stacked

    def visit_while(self, loop: While, operands: Values, position: Any) -> Values:
        _, carried, _ = loop.split(operands)
        needed = position.in_body(loop).needed

        def condition(carry: Any) -> Any:
            (again,) = self.visit_condition(loop, operands, carry[0], position)
            return again

        def body(carry: Any) -> Any:
            carried, state = carry
            inside = self.inside(position, state)
            results = inside.visit_body(loop, operands, carried, [], position)
            return keep(results, needed), inside.state(position)

        first = keep(carried, needed), self.state(position)
        carried, state = lax.while_loop(condition, body, first)
        self.update(state)
        return carried

    def visit_cond(self, cond: Cond, operands: Values, position: Any) -> Values:
        index, *values = operands

        def run(number: int, state: Any, *values: Any) -> Any:
            inside = self.inside(position, state)
            results = inside.visit_branch(cond, number, values, position)
            return keep(results, position.needed), inside.state(position)

        branches = [functools.partial(run, number) for number in range(len(cond.branches))]
        results, state = lax.switch(index, branches, self.state(position), *values)
        self.update(state)
        return results


def keep(values: Sequence[Any], needed: Sequence[bool]) -> Values:
    """The values that are needed, and `None` for others."""
    return [value if is_needed else None for value, is_needed in zip(values, needed, strict=True)]
