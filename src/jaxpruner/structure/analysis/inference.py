"""Goes through a traced program and states what each of its equations says of axes."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpruner.structure.analysis.axes import Axes, Axis, Pin, Ties, new_axes
from jaxpruner.structure.analysis.records import Contraction, EquationAxes, Place
from jaxpruner.structure.rules import contracting, primitives
from jaxpruner.uses import contractions, liveness
from jaxpruner.uses.bodies import Call, Cond, Evaluator, Program, ProgramPath, Scan, While
from jaxpruner.uses.moving_rules import shape_of

_TAKES_PARTS = frozenset('dynamic_slice gather slice split'.split())


class _Constant:
    """The axes of a constant, in its place among a program's constants."""

    def __init__(self, axes: Axes):
        self.axes = axes


class Inference(Evaluator[Axes, Place]):
    """Unifies the axes of a program's values, and keeps those of each equation that is needed."""

    def __init__(self, leaves: Sequence[Axes]):
        self.first_uses: dict[int, int] = {}  # number of a leaf -> when it is first used
        # By the `id` of the axes that stand for a leaf: its number, and the axes, so that they stay alive.
        self._leaves: dict[int, tuple[int, Axes]] = {}
        for number, axes in enumerate(leaves):
            self._leaves[id(axes)] = number, axes
        self.equations: dict[ProgramPath, EquationAxes] = {}
        self.constants: dict[ProgramPath, tuple[Axes, ...]] = {}
        self.trips: dict[ProgramPath, Axis] = {}
        self.contractions: list[Contraction] = []
        self.read: list[Axes] = []  # what equations read of values, without what is cut off

    def constant(self, value: Any, aval: Any) -> Axes:
        return value.axes if isinstance(value, _Constant) else new_axes(aval.shape)

    def positions_in(self, program: Program, position: Place) -> Iterable[Place]:
        live = liveness.live(program.jaxpr, position.needed)
        for number, needed in enumerate(live.results):
            yield position.at(number)._replace(needed=needed)

    def visit_program(
        self, program: Program, inputs: Sequence[Axes], position: Place
    ) -> list[Axes]:
        constants = [_Constant(new_axes(shape_of(v))) for v in program.jaxpr.constvars]
        self.constants[position.path] = tuple([constant.axes for constant in constants])
        return super().visit_program(Program(program.jaxpr, tuple(constants)), inputs, position)

    def visit_equation(self, equation: Any, operands: list[Axes], position: Place) -> list[Axes]:
        if not any(position.needed):
            return _new_results(equation)
        results = super().visit_equation(equation, operands, position)
        self.equations[position.path] = EquationAxes(tuple(operands), tuple(results))
        return results

    def visit_plain(self, equation: Any, operands: list[Axes], position: Place) -> list[Axes]:
        for axes in operands:
            if id(axes) in self._leaves:
                self.first_uses.setdefault(self._leaves[id(axes)][0], len(self.equations))
        ties = _ties(equation, position)
        name = equation.primitive.name
        if name in primitives.ROWS:
            results = primitives.ROWS[name].axes(equation, operands, ties)
        else:
            results = _new_results(equation)
            for axes in (*operands, *results):
                ties.pin_all(axes, 'nothing is known of this operation')
        if name in contractions.OPERATIONS:
            self.contractions.append(contracting.contraction(equation, operands))
        self.read += results if name in _TAKES_PARTS else [*operands, *results]
        return results

    def visit_call(self, call: Call, operands: list[Axes], position: Place) -> list[Axes]:
        inside = position.inside(call.equation, 0, position.needed)
        return self.visit_program(call.program, operands, inside)

    def visit_scan(self, scan: Scan, operands: list[Axes], position: Place) -> list[Axes]:
        """What is carried keeps its axes. The sliced and stacked axes have an index for each trip."""
        constants, carried, sliced = scan.split(operands)
        trips = Axis(scan.length)
        self.trips[position.path] = trips
        self.read.append((trips,))
        ties = _ties(scan.equation, position)
        for axes in sliced:
            ties.unify(axes[0], trips)
        needed = liveness.needed_of_scan_body(scan, position.needed)
        inside = position.inside(scan.equation, 0, needed)
        taken = [axes[1:] for axes in sliced]
        for axes, inner in zip(sliced, taken, strict=True):
            if id(axes) in self._leaves:
                self._leaves[id(inner)] = self._leaves[id(axes)][0], inner
        results = self.visit_program(scan.body, [*constants, *carried, *taken], inside)
        carried_out, stacked = scan.split_results(results)
        for before, after in zip(carried, carried_out, strict=True):
            ties.unify_each(before, after)
        return carried + [(trips, *axes) for axes in stacked]

    def visit_while(self, loop: While, operands: list[Axes], position: Place) -> list[Axes]:
        condition_constants, body_constants, carried = loop.split(operands)
        ties = _ties(loop.equation, position)
        needed = liveness.needed_of_while_body(loop, position.needed)
        in_condition = position.inside(loop.equation, 0, (True,))
        in_body = position.inside(loop.equation, 1, needed)
        self.visit_program(loop.condition, condition_constants + carried, in_condition)
        results = self.visit_program(loop.body, body_constants + carried, in_body)
        for before, after in zip(carried, results, strict=True):
            ties.unify_each(before, after)
        return carried

    def visit_cond(self, cond: Cond, operands: list[Axes], position: Place) -> list[Axes]:
        _, *operands = operands
        ties = _ties(cond.equation, position)
        first: list[Axes] = []
        for number, branch in enumerate(cond.branches):
            inside = position.inside(cond.equation, number, position.needed)
            results = self.visit_program(branch, operands, inside)
            for before, after in zip(first, results, strict=number > 0):
                ties.unify_each(before, after)
            first = first or results
        return first


def _new_results(equation: Any) -> list[Axes]:
    return [new_axes(shape_of(variable)) for variable in equation.outvars]


def _ties(equation: Any, place: Place) -> Ties:
    def make_pin(reason: str) -> Pin:
        return place.pin(equation, reason)

    return Ties(make_pin)
