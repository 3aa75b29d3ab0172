"""Runs a traced model in segments, with parameters that change in between.

At a cut between two steps, or two trips of a scan, what is kept of a batch are the values that depend on it and are
read further on; what is made of parameters alone is made anew, from the parameters as they are by then.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.core import tree as tree_lib
from jaxpruner.uses.bodies import Position, Scan
from jaxpruner.uses.compiled_once import CompiledOnce
from jaxpruner.uses.graph import Use, UseGraph
from jaxpruner.uses.steps import ModelSteps, Step
from jaxpruner.uses.taps import TapRun, Taps


def _observe_nothing(use: Use, operands: Sequence[Any]) -> None:
    """The statistic of a run without taps; never called."""


_NO_TAPS = TapRun(Taps(places=[], statistic=_observe_nothing), totals={})
# Values of the program by number; `env` is all that are known at a step.
Values = dict[int, Any]
# The parameters' leaves; `None` for those that a segment does not read.
Leaves = list[Any]


class ProgramCut(NamedTuple):
    """A place in the program: before a step; or, where the step is a scan, inside it between two trips.

    Attributes:
      step: the number of the step.
      trips: how many trips of the scan are done; `None` before the step.
    """

    step: int
    trips: int | None = None


class State(NamedTuple):
    """What is kept of a batch at a cut.

    Attributes:
      values: by number; inside a scan those that it does not change.
      carried: inside a scan what is carried to the next trip.
      outputs: inside a scan what all trips put together, as far as it is read later.
    """

    values: Values
    carried: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


class Observer(NamedTuple):
    """Adds what goes into operations to their totals, in place.

    Attributes:
      compiled: of the totals, the leaves that it reads, the state of a batch, and how many trips of a scan are done.
      leaves_of: the leaves that it reads, of the parameters.
    """

    compiled: CompiledOnce
    leaves_of: Callable[[tree_lib.PyTree], Leaves]

    def __call__(
        self, totals: list[Any], params: tree_lib.PyTree, state: State, trips: Any
    ) -> list[Any]:
        """The new totals."""
        return self.compiled(totals, self.leaves_of(params), state, trips)

    def lower(self, totals: Any, params: tree_lib.PyTree, state: State, trips: Any) -> Any:
        """The lowered program of arguments, or of their shapes."""
        return self.compiled.lower(totals, self.leaves_of(params), state, trips)


class Segments:
    """A model that is run from cut to cut, and not beyond the uses that are going to be observed.

    Attributes:
      program: its steps.
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        self.program = ModelSteps(graph, uses)
        # Each function is made and compiled once for each step, or pair of steps.
        self._compiled = functools.cache(_compile)

    def begin(self, *inputs: Any) -> State:
        """A batch of these inputs, before the first step."""
        leaves = jax.tree.leaves(inputs)
        first = len(self.program.inputs) - len(leaves)
        numbers = self.program.inputs[first:]
        return State(dict(zip(numbers, leaves, strict=True)))

    def advance(
        self, params: tree_lib.PyTree, state: State, here: ProgramCut, there: ProgramCut
    ) -> State:
        """Runs a batch from one cut to a later one; returns its state there."""
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
        """A compiled function that adds what goes into operations to their totals, in place.

        Args:
          taps: the operations; those in the scan of the cut within one trip.
          here: where to begin; of a scan any trip.
          stop: the step before which to stop.
        """

        def run(totals: list[Any], leaves: Leaves, state: State, trips: Any) -> list[Any]:
            running = TapRun(taps, dict(enumerate(totals)))
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

    def _leaves_of(self, params: tree_lib.PyTree, start: int, values: Sequence[int]) -> Leaves:
        """The leaves of which some values are made, `None` in place of others: segments of like layers take alike."""
        needed = set(values)
        for step in self.program.made_anew(values, start):
            needed.update(step.reads)
        leaves = jax.tree.leaves(params)
        for i in range(len(leaves)):
            if self.program.inputs[i] not in needed:
                leaves[i] = None
        return leaves

    def _values_at(self, leaves: Leaves, state: State, start: int, values: Sequence[int]) -> Values:
        """All that is known before a step, with some values that are made of parameters alone."""
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
        """Runs steps; returns all values that are known after them."""
        values = self.program.reads_between(steps.start, steps.stop)
        env = self._values_at(leaves, state, steps.start, values)
        for number in steps:
            _evaluate(self.program.steps[number], env, running)
        return env

    def _segment(self, start: int, stop: int) -> Callable[..., State]:
        """From one step to another."""
        live = self.program.live(stop)

        def run(leaves: Leaves, state: State) -> State:
            env = self._run(_NO_TAPS, leaves, state, range(start, stop))
            return State(_chosen(env, live))

        return run

    def _enter(self, number: int) -> Callable[..., State]:
        """To the first trip of a scan."""
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
            return State(values, [env[value] for value in carried], stacked)

        return run

    def _trip(self, number: int) -> Callable[..., State]:
        """One trip of a scan."""
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
        """After the last trip of a scan."""
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
        """Which results of a scan are put together from all trips and read later."""
        writes = self.program.steps[number].writes
        live = self.program.live(number + 1)
        outputs = []
        for i in range(self._scan(number).carried, len(writes)):
            if writes[i] in live:
                outputs.append(i)
        return outputs

    def _run_trip(
        self, running: TapRun, number: int, leaves: Leaves, state: State, trips: Any
    ) -> list[Any]:
        """Runs the body of a scan once; returns its results."""
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


def _compile(make: Callable[..., Callable[..., Any]], *steps: int) -> CompiledOnce:
    """Makes a function of some steps with a method such as `Segments._segment`, and compiles it."""
    return CompiledOnce(make(*steps))


def _element_of(scan: Scan, trips: Any) -> Any:
    """The element of the stacks that the next trip takes."""
    return scan.length - 1 - trips if scan.reverse else trips


def _evaluate(step: Step, env: Values, running: TapRun) -> None:
    operands = [env[value] for value in step.reads]
    results = running.visit_equation(step.equation, operands, Position(step.path))
    env.update(zip(step.writes, results, strict=True))


def _chosen(env: Values, values: Iterable[int]) -> Values:
    return {value: env[value] for value in values}
