"""Scales parameters so that a module of the new widths gives what the smaller program gives.

`scales` states what has to hold for the factors. Here the equations are solved: with as few parameters as possible, and
with factors for constants such as an epsilon, which only a constructor can change. Where no factors do, such as for the
mean that a LayerNorm subtracts, a number is left as it is in the module, and named.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.widths.old_numbers import (
    OldNumber,
    OldNumbers,
    OldValues,
    number_at,
    to_table,
)
from jaxpruner.structure.widths.scales import ScaleFlow, Unknown

# What a changed factor counts: a module gets another epsilon before a whole stream is scaled.
_COSTS = {'leaf': 1.0, 'constant': 0.25, 'carried': 1e-3}
_ROUNDS = 80
_TOLERANCE = 1e-8
_SMALL = 1e-4  # a logarithm below this belongs to a factor of one: rounds end before it is 0


@dataclasses.dataclass(frozen=True, eq=False)
class Folded:
    """Parameters that take up numbers of old widths. Made by `ChannelGraph.fold`.

    Attributes:
      params: for the module with the new widths.
      factors: path of a parameter -> what it was multiplied by.
      constants: what the module's constructor still has to change, such as an epsilon: `old` is what it is, `new` what
        it has to be.
      left: numbers that nothing takes up.

    >>> print(Folded({}, {'norm/scale': 2**0.5}, (), ()))
    norm/scale times 1.41421
    """

    params: tree_lib.PyTree
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


def fold(
    trace: Trace, old_numbers: OldNumbers, params: tree_lib.PyTree, weights_only: bool
) -> Folded:
    """Scales parameters.

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
    numbers: list[OldNumber] = []
    left: list[OldNumber] = []
    for number in old_numbers.numbers:
        (numbers if _ratio(number) else left).append(number)
    flow = ScaleFlow(trace, numbers)
    flow.run()
    solved = _solve(flow, numbers, weights_only)
    for number, is_folded in zip(numbers, solved.is_folded, strict=True):
        if not is_folded:
            left.append(number)
    constants = []
    of_leaves: dict[int, float] = {}
    for unknown, factor in solved.factors.items():
        if unknown.kind == 'leaf':
            of_leaves[unknown.key] = factor
        elif unknown.kind == 'constant':
            equation, place, operand = flow.constants[unknown]
            value = np.asarray(equation.invars[operand].val).item()
            values = OldValues(value, value * factor, operand)
            constants.append(number_at(equation, place, values, ()))
    leaves, treedef = jax.tree.flatten(params)
    named = {}
    for number, factor in sorted(of_leaves.items()):
        named[tree_lib.path_string(trace.paths[number])] = factor
        leaves[number] = leaves[number] * np.asarray(factor, leaves[number].dtype)
    return Folded(jax.tree.unflatten(treedef, leaves), named, tuple(constants), tuple(left))


def _ratio(number: OldNumber) -> float:
    """What the module has over what the smaller program has; 0 for tables and for other signs."""
    if number.is_table or np.size(number.new) != 1:
        return 0.0
    before, after = float(np.asarray(number.old).item()), float(np.asarray(number.new).item())
    return after / before if before * after > 0 else 0.0


class _Solved(NamedTuple):
    """Whether each number is taken up, and the factors that differ from one."""

    is_folded: Sequence[bool]
    factors: Mapping[Unknown, float]


def _solve(flow: ScaleFlow, numbers: Sequence[OldNumber], weights_only: bool) -> _Solved:
    """The factors, of which few differ from one."""
    ratios = list(map(_ratio, numbers))
    columns: dict[Unknown, int] = {}
    for row in flow.rows:
        for unknown in row.terms:
            is_fixed = unknown.kind == 'number' or (weights_only and unknown.kind == 'constant')
            if not is_fixed:
                columns.setdefault(unknown, len(columns))
    equations = np.zeros((len(flow.rows), len(columns)))
    of_numbers = np.zeros((len(flow.rows), len(ratios)))
    for i, row in enumerate(flow.rows):
        for unknown, coefficient in row.terms.items():
            if unknown in columns:
                equations[i, columns[unknown]] = coefficient
            elif unknown.kind == 'number':
                of_numbers[i, unknown.key] = -coefficient * math.log(ratios[unknown.key])
    together = np.unique(np.hstack([equations, of_numbers]), axis=0)
    equations, of_numbers = np.split(together, [len(columns)], axis=1)
    solution = _least_squares(equations, of_numbers)
    unsolved = of_numbers - equations @ solution
    is_folded = np.ones(len(ratios), bool)
    if np.abs(unsolved.sum(1)).max(initial=0.0) > _TOLERANCE:
        is_folded = np.abs(unsolved).max(axis=0, initial=0.0) <= _TOLERANCE
    # Each kind of number by itself: a solution for two of them would mix what they change. Some only go together.
    kinds: dict[Any, list[int]] = {}
    for i, number in enumerate(numbers):
        is_solved = np.abs(unsolved[:, i]).max(initial=0.0) <= _TOLERANCE
        if is_folded[i]:
            key = (number.line, ratios[i]) if is_solved else None
            kinds.setdefault(key, []).append(i)
    costs = _costs(columns, equations)
    logarithms = np.zeros(len(columns))
    for members in kinds.values():
        values = of_numbers[:, members].sum(1)
        logarithms += _sparse_solution(equations, values, costs)
    support = np.abs(logarithms) > _SMALL
    logarithms = np.where(support, logarithms, 0.0)
    error = of_numbers @ is_folded - equations @ logarithms
    logarithms[support] += _least_squares(equations[:, support], error)
    factors = {}
    for unknown, i in columns.items():
        if support[i]:
            factors[unknown] = math.exp(logarithms[i])
    return _Solved(is_folded.tolist(), factors)


def _costs(columns: Mapping[Unknown, int], equations: np.ndarray) -> np.ndarray:
    """What a change of each factor counts; of one that many values depend on, such as a norm's scale, more."""
    costs = np.zeros(len(columns))
    uses = np.count_nonzero(equations, axis=0)
    for unknown, i in columns.items():
        # Of two that would do, such as queries and keys, the one that the model uses first.
        costs[i] = _COSTS[unknown.kind] * (1 + 0.5 * uses[i] + 0.1 * i / len(columns))
    return costs


def _sparse_solution(equations: np.ndarray, values: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """A solution with few numbers that are not 0: least squares, reweighted by what was found."""
    solution = np.zeros(len(costs))
    sizes = 1 / costs
    for number in range(_ROUNDS):
        roots = np.sqrt(sizes)
        solution = roots * _least_squares(equations * roots, values)
        sizes = (solution**2 + 0.7**number) / costs
    return solution


def _least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.linalg.lstsq(matrix, values, rcond=None)[0]
