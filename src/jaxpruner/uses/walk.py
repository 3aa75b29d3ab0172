"""The walk through a program that finds where parameters meet data.

Each value of the program is data (it depends on an input), or made of parameters alone and has views of them, or
constant. Where a value with views and one that is data go into the same operation, that is a use.
"""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxpruner.uses import bodies, constants, contractions, control_flow, liveness, numbers, rules
from jaxpruner.uses.graph import Site, Use
from jaxpruner.uses.indexing_rules import SCATTERS
from jaxpruner.uses.moving_rules import SAME, same
from jaxpruner.uses.records import Records, Scope, Value
from jaxpruner.uses.views import NoRuleError, View, along

# Operations in which a parameter takes its place among data, beside the elementwise ones.
_PLACES = frozenset('concatenate dynamic_update_slice pad stack'.split())
# What these read may have been written by any equation before.
_READS_MEMORY = frozenset(('addupdate', 'get', 'swap'))
_LOOKS_UP = frozenset(('dynamic_slice', 'gather'))


class Walk:
    """Walks through a program.

    >>> Walk([(2, 3)]).records.uses
    {}
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.shapes = shapes
        self.records = Records()

    def program(
        self,
        program: bodies.Program,
        values: Sequence[Value],
        scope: Scope,
        wanted: liveness.Wanted,
    ) -> list[Value]:
        """The values of a program's results, from those of its inputs.

        Args:
          program: the program.
          values: of its inputs.
          scope: where it stands.
          wanted: which of its results have a part in the results of all.
        """
        jaxpr = program.jaxpr
        known = {id(variable): value for variable, value in zip(jaxpr.invars, values, strict=True)}
        for variable, constant in zip(jaxpr.constvars, program.constants, strict=True):
            known[id(variable)] = _constant(constants.of_value(constant), variable)

        def read(variable: Any) -> Value:
            if isinstance(variable, Literal):
                return Value(
                    number=numbers.of_literal(variable), constant=constants.of_value(variable.val)
                )
            return known.get(id(variable), Value())  # nothing is known of what is not wanted

        live = liveness.live(jaxpr, wanted)
        for number, (equation, parts) in enumerate(zip(jaxpr.eqns, live.results, strict=True)):
            if any(parts):
                results = self._equation(
                    equation, [read(v) for v in equation.invars], scope.at(number), parts
                )
                known.update(
                    {
                        id(variable): value
                        for variable, value in zip(equation.outvars, results, strict=True)
                    }
                )
        return [read(variable) for variable in jaxpr.outvars]

    def _equation(
        self, equation: Any, values: list[Value], scope: Scope, parts: liveness.Wanted
    ) -> list[Value]:
        name = equation.primitive.name
        if name in control_flow.RULES:
            scope = scope._replace(line=scope.where(equation))
            return control_flow.RULES[name](self, equation, values, scope, parts)
        if name in contractions.OPERATIONS:
            self.records.flops[scope.path] = (
                contractions.flops(equation) * scope.trips * scope.devices
            )
        data = name in _READS_MEMORY or any(value.data for value in values)
        if name not in rules.CHEAP and (data or any(value.views for value in values)):
            self.records.uncounted.setdefault(name, scope.where(equation))
        results = [Value(data)] * len(equation.outvars)
        if not any(value.views for value in values):
            return results if data else _constants(equation, values)
        try:
            if name in SAME:  # each for itself, whatever stands beside it
                moved = same(equation, [value.views for value in values])
                return [
                    value._replace(views=views) for value, views in zip(values, moved, strict=True)
                ]
            if data:
                self._meet(equation, values, scope)
                return results
            return [Value(views=views) for views in rules.views_of_results(equation, values)]
        except NoRuleError as reason:
            self.make_opaque(values, str(reason), equation, scope)
            return results

    def make_opaque(
        self, values: Sequence[Value], reason: str, equation: Any, scope: Scope
    ) -> None:
        """Says that the parameters in these values cannot be followed further."""
        for value in values:
            for view in value.views:
                self.records.opaque.setdefault(view.leaf, f'{reason} ({scope.where(equation)})')

    def _meet(self, equation: Any, values: Sequence[Value], scope: Scope) -> None:
        """An equation in which parameters meet data."""
        name = equation.primitive.name
        operands = [i for i, value in enumerate(values) if value.views]
        if name in contractions.OPERATIONS:
            operand, *others = operands
            if others:
                raise NoRuleError(f'no rule for {name} of several parameters')
            roles = contractions.roles(equation, operand)
            flops = contractions.flops(equation)
            for view in values[operand].views:
                self.record(
                    contractions.OPERATIONS[name], equation, operand, view, scope, flops, roles
                )
        elif name in rules.ELEMENTWISE | _PLACES | SCATTERS:
            indices = (
                values[1:2]
                if name in SCATTERS
                else values[2:]
                if name == 'dynamic_update_slice'
                else ()
            )
            if any(value.views for value in indices):
                raise NoRuleError(f'no rule for {name} at indices made of parameters')
            flops = math.prod(equation.outvars[0].aval.shape) if name in rules.ARITHMETIC else 0
            if flops:
                self.records.flops[scope.path] = flops * scope.trips * scope.devices
            for operand in operands:
                for view in values[operand].views:
                    self.record('elementwise', equation, operand, view, scope, flops)
        elif name in _LOOKS_UP and operands == [0]:
            for view in values[0].views:
                self.record('gather', equation, 0, view, scope, 0)
        else:
            raise NoRuleError(f'no rule for {name} of a parameter and data')

    def record(
        self,
        op: str,
        equation: Any,
        operand: int,
        view: View,
        scope: Scope,
        flops: int = 0,
        roles: contractions.Roles | None = None,
    ) -> None:
        """Notes a use.

        Args:
          op: the operation, as in `Use`.
          equation: where it happens; `None` for a result of the program.
          operand: which operand.
          view: how the operand is read from the parameter.
          scope: where the equation stands.
          flops: of one run of the equation.
          roles: what happens to the operand's axes; `None` for all free.
        """
        roles = roles or contractions.Roles((), tuple(range(len(view.axes))), ())
        shape = self.shapes[view.leaf]

        def axes_of(indices: Sequence[int]) -> tuple[int, ...]:
            factors = tuple(factor for i in indices for factor in view.axes[i])
            # An axis of which one element was taken is not there any more.
            return along(
                tuple(f for f in factors if f.size > 1 or all(shape[axis] == 1 for axis in f.axes))
            )

        share = math.prod(entry.share for entry in view.stack)
        trips = round(scope.trips * share)
        if equation is not None and flops:
            size = math.prod(equation.invars[operand].aval.shape)
            share *= math.prod(high - low for low, high in view.region) / max(size, 1)
        use = Use(
            op=op,
            contract=axes_of(roles.contract),
            free=axes_of(roles.free),
            batch=axes_of(roles.batch),
            stack=along(tuple(factor for entry in view.stack for factor in entry.factors)),
            flops=round(flops * scope.trips * scope.devices * share),
            trips=trips if scope.certain else None,
            exact=view.exact,
            where='the result' if equation is None else scope.where(equation),
            site=Site(scope.path, equation, operand, view),
        )
        self.records.uses[scope.path, operand, view.leaf, view.region] = (view.leaf, use)


def _constants(equation: Any, values: Sequence[Value]) -> list[Value]:
    """The results of an equation that no parameter and no input has a part in."""
    number = numbers.of_result(equation, [value.number for value in values])
    found = constants.of_results(equation, [value.constant for value in values])
    if number is not None:
        return [Value(number=number, constant=found[0])]
    return [_constant(*pair) for pair in zip(found, equation.outvars, strict=True)]


def _constant(constant: constants.Constant | None, variable: Any) -> Value:
    return Value(number=constants.whole_number(constant, variable.aval), constant=constant)
