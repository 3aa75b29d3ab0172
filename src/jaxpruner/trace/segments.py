"""Runs a traced model in segments, with parameters that change in between.

A model is one list of steps: its equations, without calls, and with the scans unrolled whose trips are told apart. A
cut lies before a step. There the values of a batch are kept that depend on its inputs and are read later. Values that
are made only of parameters are made anew, from the current parameters.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.trace.compiled_once import CompiledOnce
from jaxpruner.trace.graph import Use, UseGraph
from jaxpruner.trace.program import Interpreter, Position, ProgramPath, Run, Scan
from jaxpruner.trace.taps import TapRun, Taps
from jaxpruner.tree import PyTree

# Number of a value of the program -> the value.
Values = dict[Any, Any]
# Of values; `None` for what is not needed.
Numbers = list[int | None]


class Step(NamedTuple):
    """A part of the program.

    Attributes:
      compute: `(run, operands) -> results`.
      reads: the numbers of its operands; `None` for what is not needed.
      writes: the numbers of its results.
      is_data: whether it depends on the inputs of the model.
    """

    compute: Callable[[Run, list[Any]], list[Any]]
    reads: tuple[int | None, ...]
    writes: tuple[int, ...]
    is_data: bool

    def run(self, running: Run, values: Any) -> None:
        """Adds the results to the values that are known."""
        results = self.compute(running, [values[number] for number in self.reads])
        values.update(zip(self.writes, results, strict=True))


class Segments(Interpreter[int | None]):
    """A model that runs from step to step, and no further than the last use that is observed.

    Attributes:
      scans: the scans that are unrolled, by path.
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        uses = list(uses)
        self.scans: dict[ProgramPath, Scan] = {}
        self._unrolled = {use.site.view.stack[0].loop for use in uses if use.site.view.stack}
        self._trip: int | None = None
        self._steps: list[Step] = []
        # Of an equation in this trip of an unrolled scan (`None` outside of such scans): its first and last step.
        self._spans: dict[tuple[ProgramPath, int | None], tuple[int, int]] = {}
        self._constants: Values = {}
        self._data: set[Any] = set()
        self._count = 0
        inputs = self._new_values(len(graph.program.jaxpr.invars))
        leaves = len(graph) + len(graph.opaque) + len(graph.unused)
        self._leaves, self._inputs = inputs[:leaves], inputs[leaves:]
        self._data.update(self._inputs)
        self.visit_all(graph.program, inputs)
        del self._steps[max((self.span_of(use)[1] + 1 for use in uses), default=0) :]

    def _new_values(self, count: int) -> list[int]:
        self._count += count
        return list(range(self._count - count, self._count))

    def _add_step(self, compute: Any, reads: Sequence[int | None], count: int = 1) -> list[Any]:
        writes = self._new_values(count)
        is_data = not self._data.isdisjoint(reads)
        if is_data:
            self._data.update(writes)
        self._steps.append(Step(compute, tuple(reads), tuple(writes), is_data))
        return writes

    def constant(self, value: Any, aval: Any) -> int:
        (number,) = self._new_values(1)
        self._constants[number] = value
        return number

    def unneeded(self, equation: Any, operands: Numbers) -> Numbers:
        return [None] * len(equation.outvars)

    def visit_plain(self, equation: Any, operands: Numbers, position: Position) -> Numbers:
        def compute(running: Run, values: list[Any]) -> list[Any]:
            return running.visit_equation(equation, values, position)

        number = len(self._steps)
        self._spans[position.path, self._trip] = number, number
        return self._add_step(compute, operands, len(equation.outvars))

    def visit_scan(self, scan: Scan, operands: Numbers, position: Position) -> Numbers:
        """Lists the steps of each trip, if trips are told apart."""
        if position.path not in self._unrolled or self._trip is not None:
            return self.visit_plain(scan.equation, operands, position)
        self.scans[position.path] = scan
        first = len(self._steps)
        _, carried, sliced = scan.split(operands)
        stacked = []
        for self._trip in range(scan.length):
            element = element_of(scan, self._trip)

            def take(running: Run, values: list[Any], element: int = element) -> list[Any]:
                return [lax.index_in_dim(values[0], element, keepdims=False)]

            elements = []
            for number in sliced:
                elements += [None] if number is None else self._add_step(take, [number])
            results = self.visit_body(scan, operands, carried, elements, position)
            carried, of_trip = scan.split_results(results)
            stacked.append(of_trip)
        self._trip = None
        results = list(carried)
        for column in zip(*(reversed(stacked) if scan.reverse else stacked), strict=True):
            if position.needed[len(results)]:
                results += self._add_step(lambda running, values: [jnp.stack(values)], column)
            else:
                results.append(None)
        self._spans[position.path, None] = first, len(self._steps) - 1
        return results

    def span_of(self, use: Use, trip: int | None = None) -> tuple[int, int]:
        """The first and the last step that an operation lies in: in one trip of an unrolled scan, or in all."""
        path = use.site.path
        while (path, trip) not in self._spans:
            path = path[:-1]
        return self._spans[path, trip]

    def scan_of(self, uses: Iterable[Use]) -> ProgramPath | None:
        """The path of the unrolled scan whose trips each take an element of what all these uses of a leaf read."""
        stacks = [use.site.view.stack for use in uses]
        loops = {stack[0].loop if stack else () for stack in stacks}
        return next((loop for loop in loops if len(loops) == 1 and loop in self.scans), None)

    def begin(self, *inputs: Any) -> list[Any]:
        """The values of a batch of these inputs that are kept before the first step."""
        known = dict(zip(self._inputs, jax.tree.leaves(inputs), strict=True))
        return [known[number] for number in self._kept(0)]

    def advance(self, params: PyTree, start: int, stop: int) -> Callable[[list[Any]], list[Any]]:
        """Makes the function that runs a batch from one step to another, with these parameters."""
        if start == stop:
            return lambda values: values

        def run(made: list[Any], kept: list[Any]) -> list[Any]:
            known = self._run(Run(), start, stop, made, kept)
            return [known[number] for number in self._kept(stop)]

        return functools.partial(CompiledOnce(run), self._make(params, start, stop))

    def observe(self, taps: Taps, params: PyTree, start: int, stop: int) -> Callable[..., Any]:
        """Makes the function `(totals, values of a batch, *given) -> totals` that adds statistics in place.

        It runs from one step to another, with these parameters; the statistic gets what is given.
        """

        def run(made: list[Any], totals: Any, kept: list[Any], *given: Any) -> Any:
            running = TapRun(taps, dict(enumerate(totals)), given=given)
            self._run(running, start, stop, made, kept)
            return list(running.totals.values())

        compiled = CompiledOnce(run, donate_argnums=(1,))
        return functools.partial(compiled, self._make(params, start, stop))

    def _run(self, running: Run, start: int, stop: int, made: list[Any], kept: list[Any]) -> Values:
        known = {None: None, **self._constants}
        known |= zip(self._made(start, stop), made, strict=True)
        known |= zip(self._kept(start), kept, strict=True)
        for step in self._steps[start:stop]:
            if step.is_data:
                step.run(running, known)
        return known

    def _kept(self, start: int) -> list[int]:
        """The numbers of the values that depend on inputs and that the steps from here on read."""
        writes = {number for step in self._steps[start:] for number in step.writes}
        reads: set[Any] = {number for step in self._steps[start:] for number in step.reads}
        return sorted((reads - writes) & self._data)

    def _made(self, start: int, stop: int) -> list[int]:
        """The numbers of the values that are made only of parameters and that a segment reads beside data."""
        reads: set[Any] = {
            n for step in self._steps[start:stop] if step.is_data for n in step.reads
        }
        return sorted(reads - self._data - self._constants.keys() - {None})

    def _make(self, params: PyTree, start: int, stop: int) -> list[Any]:
        made = self._made(start, stop)
        needed: set[Any] = set(made)
        steps = []
        for step in reversed(self._steps[:stop]):
            if not step.is_data and not needed.isdisjoint(step.writes):
                needed.update(step.reads)
                steps.append(step)
        known = {None: None, **self._constants}
        known |= zip(self._leaves, jax.tree.leaves(params), strict=True)
        for step in reversed(steps):
            step.run(Run(), known)
        return [known[number] for number in made]


def element_of(scan: Scan, trip: int) -> int:
    """The index of the element of what is sliced that a trip takes."""
    return scan.length - 1 - trip if scan.reverse else trip
