"""Runs a traced program with smaller shapes.

An equation with an axis that gets smaller runs as its row of the table says. All other equations run as they were
traced, with their derivative rules. Each result is checked to have the shape that the cut leaves.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpruner.structure.analysis.axes import Axis, atoms, sizes_of
from jaxpruner.structure.analysis.live_evaluator import LiveEvaluator
from jaxpruner.structure.analysis.records import TraceLike, TracePosition
from jaxpruner.structure.cutting import derivatives
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.rules import primitives
from jaxpruner.structure.rules.resizing import EquationCut
from jaxpruner.uses import bodies
from jaxpruner.uses.bodies import Call, Cond, Program, Scan, While, bind

# Values that the model's results do not depend on are `None`, an empty tree for loops and calls of JAX.
Values = list[Any]


class Replay(LiveEvaluator[Any]):
    """A run of a program on values that have been cut.

    Attributes:
      trace: of the whole program.
      cut: the channels that stay.
    """

    def __init__(self, trace: TraceLike, cut: Cut):
        self.trace = trace
        self.cut = cut

    def run(self, arguments: Sequence[Any]) -> Values:
        """Runs the whole program."""
        return self.visit_whole(self.trace.program, arguments)

    def constant(self, value: Any, aval: Any) -> Any:
        return value

    def visit_program(
        self, program: Program, inputs: Sequence[Any], position: TracePosition
    ) -> Values:
        axes_of_constants = self.trace.constants[position.path]
        constants = map(self.cut.take, program.constants, axes_of_constants)
        small = Program(program.jaxpr, tuple(constants))
        results = super().visit_program(small, inputs, position)
        return _drop_unneeded(position.needed, results)

    def unneeded(self, equation: Any) -> Values:
        return [None] * len(equation.outvars)

    def visit_needed(self, equation: Any, operands: Values, position: TracePosition) -> Values:
        axes = self.trace.equations[position.path]
        is_missing = [operand is None for operand in operands]
        if self.cut.touches(axes.values):
            results = super().visit_needed(equation, operands, position)
        elif not any(is_missing):
            results = bind(equation, operands)
        elif equation.primitive.name in bodies.RULED:
            results = _run_with_zeros(equation, operands)
        else:
            results = super().visit_needed(equation, operands, position)
        values = zip(results, axes.results, position.needed, strict=True)
        for value, axes_of_result, is_needed in values:
            if not is_needed:
                continue
            shape = jnp.shape(value)
            expected = self.cut.shape(axes_of_result)
            if shape != expected:
                raise AssertionError(
                    f'{equation.primitive.name} at {position.line(equation)} has a result of shape {shape} where the '
                    f'cut leaves {expected}; its rule in jaxpruner.structure is wrong'
                )
        return results

    def visit_plain(self, equation: Any, operands: Values, position: TracePosition) -> Values:
        small = self._small(equation, position)
        run = primitives.resized_rule(equation.primitive.name)
        return run(small, operands)

    def _small(self, equation: Any, position: TracePosition) -> EquationCut:
        axes = self.trace.equations[position.path]
        return EquationCut(equation, axes, self.cut)

    def visit_call(self, call: Call, operands: Values, position: TracePosition) -> Values:
        equation = call.equation
        inside = position.inside(equation, 0, position.needed)

        def run(*operands: Any) -> Values:
            return self.visit_program(call.program, operands, inside)

        if equation.primitive.name in bodies.RULED:
            small = self._small(equation, position)
            run_by_rule = derivatives.RuledCall(run, small, position, Replay)
            return run_by_rule(*operands)
        return bodies.run_call(equation, run, operands)

    def visit_scan(self, scan: Scan, operands: Values, position: TracePosition) -> Values:
        _, carried, sliced = scan.split(operands)
        needed = position.in_scan(scan).needed
        trips = self.trace.trips[position.path]
        has_lists = self.cut.has_lists_of(atoms(trips))
        trips_that_stay = None
        if has_lists:
            all_trips = jnp.arange(scan.length)
            trips_that_stay = self.cut.take(all_trips, (trips,))

        def body(carried: Values, slices_and_trip: Any) -> tuple[Values, Values]:
            slices, trip = slices_and_trip
            run = self._in_trip(trips, trip) if has_lists else self
            results = run.visit_scan_body(scan, operands, carried, slices, position)
            return scan.split_results(results)

        carried = _drop_unneeded(needed[: scan.carried], carried)
        carried, stacked = scan.run(body, carried, (sliced, trips_that_stay), self.cut.size(trips))
        return carried + stacked

    def _in_trip(self, trips: Axis, trip: Any) -> 'Replay':
        """A run of the body of a scan, with the channels that are listed for this trip."""
        trip_atoms = atoms(trips)
        indices = jnp.unravel_index(trip, sizes_of(trip_atoms))
        index_of = dict(zip(trip_atoms, indices, strict=True))
        return Replay(self.trace, self.cut.inside(index_of))

    def visit_while(self, loop: While, operands: Values, position: TracePosition) -> Values:
        _, _, carried = loop.split(operands)

        def condition(carried: Values) -> Any:
            (again,) = self.visit_condition(loop, operands, carried, position)
            return again

        def body(carried: Values) -> Values:
            return self.visit_loop_body(loop, operands, carried, position)

        initial = _drop_unneeded(position.in_body(loop).needed, carried)
        return lax.while_loop(condition, body, initial)

    def visit_cond(self, cond: Cond, operands: Values, position: TracePosition) -> Values:
        index, *values = operands

        def run(number: int, branch: Program, *values: Any) -> Values:
            inside = position.inside(cond.equation, number, position.needed)
            return self.visit_program(branch, values, inside)

        branches = []
        for number, branch in enumerate(cond.branches):
            branches.append(functools.partial(run, number, branch))
        return lax.switch(index, branches, *values)


def _run_with_zeros(equation: Any, operands: Values) -> Values:
    """Runs an equation with zeros for operands that are not needed."""
    whole = []
    for variable, operand in zip(equation.invars, operands, strict=True):
        is_missing = operand is None
        whole.append(jnp.zeros_like(variable.aval) if is_missing else operand)
    return bind(equation, whole)


def _drop_unneeded(needed: Sequence[bool], values: Sequence[Any]) -> Values:
    """Replaces values that are not needed by `None`."""
    needed_values = []
    for value, is_needed in zip(values, needed, strict=True):
        needed_values.append(value if is_needed else None)
    return needed_values
