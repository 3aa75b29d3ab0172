"""The one interpreter of traced programs: it goes through a program equation by equation.

A subclass says what it knows of a value, and what an equation without a program inside does to it (`visit_plain`).

    Interpreter  goes through the live equations; calls are entered, loops and branches are asked of the subclass
    Run          computes values, and enters loops and branches, too
"""

import abc
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Literal

from jaxpruner.trace.program import (
    Call,
    Cond,
    Loop,
    Needed,
    Program,
    ProgramPath,
    Scan,
    ShardMap,
    While,
    bind,
    inside,
    live,
    needed_in_body,
)


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

    @classmethod
    def of_whole(cls, program: Any) -> Self:
        """A whole traced program, with all its results needed."""
        return cls(needed=(True,) * len(program.jaxpr.outvars))

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
