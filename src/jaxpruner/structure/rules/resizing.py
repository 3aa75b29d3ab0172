"""How primitives are bound where operands and results are smaller: the third part of each row of the table.

Most primitives read all shapes off their operands and are bound unchanged. Here are those whose parameters hold sizes.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpruner.structure.analysis.axes import Axis
from jaxpruner.structure.analysis.records import EquationAxes
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.uses.bodies import bind

Values = list[Any]


class EquationCut(NamedTuple):
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


def unchanged(small: EquationCut, operands: Values) -> Values:
    """The primitive reads all sizes off its operands."""
    return small.run(operands)


def from_nothing(small: EquationCut, operands: Values) -> Values:
    """What is made from nothing is made as before, and cut along: what stands at an index is known."""
    rank = operands[0].ndim if operands else 0  # of keys, for each of which values are made
    take = functools.partial(small.cut.take, first=rank)
    return list(map(take, small.run(operands), small.axes.results))


def broadcast(small: EquationCut, operands: Values) -> Values:
    """The shape of the result is a parameter."""
    return small.run(operands, shape=small.result_shape())


def reshape(small: EquationCut, operands: Values) -> Values:
    """As `broadcast`."""
    return small.run(operands, new_sizes=small.result_shape())


def tile(small: EquationCut, operands: Values) -> Values:
    """How often each axis is repeated is a parameter."""
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
    """Windows that are as long as their axis stay so."""
    sizes = []
    axes = small.axes.operands[0]
    old_sizes = small.equation.params['slice_sizes']
    for axis, old_size in zip(axes, old_sizes, strict=True):
        is_whole = old_size == axis.size and old_size > 1
        size = small.cut.size(axis) if is_whole else old_size
        sizes.append(size)
    return small.run(operands, slice_sizes=tuple(sizes))


def slices(params: Mapping[str, Any]) -> list[range]:
    """The positions that a slice takes along each axis."""
    starts = params['start_indices']
    limits = params['limit_indices']
    strides = params['strides'] or [1] * len(starts)
    return list(map(range, starts, limits, strides))


def slice_(small: EquationCut, operands: Values) -> Values:
    """Bounds are moved to where their elements have gone."""
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
    """The elements of a slice of an axis, of which `count` stay, among those that stay."""
    if not cut.shortens(axis):
        return old_slice
    start, step = old_slice.start, old_slice.step
    if step > 1:  # one of each few neighbours, which are all there
        last = start + (count - 1) * step
        return range(start, last + 1, step)
    new_start = cut.size_before(axis, start)
    new_stop = cut.size_before(axis, old_slice.stop)
    return range(new_start, new_stop)


def conv(small: EquationCut, operands: Values) -> Values:
    """The number of groups is a parameter: each has the number of channels that the kernel has inputs."""
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
