"""How primitives are bound where operands and results are smaller: the third part of each row of the table.

Most primitives read all shapes off their operands and are bound unchanged. Here are those whose parameters hold sizes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.structure.analysis.axes import Axis
from jaxpruner.structure.analysis.records import EquationAxes
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.uses.bodies import bind

Values = list[Any]


class SmallEquation(NamedTuple):
    """An equation of which some operands or results are smaller.

    Attributes:
      equation: the equation.
      axes: of its operands and results.
      cut: what stays of them.
    """

    equation: Any
    axes: EquationAxes
    cut: Cut

    def run(self, operands: Sequence[Any], **changed: Any) -> Values:
        """Runs the primitive on small operands, with some of its parameters changed."""
        return bind(self.equation, operands, changed)

    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.cut.shape(self.axes.results[0])


def unchanged(small: SmallEquation, operands: Values) -> Values:
    """The primitive reads all sizes off its operands."""
    return small.run(operands)


def from_nothing(small: SmallEquation, operands: Values) -> Values:
    """What is made from nothing is made as before, and cut along: what stands at an index is known."""
    rank = len(operands[0].shape) if operands else 0
    results = small.run(operands)
    axes = small.axes.results
    return [small.cut.take(value, each, rank) for value, each in zip(results, axes, strict=True)]


def broadcast(small: SmallEquation, operands: Values) -> Values:
    """The shape of the result is a parameter."""
    return small.run(operands, shape=small.result_shape())


def reshape(small: SmallEquation, operands: Values) -> Values:
    """As `broadcast`."""
    return small.run(operands, new_sizes=small.result_shape())


def tile(small: SmallEquation, operands: Values) -> Values:
    """How often each axis is repeated is a parameter."""
    sizes = zip(small.result_shape(), operands[0].shape, strict=True)
    return small.run(operands, reps=tuple([result // size for result, size in sizes]))


def split(small: SmallEquation, operands: Values) -> Values:
    """The sizes of the parts are a parameter."""
    i = small.equation.params['axis']
    sizes = [small.cut.size(axes[i]) for axes in small.axes.results]
    return small.run(operands, sizes=tuple(sizes))


def dynamic_slice(small: SmallEquation, operands: Values) -> Values:
    """The shape of the window is a parameter."""
    return small.run(operands, slice_sizes=small.result_shape())


def gather(small: SmallEquation, operands: Values) -> Values:
    """Windows that are as long as their axis stay so."""
    sizes = []
    old_sizes = small.equation.params['slice_sizes']
    for axis, size in zip(small.axes.operands[0], old_sizes, strict=True):
        is_whole = size == axis.size and size > 1
        sizes.append(small.cut.size(axis) if is_whole else size)
    return small.run(operands, slice_sizes=tuple(sizes))


def slice_(small: SmallEquation, operands: Values) -> Values:
    """Bounds are moved to where their elements have gone."""
    params = small.equation.params
    strides = params['strides'] or [1] * len(small.axes.operands[0])
    starts, limits = [], []
    for i, axis in enumerate(small.axes.operands[0]):
        taken = range(params['start_indices'][i], params['limit_indices'][i], strides[i])
        count = small.cut.size(small.axes.results[0][i])
        taken = _moved(small.cut, axis, taken, count)
        starts.append(taken.start)
        limits.append(taken.stop)
    return small.run(operands, start_indices=tuple(starts), limit_indices=tuple(limits))


def _moved(cut: Cut, axis: Axis, taken: range, count: int) -> range:
    """The elements of a slice of an axis, of which `count` stay, among those that stay."""
    if cut.size(axis) == axis.size:
        return taken
    if taken.step > 1:  # one of each few neighbours, which are all there
        return range(taken.start, taken.start + (count - 1) * taken.step + 1, taken.step)
    return range(cut.size_before(axis, taken.start), cut.size_before(axis, taken.stop))


def conv(small: SmallEquation, operands: Values) -> Values:
    """Each group of channels has as many as the kernel has inputs."""
    numbers = small.equation.params['dimension_numbers']
    if small.equation.params['feature_group_count'] == 1:
        return small.run(operands)
    image, kernel = operands
    channels, inputs = image.shape[numbers.lhs_spec[1]], kernel.shape[numbers.rhs_spec[1]]
    return small.run(operands, feature_group_count=channels // inputs)
