"""Visitors of programs.

A `Visitor` has one method for each record of `bodies`, and one for equations with no program inside. An `Evaluator` is
a visitor that goes through a program from its inputs to its results. Its subclass defines what it knows of a value.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from jax.extend.core import Literal

from jaxpruner.uses.bodies import Call, Cond, Program, ProgramPath, Scan, ShardMap, While, inside


class PositionLike(Protocol):
    """Where a visitor is."""

    def at(self, number: int) -> Self:
        """An equation in this program, or a program in this equation."""
        ...


class Position(NamedTuple):
    """A position that has only a path.

    In a while loop, program 0 is the condition and program 1 is the body.
    """

    path: ProgramPath = ()

    def at(self, number: int) -> 'Position':
        """An equation in this program, or a program in this equation."""
        return Position((*self.path, number))


T = TypeVar('T')
P = TypeVar('P', bound=PositionLike)


class Visitor(abc.ABC, Generic[T, P]):
    """Visits equations. `T` is what it knows of a value, and `P` is its position.

    Each method gets what is known of the operands, and returns what is known of the results.
    """

    @abc.abstractmethod
    def visit_program(self, program: Program, inputs: Sequence[T], position: P) -> list[T]:
        """Visits a program."""

    @abc.abstractmethod
    def visit_plain(self, equation: Any, operands: list[T], position: P) -> list[T]:
        """Visits an equation with no program inside, or one whose programs the visitor does not visit."""

    def visit_equation(self, equation: Any, operands: list[T], position: P) -> list[T]:
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

    def visit_call(self, call: Call, operands: list[T], position: P) -> list[T]:
        """Visits a call. Its program has number 0."""
        return self.visit_program(call.program, operands, position.at(0))

    def visit_shard_map(self, shard_map: ShardMap, operands: list[T], position: P) -> list[T]:
        """Visits a program that each device runs."""
        return self.visit_plain(shard_map.equation, operands, position)

    def visit_scan(self, scan: Scan, operands: list[T], position: P) -> list[T]:
        """Visits a scan."""
        return self.visit_plain(scan.equation, operands, position)

    def visit_while(self, loop: While, operands: list[T], position: P) -> list[T]:
        """Visits a while loop."""
        return self.visit_plain(loop.equation, operands, position)

    def visit_cond(self, cond: Cond, operands: list[T], position: P) -> list[T]:
        """Visits an equation with branches."""
        return self.visit_plain(cond.equation, operands, position)


class Evaluator(Visitor[T, P]):
    """Goes through a program from its inputs to its results."""

    @abc.abstractmethod
    def constant(self, value: Any, aval: Any) -> T:
        """What is known of a constant in a program. `aval` has its shape and dtype."""

    def positions_in(self, program: Program, position: P) -> Iterable[P]:
        """The position of each equation of a program."""
        count = len(program.jaxpr.eqns)
        return map(position.at, range(count))

    def visit_program(self, program: Program, inputs: Sequence[T], position: P) -> list[T]:
        """Visits each equation of a program."""
        jaxpr = program.jaxpr
        values: dict[int, T] = {}
        for variable, constant in zip(jaxpr.constvars, program.constants, strict=True):
            values[id(variable)] = self.constant(constant, variable.aval)

        def write(variables: Iterable[Any], new_values: Iterable[T]) -> None:
            values.update(zip(map(id, variables), new_values, strict=True))

        def read(variable: Any) -> T:
            if isinstance(variable, Literal):
                return self.constant(variable.val, variable.aval)
            return values[id(variable)]

        write(jaxpr.invars, inputs)
        positions = self.positions_in(program, position)
        for equation, at_equation in zip(jaxpr.eqns, positions, strict=True):
            operands = list(map(read, equation.invars))
            results = self.visit_equation(equation, operands, at_equation)
            write(equation.outvars, results)
        return list(map(read, jaxpr.outvars))
