"""What an equation of a traced program says of the axes of its values."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpruner.structure.axes import Axes, Axis, Pin, Ties, new_axes
from jaxpruner.trace import contractions
from jaxpruner.trace.program import Live, Position, bind, live, shape_of


def pin_at(position: Position, equation: Any, reason: str) -> Pin:
    """The pin of an axis by an equation at a position of a program."""
    line = position.line(equation)
    return Pin(f'{equation.primitive.name}: {reason}' + (f' ({line})' if line else ''))


class EquationAxes(NamedTuple):
    """The axes of an equation's operands and of its results, the row of its primitive, and the equation."""

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    row: 'Row'
    equation: Any

    @property
    def values(self) -> tuple[Axes, ...]:
        """The axes of the operands, then those of the results."""
        return self.operands + self.results


class Index(NamedTuple):
    """An index of a contraction, `i`, `j` or `k` in `result[i, j] = sum over k of left[i, k] * right[k, j]`.

    Attributes:
      left, right, result: the axis that has it; `None` if there is none.
    """

    left: int | None
    right: int | None
    result: int | None

    def of(self, operands: Sequence[Axes]) -> list[Axis]:
        """The axes of the operands that have it."""
        places = zip(operands, self[:2], strict=False)
        return [axes[i] for axes, i in places if i is not None]


def is_contraction(equation: Any) -> bool:
    """Whether an equation multiplies and sums."""
    return equation.primitive.name in contractions.OPERATIONS


def indices_of_contraction(equation: Any) -> list[Index]:
    """The indices of a contraction, but those of the window of a convolution, and of groups of rows."""
    if equation.primitive.name == 'conv_general_dilated':
        image, kernel, result = equation.params[
            'dimension_numbers'
        ]  # batch or outputs, then channels
        return [
            Index(image[1], kernel[1], None),
            Index(image[0], None, result[0]),
            Index(None, kernel[0], result[1]),
        ]
    axes = contractions.dot_axes(equation)
    left, right = [contractions.roles(equation, operand).free for operand in (0, 1)]
    kept = [*zip(*axes.batch, strict=True)]
    kept += [(i, None) for i in left] + [(None, k) for k in right]
    summed = [Index(i, k, None) for i, k in zip(*axes.contract, strict=True)]
    return summed + [Index(i, k, number) for number, (i, k) in enumerate(kept)]


class EquationTies(Ties):
    """An equation, and what it states of axes.

    Attributes:
      equation: the equation.
      params: its parameters.
      operands: the axes of its operands.
      shape: of its first result.
    """

    def __init__(self, equation: Any, operands: Sequence[Axes], position: Position):
        super().__init__(functools.partial(pin_at, position, equation))
        self.equation = equation
        self.params: Mapping[str, Any] = equation.params
        self.operands = operands
        self.shape = shape_of(equation.outvars[0]) if equation.outvars else ()

    def pin_everything(self, reason: str = 'nothing is known of this operation') -> list[Axes]:
        """Pins the axes of all operands and results; returns those of the results."""
        results = new_results(self.equation)
        for axes in (*self.operands, *results):
            self.pin(reason, *axes)
        return results


def new_results(equation: Any) -> list[Axes]:
    """New axes for each result of an equation."""
    return [new_axes(shape_of(variable)) for variable in equation.outvars]


class Row(NamedTuple):
    """The three rules of a primitive.

    Attributes:
      axes: ties the axes of the operands together, and returns the axes of each result.
      fills: takes a `zeros.ZeroedEquation`, and returns the fill of each result.
      resized: takes a `cut.EquationCut` and the smaller operands, and runs the primitive on them; `None` if the
        primitive reads all sizes off its operands.
    """

    axes: Callable[[EquationTies], list[Axes]]
    fills: Callable[[Any], list[Any]]
    resized: Callable[[Any, list[Any]], list[Any]] | None = None


def live_in_whole(jaxpr: Any) -> Live:
    """What the results of a whole program depend on."""
    return live(jaxpr, (True,) * len(jaxpr.outvars))


class EquationCut(NamedTuple):
    """An equation with some smaller operands or results.

    Attributes:
      equation: the equation.
      axes: of its operands and results.
      cut: the channels that stay along these axes, a `cut.Cut`.
    """

    equation: Any
    axes: EquationAxes
    cut: Any

    def run(self, operands: Sequence[Any], **changed: Any) -> list[Any]:
        """Runs the primitive on small operands, with some of its parameters changed."""
        return bind(self.equation, operands, changed)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first result after the cut."""
        return self.cut.shape(self.axes.results[0])
