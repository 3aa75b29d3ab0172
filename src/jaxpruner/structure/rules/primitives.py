"""The table of primitives: a row of three rules for each.

Take `hidden = x @ up`, which JAX turns into a `dot_general`. With `x` of shape (5, 3) and `up` of shape (3, 8), its row
says this:

    axes     `x[1]` and `up[0]` are one axis, which is summed over; the result has the axes `x[0]` and `up[1]`
    fills    a zero column of `up` makes a zero column of the result; a sum over removed channels is the same without
             them only if the products there are zero
    resized  nothing: it reads all sizes off its operands, such as an `up` of shape (3, 4)

A `reshape` to (5, 2, 4) has a rule for smaller operands. The shape is one of its parameters, and has to become
(5, 2, 3) if one of each 4 features is removed.

A primitive without a row pins every axis that it touches; nothing is guessed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxpruner.structure.axes import Axes, Axis, new_axes
from jaxpruner.structure.cut import EquationCut
from jaxpruner.structure.fills import EquationFills, Fill, Scalar, computed, is_finite, nothing_of
from jaxpruner.structure.rules import contracting, moving
from jaxpruner.structure.traces import EquationTies, Row
from jaxpruner.trace import rules


def elementwise_axes(ties: EquationTies) -> list[Axes]:
    """All operands have the axes of the result. Scalars and axes of one element are repeated."""
    arrays = [axes for axes in ties.operands if axes]
    result = []
    for i, size in enumerate(ties.shape):
        first, *others = [axes[i] for axes in arrays if axes[i].size == size]
        for other in others:
            ties.unify(first, other)
        result.append(first)
    return [tuple(result)]


def elementwise_fills(fills: EquationFills) -> list[Fill]:
    """Computes the scalars of the result from those of the operands."""
    everywhere = [fill.everywhere for fill in fills.of_operands]
    is_literal = [scalar is not None for scalar in everywhere]
    if any(is_literal):
        result = computed(fills.equation, everywhere, is_literal)
        if result is not None and (all(is_literal) or is_finite(result)):
            return [nothing_of(len(fills.results[0]))._replace(everywhere=result)]

    def find(i: int, atom: Axis) -> Scalar:
        size = fills.results[0][i].size
        scalars = []
        for fill, axes in zip(fills.of_operands, fills.operands, strict=True):
            is_repeated = not axes or axes[i].size != size
            scalars.append(fill.everywhere if is_repeated else fill.at(i, atom))
        result = computed(fills.equation, scalars, is_literal)
        if not is_finite(result) and all(map(is_finite, scalars)):
            fills.note_cause(atom, _not_finite(fills.equation, result, scalars))
        return result

    return fills.fill_results(find)


def _not_finite(equation: Any, result: Scalar, scalars: Sequence[Scalar]) -> str:
    """Why these scalars have a result that is not finite, and the remedy."""
    if equation.primitive.name == 'div' and scalars[1] == 0:
        dividend = 'x' if scalars[0] is None else f'{scalars[0]:g}'
        return f'{dividend} / 0 at zeroed channels; divide by what is never 0, such as jnp.maximum(divisor, 1e-6)'
    return f'{result} at zeroed channels'


def bits_axes(ties: EquationTies) -> list[Axes]:
    """Reads bits as numbers of another width. A last axis for the parts of a number comes or goes."""
    axes = ties.operands[0]
    common = min(len(ties.shape), len(axes))
    bytes_axes = new_axes(ties.shape[common:])
    ties.pin('parts of numbers lie along it', *axes[common:], *bytes_axes)
    return [axes[:common] + bytes_axes]


# They compute one result from all operands.
COMPUTING = rules.ARITHMETIC | frozenset(
    """
    convert_element_type igamma igammac polygamma random_fold_in random_seed reduce_precision
    regularized_incomplete_beta select_n zeta
    """.split()
)
ROWS: dict[str, Row] = {
    **dict.fromkeys(COMPUTING, Row(elementwise_axes, elementwise_fills)),
    **dict.fromkeys(
        rules.SAME - COMPUTING,
        Row(lambda ties: list(ties.operands), lambda fills: list(fills.of_operands)),
    ),
    'bitcast_convert_type': Row(bits_axes, moving.nothing_known),
    **moving.ROWS,
    **contracting.ROWS,
}


def fills_rule(name: str) -> Callable[[EquationFills], list[Fill]]:
    """The rule for the fills of a primitive's results."""
    return ROWS[name].fills if name in ROWS else moving.nothing_known


def resized_rule(name: str) -> Callable[[EquationCut, list[Any]], list[Any]]:
    """How a primitive runs on smaller operands. It has a row, since the axes of others are pinned."""
    return ROWS[name].resized or EquationCut.run
