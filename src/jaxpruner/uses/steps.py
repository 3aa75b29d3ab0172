"""A traced model as one list of steps, without calls."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxpruner.uses.bodies import Program, ProgramPath
from jaxpruner.uses.graph import Use, UseGraph
from jaxpruner.uses.visitors import Evaluator, Position


class Step(NamedTuple):
    """An equation, and the numbers of the values that it reads and writes."""

    equation: Any
    path: ProgramPath
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class ModelSteps:
    """The steps of a model up to the last operation that is observed, and the values that they pass on.

    Attributes:
      steps: in the order of the program. Each value has a number of its own.
      inputs: numbers of the parameters and of the inputs.
      constants: the constants' values by number.
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        jaxpr = graph.program.jaxpr
        leaves = len(graph) + len(graph.opaque) + len(graph.unused)
        flat = _Flattening()
        self.inputs = flat.new_values(jaxpr.invars)
        flat.data.update(self.inputs[leaves:])
        program = Program.of(graph.program)
        flat.visit_program(program, self.inputs, Position())
        self.steps = flat.steps
        self.constants = flat.constants
        self._data = flat.data
        self._bytes = flat.bytes
        self._numbers: dict[ProgramPath, int] = {}
        for number, step in enumerate(self.steps):
            self._numbers[step.path] = number
        stop = 0
        for use in uses:
            stop = max(stop, self.place_of(use.site.path) + 1)
        del self.steps[stop:]

    def place_of(self, path: ProgramPath) -> int:
        """The number of the step that an equation lies in."""
        while path not in self._numbers:
            path = path[:-1]
        return self._numbers[path]

    def scan_of(self, uses: Iterable[Use]) -> int | None:
        """The number of the scan whose trips each take an element of what all these uses of a leaf read.

        It is `None` if there is no such scan, or if the scan lies in another loop.
        """
        loops = set()
        for use in uses:
            stack = use.site.view.stack
            loops.add(stack[0].loop if stack else ())
        if len(loops) != 1:
            return None
        return self._numbers.get(loops.pop())

    def live(self, start: int) -> list[int]:
        """The values that depend on the inputs, are made before a step, and are read in it or later."""
        reads: set[int] = set()
        writes: set[int] = set()
        for step in self.steps[start:]:
            reads.update(step.reads)
            writes.update(step.writes)
        return sorted(reads & self._data - writes)

    def bytes_kept(self) -> list[int]:
        """The bytes of the `live` values before each step, and at the end."""
        first = dict.fromkeys(self.inputs, 0)
        last: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            first |= dict.fromkeys(step.writes, number + 1)
            last |= dict.fromkeys(step.reads, number)
        changes = [0] * (len(self.steps) + 2)
        for value in self._data & last.keys():
            changes[first[value]] += self._bytes[value]
            changes[last[value] + 1] -= self._bytes[value]
        return list(itertools.accumulate(changes))[:-1]

    def reads_between(self, start: int, stop: int) -> list[int]:
        """The values that some steps read."""
        reads: list[int] = []
        for step in self.steps[start:stop]:
            reads += step.reads
        return reads

    def of_data(self, values: Iterable[int]) -> list[int]:
        """The values among these that depend on the inputs."""
        return sorted(self._data.intersection(values))

    def made_anew(self, values: Iterable[int], stop: int) -> list[Step]:
        """The steps before `stop` that make these values only of parameters and constants, in order."""
        needed = set(values)
        steps = []
        for step in reversed(self.steps[:stop]):
            anew = needed.difference(self._data)
            if anew.intersection(step.writes):
                steps.append(step)
                needed.update(step.reads)
        return steps[::-1]


class _Flattening(Evaluator[int, Position]):
    """Numbers the values of a program, and appends its equations to one list.

    The equations of a call are listed instead of the call. So a parameter that a call returns beside data is no data.
    """

    def __init__(self):
        self.steps: list[Step] = []
        self.constants: dict[int, Any] = {}
        self.data: set[int] = set()
        self.bytes: list[int] = []

    def new_value(self, aval: Any) -> int:
        """The number of a new value."""
        size = 0
        if hasattr(aval, 'shape'):
            size = math.prod(aval.shape) * aval.dtype.itemsize
        self.bytes.append(size)
        return len(self.bytes) - 1

    def new_values(self, variables: Sequence[Any]) -> list[int]:
        """The numbers of the values of some variables."""
        return [self.new_value(variable.aval) for variable in variables]

    def constant(self, value: Any, aval: Any) -> int:
        number = self.new_value(aval)
        self.constants[number] = value
        return number

    def visit_plain(self, equation: Any, operands: list[int], position: Position) -> list[int]:
        results = self.new_values(equation.outvars)
        step = Step(equation, position.path, tuple(operands), tuple(results))
        self.steps.append(step)
        if self.data.intersection(operands):
            self.data.update(results)
        return results
