"""Goes through a traced program and unifies the axes that its equations tie together."""

from collections.abc import Sequence
from typing import Any

from jaxpruner.structure.axes import Axes, Axis, new_axes
from jaxpruner.structure.rules import contracting, primitives
from jaxpruner.structure.traces import (
    Contraction,
    EquationAxes,
    EquationTies,
    new_results,
)
from jaxpruner.trace import contractions
from jaxpruner.trace.interpreter import Interpreter, Position
from jaxpruner.trace.program import Cond, Program, ProgramPath, Scan, While, shape_of

# These may read only parts of their operands, so that their results count as read (`programs.pin_unread`).
_TAKES_PARTS = frozenset('dynamic_slice gather slice split unstack'.split())


class Inference(Interpreter[Axes]):
    """Unifies the axes of a program's values, and keeps those of each equation that is needed."""

    def __init__(self, leaves: Sequence[Axes]):
        self.first_uses: dict[int, int] = {}  # number of a leaf -> when it is first used
        # `id` of a leaf's axes -> the number of the leaf, and the axes, so that they stay alive.
        self._leaves = {id(axes): (number, axes) for number, axes in enumerate(leaves)}
        self.equations: dict[ProgramPath, EquationAxes] = {}
        self.constants: dict[ProgramPath, tuple[Axes, ...]] = {}
        self.trips: dict[ProgramPath, Axis] = {}
        self.contractions: list[Contraction] = []
        self.read: list[Axes] = []  # axes of values, or of their parts, that equations read

    def constant(self, value: Any, aval: Any) -> Axes:
        return value if isinstance(value, tuple) else new_axes(aval.shape)

    def unneeded(self, equation: Any, operands: Any) -> list[Axes]:
        return new_results(equation)

    def visit_program(
        self, program: Program, inputs: Sequence[Axes], position: Position
    ) -> list[Axes]:
        axes = tuple([new_axes(shape_of(variable)) for variable in program.jaxpr.constvars])
        self.constants[position.path] = axes
        return super().visit_program(Program(program.jaxpr, axes), inputs, position)

    def visit_equation(self, equation: Any, operands: list[Axes], position: Position) -> list[Axes]:
        results = super().visit_equation(equation, operands, position)
        self.equations[position.path] = EquationAxes(tuple(operands), tuple(results))
        return results

    def visit_plain(self, equation: Any, operands: list[Axes], position: Position) -> list[Axes]:
        for axes in operands:
            if id(axes) in self._leaves:
                number, _ = self._leaves[id(axes)]
                self.first_uses.setdefault(number, len(self.equations))
        name = equation.primitive.name
        ties = EquationTies(equation, operands, position)
        if name in primitives.ROWS:
            results = primitives.ROWS[name].axes(ties)
        else:
            results = ties.pin_everything('nothing is known of this operation')
        if name in contractions.OPERATIONS:
            self.contractions.append(contracting.contraction(ties))
        if name not in _TAKES_PARTS:
            self.read += operands
        self.read += results
        return results

    def visit_scan(self, scan: Scan, operands: list[Axes], position: Position) -> list[Axes]:
        """Carried values keep their axes. The sliced and stacked axes have an index for each trip."""
        _, carried, sliced = scan.split(operands)
        trips = Axis(scan.length)
        self.trips[position.path] = trips
        self.read.append((trips,))
        ties = EquationTies(scan.equation, operands, position)
        slices = []
        for axes in sliced:
            ties.unify(axes[0], trips)
            slices.append(axes[1:])
            if id(axes) in self._leaves:  # a slice of a leaf counts as that leaf
                number, _ = self._leaves[id(axes)]
                self._leaves[id(slices[-1])] = number, slices[-1]
        results = self.visit_scan_body(scan, operands, carried, slices, position)
        carried_out, stacked = scan.split_results(results)
        ties.unify_values(carried, carried_out)
        return carried + [(trips, *axes) for axes in stacked]

    def visit_while(self, loop: While, operands: list[Axes], position: Position) -> list[Axes]:
        _, _, carried = loop.split(operands)
        self.visit_condition(loop, operands, carried, position)
        results = self.visit_loop_body(loop, operands, carried, position)
        EquationTies(loop.equation, operands, position).unify_values(carried, results)
        return carried

    def visit_cond(self, cond: Cond, operands: list[Axes], position: Position) -> list[Axes]:
        ties = EquationTies(cond.equation, operands, position)
        first, *others = self.visit_branches(cond, operands, position)
        for results in others:
            ties.unify_values(first, results)
        return first
