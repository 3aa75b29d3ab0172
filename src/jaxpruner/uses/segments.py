"""Runs a traced model in segments, with parameters that change in between.

A cut lies between two steps, or between two trips of a scan. There the values of a batch are kept that depend on its
inputs and are read later. Values that are made only of parameters are made anew, from the current parameters.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.tree import PyTree
from jaxpruner.uses.bodies import Scan
from jaxpruner.uses.compiled_once import CompiledOnce
from jaxpruner.uses.graph import Use, UseGraph
from jaxpruner.uses.steps import ModelSteps, Step
from jaxpruner.uses.taps import TapRun, Taps
from jaxpruner.uses.visitors import Position


def _observe_nothing(use: Use, operands: Sequence[Any]) -> None:
    """The statistic of a run without taps. It is never called."""


_NO_TAPS = TapRun(Taps(places=[], statistic=_observe_nothing), totals={})
# Number of a value of the program -> the value. `env` has all values that are known at a step.
Values = dict[int, Any]
# The parameters' leaves; `None` for those that a segment does not read.
Leaves = list[Any]
Totals = list[Any]
Function = Callable[..., Any]


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

    def __call__(
        self, totals: Totals, params: PyTree, state: State, trips: Any, *given: Any
    ) -> Totals:
        """The new totals; the statistic gets what is given."""
        leaves = self.leaves_of(params)
        return self.compiled(totals, leaves, state, trips, *given)

    def lower(self, totals: Any, params: PyTree, state: State, trips: Any) -> Any:
        """The lowered program of arguments, or of their shapes."""
        leaves = self.leaves_of(params)
        return self.compiled.lower(totals, leaves, state, trips)


class Segments:
    """A model that runs from cut to cut, and no further than the last use that is observed.

    Attributes:
      program: its steps.
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        self.program = ModelSteps(graph, uses)
        # Each function is made and compiled once for each step or pair of steps.
        self._compiled = functools.cache(_compile)

    def begin(self, *inputs: Any) -> State:
        """A batch of these inputs, before the first step."""
        leaves = jax.tree.leaves(inputs)
        first = len(self.program.inputs) - len(leaves)
        numbers = self.program.inputs[first:]
        return State(dict(zip(numbers, leaves, strict=True)))

    def advance(self, params: PyTree, state: State, here: ProgramCut, there: ProgramCut) -> State:
        """Runs a batch from one cut to a later one, and returns its state there."""
        while here != there:
            step = here.step
            if here.trips is None and step < there.step:
                run = self._compiled(self._segment, step, there.step)
                values = self.program.reads_between(step, there.step)
                values += self.program.live(there.step)
                state = run(self._leaves_of(params, step, values), state)
                here = ProgramCut(there.step)
                continue
            values = self.program.steps[step].reads
            leaves = self._leaves_of(params, step, values)
            if here.trips is None:
                enter = self._compiled(self._enter, step)
                state = enter(leaves, state)
                here = ProgramCut(step, 0)
            elif here.trips < self._scan(step).length:
                trip = self._compiled(self._trip, step)
                state = trip(leaves, state, here.trips)
                here = ProgramCut(step, here.trips + 1)
            else:
                state = self._leave(step, state)
                here = ProgramCut(step + 1)
        return state

    def observe(self, taps: Taps, here: ProgramCut, stop: int) -> Observer:
        """Makes an `Observer` for the operations of some taps.

        Args:
          taps: the operations. Those in the scan of the cut are observed in one trip.
          here: where to begin. Inside a scan, any trip will do.
          stop: the step before which to stop.
        """

        def run(totals: Totals, leaves: Leaves, state: State, trips: Any, *given: Any) -> Totals:
            totals_by_place = dict(enumerate(totals))
            running = TapRun(taps, totals_by_place, given=given)
            if here.trips is None:
                self._run(running, leaves, state, range(here.step, stop))
            else:
                self._run_trip(running, here.step, leaves, state, trips)
            return list(running.totals.values())

        compiled = CompiledOnce(run, donate_argnums=(0,))
        end = max(stop, here.step + 1)
        values = self.program.reads_between(here.step, end)
        leaves_of = functools.partial(self._leaves_of, start=here.step, values=values)
        return Observer(compiled, leaves_of)

    def _leaves_of(self, params: PyTree, start: int, values: Sequence[int]) -> Leaves:
        """The leaves that some values are made of; `None` for others, so that like layers have equal programs."""
        needed = set(values)
        for step in self.program.made_anew(values, start):
            needed.update(step.reads)
        leaves = jax.tree.leaves(params)
        for i in range(len(leaves)):
            if self.program.inputs[i] not in needed:
                leaves[i] = None
        return leaves

    def _values_at(self, leaves: Leaves, state: State, start: int, values: Sequence[int]) -> Values:
        """The known values before a step, with these values that are made only of parameters."""
        program = self.program
        env = dict(program.constants)
        for number, leaf in zip(program.inputs, leaves, strict=False):
            if leaf is not None:
                env[number] = leaf
        env.update(state.values)
        for step in program.made_anew(values, start):
            _evaluate(step, env, _NO_TAPS)
        return env

    def _run(self, running: TapRun, leaves: Leaves, state: State, steps: range) -> Values:
        """Runs steps, and returns all values that are known after them."""
        values = self.program.reads_between(steps.start, steps.stop)
        env = self._values_at(leaves, state, steps.start, values)
        for number in steps:
            _evaluate(self.program.steps[number], env, running)
        return env

    def _segment(self, start: int, stop: int) -> Function:
        """Makes the function that runs from one step to another."""
        live = self.program.live(stop)

        def run(leaves: Leaves, state: State) -> State:
            env = self._run(_NO_TAPS, leaves, state, range(start, stop))
            return State(_chosen(env, live))

        return run

    def _enter(self, number: int) -> Function:
        """Makes the function that runs to the first trip of a scan."""
        step = self.program.steps[number]
        constants, carried, sliced = self._scan(number).split(step.reads)
        live = self.program.live(number + 1)
        later = set(live).difference(step.writes)
        unchanged = self.program.of_data(later.union(constants, sliced))
        outputs = self._outputs(number)

        def run(leaves: Leaves, state: State) -> State:
            env = self._values_at(leaves, state, number, carried)
            stacked = []
            for i in outputs:
                aval = step.equation.outvars[i].aval
                stacked.append(jnp.zeros(aval.shape, aval.dtype))
            values = _chosen(env, unchanged)
            carried_values = [env[value] for value in carried]
            return State(values, carried_values, stacked)

        return run

    def _trip(self, number: int) -> Function:
        """Makes the function that runs one trip of a scan."""
        scan = self._scan(number)
        outputs = self._outputs(number)

        def run(leaves: Leaves, state: State, trips: Any) -> State:
            results = self._run_trip(_NO_TAPS, number, leaves, state, trips)
            carried, _ = scan.split_results(results)
            index = _element_of(scan, trips)
            put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
            updated = []
            for stacked, i in zip(state.outputs, outputs, strict=True):
                updated.append(put(stacked, results[i]))
            return State(state.values, carried, updated)

        return run

    def _leave(self, number: int, state: State) -> State:
        """The state after the last trip of a scan."""
        writes = self.program.steps[number].writes
        values = dict(state.values)
        values.update(zip(writes, state.carried, strict=False))
        outputs = self._outputs(number)
        for i, stacked in zip(outputs, state.outputs, strict=True):
            values[writes[i]] = stacked
        live = self.program.live(number + 1)
        return State(_chosen(values, live))

    def _scan(self, number: int) -> Scan:
        return Scan.of(self.program.steps[number].equation)

    def _outputs(self, number: int) -> list[int]:
        """The numbers of a scan's stacked results that are read later."""
        writes = self.program.steps[number].writes
        live = self.program.live(number + 1)
        first_stacked = self._scan(number).carried
        return [i for i in range(first_stacked, len(writes)) if writes[i] in live]

    def _run_trip(
        self, running: TapRun, number: int, leaves: Leaves, state: State, trips: Any
    ) -> list[Any]:
        """Runs the body of a scan once, and returns its results."""
        step = self.program.steps[number]
        scan = self._scan(number)
        constants, _, sliced = scan.split(step.reads)
        env = self._values_at(leaves, state, number, constants + sliced)
        inputs = [env[value] for value in constants]
        inputs += state.carried
        index = _element_of(scan, trips)
        take = functools.partial(lax.dynamic_index_in_dim, index=index, keepdims=False)
        for value in sliced:
            element = take(env[value])
            inputs.append(element)
        in_body = Position(step.path).at(0)
        return running.visit_program(scan.body, inputs, in_body)


def _compile(make: Function, *steps: int) -> CompiledOnce:
    """Makes a function for some steps with a method such as `Segments._segment`, and compiles it."""
    function = make(*steps)
    return CompiledOnce(function)


def _element_of(scan: Scan, trips: Any) -> Any:
    """The index of the sliced elements that the next trip takes."""
    return scan.length - 1 - trips if scan.reverse else trips


def _evaluate(step: Step, env: Values, running: TapRun) -> None:
    operands = [env[value] for value in step.reads]
    results = running.visit_equation(step.equation, operands, Position(step.path))
    env.update(zip(step.writes, results, strict=True))


def _chosen(env: Values, values: Iterable[int]) -> Values:
    return {value: env[value] for value in values}
