"""Runs a traced model and adds up statistics of the inputs of chosen operations.

The program runs as it was traced. Only equations with a chosen operation inside are opened. Totals are passed through
loops and branches and added to in place, so that they take memory only once if they are donated.
"""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.uses.bodies import Cond, Program, ProgramPath, Scan, While, bind
from jaxpruner.uses.graph import UnsupportedPrimitive, Use, UseGraph, leaves_a_program
from jaxpruner.uses.visitors import Evaluator, Position

Values = list[Any]
# Number of a place -> its total.
Totals = dict[int, Any]
# Path of a loop -> its current trip.
Trips = Mapping[ProgramPath, Any]
Statistic = Callable[..., Any]


def run_with_taps(
    graph: UseGraph,
    uses: Sequence[Use],
    statistic: Statistic,
    params: tree_lib.PyTree,
    *inputs: Any,
) -> tuple[list[jax.Array], list[Any]]:
    """Runs the model and takes a statistic of the operands of some of its operations.

    Call this function inside `jax.jit`. `use.site.equation` is the operation, and its operand number `use.site.operand`
    is read from the parameter.

    Args:
      graph: of the model, traced with inputs of these shapes.
      uses: of the graph.
      statistic: `(use, operands) -> pytree of arrays`.
      params: the parameters.
      *inputs: the inputs.

    Returns:
      The leaves of the model's results, and a statistic for each use. It is summed over the trips of loops. If each
      trip of a loop gets its own element of the parameter, it is stacked along a first axis instead.

    Raises:
      UnsupportedPrimitive: an operation lies in a program that cannot be opened.

    >>> from jaxpruner.uses import param_uses
    >>> params, x = {'w': jnp.ones((3, 4))}, jnp.arange(6.0).reshape(2, 3)
    >>> graph = param_uses(lambda params, x: x @ params['w'], params, x)
    >>> _, (squares,) = run_with_taps(graph, graph['w'], lambda use, xs: (xs[0] ** 2).sum(0), params, x)
    >>> squares
    Array([ 9., 17., 29.], dtype=float32)
    """
    taps = Taps([[use] for use in uses], statistic)
    return taps.run(graph, taps.zeros(), params, *inputs)


class Tap(NamedTuple):
    """A use that is observed, and the number of the place where its statistic is added."""

    number: int
    use: Use


class Taps:
    """Operations that are observed, and the places where their statistics are added up.

    Attributes:
      places: the uses of each place, all with statistics of the same shape.
      statistic: `(use, operands, *given) -> pytree of arrays`; what a run is given changes no shape.
      opened: paths of the equations that have an operation inside.
    """

    def __init__(self, places: Sequence[Sequence[Use]], statistic: Statistic):
        self.places = places
        self.statistic = statistic
        self.opened: set[ProgramPath] = set()
        self._taps: dict[ProgramPath, list[Tap]] = {}
        for number, uses in enumerate(places):
            for use in uses:
                _check_observable(use)
                path = use.site.path
                self._taps.setdefault(path, []).append(Tap(number, use))
                for length in range(1, len(path), 2):
                    self.opened.add(path[:length])

    def zeros(self, within: ProgramPath | None = None) -> list[Any]:
        """Zero totals, one for each place.

        `within` is the path of a loop if only single trips of it are run.
        """
        return [self._zeros_of(uses[0], within) for uses in self.places]

    def run(
        self,
        graph: UseGraph,
        totals: Sequence[Any],
        params: tree_lib.PyTree,
        *inputs: Any,
        given: Sequence[Any] = (),
    ) -> tuple[list[jax.Array], list[Any]]:
        """Runs the model, and returns the leaves of its results and the new totals.

        Raises:
          UnsupportedPrimitive: an operation lies in a program that cannot be opened.
        """
        running = TapRun(self, dict(enumerate(totals)), given=given)
        program = Program.of(graph.program)
        values = jax.tree.leaves((params, inputs))
        results = running.visit_program(program, values, Position())
        return results, list(running.totals.values())

    def at(self, path: ProgramPath) -> Sequence[Tap]:
        """The taps of an equation."""
        return self._taps.get(path, ())

    def within(self, path: ProgramPath) -> list[Tap]:
        """The taps of an equation and of the equations inside it."""
        inside: list[Tap] = []
        for at, taps in self._taps.items():
            if at[: len(path)] == path:
                inside += taps
        return inside

    def _zeros_of(self, use: Use, within: ProgramPath | None) -> Any:
        operands = []
        for variable in use.site.equation.invars:
            aval = variable.aval
            operands.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        lengths = []
        for entry in use.site.view.stack:
            if entry.loop not in ((), within):
                lengths.append(entry.length)

        def zeros(shape: Any) -> jax.Array:
            return jnp.zeros((*lengths, *shape.shape), shape.dtype)

        shapes = jax.eval_shape(functools.partial(self.statistic, use), operands)
        return jax.tree.map(zeros, shapes)


