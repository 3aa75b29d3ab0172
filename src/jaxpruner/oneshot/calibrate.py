"""Statistics of what the weight matrices of a model meet, taken while the model runs on some batches.

The model is traced once. Where it multiplies data by a leaf, the interpreter calls `_statistics_of`, which adds up the
inputs: their number, their squares, and for SparseGPT their products. Leaves that meet one value share its statistics.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import on_explicit_mesh, without_explicit_axes
from jaxpruner.oneshot import batches as batches_lib
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.leaves import Names, block_of
from jaxpruner.oneshot.matrices import WeightMatrices, data_axes
from jaxpruner.progress import progress_bar
from jaxpruner.trace import Use, contractions
from jaxpruner.trace.compiled_once import CompiledOnce
from jaxpruner.trace.program import ProgramPath
from jaxpruner.trace.segments import Segments, element_of
from jaxpruner.trace.taps import Taps

# A batch -> how much each of its samples counts.
SampleWeights = Callable[[Any], Any]


class InputStatistics(NamedTuple):
    """Sums over samples of the inputs that a leaf's weight matrices meet. Leading axes are those of the matrices.

    Attributes:
      count: number of samples, or the sum of their weights; a scalar, or one for each of the layers that a loop goes
        through.
      second_moment: sum of squares of each input, `[..., inputs]`.
      gram: sum of products of each two inputs, `[..., inputs, inputs]`; `None` where it was not asked for.

    >>> inputs = jnp.array([[1.0, 2.0], [0.0, 2.0], [1.0, 0.0]])
    >>> InputStatistics(3, jnp.sum(inputs**2, 0), inputs.T @ inputs).second_moment.tolist()
    [2.0, 8.0]
    """

    count: jax.Array | int
    second_moment: jax.Array
    gram: jax.Array | None = None


class CalibratedMatrices(NamedTuple):
    """Weight matrices of a leaf, and the statistics of their inputs.

    Attributes:
      matrices: how the model reads them from the leaf.
      statistics: of their inputs.

    >>> CalibratedMatrices(None, InputStatistics(2, jax.numpy.ones(3))).statistics.count
    2
    """

    matrices: WeightMatrices
    statistics: InputStatistics


class Calibration(dict[tree_lib.Path, tuple[CalibratedMatrices, ...]]):
    """Statistics by leaf path; a leaf has one entry for each way in which it is read, mostly one.

    >>> calibration = calibrate(lambda params, x: x @ params['w'], {'w': jnp.ones((2, 3))}, [jnp.eye(2)])
    >>> [entry.statistics.second_moment.tolist() for entry in calibration['w',]]
    [[1.0, 1.0]]
    """

    # Of all leaves that were asked for: it says why some have no statistics.
    followed: leaves_lib.FollowedLeaves


def calibrate(
    apply_fn: Callable[..., Any],
    params: tree_lib.PyTree,
    batches: Iterable[Any],
    kind: str = 'second_moment',
    only: Sequence[str | tree_lib.Path] | str | None = None,
    progress: bool = True,
    weights: SampleWeights | None = None,
) -> Calibration:
    """Takes statistics of the inputs of each leaf that is contracted with data, whatever the model's framework.

    Sums are float32, at highest precision. Leaves that meet the same value share their statistics. Layers that a scan
    goes through have statistics stacked in front.

    Args:
      apply_fn: `(params, *inputs) -> results`.
      params: any pytree of arrays.
      batches: any iterable of batches: a tuple holds the inputs, anything else is the only input. Each new shape is
        compiled anew.
      kind: `'second_moment'` (sums of squares), or `'gram'` (also of the products of each two inputs).
      only: names, globs or paths of leaves; by default all that are contracted with data.
      progress: show a progress bar, if stderr is a terminal and rich is installed.
      weights: `batch -> array`, how much each position counts: of padding 0, of all others 1. The array has the shape
        of the leading axes of the inputs, such as `(batch, length)`. A model that puts other axes first inside, such
        as length before batch, needs weights in that order: shapes alone are compared. By default all count.

    Returns:
      Statistics by leaf path.

    Raises:
      TypeError: a batch holds another number of inputs than the model takes.
      ValueError: another kind, a name that matches no leaf, no batches, a model that does not
        use its parameters, a leaf that `only` names in full and that no matrix can be read from (of other such leaves
        a warning tells), or leaves of whose inputs it is not clear which sample has which of the `weights`.
      UnsupportedPrimitive: a leaf that `only` names in full goes through an operation that is not understood.

    >>> params = {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}
    >>> batches = [jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]])]
    >>> (entry,) = calibrate(lambda p, x: x @ p['w'] + p['b'], params, batches, kind='gram')['w',]
    >>> int(entry.statistics.count), entry.statistics.gram.tolist()
    (2, [[10.0, 2.0], [2.0, 4.0]])
    """
    if kind not in ('second_moment', 'gram'):
        raise ValueError(f"kind is 'second_moment' or 'gram', got {kind!r}")
    first: Any = None
    totals: Any = None
    step: Any = None
    shapes: Any = None
    _, batches = batches_lib.first_batch(batches)
    with progress_bar(len(batches) if isinstance(batches, Sized) else None, progress) as show:
        for number, batch in enumerate(batches):
            show('calibrating', number, totals)
            inputs, own_weights = batches_lib.as_inputs(batch), weights_of(batch, weights)
            own_shapes = batches_lib.shapes_of((inputs, own_weights))
            if own_shapes != shapes:
                shapes = own_shapes
                graph = leaves_lib.trace_model(apply_fn, params, batch)
                followed = leaves_lib.follow_named_leaves(graph, only)
                check_samples_are_told(followed.all_matrices, own_weights)
                taps = input_taps(followed.all_matrices, kind == 'gram')
                if first is None:
                    leaves_lib.warn_of_dense('calibrate', followed, followed.unclear)
                    totals, first = on_explicit_mesh(taps.zeros(), (params, inputs)), followed
                elif _sharing(first.all_matrices) != _sharing(followed.all_matrices):
                    raise ValueError(
                        'with batches of different shapes the model uses its leaves in different ways, or other leaves '
                        'meet the same value, so that their statistics cannot be added up; give batches of one shape'
                    )

                def add(totals, weights, params, *inputs, taps=taps, graph=graph) -> Any:
                    return taps.run(graph, totals, params, *inputs, given=(weights,))[1]

                step = CompiledOnce(add, donate_argnums=(0,))
            totals = step(totals, own_weights, params, *inputs)
    calibration = Calibration()
    calibration.followed = first
    for matrices, statistics in calibrated(first.all_matrices, totals):
        if not matrices.fills_stacks:  # other trips of the loop read other leaves
            trips = tuple(slice(*axis.range) for axis in matrices.stack if axis.loop)
            statistics = jax.tree.map(lambda x, trips=trips: x[trips] if x.ndim else x, statistics)
        entry = CalibratedMatrices(matrices, statistics)
        calibration[matrices.path] = (*calibration.get(matrices.path, ()), entry)
    return calibration


# One block after another: each batch is run from block to block, and its values are kept in between. So each part of
# the model is run twice on it: for its statistics, and once it is pruned.


class Block(NamedTuple):
    """Weight matrices that are pruned together.

    Attributes:
      matrices: whole stacks, or one layer of each.
      start: the first step of the program that reads one of them.
      stop: the step after the last one.
      scan: path of the scan that takes the layers apart.
    """

    matrices: tuple[WeightMatrices, ...]
    start: int
    stop: int
    scan: ProgramPath | None


def find_blocks(matrices, segments: Segments, blocks: Sequence[Names] = ()) -> list[Block]:
    """Finds the blocks of a model, in the order in which the program comes to them.

    `blocks` holds globs or paths for each block; within a scan they divide each of its trips. Other leaves form a block
    if they belong to the same trip of a scan, or, outside of scans, if they meet the same value.
    """
    together: dict[Any, list[WeightMatrices]] = {}
    for part in matrices:
        path, number = segments.scan_of(part.uses), block_of(part.path, blocks)
        value = inputs_key(part) if path is None and number is None else None
        together.setdefault((path, number, value), []).append(part)
    found = []
    for (path, *_), parts in together.items():
        scan = segments.scans[path] if path is not None else None
        for trip in [None] if scan is None else range(scan.length):
            layer = None if scan is None or trip is None else element_of(scan, trip)
            of_trip = tuple(part.at_layer(layer) for part in parts)
            spans = [segments.span_of(use, trip) for part in parts for use in part.uses]
            start, stop = min(first for first, _ in spans), max(last for _, last in spans) + 1
            found.append(Block(of_trip, start, stop, path))
    return sorted(found, key=lambda block: block.start)


class SequentialCalibration:
    """A model that is calibrated one block after another, with parameters that change in between.

    Args:
      graph: of the model.
      matrices: those that are to be calibrated.
      batches: all of one shape; they are held at once.
      kind: as in `calibrate`.
      named: what a block holds, as `CalibratedPruning.blocks`.
      weights: as in `calibrate`.

    Attributes:
      blocks: in the order in which they have to be pruned.

    Raises:
      ValueError: batches of several shapes, or leaves that no block can hold.

    >>> params, batch = {'a': jnp.eye(2), 'b': jnp.ones((2, 1))}, jnp.ones((1, 2))
    >>> graph = leaves_lib.trace_model(lambda p, x: x @ p['a'] @ p['b'], params, batch)
    >>> matrices = leaves_lib.follow_leaves(graph, graph).all_matrices
    >>> calibration = SequentialCalibration(graph, matrices, [batch])
    >>> def squares(number):
    ...     ((_, statistics),) = calibration.take(number, params)
    ...     return statistics.second_moment.tolist()
    >>> squares(0)
    [1.0, 1.0]
    >>> params['a'] = 3 * params['a']  # it has been pruned
    >>> squares(1)
    [9.0, 9.0]
    """

    def __init__(self, graph, matrices, batches, kind='second_moment', named=(), weights=None):
        given = [(batches_lib.as_inputs(batch), weights_of(batch, weights)) for batch in batches]
        shapes = [batches_lib.shapes_of(each) for each in given]
        if any(each != shapes[0] for each in shapes):
            raise ValueError(
                'sequential=True takes batches of one shape, and these have several; leave out the last one if it is '
                'smaller'
            )
        check_samples_are_told(matrices, given[0][1])
        for part in matrices:
            if not part.fills_stacks:
                raise ValueError(
                    f'{part.where}: a loop goes through this leaf and others, which no block can hold; leave '
                    'sequential out'
                )
        self._with_gram = kind == 'gram'
        self._segments = Segments(graph, [use for part in matrices for use in part.uses])
        self.blocks = find_blocks(matrices, self._segments, named)
        # The values of each batch at a step, and its weights.
        self._batches = [(self._segments.begin(*inputs), own) for inputs, own in given]
        self._step = 0

    def take(self, number: int, params: tree_lib.PyTree) -> list[CalibratedMatrices]:
        """Takes the matrices of a block and their statistics; blocks have to be taken in their order.

        In `params` the blocks before it are pruned.
        """
        block: Any = self.blocks[number]
        taps = input_taps(block.matrices, self._with_gram)
        advance = self._segments.advance(params, self._step, block.start)
        observe = self._segments.observe(taps, params, block.start, block.stop)
        self._step = block.start
        totals = on_explicit_mesh(taps.zeros(block.scan), (params, self._batches))
        for i, (values, weights) in enumerate(self._batches):
            values = advance(values)
            self._batches[i] = values, weights
            totals = observe(totals, values, weights)
        return calibrated(block.matrices, totals)


# Which matrices meet the same value.


def inputs_key(matrices: WeightMatrices) -> Hashable:
    """Tells what the statistics of the inputs depend on; valid within one trace of the model."""
    keys = []
    for use in matrices.uses:
        site, equation = use.site, use.site.equation
        data = equation.invars[1 - site.operand]
        how: Any = id(equation)
        if use.op == 'dot':
            sizes_of_groups = tuple(map(id, equation.invars[2:]))
            how = sizes_of_groups, data_axes(equation, site.operand)
        loops = tuple(axis.loop for axis in site.view.stack)
        keys.append((site.path[:-1], id(data), how, loops))
    return tuple(keys)


def _uses_by_inputs(matrices: Iterable[WeightMatrices]) -> dict[Hashable, tuple[Use, ...]]:
    """Lists the uses that meet each value, in the order in which the values come first."""
    uses: dict[Hashable, tuple[Use, ...]] = {}
    for part in matrices:
        uses.setdefault(inputs_key(part), part.uses)
    return uses


def calibrated(
    matrices: Sequence[WeightMatrices], totals: Sequence[InputStatistics]
) -> list[CalibratedMatrices]:
    """Gives matrices their statistics: `totals` of the taps that `input_taps` made of them."""
    by_inputs = dict(zip(_uses_by_inputs(matrices), totals, strict=True))
    return [CalibratedMatrices(part, by_inputs[inputs_key(part)]) for part in matrices]


def _sharing(matrices: Sequence[WeightMatrices]) -> list[Any]:
    """Tells how leaves are read, and which of them meet the same value; to be compared between traces."""
    numbers = {key: number for number, key in enumerate(_uses_by_inputs(matrices))}
    return [(part.path, part.reading, numbers[inputs_key(part)]) for part in matrices]


def input_taps(matrices: Iterable[WeightMatrices], with_gram: bool) -> Taps:
    """Takes the statistics of each value that meets matrices, once; a run may say how much samples count."""

    def statistic(use: Use, operands: list[Any], weights: Any = None) -> InputStatistics:
        data = operands[1 - use.site.operand]
        data = data.astype(tree_lib.at_least_float32(data.dtype))
        sizes = operands[2] if len(operands) > 2 else None

        def take(data: Any, sizes: Any, weights: Any) -> InputStatistics:
            return _statistics_of(use, data, sizes, weights, with_gram)

        return without_explicit_axes(take, data)(data, sizes, weights)

    return Taps(list(_uses_by_inputs(matrices).values()), statistic)


# What one product or convolution adds to the statistics of its inputs.


def _statistics_of(use: Use, data, sizes, weights, with_gram: bool) -> InputStatistics:
    """Sums over samples, of a convolution over its windows; `sizes` are those of groups with a matrix each."""
    equation = use.site.equation
    if weights is not None:
        (axes,) = sample_axes(use, weights.shape)
        own = weights.reshape([data.shape[i] if i in axes else 1 for i in range(data.ndim)])
        # Squares are weighed. A sample of weight 0 becomes zero, even if it is NaN.
        data = jnp.where(own == 0, 0, data * jnp.sqrt(own).astype(data.dtype))
    if use.op == 'conv':
        count, moments = _moments_of_windows(equation, data, with_gram)
    else:
        contract, batch = data_axes(equation, use.site.operand)
        rows = [axis for axis in range(data.ndim) if axis not in {*contract, *batch}]
        sides = [[data.shape[axis] for axis in axes] for axes in (batch, rows, contract)]
        lengths, number_of_rows, inputs = sides[0], math.prod(sides[1]), math.prod(sides[2])
        samples = data.transpose(*batch, *rows, *contract)
        samples = samples.reshape(*lengths, number_of_rows, inputs)
        if sizes is None:
            count, moments = jnp.float32(number_of_rows), _moments(samples, with_gram)
        else:  # rows behind the last group meet no weights
            ends, numbers = jnp.cumsum(sizes), jnp.arange(number_of_rows)

            def of_group(start_and_end: Any) -> Any:
                start, end = start_and_end
                is_member = (numbers >= start) & (numbers < end)
                return _moments(jnp.where(is_member[:, None], samples, 0), with_gram)

            count, moments = sizes.astype(jnp.float32), lax.map(of_group, (ends - sizes, ends))
    if weights is not None:
        count = count / weights.size * jnp.sum(weights)
    return InputStatistics(count, *moments)  # pyright: ignore[reportArgumentType]


def _moments(samples: jax.Array, with_gram: bool) -> tuple[jax.Array, jax.Array | None]:
    """Sums squares, and products if asked, over the samples of `[..., samples, inputs]`."""
    if not with_gram:
        return jnp.sum(jnp.square(samples), -2), None
    gram = jnp.matmul(samples.swapaxes(-2, -1), samples, precision=lax.Precision.HIGHEST)
    return jnp.diagonal(gram, 0, -2, -1), gram


def _moments_of_windows(equation: Any, data: jax.Array, with_gram: bool) -> tuple[jax.Array, Any]:
    """Counts the windows of a convolution and sums their moments, image by image: windows take much memory."""
    params = equation.params
    dimension_numbers = params['dimension_numbers']
    kernel = equation.invars[1].aval.shape
    window = [kernel[axis] for axis in dimension_numbers.rhs_spec[2:]]
    names = 'window_strides', 'padding', 'lhs_dilation', 'rhs_dilation'
    settings = [params[name] for name in names]
    groups, pixels = params['feature_group_count'], math.prod(window)
    images = data.transpose(dimension_numbers.lhs_spec)
    channels = images.shape[1] // groups

    def moments_of(image: jax.Array) -> Any:
        patches = lax.conv_general_dilated_patches(
            image[None], window, *settings, precision=lax.Precision.HIGHEST
        )
        # Channels come first in the patches, and last in the order of inputs.
        patches = patches.reshape(groups, channels, pixels, -1).transpose(0, 3, 2, 1)
        samples = patches.reshape(groups, -1, pixels * channels)
        return _moments(samples if groups > 1 else samples[0], with_gram)

    def add(total: Any, image: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, moments_of(image)), None

    result = equation.outvars[0].aval.shape
    count = jnp.float32(math.prod(result) // result[dimension_numbers.out_spec[1]])
    return count, lax.scan(add, moments_of(images[0]), images[1:])[0]


# How much each sample of a batch counts: padding, for one, counts nothing.
#
# Weights have the shape of the leading axes of a model's inputs, such as `(batch, length)`. The inputs of a product
# must have these axes side by side and in this order, among those that are neither summed over nor shared with the
# weight matrices; or one axis that all of them are flattened into. A convolution takes one weight for each image. Axes
# are told apart by their lengths alone. A product that leaves no place for the weights, or several, is refused: pooled
# inputs have no positions any more, and rows that are sorted by experts have others.


def weights_of(batch: Any, weights: SampleWeights | None) -> jax.Array | None:
    """Calls the function that a user gave; returns float32, and refuses what is negative or not finite."""
    if weights is None:
        return None
    array = jnp.asarray(weights(batch), jnp.float32)
    if not bool(jnp.all(jnp.isfinite(array) & (array >= 0))):
        raise ValueError('weights must be finite and not negative; 0 leaves a sample out')
    return array


def check_samples_are_told(matrices: Iterable[WeightMatrices], weights: jax.Array | None) -> None:
    """Refuses leaves of whose inputs it is not clear which sample has which weight."""
    if weights is None:
        return
    for part in matrices:
        for use in part.uses:
            if len(sample_axes(use, weights.shape)) != 1:
                shape = use.site.equation.invars[1 - use.site.operand].aval.shape
                raise ValueError(
                    f'{part.where}: inputs {shape} at {use.where} do not tell which of them weights of shape '
                    f'{weights.shape} count. Inputs need these axes side by side, or flattened into one, and a '
                    'convolution has one weight for each image; rows that are sorted by experts have none. Where '
                    'lengths coincide give batches of another size. Or leave the leaf dense: '
                    f'{leaves_lib.dense_setting([part.path])}'
                )


def sample_axes(use: Use, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lists the places where the inputs of a product may have the axes of weights of this shape."""
    equation, operand = use.site.equation, 1 - use.site.operand
    lengths = equation.invars[operand].aval.shape
    if use.op == 'conv':
        images = equation.params['dimension_numbers'].lhs_spec[0]
        return [(images,)] if shape == (lengths[images],) else []
    if equation.primitive.name in contractions.RAGGED:
        return []
    roles = contractions.roles(equation, operand)
    flattened = [(math.prod(shape),)] if len(shape) > 1 and not roles.batch else []
    for own_shape in (shape, *flattened):
        starts = range(len(roles.free) - len(own_shape) + 1)
        places = [roles.free[start : start + len(own_shape)] for start in starts]
        places = [axes for axes in places if tuple(lengths[axis] for axis in axes) == own_shape]
        if places:
            return places
    return []
