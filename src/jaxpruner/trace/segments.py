"""Runs a traced model in segments, with parameters that change in between.

A model is one list of steps, its equations without calls (`ModelSteps`). A cut lies between two steps, or between two
trips of a scan. There the values of a batch are kept that depend on its inputs and are read later. Values that are made
only of parameters are made anew, from the current parameters.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.trace.compiled_once import CompiledOnce
from jaxpruner.trace.graph import Use, UseGraph
from jaxpruner.trace.interpreter import Interpreter, Position, Run, keep
from jaxpruner.trace.program import Program, ProgramPath, Scan, inside
from jaxpruner.trace.taps import TapRun, Taps
from jaxpruner.tree import PyTree


class Step(NamedTuple):
    """An equation, and the numbers of the values that it reads and writes; `None` for what is not needed."""

    equation: Any
    position: Position
    reads: tuple[Any, ...]
    writes: tuple[int, ...]

    @property
    def path(self) -> ProgramPath:
        """The path of the equation."""
        return self.position.path


class ModelSteps(Interpreter[int | None]):
    """The steps of a model up to the last operation that is observed, and the values that they pass on.

    The equations of a call are listed instead of the call. So a parameter that a call returns beside data is no data.

    Attributes:
      steps: in the order of the program. Each value has a number of its own.
      inputs: numbers of the parameters and of the inputs.
      constants: the constants' values by number.
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        self.steps: list[Step] = []
        self.constants: dict[int, Any] = {}
        self._data: set[int | None] = set()
        self._bytes: list[int] = []
        self.inputs = self._new_values(graph.program.jaxpr.invars)
        leaves = len(graph) + len(graph.opaque) + len(graph.unused)
        self._data.update(self.inputs[leaves:])
        position = Position.of_whole(graph.program)
        self.visit_program(Program.of(graph.program), self.inputs, position)
        self._numbers = {step.path: number for number, step in enumerate(self.steps)}
        stop = max((self.place_of(use.site.path) + 1 for use in uses), default=0)
        del self.steps[stop:]

    def _new_values(self, variables: Sequence[Any]) -> list[int]:
        """The numbers of the values of some variables."""
        first = len(self._bytes)
        for variable in variables:
            aval = variable.aval
            has_size = hasattr(aval, 'shape')
            self._bytes.append(math.prod(aval.shape) * aval.dtype.itemsize if has_size else 0)
        return list(range(first, len(self._bytes)))

    def constant(self, value: Any, aval: Any) -> int:
        self._bytes.append(0)
        number = len(self._bytes) - 1
        self.constants[number] = value
        return number

    def unneeded(self, equation: Any, operands: list[int | None]) -> list[int | None]:
        return [None] * len(equation.outvars)

    def visit_plain(
        self, equation: Any, operands: list[int | None], position: Position
    ) -> list[int | None]:
        results = self._new_values(equation.outvars)
        self.steps.append(Step(equation, position, tuple(operands), tuple(results)))
        if self._data.intersection(operands):
            self._data.update(results)
        return [*results]

    def place_of(self, path: ProgramPath) -> int:
        """The number of the step that an equation lies in."""
        while path not in self._numbers:
            path = path[:-1]
        return self._numbers[path]

    def scan_of(self, uses: Iterable[Use]) -> int | None:
        """The number of the scan whose trips each take an element of what all these uses of a leaf read.

        It is `None` if there is no such scan, or if the scan lies in another loop.
        """
        stacks = [use.site.view.stack for use in uses]
        loops = {stack[0].loop if stack else () for stack in stacks}
        return self._numbers.get(loops.pop()) if len(loops) == 1 else None

    def live(self, start: int) -> list[int]:
        """The values that depend on the inputs, are made before a step, and are read in it or later."""
        writes = {value for step in self.steps[start:] for value in step.writes}
        return self.of_data(set(self.reads_between(start, len(self.steps))) - writes)

    def bytes_kept(self) -> list[int]:
        """The bytes of the `live` values before each step, and at the end."""
        first: dict[Any, int] = dict.fromkeys(self.inputs, 0)
        last: dict[Any, int] = {}
        for number, step in enumerate(self.steps):
            first |= dict.fromkeys(step.writes, number + 1)
            last |= dict.fromkeys(step.reads, number)
        changes = [0] * (len(self.steps) + 2)
        for value in self.of_data(last):
            changes[first[value]] += self._bytes[value]
            changes[last[value] + 1] -= self._bytes[value]
        return list(itertools.accumulate(changes))[:-1]

    def reads_between(self, start: int, stop: int) -> list[Any]:
        """The values that some steps read."""
        return [value for step in self.steps[start:stop] for value in step.reads]

    def of_data(self, values: Iterable[Any]) -> list[Any]:
        """The values among these that depend on the inputs."""
        return sorted(self._data.intersection(values))

    def made_anew(self, values: Iterable[Any], stop: int) -> list[Step]:
        """The steps before `stop` that make these values only of parameters and constants, in order."""
        needed = set(values)
        steps = []
        for step in reversed(self.steps[:stop]):
            if needed.difference(self._data).intersection(step.writes):
                steps.append(step)
                needed.update(step.reads)
        return steps[::-1]


