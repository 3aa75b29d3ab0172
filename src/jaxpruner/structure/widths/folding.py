"""Scales parameters so that a module of the new widths gives the same results as the smaller program.

`scales` states equations between the factors. Here they are solved, with as few scaled parameters as possible.
Constants such as an epsilon get factors, too, though only a constructor can change them. Sometimes no factors exist,
such as for the mean that a LayerNorm subtracts. Then the number is listed, and the module keeps it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.widths.old_numbers import (
    OldNumber,
    OldNumbers,
    OldValues,
    number_at,
    to_table,
)
from jaxpruner.structure.widths.scales import Constant, ScaleFlow, Unknown
from jaxpruner.tree import PyTree

# The cost of a factor other than one. A new epsilon costs less than the scaling of a whole stream.
_COSTS = {'leaf': 1.0, 'constant': 0.25, 'carried': 1e-3}
_ROUNDS = 80
_TOLERANCE = 1e-8
_SMALL = 1e-4  # a smaller logarithm counts as 0, which rounds only approach


@dataclasses.dataclass(frozen=True, eq=False)
class Folded:
    """Parameters that take up numbers of old widths. Made by `ChannelGraph.fold`.

    Attributes:
      params: for the module with the new widths.
      factors: path of a parameter -> what it was multiplied by.
      constants: constants that the module's constructor still has to change from `old` to `new`, such as an epsilon.
      left: numbers that no parameter takes up.

    >>> print(Folded({}, {'norm/scale': 2**0.5}, (), ()))
    norm/scale times 1.41421
    """

    params: PyTree
    factors: Mapping[str, float]
    constants: tuple[OldNumber, ...]
    left: tuple[OldNumber, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the module with these parameters is the smaller model."""
        return not self.constants and not self.left

    def __str__(self) -> str:
        lines = []
        for name, factor in self.factors.items():
            lines.append(f'{name} times {factor:.6g}')
        if self.constants:
            lines += ['constants that the module has to get:', to_table(self.constants)]
        if self.left:
            lines += ['numbers that no parameter takes up:', to_table(self.left)]
        return '\n'.join(lines) or 'nothing is scaled'


def fold(trace: Trace, old_numbers: OldNumbers, params: PyTree, weights_only: bool) -> Folded:
    """Scales parameters; see `ChannelGraph.fold`.

    Args:
      trace: of the model.
      old_numbers: the numbers that differ in the module.
      params: of the smaller model.
      weights_only: whether constants stay as they are.

    Raises:
      ValueError: the programs differ in more than numbers.
    """
    if old_numbers.other_difference:
        raise ValueError(
            f'nothing can be folded into a module of another program: it has {old_numbers.other_difference}; build the '
            'module with the arguments that constructor_arguments finds'
        )
    scalable = [number for number in old_numbers.numbers if _ratio(number)]
    left = [number for number in old_numbers.numbers if not _ratio(number)]
    flow = ScaleFlow(trace, scalable)
    flow.run()
    solution = _solve(flow, scalable, weights_only)
    for number, is_folded in zip(scalable, solution.is_folded, strict=True):
        if not is_folded:
            left.append(number)
    constants = []
    factors_of_leaves: dict[int, float] = {}
    for unknown, factor in solution.factors.items():
        if unknown.role == 'leaf':
            factors_of_leaves[unknown.key] = factor
        elif unknown.role == 'constant':
            constant = flow.constants[unknown]
            constants.append(_scale_constant(constant, factor))
    leaves, treedef = jax.tree.flatten(params)
    factors = {}
    for number, factor in sorted(factors_of_leaves.items()):
        name = tree_lib.path_string(trace.paths[number])
        factors[name] = factor
        leaf = leaves[number]
        leaves[number] = leaf * np.asarray(factor, leaf.dtype)
    scaled = jax.tree.unflatten(treedef, leaves)
    return Folded(scaled, factors, tuple(constants), tuple(left))


def _scale_constant(constant: Constant, factor: float) -> OldNumber:
    """The record of a constant that the module has to get."""
    literal = constant.equation.invars[constant.operand]
    value = np.asarray(literal.val).item()
    values = OldValues(value, value * factor, constant.operand)
    return number_at(constant.equation, constant.position, values, ())


def _ratio(number: OldNumber) -> float:
    """The number in the module over that in the smaller program; 0 for tables, zeros and different signs."""
    if number.is_table or np.size(number.new) != 1:
        return 0.0
    before = float(np.asarray(number.old).item())
    after = float(np.asarray(number.new).item())
    has_same_sign = before * after > 0
    return after / before if has_same_sign else 0.0


