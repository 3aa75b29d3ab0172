"""The table of primitives: one row of three rules for each.

Take `hidden = x @ up`, which JAX turns into a `dot_general`. With `x` of shape (5, 3) and `up` of shape (3, 8), its row
says this:

    axes     `x[1]` and `up[0]` are one axis, which is summed over; the result has the axes `x[0]` and `up[1]`
    fills    a zero column of `up` makes a zero column of the result; a sum over removed channels is the same without
             them only if the products there are zero
    resized  nothing: it reads all sizes off its operands, such as an `up` of shape (3, 4)

A `reshape` to (5, 2, 4) has a rule for smaller operands. The shape is one of its parameters, and has to become
(5, 2, 3) if one of each 4 features is removed.

An axis is pinned if an index says where a window lies along it. A window as long as its axis has only one place, so
such an axis is not pinned. A primitive without a row pins every axis that it touches; nothing is guessed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxpruner.structure import zeros
from jaxpruner.structure.axes import (
    Axes,
    Axis,
    EquationTies,
    Index,
    drop,
    new_axes,
    pick,
    product,
    sizes_of,
    total,
)
from jaxpruner.structure.zeros import moved
from jaxpruner.trace import rules, views
from jaxpruner.trace.program import CONTRACTIONS, PLAIN_RAGGED_DOT, RAGGED, all_but, bind, dot_axes

Values = list[Any]


class Row(NamedTuple):
    """The three rules of a primitive.

    Attributes:
      axes: ties the axes of the operands together, and returns the axes of each result.
      fills: takes a `zeros.ZeroedEquation`, and returns the fill of each result.
      resized: takes an `EquationCut` and the smaller operands, and runs the primitive on them; `None` if the
        primitive reads all sizes off its operands.
    """

    axes: Callable[[EquationTies], list[Axes]]
    fills: Callable[[Any], list[Any]]
    resized: Callable[['EquationCut', Values], Values] | None = None


class EquationAxes(NamedTuple):
    """The axes of an equation's operands and of its results, the row of its primitive, and the equation."""

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    row: Row
    equation: Any

    @property
    def values(self) -> tuple[Axes, ...]:
        """The axes of the operands, then those of the results."""
        return self.operands + self.results

    @property
    def is_contraction(self) -> bool:
        """Whether it multiplies and sums."""
        return self.equation.primitive.name in CONTRACTIONS