# Number of a value of the program -> the value. `env` has all values that are known at a step.
Values = dict[Any, Any]
# The parameters' leaves; `None` for those that a segment does not read.
Leaves = list[Any]


class ProgramCut(NamedTuple):
    """A place in the program: before a step, or between two trips of a step that is a scan.

    Attributes:
      step: the number of the step.
      trips: how many trips of the scan are done; `None` before the step.
    """

    step: int
    trips: int | None = None


class State(NamedTuple):
    """The values of a batch that are kept at a cut.

    Attributes:
      values: by number; inside a scan those that it does not change.
      carried: inside a scan the values that are carried to the next trip.
      outputs: inside a scan the stacked results that are read later.
    """

    values: Values
    carried: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


class Observer(NamedTuple):
    """Adds statistics of the inputs of operations to their totals, in place.

    Attributes:
      compiled: `(totals, leaves that it reads, state of a batch, trips of a scan that are done, *given) -> totals`.
      leaves_of: parameters -> the leaves that it reads.
    """

    compiled: CompiledOnce
    leaves_of: Callable[[PyTree], Leaves]

    def __call__(self, totals: Any, params: PyTree, state: State, trips: Any, *given: Any) -> Any:
        """The new totals; the statistic gets what is given."""
        return self.compiled(totals, self.leaves_of(params), state, trips, *given)

    def lower(self, totals: Any, params: PyTree, state: State, trips: Any) -> Any:
        """The lowered program of arguments, or of their shapes."""
        return self.compiled.lower(totals, self.leaves_of(params), state, trips)