class _Solution(NamedTuple):
    """Whether each number is folded, and the factors that differ from one."""

    is_folded: Sequence[bool]
    factors: Mapping[Unknown, float]


class _System(NamedTuple):
    """Linear equations for the logarithms of the factors, `matrix @ logarithms = values.sum(1)`.

    Attributes:
      columns: unknown -> its column of the matrix.
      matrix: a row for each equation.
      values: a column for each number, with what it adds to the right sides.
    """

    columns: Mapping[Unknown, int]
    matrix: np.ndarray
    values: np.ndarray


def _solve(flow: ScaleFlow, numbers: Sequence[OldNumber], weights_only: bool) -> _Solution:
    """Finds factors, few of which differ from one."""
    ratios = list(map(_ratio, numbers))
    system = _build_system(flow, ratios, weights_only)
    solution = _solve_least_squares(system.matrix, system.values)
    unsolved = system.values - system.matrix @ solution
    errors = np.abs(unsolved).max(axis=0, initial=0.0)
    error_of_all = np.abs(unsolved.sum(1)).max(initial=0.0)
    is_solved = errors <= _TOLERANCE
    is_folded = is_solved
    if error_of_all <= _TOLERANCE:
        is_folded = np.ones(len(ratios), bool)  # some numbers can only be folded together
    # Each sort of numbers is solved by itself: a solution for two sorts would mix their changes.
    alike: dict[Any, list[int]] = {}
    for i in np.flatnonzero(is_folded).tolist():
        key = None
        if is_solved[i]:
            key = numbers[i].line, ratios[i]
        alike.setdefault(key, []).append(i)
    costs = _weigh_changes(system)
    logarithms = np.zeros(len(costs))
    for members in alike.values():
        values = system.values[:, members].sum(1)
        logarithms += _solve_sparsely(system.matrix, values, costs)
    is_changed = np.abs(logarithms) > _SMALL
    logarithms = np.where(is_changed, logarithms, 0.0)
    error = system.values @ is_folded - system.matrix @ logarithms
    changed_columns = system.matrix[:, is_changed]
    logarithms[is_changed] += _solve_least_squares(changed_columns, error)
    factors = {}
    for unknown, i in system.columns.items():
        if is_changed[i]:
            factors[unknown] = math.exp(logarithms[i])
    return _Solution(is_folded.tolist(), factors)


def _build_system(flow: ScaleFlow, ratios: Sequence[float], weights_only: bool) -> _System:
    """The equations that a program states, each once."""
    columns: dict[Unknown, int] = {}
    for row in flow.rows:
        for unknown in row.terms:
            is_fixed = weights_only and unknown.role == 'constant'
            if unknown.role != 'number' and not is_fixed:
                columns.setdefault(unknown, len(columns))
    count = len(flow.rows)
    matrix = np.zeros((count, len(columns)))
    values = np.zeros((count, len(ratios)))
    for i, row in enumerate(flow.rows):
        for unknown, coefficient in row.terms.items():
            if unknown in columns:
                matrix[i, columns[unknown]] = coefficient
            elif unknown.role == 'number':
                logarithm = math.log(ratios[unknown.key])
                values[i, unknown.key] = -coefficient * logarithm
    equations = np.hstack([matrix, values])
    equations = np.unique(equations, axis=0)
    matrix, values = np.split(equations, [len(columns)], axis=1)
    return _System(columns, matrix, values)


def _weigh_changes(system: _System) -> np.ndarray:
    """The cost of changing each factor. It grows with the equations that the factor is in."""
    count = len(system.columns)
    costs = np.zeros(count)
    uses = np.count_nonzero(system.matrix, axis=0)
    for unknown, i in system.columns.items():
        # Of two equal choices, such as queries and keys, the one that the model uses first.
        lateness = 0.1 * i / count
        weight = 1 + 0.5 * uses[i] + lateness
        costs[i] = _COSTS[unknown.role] * weight
    return costs


def _solve_sparsely(equations: np.ndarray, values: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """A solution with few nonzero numbers, by iteratively reweighted least squares."""
    solution = np.zeros(len(costs))
    sizes = 1 / costs
    for number in range(_ROUNDS):
        roots = np.sqrt(sizes)
        weighted = _solve_least_squares(equations * roots, values)
        solution = roots * weighted
        sizes = (solution**2 + 0.7**number) / costs
    return solution


def _solve_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    solution, *_ = np.linalg.lstsq(matrix, values, rcond=None)
    return solution
