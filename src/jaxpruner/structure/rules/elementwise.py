"""Elementwise primitives: each element of a result is computed from the operands' elements at the same position."""

from jaxpruner.structure.analysis.axes import Axes, new_axes
from jaxpruner.structure.analysis.records import EquationTies, Row
from jaxpruner.structure.rules import moving_fills
from jaxpruner.trace import rules


def _elementwise(ties: EquationTies) -> list[Axes]:
    """All operands have the axes of the result. Scalars and axes of one element are repeated."""
    arrays = [axes for axes in ties.operands if axes]
    result = []
    for i, size in enumerate(ties.shape):
        axes_here = [axes[i] for axes in arrays]
        first, *others = [axis for axis in axes_here if axis.size == size]
        for other in others:
            ties.unify(first, other)
        result.append(first)
    return [tuple(result)]


def _same(ties: EquationTies) -> list[Axes]:
    """Each result has the axes of its operand."""
    return list(ties.operands)


def _bits(ties: EquationTies) -> list[Axes]:
    """Reads bits as numbers of another width. A last axis for the parts of a number comes or goes."""
    axes = ties.operands[0]
    shape = ties.shape
    if len(shape) == len(axes):
        return [axes]
    common = min(len(shape), len(axes))
    bytes_axes = new_axes(shape[common:])
    parts = axes[common:] + bytes_axes
    ties.pin_all(parts, 'parts of numbers lie along it')
    return [axes[:common] + bytes_axes]


# They compute one result from all operands.
COMPUTING = rules.ARITHMETIC | frozenset(
    """
    convert_element_type igamma igammac polygamma random_fold_in random_seed reduce_precision
    regularized_incomplete_beta select_n zeta
    """.split()
)
ROWS: dict[str, Row] = {
    **dict.fromkeys(COMPUTING, Row(_elementwise, moving_fills.elementwise)),
    **dict.fromkeys(rules.SAME - COMPUTING, Row(_same, moving_fills.same)),
    'bitcast_convert_type': Row(_bits, moving_fills.nothing),
}
