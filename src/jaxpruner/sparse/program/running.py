"""Runs a traced model with operators in the place of some of its parameters.

Such a parameter goes through the program as `None`, an empty tree. Equations that only move its elements return `None`,
too. Where it meets data, its operator multiplies. A scan also scans over the arrays of operators, so each trip has the
slices of its layer, and the derivatives of the arrays are put together trip by trip.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner.sparse.program.product_sites import ProductSite
from jaxpruner.trace.interpreter import Position, Run
from jaxpruner.trace.program import RULED, Program, ProgramPath, Scan, inside

Values = list[Any]
# By number of the leaf.
Operators = Mapping[int, Any]


class Replacements(NamedTuple):
    """Where operators multiply, by the paths of equations.

    Attributes:
      sites: the product sites.
      opened: equations whose inner programs hold a site.
      sliced: scans, each with the leaves of which each trip reads one layer.
    """

    sites: dict[ProgramPath, ProductSite]
    opened: set[ProgramPath]
    sliced: dict[ProgramPath, set[int]]


class ProductRun(Run):
    """A run of a program.

    Attributes:
      replacements: where operators multiply.
      operators: of the layers of this trip, inside of scans.
    """

    shows = True

    def __init__(self, replacements: Replacements, operators: Operators):
        self.replacements = replacements
        self.operators = operators

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        product_site = self.replacements.sites.get(position.path)
        if product_site is not None:
            leaf = product_site.use.site.view.leaf
            data = operands[1 - product_site.operand]
            return [product_site.multiply(data, self.operators[leaf])]
        is_missing = any(operand is None for operand in operands)
        # A call with a derivative rule of its own only moves a parameter: others are refused.
        is_ruled = equation.primitive.name in RULED
        is_entered = is_missing and not is_ruled and inside(equation) is not None
        if is_entered or position.path in self.replacements.opened:
            return self.enter(equation, operands, position)
        has_data = any(isinstance(operand, jax.Array) for operand in operands)
        if is_missing and not (is_ruled and has_data):
            return [None] * len(equation.outvars)
        return super().visit_equation(equation, operands, position)

    def slices(self, scan: Scan, position: Position) -> tuple[Operators, None]:
        sliced = self.replacements.sliced.get(position.path, ())
        return {leaf: self.operators[leaf] for leaf in sliced if leaf in self.operators}, None

    def inside(self, position: Position, state: Any, element: Any = None) -> 'ProductRun':
        return ProductRun(self.replacements, {**self.operators, **(element or {})})


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
    replacements = Replacements({}, set(), {})
    for product_site in product_sites:
        site = product_site.use.site
        replacements.sites[site.path] = product_site
        replacements.opened.update(site.path[:length] for length in range(1, len(site.path), 2))
        for entry in site.view.stack:
            replacements.sliced.setdefault(entry.loop, set()).add(site.view.leaf)
    run = ProductRun(replacements, operators)
    return run.visit_program(Program.of(program), values, Position.of_whole(program))
