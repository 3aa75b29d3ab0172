"""The walk through a program that finds where parameters meet data.

A value of the program is data if it depends on an input. Otherwise it is made only of parameters and has views of them,
or it is constant. An operation on a value with views and on data is a use.

The rules of `rules` are asked only if no operand is data. Those of `moving_rules.SAME` are always asked, since they
treat each operand by itself. `Walk._meet` decides how a parameter is used beside data. So a primitive that places
parameters among data also goes into `_PLACES`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpruner.uses import (
    constants,
    contractions,
    control_flow,
    known_integers,
    liveness,
    rules,
    shard_maps,
)
from jaxpruner.uses.bodies import Call, Cond, Program, Scan, ShardMap, While
from jaxpruner.uses.graph import Site
from jaxpruner.uses.indexing_rules import SCATTERS
from jaxpruner.uses.moving_rules import SAME, same
from jaxpruner.uses.records import Findings, Value, Values, WalkPosition, has_views, views_of
from jaxpruner.uses.views import NoRuleError
from jaxpruner.uses.visitors import Evaluator

# Operations that place parameters among data, besides the elementwise ones.
_PLACES = frozenset('concatenate dynamic_update_slice pad stack'.split())
# These read memory that any earlier equation may have written.
_READS_MEMORY = frozenset(('addupdate', 'get', 'swap'))
_LOOKS_UP = frozenset(('dynamic_slice', 'gather'))


class Walk(Evaluator[Value, WalkPosition]):
    """Walks through a program whose parameters have these shapes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.findings = Findings(shapes)

    def constant(self, value: Any, aval: Any) -> Value:
        return _constant(constants.of_value(value), aval)

    def positions_in(self, program: Program, position: WalkPosition) -> Iterable[WalkPosition]:
        live = liveness.live(program.jaxpr, position.needed)
        for number, needed in enumerate(live.results):
            yield position.at(number)._replace(needed=needed)

    def visit_equation(self, equation: Any, operands: Values, position: WalkPosition) -> Values:
        if not any(position.needed):
            return [Value()] * len(equation.outvars)
        return super().visit_equation(equation, operands, position)

    def visit_call(self, call: Call, operands: Values, position: WalkPosition) -> Values:
        inside = position.inside(call.equation, 0)
        return self.visit_program(call.program, operands, inside)

    def visit_scan(self, scan: Scan, operands: Values, position: WalkPosition) -> Values:
        return control_flow.walk_scan(self, scan, operands, position)

    def visit_while(self, loop: While, operands: Values, position: WalkPosition) -> Values:
        return control_flow.walk_while(self, loop, operands, position)

    def visit_cond(self, cond: Cond, operands: Values, position: WalkPosition) -> Values:
        return control_flow.walk_cond(self, cond, operands, position)

    def visit_shard_map(
        self, shard_map: ShardMap, operands: Values, position: WalkPosition
    ) -> Values:
        return shard_maps.walk_shard_map(self, shard_map, operands, position)

    def visit_plain(self, equation: Any, operands: Values, position: WalkPosition) -> Values:
        name = equation.primitive.name
        is_data = name in _READS_MEMORY or any(value.data for value in operands)
        has_parameters = has_views(operands)
        if name in contractions.OPERATIONS:
            self.findings.add_flops(contractions.flops(equation), position)
        if name not in rules.CHEAP and (is_data or has_parameters):
            self.findings.uncounted.setdefault(name, position.where(equation))
        if not is_data and not has_parameters:
            return _constants(equation, operands)
        unknown = [Value(is_data)] * len(equation.outvars)
        if not has_parameters:
            return unknown
        try:
            if name in SAME:  # it treats each operand by itself
                return _moved(equation, operands)
            if is_data:
                self._meet(equation, operands, position)
                return unknown
            views_of_results = rules.views_of_results(equation, operands)
            return [Value(views=views) for views in views_of_results]
        except NoRuleError as reason:
            self.findings.add_opaque(operands, str(reason), equation, position)
            return unknown

    def _meet(self, equation: Any, operands: Values, position: WalkPosition) -> None:
        """Records the uses in an equation in which parameters meet data."""
        name = equation.primitive.name
        if name in contractions.OPERATIONS:
            self._meet_in_contraction(equation, operands, position)
        elif name in rules.ELEMENTWISE | _PLACES | SCATTERS:
            self._meet_elementwise(equation, operands, position)
        elif name in _LOOKS_UP and not has_views(operands[1:]):
            for view in operands[0].views:
                site = Site(position.path, equation, 0, view)
                self.findings.add_use('gather', site, position)
        else:
            raise NoRuleError(f'no rule for {name} of a parameter and data')

    def _meet_in_contraction(self, equation: Any, operands: Values, position: WalkPosition) -> None:
        name = equation.primitive.name
        numbers = [i for i, value in enumerate(operands) if value.views]
        if len(numbers) > 1:
            raise NoRuleError(f'no rule for {name} of several parameters')
        (number,) = numbers
        op = contractions.OPERATIONS[name]
        roles = contractions.roles(equation, number)
        flops = contractions.flops(equation)
        for view in operands[number].views:
            site = Site(position.path, equation, number, view)
            self.findings.add_use(op, site, position, flops, roles)

    def _meet_elementwise(self, equation: Any, operands: Values, position: WalkPosition) -> None:
        name = equation.primitive.name
        if has_views(_indices(name, operands)):
            raise NoRuleError(f'no rule for {name} at indices made of parameters')
        flops = 0
        if name in rules.ARITHMETIC:
            flops = math.prod(equation.outvars[0].aval.shape)
            self.findings.add_flops(flops, position)
        for number, value in enumerate(operands):
            for view in value.views:
                site = Site(position.path, equation, number, view)
                self.findings.add_use('elementwise', site, position, flops)


def _indices(name: str, operands: Values) -> Values:
    """The operands that are indices, of operations that place others there."""
    if name in SCATTERS:
        return operands[1:2]
    return operands[2:] if name == 'dynamic_update_slice' else []


def _moved(equation: Any, operands: Values) -> Values:
    views_of_results = same(equation, views_of(operands))
    results = []
    for value, views in zip(operands, views_of_results, strict=True):
        results.append(value._replace(views=views))
    return results


def _constants(equation: Any, operands: Values) -> Values:
    """The results of an equation whose operands are constants."""
    integers = [value.known_integer for value in operands]
    known_integer = known_integers.of_result(equation, integers)
    constant_operands = [value.constant for value in operands]
    results = constants.of_results(equation, constant_operands)
    if known_integer is not None:
        return [Value(known_integer=known_integer, constant=results[0])]
    avals = [variable.aval for variable in equation.outvars]
    return list(map(_constant, results, avals))


def _constant(constant: constants.Constant | None, aval: Any) -> Value:
    known_integer = constants.known_integer(constant, aval)
    return Value(known_integer=known_integer, constant=constant)
