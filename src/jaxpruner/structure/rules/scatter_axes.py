"""What a scatter does with the axes of its operands."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.trace.program import shape_of
from jaxpruner.trace.views import all_but


class ScatterAxes(NamedTuple):
    """What a scatter does with axes.

    Attributes:
      kept: axis of the operand that a window has -> axis of the updates.
      rows: axes of the updates along which the indices lie.
      batching: axes that the operand shares with the indices.
      batching_of_indices: these axes in the indices.
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
