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
from jaxpruner.uses import bodies
from jaxpruner.uses.compiled_once import CompiledOnce
from jaxpruner.uses.graph import Use, UseGraph
from jaxpruner.uses.steps import Step, Steps
from jaxpruner.uses.taps import Taps

_NO_TAPS = Taps([], lambda use, operands: None)
# Values of the program by number.
Values = dict[int, Any]


class Cut(NamedTuple):
    """A place in the program: before a step, or in the scan that it is, after so many trips.

    >>> Cut(2) == Cut(2, 0)
    False
    """

    step: int
    trips: int | None = None


class State(NamedTuple):
    """What is kept of a batch at a cut.

    Attributes:
      values: by number; inside a scan those that it does not change.
      carried: inside a scan what is carried to the next trip.
      outputs: inside a scan what all trips put together, as far as it is read later.

    >>> State({0: 1.0}).carried
    ()
    """

    values: Values
    carried: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


class Observer(NamedTuple):
    """Adds what goes into operations to their totals, in place.

    Attributes:
      compiled: of the totals, the leaves that it reads, the state of a batch, and how many trips of a scan are done.
      leaves_of: the leaves that it reads, of the parameters.

    >>> Observer(CompiledOnce(lambda totals, *rest: totals), lambda params: [])([], {}, State({}), None)
    []
    """

    compiled: CompiledOnce
    leaves_of: Callable[[tree_lib.PyTree], list[Any]]

    def __call__(
        self, totals: list[Any], params: tree_lib.PyTree, state: State, trips: Any
    ) -> list[Any]:
        """The new totals."""
        return self.compiled(totals, self.leaves_of(params), state, trips)

    def lower(self, totals: Any, params: tree_lib.PyTree, state: State, trips: Any) -> Any:
        """The lowered program of arguments, or of their shapes."""
        return self.compiled.lower(totals, self.leaves_of(params), state, trips)