class Segments:
    """A model that runs from cut to cut, and no further than the last use that is observed.

    Attributes:
      program: its steps.
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        self.program = ModelSteps(graph, uses)
        # Each function is made and compiled once for each step or pair of steps.
        self._compiled = functools.cache(lambda make, *steps: CompiledOnce(make(*steps)))

    def begin(self, *inputs: Any) -> State:
        """A batch of these inputs, before the first step."""
        leaves = jax.tree.leaves(inputs)
        numbers = self.program.inputs[len(self.program.inputs) - len(leaves) :]
        return State(dict(zip(numbers, leaves, strict=True)))

    def advance(self, params: PyTree, state: State, here: ProgramCut, there: ProgramCut) -> State:
        """Runs a batch from one cut to a later one, and returns its state there."""
        program = self.program
        while here != there:
            step = here.step
            if here.trips is None and step < there.step:
                values = program.reads_between(step, there.step) + program.live(there.step)
                run = self._compiled(self._segment, step, there.step)
                state = run(self._leaves_of(params, step, values), state)
                here = ProgramCut(there.step)
                continue
            leaves = self._leaves_of(params, step, program.steps[step].reads)
            if here.trips is None:
                state = self._compiled(self._enter, step)(leaves, state)
                here = ProgramCut(step, 0)
            elif here.trips < self._scan(step).length:
                state = self._compiled(self._trip, step)(leaves, state, here.trips)
                here = ProgramCut(step, here.trips + 1)
            else:  # leaves the scan
                writes = program.steps[step].writes
                values = {**state.values, **dict(zip(writes, state.carried, strict=False))}
                stacked = [writes[i] for i in self._outputs(step)]
                values.update(zip(stacked, state.outputs, strict=True))
                state = State({value: values[value] for value in program.live(step + 1)})
                here = ProgramCut(step + 1)
        return state

    def observe(self, taps: Taps, here: ProgramCut, stop: int) -> Observer:
        """Makes an `Observer` for the operations of some taps.

        Args:
          taps: the operations. Those in the scan of the cut are observed in one trip.
          here: where to begin. Inside a scan, any trip will do.
          stop: the step before which to stop.
        """

        def run(totals: Any, leaves: Leaves, state: State, trips: Any, *given: Any) -> Any:
            running = TapRun(taps, dict(enumerate(totals)), given=given)
            if here.trips is None:
                self._run(running, leaves, state, range(here.step, stop))
            else:
                self._run_trip(running, here.step, leaves, state, trips)
            return list(running.totals.values())

        values = self.program.reads_between(here.step, max(stop, here.step + 1))
        leaves_of = functools.partial(self._leaves_of, start=here.step, values=values)
        return Observer(CompiledOnce(run, donate_argnums=(0,)), leaves_of)

    def _leaves_of(self, params: PyTree, start: int, values: Sequence[Any]) -> Leaves:
        """The leaves that some values are made of; `None` for others, so that like layers have equal programs."""
        needed = set(values)
        for step in self.program.made_anew(values, start):
            needed.update(step.reads)
        leaves = jax.tree.leaves(params)
        numbers = self.program.inputs[: len(leaves)]
        return keep(leaves, [number in needed for number in numbers])

    def _values_at(self, leaves: Leaves, state: State, start: int, values: Sequence[Any]) -> Values:
        """The known values before a step, with these values that are made only of parameters."""
        pairs = zip(self.program.inputs, leaves, strict=False)
        own = {number: leaf for number, leaf in pairs if leaf is not None}
        env = {None: None, **self.program.constants, **own, **state.values}
        for step in self.program.made_anew(values, start):
            _evaluate(step, env, Run())
        return env

    def _run(self, running: Run, leaves: Leaves, state: State, steps: range) -> Values:
        """Runs steps, and returns all values that are known after them."""
        values = self.program.reads_between(steps.start, steps.stop)
        env = self._values_at(leaves, state, steps.start, values)
        for number in steps:
            _evaluate(self.program.steps[number], env, running)
        return env

    def _segment(self, start: int, stop: int) -> Callable[..., State]:
        """Makes the function that runs from one step to another."""
        live = self.program.live(stop)

        def run(leaves: Leaves, state: State) -> State:
            env = self._run(Run(), leaves, state, range(start, stop))
            return State({value: env[value] for value in live})

        return run

    def _enter(self, number: int) -> Callable[..., State]:
        """Makes the function that runs to the first trip of a scan."""
        step, scan = self.program.steps[number], self._scan(number)
        constants, carried, sliced = scan.split(step.reads)
        later = set(self.program.live(number + 1)).difference(step.writes)
        unchanged = self.program.of_data(later.union(constants, sliced))
        stacked = [step.equation.outvars[i].aval for i in self._outputs(number)]

        def run(leaves: Leaves, state: State) -> State:
            env = self._values_at(leaves, state, number, carried)
            first = [env[value] for value in carried]
            return State(
                {value: env[value] for value in unchanged},
                keep(first, step.position.in_scan(scan).needed[: scan.carried]),
                [jnp.zeros(aval.shape, aval.dtype) for aval in stacked],
            )

        return run

    def _trip(self, number: int) -> Callable[..., State]:
        """Makes the function that runs one trip of a scan."""
        scan, outputs = self._scan(number), self._outputs(number)

        def run(leaves: Leaves, state: State, trips: Any) -> State:
            results = self._run_trip(Run(), number, leaves, state, trips)
            index = _element_of(scan, trips)
            updated = []
            for stacked, i in zip(state.outputs, outputs, strict=True):
                updated.append(lax.dynamic_update_index_in_dim(stacked, results[i], index, 0))
            return State(state.values, results[: scan.carried], updated)

        return run

    def _scan(self, number: int) -> Scan:
        scan = inside(self.program.steps[number].equation)
        assert isinstance(scan, Scan)
        return scan

    def _outputs(self, number: int) -> list[int]:
        """The numbers of a scan's stacked results that are read later."""
        writes = self.program.steps[number].writes
        live = self.program.live(number + 1)
        return [i for i in range(self._scan(number).carried, len(writes)) if writes[i] in live]

    def _run_trip(
        self, running: Run, number: int, leaves: Leaves, state: State, trips: Any
    ) -> list[Any]:
        """Runs the body of a scan once, and returns its results."""
        step, scan = self.program.steps[number], self._scan(number)
        constants, _, sliced = scan.split(step.reads)
        env = self._values_at(leaves, state, number, constants + sliced)
        index = _element_of(scan, trips)
        take = functools.partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
        elements = jax.tree.map(take, [env[value] for value in sliced])
        inputs = [*(env[value] for value in constants), *state.carried, *elements]
        inner = step.position.in_scan(scan)
        return keep(running.visit_program(scan.body, inputs, inner), inner.needed)


def _element_of(scan: Scan, trips: Any) -> Any:
    """The index of the sliced elements that the next trip takes."""
    return scan.length - 1 - trips if scan.reverse else trips


def _evaluate(step: Step, env: Values, running: Run) -> None:
    operands = [env[value] for value in step.reads]
    results = running.visit_equation(step.equation, operands, step.position)
    env.update(zip(step.writes, results, strict=True))
