"""How primitives run on smaller operands: the third rule of each row of the table.

Most primitives read all sizes off their operands and run unchanged. Here are rules for those whose parameters hold
sizes.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.structure.analysis.axes import Axis
from jaxpruner.structure.analysis.records import EquationAxes
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.trace.program import bind
from jaxpruner.trace.rules import slices

Values = list[Any]


class EquationCut(NamedTuple):
    """An equation with some smaller operands or results.

    Attributes:
      equation: the equation.
      axes: of its operands and results.
      cut: the channels that stay along these axes.
    """

    equation: Any
    axes: EquationAxes
    cut: Cut

    def run(self, operands: Sequence[Any], **changed: Any) -> Values:
        """Runs the primitive on small operands, with some of its parameters changed."""
        return bind(self.equation, operands, changed)

    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first result after the cut."""
        return self.cut.shape(self.axes.results[0])


def unchanged(small: EquationCut, operands: Values) -> Values:
    """Runs a primitive that reads all sizes off its operands."""
    return small.run(operands)


def from_nothing(small: EquationCut, operands: Values) -> Values:
    """New values are made in the old size and then cut, so that each index keeps its value."""
    keys_rank = operands[0].ndim if operands else 0  # axes of keys are cut already
    values = small.run(operands)
    take = functools.partial(small.cut.take, first=keys_rank)
    return list(map(take, values, small.axes.results))


def broadcast(small: EquationCut, operands: Values) -> Values:
    """The shape of the result is a parameter."""
    return small.run(operands, shape=small.result_shape())


def reshape(small: EquationCut, operands: Values) -> Values:
    """As `broadcast`."""
    return small.run(operands, new_sizes=small.result_shape())


def tile(small: EquationCut, operands: Values) -> Values:
    """The number of repetitions of each axis is a parameter."""
    (value,) = operands
    counts = map(operator.floordiv, small.result_shape(), value.shape)
    return small.run(operands, reps=tuple(counts))


def split(small: EquationCut, operands: Values) -> Values:
    """The sizes of the parts are a parameter."""
    i = small.equation.params['axis']
    segments = [axes[i] for axes in small.axes.results]
    sizes = map(small.cut.size, segments)
    return small.run(operands, sizes=tuple(sizes))


def dynamic_slice(small: EquationCut, operands: Values) -> Values:
    """The shape of the window is a parameter."""
    return small.run(operands, slice_sizes=small.result_shape())


def gather(small: EquationCut, operands: Values) -> Values:
    """The sizes of windows are a parameter. A window as long as its axis stays so."""
    sizes = []
    axes = small.axes.operands[0]
    old_sizes = small.equation.params['slice_sizes']
    for axis, old_size in zip(axes, old_sizes, strict=True):
        is_whole = old_size == axis.size and old_size > 1
        size = small.cut.size(axis) if is_whole else old_size
        sizes.append(size)
    return small.run(operands, slice_sizes=tuple(sizes))


def slice_(small: EquationCut, operands: Values) -> Values:
    """The bounds of a slice are parameters. They move with their elements."""
    axes = small.axes.operands[0]
    counts = small.result_shape()
    old_slices = slices(small.equation.params)
    starts, limits = [], []
    for axis, old_slice, count in zip(axes, old_slices, counts, strict=True):
        moved = _move_slice(small.cut, axis, old_slice, count)
        starts.append(moved.start)
        limits.append(moved.stop)
    bounds = {'start_indices': tuple(starts), 'limit_indices': tuple(limits)}
    return small.run(operands, **bounds)


def _move_slice(cut: Cut, axis: Axis, old_slice: range, count: int) -> range:
    """The positions of a slice's kept elements, `count` of them, among the kept ones of the axis."""
    if not cut.shortens(axis):
        return old_slice
    start, step = old_slice.start, old_slice.step
    if step > 1:  # it takes one of every few neighbours, and all of these stay
        last = start + (count - 1) * step
        return range(start, last + 1, step)
    new_start = cut.size_before(axis, start)
    new_stop = cut.size_before(axis, old_slice.stop)
    return range(new_start, new_stop)


def conv(small: EquationCut, operands: Values) -> Values:
    """The number of groups is a parameter. A group has as many channels as the kernel has inputs."""
    params = small.equation.params
    if params['feature_group_count'] == 1:
        return small.run(operands)
    dimension_numbers = params['dimension_numbers']
    image, kernel = operands
    _, channel_axis, *_ = dimension_numbers.lhs_spec
    _, input_axis, *_ = dimension_numbers.rhs_spec
    channels = image.shape[channel_axis]
    inputs = kernel.shape[input_axis]
    return small.run(operands, feature_group_count=channels // inputs)
