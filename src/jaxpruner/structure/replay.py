"""Runs a traced program with smaller shapes.

An equation with an axis that gets smaller runs as its row of the table says. All other equations run as they were
traced, with their derivative rules. Each result is checked to have the shape that the cut leaves.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner.structure import derivatives
from jaxpruner.structure.axes import atoms, sizes_of
from jaxpruner.structure.cut import Cut, EquationCut
from jaxpruner.structure.traces import Trace
from jaxpruner.trace.interpreter import Position, Run, keep
from jaxpruner.trace.program import RULED, Call, Program, Scan

Values = list[Any]


class Replay(Run):
    """A run of a program on values that have been cut.

    Attributes:
      trace: of the whole program.
      cut: the channels that stay.
    """

    def __init__(self, trace: Trace, cut: Cut):
        self.trace = trace
        self.cut = cut

    def run(self, arguments: Sequence[Any]) -> Values:
        """Runs the whole program."""
        position = Position.of_whole(self.trace.program)
        return self.visit_program(Program.of(self.trace.program), arguments, position)

    def visit_program(self, program: Program, inputs: Sequence[Any], position: Position) -> Values:
        axes_of_constants = self.trace.constants[position.path]
        constants = map(self.cut.take, program.constants, axes_of_constants)
        small = Program(program.jaxpr, tuple(constants))
        return super().visit_program(small, inputs, position)

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        axes = self.trace.equations[position.path]
        is_cut = any(map(self.cut.shrinks, axes.values))
        run = self.enter if is_cut else super().visit_equation
        results = run(equation, operands, position)
        values = zip(results, axes.results, position.needed, strict=True)
        for value, axes_of_result, is_needed in values:
            expected = self.cut.shape(axes_of_result)
            if is_needed and jnp.shape(value) != expected:
                shape = jnp.shape(value)
                raise AssertionError(
                    f'{equation.primitive.name} at {position.line(equation)} has a result of shape {shape} where the '
                    f'cut leaves {expected}; its rule in jaxpruner.structure is wrong'
                )
        return results

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        small = self._small(equation, position)
        run = small.axes.row.resized or EquationCut.run
        return run(small, operands)

    def _small(self, equation: Any, position: Position) -> EquationCut:
        return EquationCut(equation, self.trace.equations[position.path], self.cut)

    def visit_call(self, call: Call, operands: Values, position: Position) -> Values:
        equation = call.equation
        if equation.primitive.name not in RULED:
            return super().visit_call(call, operands, position)
        inner = position.inside(equation, 0, position.needed)

        def run(*operands: Any) -> Values:
            return keep(self.visit_program(call.program, operands, inner), inner.needed)

        small = self._small(equation, position)
        return derivatives.run_ruled(run, small, position, Replay, operands)

    def slices(self, scan: Scan, position: Position) -> tuple[Any, int]:
        """The numbers of the trips that stay, if channels are listed for each trip."""
        trips = self.trace.trips[position.path]
        stay = None
        if not self.cut.owners.isdisjoint(atoms(trips)):
            stay = self.cut.take(jnp.arange(scan.length), (trips,))
        return stay, self.cut.size(trips)

    def inside(self, position: Position, state: Any, element: Any = None) -> 'Replay':
        if element is None:
            return self
        trip_atoms = atoms(self.trace.trips[position.path])
        indices = jnp.unravel_index(element, sizes_of(trip_atoms))
        trips = {**self.cut.trips, **dict(zip(trip_atoms, indices, strict=True))}
        return Replay(self.trace, Cut(self.cut.lists, trips))