class Segments:
    """A model that is run from cut to cut.

    Attributes:
      program: its steps.

    Args:
      graph: of the model.
      uses: what is going to be observed; the model is not run beyond.

    >>> from jaxpruner.uses import param_uses
    >>> params, x = {'a': jnp.ones((3, 3)), 'b': jnp.ones((3, 1))}, jnp.ones((2, 3))
    >>> graph = param_uses(lambda params, x: jnp.tanh(x @ params['a']) @ params['b'], params, x)
    >>> segments = Segments(graph, graph['b'])
    >>> state = segments.advance(params, segments.begin(x), Cut(0), Cut(2))  # after the product and tanh
    >>> [value.shape for value in state.values.values()]
    [(2, 3)]
    """

    def __init__(self, graph: UseGraph, uses: Iterable[Use]):
        self.program = Steps(graph, uses)
        self._compiled = functools.cache(lambda make, *places: CompiledOnce(make(*places)))

    def begin(self, *inputs: Any) -> State:
        """A batch before the first step.

        Args:
          *inputs: the model's.
        """
        leaves = jax.tree.leaves(inputs)
        numbers = self.program.inputs[len(self.program.inputs) - len(leaves) :]
        return State(dict(zip(numbers, leaves, strict=True)))

    def advance(self, params: tree_lib.PyTree, state: State, here: Cut, there: Cut) -> State:
        """Runs a batch from one cut to another.

        Args:
          params: the parameters.
          state: of the batch, at `here`.
          here: a cut.
          there: a later cut.

        Returns:
          The state at `there`.
        """
        while here != there:
            step = here.step
            if here.trips is None and step < there.step:
                numbers = self._reads(step, there.step) + self.program.live(there.step)
                leaves = self._leaves_of(params, step, numbers)
                state = self._compiled(self._segment, step, there.step)(leaves, state)
                here = Cut(there.step)
            elif here.trips is None:
                leaves = self._leaves_of(params, step, self.program.steps[step].reads)
                state, here = self._compiled(self._enter, step)(leaves, state), Cut(step, 0)
            elif here.trips < self._scan(step)[1].length:
                leaves = self._leaves_of(params, step, self.program.steps[step].reads)
                state = self._compiled(self._trip, step)(leaves, state, here.trips)
                here = Cut(step, here.trips + 1)
            else:
                state, here = self._leave(step, state), Cut(step + 1)
        return state

    def observe(self, taps: Taps, here: Cut, stop: int) -> 'Observer':
        """A compiled function that adds what goes into operations to their totals, in place.

        Args:
          taps: the operations; those in the scan of the cut within one trip.
          here: where to begin; of a scan any trip.
          stop: the step before which to stop.

        Returns:
          A function of the totals, the parameters, the state of a batch, and how many trips of the scan it is behind.
        """

        def run(totals: list[Any], leaves: list[Any], state: State, trips: Any) -> list[Any]:
            found = dict(enumerate(totals))
            if here.trips is None:
                found = self._run(leaves, state, here.step, stop, taps, found)[1]
            else:
                step, scan = self._scan(here.step)
                operands, _ = self._operands_of_trip(here.step, leaves, state, trips)
                found = taps.program(scan.body, operands, (*step.path, 0), found, {})[1]
            return [found[place] for place in range(len(totals))]

        compiled = CompiledOnce(run, donate_argnums=(0,))
        numbers = self._reads(here.step, max(stop, here.step + 1))
        return Observer(compiled, lambda params: self._leaves_of(params, here.step, numbers))

    def _reads(self, start: int, stop: int) -> list[int]:
        return [number for step in self.program.steps[start:stop] for number in step.reads]

    def _leaves_of(self, params: tree_lib.PyTree, place: int, numbers: Iterable[int]) -> list[Any]:
        """The leaves of which some values are made, `None` in place of others: segments of like layers take alike."""
        numbers = list(numbers)
        needed = {
            number for step in self.program.made_anew(numbers, place) for number in step.reads
        }.union(numbers)
        pairs = zip(self.program.inputs, jax.tree.leaves(params), strict=False)
        return [leaf if number in needed else None for number, leaf in pairs]

    def _known(self, leaves: list[Any], state: State, place: int, numbers: Iterable[int]) -> Values:
        """All that is known before a step, with some values that are made of parameters alone."""
        program = self.program
        given = {
            number: leaf
            for number, leaf in zip(program.inputs, leaves, strict=False)
            if leaf is not None
        }
        known = {**program.constants, **given, **state.values}
        for step in program.made_anew(numbers, place):
            self._evaluate(step, known)
        return known

    def _run(
        self,
        leaves: list[Any],
        state: State,
        start: int,
        stop: int,
        taps: Taps = _NO_TAPS,
        totals: Any = None,
    ) -> tuple[Values, Any]:
        steps = self.program.steps[start:stop]
        known = self._known(
            leaves, state, start, [number for step in steps for number in step.reads]
        )
        for step in steps:
            totals = self._evaluate(step, known, taps, totals)
        return known, totals

    def _evaluate(
        self, step: Step, known: Values, taps: Taps = _NO_TAPS, totals: Any = None
    ) -> Any:
        operands = [known[number] for number in step.reads]
        results, totals = taps.equation(step.equation, operands, step.path, totals, {})
        known.update(zip(step.writes, results, strict=True))
        return totals

    def _segment(self, start: int, stop: int) -> Callable[..., State]:
        def run(leaves: list[Any], state: State) -> State:
            known, _ = self._run(leaves, state, start, stop)
            return State({number: known[number] for number in self.program.live(stop)})

        return run

    def _scan(self, place: int) -> tuple[Step, bodies.Scan]:
        step = self.program.steps[place]
        return step, bodies.Scan.of(step.equation)

    def _outputs(self, place: int) -> list[int]:
        """Which results of a scan are put together from all trips and read later."""
        (step, scan), live = self._scan(place), self.program.live(place + 1)
        return [i for i in range(scan.carried, len(step.writes)) if step.writes[i] in live]

    def _enter(self, place: int) -> Callable[..., State]:
        """To the first trip of a scan."""
        step, scan = self._scan(place)
        constants, carried, sliced = scan.split(list(step.reads))
        later = set(self.program.live(place + 1)).difference(step.writes)
        beside = self.program.of_data([*later, *constants, *sliced])
        outputs = [step.equation.outvars[i].aval for i in self._outputs(place)]

        def run(leaves: list[Any], state: State) -> State:
            known = self._known(leaves, state, place, carried)
            return State(
                {number: known[number] for number in beside},
                [known[number] for number in carried],
                [jnp.zeros(aval.shape, aval.dtype) for aval in outputs],
            )

        return run

    def _trip(self, place: int) -> Callable[..., State]:
        """One trip of a scan."""
        scan = self._scan(place)[1]

        def run(leaves: list[Any], state: State, trips: Any) -> State:
            operands, at = self._operands_of_trip(place, leaves, state, trips)
            results, _ = _NO_TAPS.program(scan.body, operands, (), {}, {})
            pairs = zip(state.outputs, (results[i] for i in self._outputs(place)), strict=True)
            outputs = [lax.dynamic_update_index_in_dim(*pair, at, 0) for pair in pairs]
            return State(state.values, results[: scan.carried], outputs)

        return run

    def _leave(self, place: int, state: State) -> State:
        """After the last trip of a scan."""
        step = self.program.steps[place]
        written = dict(zip(step.writes, state.carried, strict=False))
        written |= {
            step.writes[i]: value
            for i, value in zip(self._outputs(place), state.outputs, strict=True)
        }
        values = {**state.values, **written}
        return State({number: values[number] for number in self.program.live(place + 1)})

    def _operands_of_trip(
        self, place: int, leaves: list[Any], state: State, trips: Any
    ) -> tuple[list[Any], Any]:
        """What the body of a scan gets, and which elements these are."""
        step, scan = self._scan(place)
        constants, _, sliced = scan.split(list(step.reads))
        known = self._known(leaves, state, place, [*constants, *sliced])
        at = scan.length - 1 - trips if step.equation.params['reverse'] else trips
        taken = [lax.dynamic_index_in_dim(known[number], at, keepdims=False) for number in sliced]
        return [*(known[number] for number in constants), *state.carried, *taken], at
