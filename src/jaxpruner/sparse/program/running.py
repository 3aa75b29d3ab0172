"""Runs a traced model with operators in the place of some of its parameters.

Such a parameter goes through the program as a placeholder, an empty tree. Equations that only move its elements return
the placeholder. Where it meets data, its operator multiplies. A scan also scans over the arrays of operators, so each
trip has the slices of its layer, and the derivatives of the arrays are put together trip by trip.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.sparse.program.product_sites import ProductSite
from jaxpruner.uses.bodies import (
    RULED,
    Call,
    Cond,
    Program,
    ProgramPath,
    Scan,
    While,
    bind,
    run_call,
)
from jaxpruner.uses.visitors import Evaluator, Position

Values = list[Any]
# By number of the leaf.
Operators = Mapping[int, Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A value that is made of a leaf with an operator; the leaf is known by its number."""

    leaf: int


class Replacements:
    """The product sites of a program at which operators multiply.

    Attributes:
      opened: paths of the equations whose inner programs hold a site.
    """

    def __init__(self, product_sites: Sequence[ProductSite]):
        self._product_sites: dict[ProgramPath, ProductSite] = {}
        self._sliced: dict[ProgramPath, set[int]] = {}
        self.opened: set[ProgramPath] = set()
        for product_site in product_sites:
            site = product_site.use.site
            self._product_sites[site.path] = product_site
            for length in range(1, len(site.path), 2):
                outer_path = site.path[:length]
                self.opened.add(outer_path)
            for entry in site.view.stack:
                leaves = self._sliced.setdefault(entry.loop, set())
                leaves.add(site.view.leaf)

    def at(self, path: ProgramPath) -> ProductSite | None:
        """The product site at an equation; `None` if there is none."""
        return self._product_sites.get(path)

    def sliced_in(self, path: ProgramPath) -> set[int]:
        """The leaves of which each trip of a scan reads one layer."""
        return self._sliced.get(path, set())


class ProductRun(Evaluator[Any, Position]):
    """A run of a program.

    Attributes:
      replacements: where operators multiply.
      operators: of the layers of this trip, inside of scans.
    """

    def __init__(self, replacements: Replacements, operators: Operators):
        self.replacements = replacements
        self.operators = operators

    def constant(self, value: Any, aval: Any) -> Any:
        return value

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        product_site = self.replacements.at(position.path)
        if product_site is not None:
            leaf = product_site.use.site.view.leaf
            data = operands[1 - product_site.operand]
            result = product_site.multiply(data, self.operators[leaf])
            return [result]
        is_opened = position.path in self.replacements.opened
        if is_opened or _placeholders(operands):
            return super().visit_equation(equation, operands, position)
        return bind(equation, operands)

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        # It moves a parameter's elements, or the results have no part in those of the model.
        placeholder, *_ = _placeholders(operands)
        return [placeholder] * len(equation.outvars)

    def visit_call(self, call: Call, operands: Values, position: Position) -> Values:
        equation = call.equation

        def run(*operands: Any) -> Values:
            return self.visit_program(call.program, operands, position.at(0))

        if equation.primitive.name in RULED:
            return self._bind_ruled(equation, operands)
        return run_call(equation, run, operands)

    def _bind_ruled(self, equation: Any, operands: Values) -> Values:
        """A call with a derivative rule. Leaves that it multiplies are refused, so it only moves the parameter."""
        if not any(isinstance(operand, jax.Array) for operand in operands):
            return self.visit_plain(equation, operands, Position())
        whole = []
        for variable, operand in zip(equation.invars, operands, strict=True):
            if isinstance(operand, Placeholder):
                operand = jnp.zeros_like(variable.aval)
            whole.append(operand)
        return bind(equation, whole)

    def visit_scan(self, scan: Scan, operands: Values, position: Position) -> Values:
        constants, carried, sliced = scan.split(operands)
        layers = {}
        for leaf in self.replacements.sliced_in(position.path):
            if leaf in self.operators:
                layers[leaf] = self.operators[leaf]

        def body(carried: Values, elements: Any) -> tuple[Values, Values]:
            elements, layers = elements
            operators = {**self.operators, **layers}
            inner = ProductRun(self.replacements, operators)
            inputs = [*constants, *carried, *elements]
            results = inner.visit_program(scan.body, inputs, position.at(0))
            return scan.split_results(results)

        carried, stacked = scan.run(body, carried, (sliced, layers))
        return carried + stacked

    def visit_while(self, loop: While, operands: Values, position: Position) -> Values:
        condition_constants, body_constants, carried = loop.split(operands)

        def condition(carried: Values) -> Any:
            inputs = condition_constants + carried
            (again,) = self.visit_program(loop.condition, inputs, position.at(0))
            return again

        def body(carried: Values) -> Values:
            inputs = body_constants + carried
            return self.visit_program(loop.body, inputs, position.at(1))

        return lax.while_loop(condition, body, carried)

    def visit_cond(self, cond: Cond, operands: Values, position: Position) -> Values:
        index, *values = operands

        def branch(number: int) -> Any:
            program = cond.branches[number]
            return lambda *values: self.visit_program(program, values, position.at(number))

        branches = [branch(number) for number in range(len(cond.branches))]
        return lax.switch(index, branches, *values)


def _placeholders(operands: Values) -> list[Placeholder]:
    return [operand for operand in operands if isinstance(operand, Placeholder)]


def run_with_operators(
    program: Any, product_sites: Sequence[ProductSite], values: Sequence[Any], operators: Operators
) -> Values:
    """Runs a closed program.

    Args:
      program: a closed jaxpr.
      product_sites: those of the leaves that have operators.
      values: of its parameters and inputs; `None` for a leaf with an operator.
      operators: by number of the leaf.
    """
    inputs = list(values)
    for leaf in operators:
        inputs[leaf] = Placeholder(leaf)
    run = ProductRun(Replacements(product_sites), operators)
    return run.visit_program(Program.of(program), inputs, Position())