class TapRun(Evaluator[Any, Position]):
    """A run of a program in which taps add to their totals.

    Attributes:
      taps: the operations that are observed.
      totals: the current totals.
      trips: the current trips of the loops around the program.
      given: further arguments of the statistic.
    """

    def __init__(
        self,
        taps: Taps,
        totals: Totals,
        trips: Trips = types.MappingProxyType({}),
        given: Sequence[Any] = (),
    ):
        self.taps = taps
        self.totals = dict(totals)
        self.trips = trips
        self.given = given

    def constant(self, value: Any, aval: Any) -> Any:
        return value

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        for tap in self.taps.at(position.path):
            statistic = self.taps.statistic(tap.use, operands, *self.given)
            index = []
            for entry in tap.use.site.view.stack:
                if entry.loop in self.trips:
                    index.append(self.trips[entry.loop])
            add = functools.partial(_add, index=index)
            total = self.totals[tap.number]
            self.totals[tap.number] = jax.tree.map(add, total, statistic)
        if position.path in self.taps.opened:
            return super().visit_equation(equation, operands, position)
        return bind(equation, operands)

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        name = equation.primitive.name
        tap = self.taps.within(position.path)[0]
        raise UnsupportedPrimitive(
            f'nothing can be observed inside {name} or the condition of a loop ({tap.use.where})'
        )

    def visit_scan(self, scan: Scan, operands: Values, position: Position) -> Values:
        constants, carried, sliced = scan.split(operands)
        first, step = 0, 1
        if scan.reverse:
            first, step = scan.length - 1, -1

        def body(state: Any, elements: Values) -> Any:
            carried, totals, trip = state
            trips = {**self.trips, position.path: trip}
            inner = self._inside(totals, trips)
            inputs = [*constants, *carried, *elements]
            results = inner.visit_program(scan.body, inputs, position.at(0))
            carried, stacked = scan.split_results(results)
            return (carried, inner.totals, trip + step), stacked

        state = carried, self._totals_within(position), jnp.int32(first)
        state, stacked = scan.run(body, state, sliced)
        carried, totals, _ = state
        self.totals |= totals
        return carried + stacked

    def visit_while(self, loop: While, operands: Values, position: Position) -> Values:
        in_condition = position.at(0)
        if self.taps.within(in_condition.path):
            return self.visit_plain(loop.equation, operands, position)
        condition_constants, body_constants, carried = loop.split(operands)

        def condition(state: Any) -> Any:
            carried, _ = state
            inner = self._inside({}, self.trips)
            inputs = condition_constants + carried
            (again,) = inner.visit_program(loop.condition, inputs, in_condition)
            return again

        def body(state: Any) -> Any:
            carried, totals = state
            inner = self._inside(totals, self.trips)
            inputs = body_constants + carried
            results = inner.visit_program(loop.body, inputs, position.at(1))
            return results, inner.totals

        state = carried, self._totals_within(position)
        carried, totals = lax.while_loop(condition, body, state)
        self.totals |= totals
        return carried

    def visit_cond(self, cond: Cond, operands: Values, position: Position) -> Values:
        index, *values = operands

        def run_branch(number: int, totals: Totals, *values: Any) -> Any:
            inner = self._inside(totals, self.trips)
            branch = cond.branches[number]
            results = inner.visit_program(branch, values, position.at(number))
            return results, inner.totals

        branches = []
        for number in range(len(cond.branches)):
            branches.append(functools.partial(run_branch, number))
        totals = self._totals_within(position)
        results, totals = lax.switch(index, branches, totals, *values)
        self.totals |= totals
        return results

    def _inside(self, totals: Totals, trips: Trips) -> 'TapRun':
        """A run of a program inside an equation, with these totals and trips."""
        return type(self)(self.taps, totals, trips, self.given)

    def _totals_within(self, position: Position) -> Totals:
        """The totals that an equation may add to."""
        totals = {}
        for tap in self.taps.within(position.path):
            totals[tap.number] = self.totals[tap.number]
        return totals


def _check_observable(use: Use) -> None:
    site = use.site
    if site.equation is None:
        raise UnsupportedPrimitive(
            'a parameter that the model returns is an operand of nothing, so there is no tap'
        )
    if leaves_a_program(site.path):
        name = site.equation.primitive.name
        raise UnsupportedPrimitive(
            f'a parameter leaves a program inside {name} as one of its results ({use.where}); it is an operand of '
            'nothing there, so there is no tap'
        )


def _add(total: jax.Array, statistic: jax.Array, index: Sequence[Any]) -> jax.Array:
    """Adds a statistic to its total, or to the current trip's element of a stacked total."""
    if not index:
        return total + statistic
    in_front = range(len(index))
    statistic = jnp.expand_dims(statistic, tuple(in_front))
    # All indices must have the same dtype.
    zero = jnp.zeros_like(index[0])
    other_axes = statistic.ndim - len(index)
    start = (*index, *[zero] * other_axes)
    old = lax.dynamic_slice(total, start, statistic.shape)
    return lax.dynamic_update_slice(total, old + statistic, start)
