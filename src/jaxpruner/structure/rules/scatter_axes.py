"""What a scatter does with the axes of its operands."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.structure.analysis.axes import all_but
from jaxpruner.uses.moving_rules import shape_of


class ScatterAxes(NamedTuple):
    """What a scatter does with axes.

    Attributes:
      kept: axes of the operand that a window has, and which axes of the updates they are.
      rows: axes of the updates along which the indices lie.
      batching: axes that the operand has in common with the indices.
      batching_of_indices: which axes of the indices these are.
    """

    kept: dict[int, int]
    rows: Sequence[int]
    batching: Sequence[int]
    batching_of_indices: Sequence[int]

    @classmethod
    def of(cls, equation: Any) -> 'ScatterAxes':
        """Reads the equation."""
        dimension_numbers = equation.params['dimension_numbers']
        operand, _, updates = map(shape_of, equation.invars)
        batching = tuple(getattr(dimension_numbers, 'operand_batching_dims', ()))
        kept = all_but((*dimension_numbers.inserted_window_dims, *batching), operand)
        return cls(
            kept=dict(zip(kept, dimension_numbers.update_window_dims, strict=True)),
            rows=all_but(dimension_numbers.update_window_dims, updates),
            batching=batching,
            batching_of_indices=getattr(dimension_numbers, 'scatter_indices_batching_dims', ()),
        )
