"""Goes through the live equations of a program: those that its needed results depend on."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from jaxpruner.structure.analysis.records import TracePosition
from jaxpruner.trace.interpreter import Interpreter
from jaxpruner.trace.program import Live, Program, live

T = TypeVar('T')


class KnownConstant(Generic[T]):
    """What an evaluator knows of a constant; it takes the constant's place in a program."""

    def __init__(self, value: T):
        self.value = value


def with_constants(program: Program, known: Iterable[Any]) -> Program:
    """The program with `KnownConstant` in the place of its constants."""
    constants = map(KnownConstant, known)
    return Program(program.jaxpr, tuple(constants))


def live_in_whole(jaxpr: Any) -> Live:
    """What the results of a whole program depend on."""
    all_results = (True,) * len(jaxpr.outvars)
    return live(jaxpr, all_results)


class LiveEvaluator(Interpreter[T]):
    """An interpreter of whole programs; `T` is what it knows of a value."""

    def visit_whole(self, program: Any, inputs: Sequence[T]) -> list[T]:
        """Goes through a whole traced program, a `ClosedJaxpr`."""
        position = TracePosition.of_whole(program)
        return self.visit_program(Program.of(program), inputs, position)
