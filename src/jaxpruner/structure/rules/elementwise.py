"""Elementwise primitives: each element of a result is computed from the operands' elements at the same position."""

from collections.abc import Sequence
from typing import Any

from jaxpruner.structure.analysis.axes import Axes, Ties, new_axes
from jaxpruner.structure.analysis.records import Row
from jaxpruner.structure.rules import moving_fills
from jaxpruner.uses import moving_rules, rules
from jaxpruner.uses.moving_rules import shape_of


def _elementwise(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """All operands have the axes of the result, but for scalars and axes of one element, which are repeated."""
    arrays = [axes for axes in operands if axes]
    result = []
    for i, size in enumerate(shape_of(equation.outvars[0])):
        first, *others = [axes[i] for axes in arrays if axes[i].size == size]
        for other in others:
            ties.unify(first, other)
        result.append(first)
    return [tuple(result)]


def _same(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """Each result has the axes of its operand."""
    return list(operands)


def _bits(equation: Any, operands: Sequence[Axes], ties: Ties) -> list[Axes]:
    """Reads the bits as numbers of another width, which splits or merges the last axis."""
    shape = shape_of(equation.outvars[0])
    if len(shape) == len(operands[0]):
        return [operands[0]]
    common = min(len(shape), len(operands[0]))
    ties.pin_all(operands[0][common:], 'parts of numbers lie along it')
    bytes_axes = new_axes(shape[common:])
    ties.pin_all(bytes_axes, 'parts of numbers lie along it')
    return [(*operands[0][:common], *bytes_axes)]


# Each makes one result of all its operands.
COMPUTING = rules.ARITHMETIC | frozenset(
    """
    convert_element_type igamma igammac polygamma random_fold_in random_seed reduce_precision
    regularized_incomplete_beta select_n zeta
    """.split()
)
ROWS: dict[str, Row] = {
    **dict.fromkeys(COMPUTING, Row(_elementwise, moving_fills.elementwise)),
    **dict.fromkeys(moving_rules.SAME - COMPUTING, Row(_same, moving_fills.same)),
    'bitcast_convert_type': Row(_bits, moving_fills.nothing),
}
