"""Goes through a traced program and unifies the axes that its equations tie together."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpruner.structure.analysis.axes import Axes, Axis, new_axes
from jaxpruner.structure.analysis.live_evaluator import KnownConstant, LiveEvaluator, with_constants
from jaxpruner.structure.analysis.records import (
    Contraction,
    EquationAxes,
    EquationTies,
    TracePosition,
    new_results,
)
from jaxpruner.structure.rules import contracting, primitives
from jaxpruner.trace import contractions
from jaxpruner.trace.program import Cond, Program, ProgramPath, Scan, While, shape_of

# These may read only parts of their operands, so that their results count as read (`tracing._pin_unread`).
_TAKES_PARTS = frozenset('dynamic_slice gather slice split unstack'.split())


class Inference(LiveEvaluator[Axes]):
    """Unifies the axes of a program's values, and keeps those of each equation that is needed."""

    def __init__(self, leaves: Sequence[Axes]):
        self.first_uses: dict[int, int] = {}  # number of a leaf -> when it is first used
        # `id` of a leaf's axes -> the number of the leaf, and the axes, so that they stay alive.
        self._leaves: dict[int, tuple[int, Axes]] = {}
        for number, axes in enumerate(leaves):
            self._leaves[id(axes)] = number, axes
        self.equations: dict[ProgramPath, EquationAxes] = {}
        self.constants: dict[ProgramPath, tuple[Axes, ...]] = {}
        self.trips: dict[ProgramPath, Axis] = {}
        self.contractions: list[Contraction] = []
        self.read: list[Axes] = []  # axes of values, or of their parts, that equations read

    def constant(self, value: Any, aval: Any) -> Axes:
        if isinstance(value, KnownConstant):
            return value.value
        return new_axes(aval.shape)

    def unneeded(self, equation: Any, operands: Any) -> list[Axes]:
        return new_results(equation)

    def visit_program(
        self, program: Program, inputs: Sequence[Axes], position: TracePosition
    ) -> list[Axes]:
        shapes = map(shape_of, program.jaxpr.constvars)
        axes_of_constants = tuple(map(new_axes, shapes))
        self.constants[position.path] = axes_of_constants
        program = with_constants(program, axes_of_constants)
        return super().visit_program(program, inputs, position)

    def visit_equation(
        self, equation: Any, operands: list[Axes], position: TracePosition
    ) -> list[Axes]:
        results = super().visit_equation(equation, operands, position)
        axes = EquationAxes(tuple(operands), tuple(results))
        self.equations[position.path] = axes
        return results

    def visit_plain(
        self, equation: Any, operands: list[Axes], position: TracePosition
    ) -> list[Axes]:
        self._note_uses(operands)
        name = equation.primitive.name
        ties = EquationTies(equation, operands, position)
        results = _results(ties)
        if name in contractions.OPERATIONS:
            self.contractions.append(contracting.contraction(ties))
        if name not in _TAKES_PARTS:
            self.read += operands
        self.read += results
        return results

    def _note_uses(self, operands: Iterable[Axes]) -> None:
        """Notes the leaves that are used here for the first time."""
        now = len(self.equations)
        for axes in operands:
            if id(axes) in self._leaves:
                number, _ = self._leaves[id(axes)]
                self.first_uses.setdefault(number, now)

    def visit_scan(self, scan: Scan, operands: list[Axes], position: TracePosition) -> list[Axes]:
        """Carried values keep their axes. The sliced and stacked axes have an index for each trip."""
        _, carried, sliced = scan.split(operands)
        trips = Axis(scan.length)
        self.trips[position.path] = trips
        self.read.append((trips,))
        ties = EquationTies(scan.equation, operands, position)
        slices = []
        for axes in sliced:
            ties.unify(axes[0], trips)
            slices.append(self._slice(axes))
        results = self.visit_scan_body(scan, operands, carried, slices, position)
        carried_out, stacked = scan.split_results(results)
        ties.unify_values(carried, carried_out)
        with_trips = [(trips, *axes) for axes in stacked]
        return carried + with_trips

    def _slice(self, axes: Axes) -> Axes:
        """The axes of an operand in one trip. A slice of a leaf counts as that leaf."""
        axes_in_trip = axes[1:]
        if id(axes) in self._leaves:
            number, _ = self._leaves[id(axes)]
            self._leaves[id(axes_in_trip)] = number, axes_in_trip
        return axes_in_trip

    def visit_while(self, loop: While, operands: list[Axes], position: TracePosition) -> list[Axes]:
        _, _, carried = loop.split(operands)
        ties = EquationTies(loop.equation, operands, position)
        self.visit_condition(loop, operands, carried, position)
        results = self.visit_loop_body(loop, operands, carried, position)
        ties.unify_values(carried, results)
        return carried

    def visit_cond(self, cond: Cond, operands: list[Axes], position: TracePosition) -> list[Axes]:
        ties = EquationTies(cond.equation, operands, position)
        first: list[Axes] = []
        for results in self.visit_branches(cond, operands, position):
            first = first or results
            ties.unify_values(first, results)
        return first


def _results(ties: EquationTies) -> list[Axes]:
    """The axes of the results of an equation with no program inside."""
    name = ties.equation.primitive.name
    if name not in primitives.ROWS:
        return ties.pin_everything('nothing is known of this operation')
    row = primitives.ROWS[name]
    return row.axes(ties)
