"""Runs a traced model and adds up statistics of the inputs of chosen operations.

The program runs as it was traced. Only equations with a chosen operation inside are opened. Totals are passed through
loops and branches and added to in place, so that they take memory only once if they are donated.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.trace.graph import LEAVES, UnsupportedPrimitive, Use, UseGraph
from jaxpruner.trace.program import Position, ProgramPath, Run, Scan, While

Values = list[Any]
# Number of a place -> its total.
Totals = dict[int, Any]
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


class Taps:
    """Operations that are observed, and the places where their statistics are added up.

    Attributes:
      places: the uses of each place, all with statistics of the same shape.
      statistic: `(use, operands, *given) -> pytree of arrays`; what a run is given changes no shape.
      within: path of an equation or of a program inside one -> the uses there and inside, each with the number of the
        place where its statistic is added.
    """

    def __init__(self, places: Sequence[Sequence[Use]], statistic: Statistic):
        self.places = places
        self.statistic = statistic
        self.within: dict[ProgramPath, list[tuple[int, Use]]] = {}
        for number, uses in enumerate(places):
            for use in uses:
                path, equation = use.site.path, use.site.equation
                if equation is None or LEAVES in path:
                    raise UnsupportedPrimitive(
                        f'a parameter leaves a program as one of its results ({use.where}); it is an operand of '
                        'nothing there, so there is no tap'
                    )
                for length in range(1, len(path) + 1):
                    self.within.setdefault(path[:length], []).append((number, use))

    def zeros(self, within: ProgramPath | None = None) -> list[Any]:
        """Zero totals, one for each place.

        `within` is the path of a loop if only single trips of it are run.
        """
        totals = []
        for use, *_ in self.places:
            avals = [variable.aval for variable in use.site.equation.invars]
            operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            stack = use.site.view.stack
            lengths = [entry.length for entry in stack if entry.loop not in ((), within)]

            def zeros(shape: Any, lengths: Any = lengths) -> jax.Array:
                return jnp.zeros((*lengths, *shape.shape), shape.dtype)

            shapes = jax.eval_shape(functools.partial(self.statistic, use), operands)
            totals.append(jax.tree.map(zeros, shapes))
        return totals

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
        values = jax.tree.leaves((params, inputs))
        results = running.visit_all(graph.program, values)
        return results, list(running.totals.values())


@dataclasses.dataclass(eq=False)
class TapRun(Run):
    """A run of a program in which taps add to their totals.

    Attributes:
      taps: the operations that are observed.
      totals: the current totals.
      trips: path of each scan around the program -> its current trip.
      given: further arguments of the statistic.
    """

    shows = True

    taps: Taps
    totals: Totals
    trips: Mapping[ProgramPath, Any] = dataclasses.field(default_factory=dict)
    given: Sequence[Any] = ()

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        within = self.taps.within.get(position.path, ())
        is_opened = False
        for number, use in within:
            if use.site.path != position.path:
                is_opened = True
                continue
            statistic = self.taps.statistic(use, operands, *self.given)
            loops = [entry.loop for entry in use.site.view.stack]
            index = [self.trips[loop] for loop in loops if loop in self.trips]
            add = functools.partial(_add, index=index)
            self.totals[number] = jax.tree.map(add, self.totals[number], statistic)
        run = self.enter if is_opened else super().visit_equation
        return run(equation, operands, position)

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        """An equation with an operation inside that is not opened."""
        (_, use), *_ = self.taps.within[position.path]
        raise UnsupportedPrimitive(
            f'nothing can be observed inside {equation.primitive.name} or the condition of a loop ({use.where})'
        )

    def visit_while(self, loop: While, operands: Values, position: Position) -> Values:
        if position.at(0).path in self.taps.within:
            return self.visit_plain(loop.equation, operands, position)
        return super().visit_while(loop, operands, position)

    def state(self, position: Position) -> Totals:
        numbers = {number for number, _ in self.taps.within[position.path]}
        return {number: self.totals[number] for number in numbers}

    def update(self, state: Totals) -> None:
        self.totals |= state

    def slices(self, scan: Scan, position: Position) -> tuple[Any, int]:
        return jnp.arange(scan.length), scan.length

    def inside(self, position: Position, state: Totals, element: Any = None) -> 'TapRun':
        trips = self.trips if element is None else {**self.trips, position.path: element}
        return TapRun(self.taps, state, trips, self.given)


def _add(total: jax.Array, statistic: jax.Array, index: Sequence[Any]) -> jax.Array:
    """Adds a statistic to its total, or to the current trip's element of a stacked total."""
    if not index:
        return total + statistic
    statistic = jnp.expand_dims(statistic, tuple(range(len(index))))
    # All indices must have the same dtype.
    start = (*index, *[jnp.zeros_like(index[0])] * (statistic.ndim - len(index)))
    old = lax.dynamic_slice(total, start, statistic.shape)
    return lax.dynamic_update_slice(total, old + statistic, start)
