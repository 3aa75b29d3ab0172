"""Runs a traced program with smaller shapes.

Each equation with an axis that gets smaller is run as its row of the table says; all others are run as they were
traced, with their rules of derivatives. Each result has to have the shape that the cut says.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpruner.structure.analysis.axes import atoms
from jaxpruner.structure.analysis.live_evaluator import LiveEvaluator
from jaxpruner.structure.analysis.records import Place, Traced
from jaxpruner.structure.cutting import derivatives
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.rules import primitives
from jaxpruner.structure.rules.resizing import SmallEquation
from jaxpruner.uses import calls
from jaxpruner.uses.bodies import (
    Call,
    Cond,
    Program,
    Scan,
    While,
    bind,
)

# Results without a part in the results of the model are `None`, which loops and calls of JAX take for an empty tree.
Values = list[Any]


class Replay(LiveEvaluator[Any]):
    """A run of a program on values of which a cut has been made.

    Attributes:
      trace: of the whole program.
      cut: what stays.
    """

    def __init__(self, trace: Traced, cut: Cut):
        self.trace = trace
        self.cut = cut

    def run(self, arguments: Sequence[Any]) -> Values:
        """Runs the whole program."""
        needed = (True,) * len(self.trace.program.jaxpr.outvars)
        return self.visit_program(Program.of(self.trace.program), arguments, Place(needed=needed))

    def constant(self, value: Any, aval: Any) -> Any:
        return value

    def visit_program(self, program: Program, inputs: Sequence[Any], position: Place) -> Values:
        constants = []
        for value, axes in zip(program.constants, self.trace.constants[position.path], strict=True):
            constants.append(self.cut.take(value, axes))
        results = super().visit_program(Program(program.jaxpr, tuple(constants)), inputs, position)
        return _where(position.needed, results)

    def unneeded(self, equation: Any) -> Values:
        return [None] * len(equation.outvars)

    def visit_needed(self, equation: Any, operands: Values, position: Place) -> Values:
        axes = self.trace.equations[position.path]
        if self.cut.touches((*axes.operands, *axes.results)):
            results = super().visit_needed(equation, operands, position)
        elif any(operand is None for operand in operands):
            results = self._run_without(equation, operands, position)
        else:
            results = bind(equation, operands)
        for value, result_axes, needed in zip(results, axes.results, position.needed, strict=True):
            expected = self.cut.shape(result_axes)
            if needed and jnp.shape(value) != expected:
                raise AssertionError(
                    f'{equation.primitive.name} at {position.line(equation)} has a result of shape '
                    f'{jnp.shape(value)} where the cut leaves {expected}; its rule in jaxpruner.structure is wrong'
                )
        return results

    def _run_without(self, equation: Any, operands: Values, position: Place) -> Values:
        """An equation that stays as it is, some of whose operands have no part in the results."""
        if equation.primitive.name not in calls.RULED:
            return super().visit_needed(equation, operands, position)
        whole = []
        for variable, operand in zip(equation.invars, operands, strict=True):
            missing = operand is None
            whole.append(jnp.zeros_like(variable.aval) if missing else operand)
        return bind(equation, whole)

    def visit_plain(self, equation: Any, operands: Values, position: Place) -> Values:
        small = SmallEquation(equation, self.trace.equations[position.path], self.cut)
        return primitives.resized_rule(equation.primitive.name)(small, operands)

    def visit_call(self, call: Call, operands: Values, position: Place) -> Values:
        equation = call.equation
        inside = position.inside(equation, 0, position.needed)

        def run(*operands: Any) -> Values:
            return self.visit_program(call.program, operands, inside)

        if equation.primitive.name in calls.RULED:
            small = SmallEquation(equation, self.trace.equations[position.path], self.cut)
            ruled = derivatives.RuledCall(run, small, position, Replay)
            return ruled(*operands)
        return calls.run_call(equation, run, operands)

    def visit_scan(self, scan: Scan, operands: Values, position: Place) -> Values:
        constants, carried, sliced = scan.split(operands)
        inside = position.in_scan(scan)
        params = scan.equation.params

        all_trips = self.trace.trips[position.path]
        numbers = self.cut.take(jnp.arange(scan.length), (all_trips,))  # of the trips that stay
        trips = atoms(all_trips)
        has_lists = self.cut.has_lists_of(trips)

        def body(carried: Values, elements: Any) -> tuple[Values, Values]:
            elements, trip = elements
            inner = self
            if has_lists:
                indices = jnp.unravel_index(trip, [each.size for each in trips])
                cut = self.cut.inside(dict(zip(trips, indices, strict=True)))
                inner = Replay(self.trace, cut)
            results = inner.visit_program(scan.body, [*constants, *carried, *elements], inside)
            return scan.split_results(results)

        carried, stacked = lax.scan(
            body,
            _where(inside.needed[: scan.carried], carried),
            (sliced, numbers if has_lists else None),
            self.cut.size(all_trips),
            scan.reverse,
            params['unroll'],
            params.get('_split_transpose', False),
        )
        return carried + stacked

    def visit_while(self, loop: While, operands: Values, position: Place) -> Values:
        condition_constants, body_constants, carried = loop.split(operands)
        in_condition, in_body = position.in_condition(loop), position.in_body(loop)

        def condition(carried: Values) -> Any:
            (again,) = self.visit_program(
                loop.condition, condition_constants + carried, in_condition
            )
            return again

        def body(carried: Values) -> Values:
            return self.visit_program(loop.body, body_constants + carried, in_body)

        return lax.while_loop(condition, body, _where(in_body.needed, carried))

    def visit_cond(self, cond: Cond, operands: Values, position: Place) -> Values:
        index, *values = operands

        def branch(number: int) -> Any:
            inside = position.inside(cond.equation, number, position.needed)
            return lambda *values: self.visit_program(cond.branches[number], values, inside)

        branches = [branch(number) for number in range(len(cond.branches))]
        return lax.switch(index, branches, *values)


def _where(needed: Sequence[bool], values: Sequence[Any]) -> Values:
    """The values that are needed, `None` for others."""
    return [value if keep else None for value, keep in zip(values, needed, strict=True)]
