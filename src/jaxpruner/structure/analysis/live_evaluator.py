"""Goes through the live equations of a program: those that its needed results depend on."""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from jaxpruner.structure.analysis.records import TracePosition
from jaxpruner.uses import liveness
from jaxpruner.uses.bodies import Call, Cond, Program, Scan, While
from jaxpruner.uses.visitors import Evaluator

T = TypeVar('T')


class KnownConstant(Generic[T]):
    """What an evaluator knows of a constant; it takes the constant's place in a program."""

    def __init__(self, value: T):
        self.value = value


def with_constants(program: Program, known: Iterable[Any]) -> Program:
    """The program with `KnownConstant` in the place of its constants."""
    constants = map(KnownConstant, known)
    return Program(program.jaxpr, tuple(constants))


def live_in_whole(jaxpr: Any) -> liveness.Live:
    """What the results of a whole program depend on."""
    all_results = (True,) * len(jaxpr.outvars)
    return liveness.live(jaxpr, all_results)


class LiveEvaluator(Evaluator[T, TracePosition]):
    """An evaluator that leaves out equations that are not live; `T` is what it knows of a value."""

    def visit_whole(self, program: Any, inputs: Sequence[T]) -> list[T]:
        """Goes through a whole traced program, a `ClosedJaxpr`."""
        position = TracePosition.of_whole(program)
        return self.visit_program(Program.of(program), inputs, position)

    @abc.abstractmethod
    def unneeded(self, equation: Any) -> list[T]:
        """Returns placeholders for the results of an equation that is left out."""

    def visit_needed(self, equation: Any, operands: list[T], position: TracePosition) -> list[T]:
        """Visits a live equation."""
        return super().visit_equation(equation, operands, position)

    def visit_equation(self, equation: Any, operands: list[T], position: TracePosition) -> list[T]:
        if not any(position.needed):
            return self.unneeded(equation)
        return self.visit_needed(equation, operands, position)

    def positions_in(self, program: Program, position: TracePosition) -> Iterable[TracePosition]:
        live = liveness.live(program.jaxpr, position.needed)
        for number, needed in enumerate(live.results):
            yield position.at(number)._replace(needed=needed)

    def visit_call(self, call: Call, operands: list[T], position: TracePosition) -> list[T]:
        inside = position.inside(call.equation, 0, position.needed)
        return self.visit_program(call.program, operands, inside)

    def visit_scan_body(
        self,
        scan: Scan,
        operands: list[T],
        carried: list[T],
        slices: list[T],
        position: TracePosition,
    ) -> list[T]:
        """Goes through the body of a scan, with these carried values and slices."""
        constants, _, _ = scan.split(operands)
        inputs = [*constants, *carried, *slices]
        inside = position.in_scan(scan)
        return self.visit_program(scan.body, inputs, inside)

    def visit_condition(
        self, loop: While, operands: list[T], carried: list[T], position: TracePosition
    ) -> list[T]:
        """Goes through the condition of a loop, with these carried values."""
        constants, _, _ = loop.split(operands)
        inside = position.in_condition(loop)
        return self.visit_program(loop.condition, constants + carried, inside)

    def visit_loop_body(
        self, loop: While, operands: list[T], carried: list[T], position: TracePosition
    ) -> list[T]:
        """Goes through the body of a loop, with these carried values."""
        _, constants, _ = loop.split(operands)
        inside = position.in_body(loop)
        return self.visit_program(loop.body, constants + carried, inside)

    def visit_branches(
        self, cond: Cond, operands: Sequence[T], position: TracePosition
    ) -> Iterator[list[T]]:
        """Goes through each branch in turn, and yields its results."""
        _, *values = operands
        for number, branch in enumerate(cond.branches):
            inside = position.inside(cond.equation, number, position.needed)
            yield self.visit_program(branch, values, inside)