class EquationCut(NamedTuple):
    """An equation with some smaller operands or results.

    Attributes:
      axes: the equation, and the axes of its operands and results.
      cut: the channels that stay along these axes, a `cut.Cut`.
    """

    axes: EquationAxes
    cut: Any

    def run(self, operands: Sequence[Any], **changed: Any) -> list[Any]:
        """Runs the primitive on small operands, with some of its parameters changed."""
        return bind(self.axes.equation, operands, changed)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first result after the cut."""
        return self.cut.shape(self.axes.results[0])


def elementwise_axes(ties: EquationTies) -> list[Axes]:
    """All operands have the axes of the result. Scalars and axes of one element are repeated."""
    arrays = [axes for axes in ties.operands if axes]
    if any(len(axes) != len(ties.shape) for axes in arrays):
        return ties.pin_everything('parts of numbers lie along a last axis')
    result = []
    for i, size in enumerate(ties.shape):
        whole = [axes[i] for axes in arrays if axes[i].size == size]
        ties.unify_each(whole[:-1], whole[1:])
        result.append(whole[0])
    return [tuple(result)]


def _along(reason: str) -> Callable[[EquationTies], list[Axes]]:
    """The rule of a primitive whose elements meet along some axes. These are pinned, and so are those of the result."""

    def rule(ties: EquationTies) -> list[Axes]:
        first, params = ties.operands[0], ties.params
        ties.unify_values(ties.operands[:-1], ties.operands[1:])
        if 'window_dimensions' in params:
            steps = zip(params['window_dimensions'], params['window_strides'], strict=True)
            meeting = [i for i, each in enumerate(steps) if max(each) > 1]
        else:
            # Older JAX only takes the largest along the last axis.
            last = len(first) - 1
            meeting = params.get('dimensions', [params.get('dimension', params.get('axis', last))])
        if 'fft_lengths' in params:
            meeting = range(len(first))[-len(params['fft_lengths']) :]
        ties.pin(reason, *pick(first, meeting))
        return [window_axes(first, ties.shape, ties, reason)] * len(ties.equation.outvars)

    return rule


def _reshaped(param: str) -> Callable[[EquationCut, Values], Values]:
    """The rule of a primitive that has the shape of its result as a parameter."""
    return lambda small, operands: small.run(operands, **{param: small.result_shape})


def broadcast_axes(ties: EquationTies) -> list[Axes]:
    """Repeats a value along new axes."""
    result = list(new_axes(ties.shape))
    for axis, i in zip(ties.operands[0], ties.params['broadcast_dimensions'], strict=True):
        if axis.size == result[i].size:
            result[i] = axis
    return [tuple(result)]


def reshape_axes(ties: EquationTies) -> list[Axes]:
    """The axes of a value in another shape."""
    axes, order = ties.operands[0], ties.params['dimensions']
    axes = pick(axes, order or range(len(axes)))  # the elements are read in this order
    if math.prod(ties.shape) == 0:
        return ties.pin_everything('a value without elements is reshaped')
    result = list(new_axes(ties.shape))
    for old, new in views.matching_runs(sizes_of(axes), ties.shape):
        if axes[old]:  # otherwise they are new axes of one element
            ties.align('product', axes[old], result[new])
    return [tuple(result)]


def concatenate_axes(ties: EquationTies) -> list[Axes]:
    """Places values one after the other along an axis; `stack` along a new one."""
    i, operands = ties.params.get('dimension'), ties.operands
    if i is None:
        i = ties.params['axis']
        operands = [(*axes[:i], Axis(1), *axes[i:]) for axes in operands]
    first = operands[0]
    others = [drop(axes, [i]) for axes in operands]
    ties.unify_values(others[:-1], others[1:])
    return [(*first[:i], total([axes[i] for axes in operands]), *first[i + 1 :])]


def split_axes(ties: EquationTies) -> list[Axes]:
    """Cuts an axis into segments; `unstack` into single elements, without that axis."""
    axes, i = ties.operands[0], ties.params['axis']
    sizes = ties.params.get('sizes')
    segments = ties.cut(axes[i], sizes or [1] * axes[i].size)
    return [(*axes[:i], *([segment] if sizes else []), *axes[i + 1 :]) for segment in segments]


def split_resized(small: EquationCut, operands: Values) -> Values:
    """The sizes of the parts are a parameter."""
    i = small.axes.equation.params['axis']
    sizes = [small.cut.size(axes[i]) for axes in small.axes.results]
    return small.run(operands, sizes=tuple(sizes))


def slice_axes(ties: EquationTies) -> list[Axes]:
    """Takes a range of an axis, or one of each few neighbours."""
    result = []
    for axis, positions in zip(ties.operands[0], rules.slices(ties.params), strict=True):
        start, step, count = positions.start, positions.step, len(positions)
        if count == axis.size:
            sliced = axis
        elif step == 1:
            _, sliced, _ = ties.cut(axis, [start, count, axis.size - positions.stop])
        else:
            sliced, neighbours = Axis(count), Axis(step)
            is_one_of_each = start < step and count * step == axis.size
            if is_one_of_each:
                ties.unify(axis, product([sliced, neighbours]))
            pinned = [neighbours] if is_one_of_each else [axis, sliced]
            ties.pin('every few of it are taken', *pinned)
        result.append(sliced)
    return [tuple(result)]


def slice_resized(small: EquationCut, operands: Values) -> Values:
    """The bounds of a slice are parameters. They move with their elements."""
    starts, limits = [], []
    slices = rules.slices(small.axes.equation.params)
    for axis, old, count in zip(small.axes.operands[0], slices, small.result_shape, strict=True):
        # Where one of every few neighbours is taken, all of these stay.
        is_moved = old.step == 1 and small.cut.shortens(axis)
        start = small.cut.size_before(axis, old.start) if is_moved else old.start
        starts.append(start)
        limits.append(start + (count - 1) * old.step + 1 if count else start)
    return small.run(operands, start_indices=tuple(starts), limit_indices=tuple(limits))


def pad_axes(ties: EquationTies) -> list[Axes]:
    """Puts padding before and after the elements of an axis."""
    result = []
    config = ties.params['padding_config']
    for axis, size, (before, after, between) in zip(
        ties.operands[0], ties.shape, config, strict=True
    ):
        parts = [Axis(before), axis, Axis(after)]
        if between or min(before, after) < 0:
            parts = [Axis(size)]
            ties.pin('padding between elements, or less than none', axis)
        ties.pin('padding', *[part for part in parts if part is not axis])
        result.append(total(parts))
    return [tuple(result)]


def window_axes(
    axes: Axes,
    shape: Sequence[int],
    ties: EquationTies,
    reason: str = 'an index says where along it',
) -> Axes:
    """The axes of a window of this shape. Axes that it takes only a part of are pinned, and replaced by new ones."""
    window = [
        axis if axis.size == size else Axis(size) for axis, size in zip(axes, shape, strict=True)
    ]
    for axis, part in zip(axes, window, strict=True):
        if part is not axis:
            ties.pin(reason, axis, part)
    return tuple(window)


def dynamic_slice_axes(ties: EquationTies) -> list[Axes]:
    """Takes a window at indices."""
    return [window_axes(ties.operands[0], ties.params['slice_sizes'], ties)]


def dynamic_update_slice_axes(ties: EquationTies) -> list[Axes]:
    """Replaces a window of the first operand by the second."""
    base, update = ties.operands[:2]
    ties.unify_each(window_axes(base, sizes_of(update), ties), update)
    return [base]


def indexed_axes(ties: EquationTies) -> list[Axes]:
    """Takes windows at indices. A scatter replaces those of the first operand, or combines both."""
    base, (*rows, parts), *updates = ties.operands
    own, gone, _, batching, batching_of_rows = ties.params['dimension_numbers']
    ties.pin('an index says where along it', *pick(base, gone))
    ties.pin('numbers that make one index lie along it', parts)
    ties.unify_each(pick(base, batching), pick(rows, batching_of_rows))
    shape = sizes_of(updates[0]) if updates else ties.shape
    window = window_axes(drop(base, (*gone, *batching)), pick(shape, own), ties)
    axis_of = dict(zip((*own, *all_but(own, shape)), (*window, *rows), strict=True))
    windows = tuple([axis_of[k] for k in range(len(shape))])
    if updates:
        ties.unify_each(windows, updates[0])
    return [base if updates else windows]


def gather_resized(small: EquationCut, operands: Values) -> Values:
    """The sizes of windows are a parameter. A window as long as its axis stays so."""
    pairs = zip(small.axes.operands[0], small.axes.equation.params['slice_sizes'], strict=True)
    sizes = [small.cut.size(axis) if size == axis.size else size for axis, size in pairs]
    return small.run(operands, slice_sizes=tuple(sizes))


def product_axes(ties: EquationTies) -> list[Axes]:
    """A matrix product, also of groups of rows with a matrix each."""
    left, right = ties.operands[:2]
    if ties.equation.primitive.name in RAGGED:
        if (len(left), len(right)) != (2, 3) or dot_axes(ties.equation) != PLAIN_RAGGED_DOT:
            return ties.pin_everything('groups of rows along several axes')
        ties.pin('data say how many rows a group has', left[0], right[0], *ties.operands[2])
    result = []
    for index in Index.all_of(ties.equation):
        own = index.of(ties.operands)
        ties.unify(own[0], own[-1])
        if index.result is not None:
            result.append(own[0])
    return [tuple(result)]


def conv_axes(ties: EquationTies) -> list[Axes]:
    """A convolution. Each group of channels has a kernel of its own."""
    if ties.params['batch_group_count'] != 1:
        return ties.pin_everything('groups of images')
    numbers = ties.params['dimension_numbers']
    result = list(new_axes(ties.shape))
    for axes, spec in zip((*ties.operands, result), numbers, strict=True):
        ties.pin('the window moves along it', *pick(axes, spec[2:]))
    batch, channels = pick(ties.operands[0], numbers.lhs_spec[:2])
    outputs, inputs = pick(ties.operands[1], numbers.rhs_spec[:2])
    groups = Axis(ties.params['feature_group_count'])
    ties.unify(channels, product([groups, inputs]))
    ties.unify(outputs, product([groups, Axis(outputs.size // groups.size)]))
    result[numbers.out_spec[0]], result[numbers.out_spec[1]] = batch, outputs
    return [tuple(result)]


def conv_resized(small: EquationCut, operands: Values) -> Values:
    """The number of groups is a parameter. A group has as many channels as the kernel has inputs."""
    dimension_numbers = small.axes.equation.params['dimension_numbers']
    channels = operands[0].shape[dimension_numbers.lhs_spec[1]]
    inputs = operands[1].shape[dimension_numbers.rhs_spec[1]]
    return small.run(operands, feature_group_count=channels // inputs)


def reduce_axes(ties: EquationTies) -> list[Axes]:
    """A reduction; one over an axis that `vmap` has named is one of arrays, else devices exchange values."""
    axes, params = ties.params['axes'], ties.params
    is_of_arrays = all(isinstance(axis, int) for axis in axes)
    if 'axis_index_groups' in params and (params['axis_index_groups'] or not is_of_arrays):
        return ties.pin_everything('devices, or parts of an axis, exchange values')
    return [drop(operand, axes) for operand in ties.operands]


def index_axes(ties: EquationTies) -> list[Axes]:
    """The index of the largest or smallest along an axis."""
    ties.pin('its result is an index along it', *pick(ties.operands[0], ties.params['axes']))
    return reduce_axes(ties)


def transpose_axes(ties: EquationTies) -> list[Axes]:
    """Brings axes into another order, or drops some of one element."""
    (axes,), params = ties.operands, ties.params
    if 'permutation' in params:
        return [pick(axes, params['permutation'])]
    return [drop(axes, params['dimensions'])]


def tile_axes(ties: EquationTies) -> list[Axes]:
    """Repeats a value along its axes."""
    pairs = zip(ties.operands[0], ties.params['reps'], strict=True)
    return [tuple([product([Axis(count), axis]) for axis, count in pairs])]


def tile_resized(small: EquationCut, operands: Values) -> Values:
    """The number of repetitions of each axis is a parameter."""
    sizes = zip(small.result_shape, operands[0].shape, strict=True)
    return small.run(operands, reps=tuple([after // before for after, before in sizes]))


def made_axes(ties: EquationTies) -> list[Axes]:
    """Makes values without operands, or with keys for some of their axes, so that the value at each index is known."""
    keys = ties.operands[0] if ties.operands else ()
    return [keys + new_axes(ties.shape[len(keys) :])]


def made_resized(small: EquationCut, operands: Values) -> Values:
    """New values are made in the old size and then cut, so that each index keeps its value."""
    (result,) = small.run(operands)
    rank_of_keys = operands[0].ndim if operands else 0  # axes of keys are cut already
    return [small.cut.take(result, small.axes.results[0], first=rank_of_keys)]


_MEET = _along('elements follow one another along it')
_LARGEST = _along('the largest along it are taken')
_WINDOW = _along('the window moves along it')
_PINNED = Row(EquationTies.pin_everything, zeros.unknown_fills)
# These compute one result from all operands.
_COMPUTING = rules.ARITHMETIC | set(
    'bitcast_convert_type convert_element_type random_fold_in random_seed reduce_precision select_n'.split()
)
_TABLE: Sequence[tuple[Iterable[str], Row]] = [
    (_COMPUTING, Row(elementwise_axes, zeros.elementwise_fills)),
    (rules.SAME - _COMPUTING, Row(lambda ties: list(ties.operands), lambda zeroed: zeroed.fills)),
    (['dot_general', *RAGGED], Row(product_axes, zeros.product_fills)),
    (['conv_general_dilated'], Row(conv_axes, zeros.product_fills, conv_resized)),
    (zeros.REDUCTIONS, Row(reduce_axes, zeros.reduce_fills)),
    (['argmax', 'argmin'], Row(index_axes, zeros.unknown_fills)),
    (['broadcast_in_dim'], Row(broadcast_axes, moved(), _reshaped('shape'))),
    (['concatenate', 'stack'], Row(concatenate_axes, moved())),
    (['dynamic_slice'], Row(dynamic_slice_axes, moved(0), _reshaped('slice_sizes'))),
    (['dynamic_update_slice'], Row(dynamic_update_slice_axes, moved(0, 1))),
    (['gather'], Row(indexed_axes, moved(0), gather_resized)),
    (['pad'], Row(pad_axes, moved(0, 1))),
    (['reshape'], Row(reshape_axes, moved(), _reshaped('new_sizes'))),
    (['slice'], Row(slice_axes, moved(), slice_resized)),
    (['split'], Row(split_axes, moved(), split_resized)),
    (['unstack'], Row(split_axes, moved())),
    (['squeeze', 'transpose'], Row(transpose_axes, moved())),
    (['tile'], Row(tile_axes, moved(), tile_resized)),
    (['scatter', 'scatter-max', 'scatter-min'], Row(indexed_axes, moved(0, 2))),
    (['scatter-add', 'scatter-mul', 'scatter-sub'], Row(indexed_axes, moved(0, 2, sums=True))),
    (['empty', 'iota', 'random_bits'], Row(made_axes, zeros.unknown_fills, made_resized)),
    (['rev'], Row(_along('it is reversed'), moved())),
    (['fft'], Row(_along('a Fourier transform goes along it'), moved(sums=True))),
    (['cummax', 'cummin', 'sort'], Row(_MEET, moved())),
    (['cumsum'], Row(_MEET, moved(sums=True))),
    (['top_k'], Row(_LARGEST, lambda zeroed: [moved()(zeroed)[0], zeros.Fill()])),
    (['reduce_window_max'], Row(_WINDOW, moved())),
    (['reduce_window_sum'], Row(_WINDOW, moved(sums=True))),
]
ROWS = {name: row for names, row in _TABLE for name in names}


def row_of(equation: Any) -> Row:
    """The row of a primitive. One without a row pins every axis that it touches; nothing is guessed."""
    return ROWS.get(equation.primitive.name, _PINNED)
