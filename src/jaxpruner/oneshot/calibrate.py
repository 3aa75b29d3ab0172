"""Statistics of what the weight matrices of a model meet, taken while the model runs on some batches.

Where the model multiplies data by a leaf, the interpreter calls `_statistics_of`, which adds up the inputs: their
number, their squares, and for SparseGPT their products. Leaves that meet one value share its statistics.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import on_explicit_mesh, without_explicit_axes
from jaxpruner.oneshot import leaves as leaves_lib
from jaxpruner.oneshot.leaves import Model, Names, as_inputs, block_of, shapes_of
from jaxpruner.oneshot.matrices import WeightMatrices, channels_last, data_axes, windows_of
from jaxpruner.progress import progress_bar
from jaxpruner.trace import Use, UseGraph
from jaxpruner.trace.compiled_once import CompiledOnce
from jaxpruner.trace.graph import roles_of
from jaxpruner.trace.program import RAGGED
from jaxpruner.trace.segments import Segments, element_of
from jaxpruner.trace.taps import Taps

# A batch -> how much each of its samples counts.
SampleWeights = Callable[[Any], Any]
# Weight matrices; those of a group meet the same value.
Groups = list[list[WeightMatrices]]

_TILES = 4  # beside each other in a Gram matrix, of which ten in sixteen are computed
_SMALLEST_TILE = 128


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
    model = leaves_lib.trace_model(apply_fn, params, batches)
    followed = leaves_lib.follow_named_leaves(model.graph, only)
    leaves_lib.warn_of_dense('calibrate', followed, followed.unclear)
    calibration = Calibration(dict.fromkeys(followed.matrices, ()))
    calibration.followed = followed
    for entry in take_statistics(model, followed.all_matrices, kind, weights, progress):
        calibration[entry.matrices.path] += (entry,)
    return calibration


def take_statistics(
    model: Model, matrices: Iterable[WeightMatrices], kind: str, weights: Any, progress: bool
) -> list[CalibratedMatrices]:
    """Takes the statistics of weight matrices that were found in the graph of a model; see `calibrate`.

    With batches of another shape the model is traced anew.
    """
    apply_fn, params, batches, graph = model
    shapes: Any = None
    step: Any = None
    totals: Any = None
    groups = by_inputs(matrices)
    with progress_bar(len(batches) if isinstance(batches, Sized) else None, progress) as show:
        for number, batch in enumerate(batches):
            show('calibrating', number, totals)
            inputs = as_inputs(batch)
            own_weights = None if weights is None else weights_of(batch, weights)
            if shapes_of((inputs, own_weights)) != shapes:
                if shapes is not None:
                    graph, groups = _trace_again(apply_fn, params, batch, groups)
                shapes = shapes_of((inputs, own_weights))
                if own_weights is not None:
                    check_samples_are_told(groups, own_weights)
                taps = input_taps(groups, kind == 'gram')
                step = CompiledOnce(functools.partial(_add, taps, graph), donate_argnums=(0,))
                if totals is None:
                    totals = on_explicit_mesh(CompiledOnce(taps.zeros)(), (params, inputs))
            totals = step(totals, own_weights, params, *inputs)
    return calibrated(groups, totals)


def _add(taps: Taps, graph: UseGraph, totals: Any, weights: Any, params: Any, *inputs: Any) -> Any:
    return taps.run(graph, totals, params, *inputs, given=(weights,))[1]


def _trace_again(apply_fn: Any, params: Any, batch: Any, groups: Groups) -> tuple[UseGraph, Groups]:
    """Traces a model with a batch of another shape, and finds the matrices again whose statistics are added up."""
    graph = leaves_lib.trace_model(apply_fn, params, [batch]).graph
    paths = dict.fromkeys(part.path for group in groups for part in group)
    again = by_inputs(leaves_lib.follow_leaves(graph, paths).all_matrices)
    if again != groups:
        raise ValueError(
            'with batches of different shapes the model uses its leaves in different ways, or other leaves meet the '
            'same value, so that their statistics cannot be added up; give batches of one shape'
        )
    return graph, again


# One block after another: each batch is run from block to block, and its values are kept in between. So each part of
# the model is run twice on it: for its statistics, and once it is pruned.


class Block(NamedTuple):
    """Weight matrices that are calibrated and pruned together."""

    matrices: list[WeightMatrices]  # whole stacks, or one layer of each
    start: int  # the first step of the program that reads one of them
    stop: int  # the step after the last one
    scan: Any  # the path of the scan that takes the layers apart


def find_blocks(matrices: Any, segments: Segments, blocks: Sequence[Names] = ()) -> list[Block]:
    """Finds what is pruned together, in the order in which the program comes to it.

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
            of_trip = [part.at_layer(layer) for part in parts]
            spans = [segments.span_of(use, trip) for part in parts for use in part.uses]
            start, stop = min(first for first, _ in spans), max(last for _, last in spans) + 1
            found.append(Block(of_trip, start, stop, path))
    return sorted(found, key=lambda block: block.start)


class SequentialCalibration:
    """A model that is calibrated one block after another, with parameters that change in between.

    Args:
      model: its batches are all of one shape, and are held at once.
      matrices: those that are to be calibrated.
      kind: as in `calibrate`.
      named: what a block holds, as `CalibratedPruning.blocks`.
      weights: as in `calibrate`.

    Attributes:
      blocks: in the order in which they have to be pruned.

    Raises:
      ValueError: batches of several shapes, or leaves that no block can hold.

    >>> params, batch = {'a': jnp.eye(2), 'b': jnp.ones((2, 1))}, jnp.ones((1, 2))
    >>> model = leaves_lib.trace_model(lambda p, x: x @ p['a'] @ p['b'], params, [batch])
    >>> matrices = leaves_lib.follow_leaves(model.graph, model.graph).all_matrices
    >>> calibration = SequentialCalibration(model, matrices)
    >>> def squares(number):
    ...     ((_, statistics),) = calibration.take(number, params)
    ...     return statistics.second_moment.tolist()
    >>> squares(0)
    [1.0, 1.0]
    >>> params['a'] = 3 * params['a']  # it has been pruned
    >>> squares(1)
    [9.0, 9.0]
    """

    def __init__(
        self, model: Model, matrices: Any, kind='second_moment', named=(), weights: Any = None
    ):
        given: Any = [
            (as_inputs(batch), weights and weights_of(batch, weights)) for batch in model.batches
        ]
        shapes = list(map(shapes_of, given))
        if any(each != shapes[0] for each in shapes):
            raise ValueError(
                'sequential=True takes batches of one shape, and these have several; leave out the last one if it is '
                'smaller'
            )
        if weights is not None:
            check_samples_are_told([list(matrices)], given[0][1])
        for part in matrices:
            if not part.fills_stacks:
                raise ValueError(
                    f'{part.where}: a loop goes through this leaf and others, which no block can hold; leave '
                    'sequential out'
                )
        self._with_gram = kind == 'gram'
        self._segments = Segments(model.graph, [use for part in matrices for use in part.uses])
        self.blocks = find_blocks(matrices, self._segments, named)
        # The values of each batch at a step, and its weights.
        self._batches = [(self._segments.begin(*inputs), own) for inputs, own in given]
        self._step = 0

    def take(self, number: int, params: tree_lib.PyTree) -> list[CalibratedMatrices]:
        """Takes the matrices of a block and their statistics; blocks have to be taken in their order.

        In `params` the blocks before it are pruned.
        """
        matrices, start, stop, scan = self.blocks[number]
        groups = by_inputs(matrices)
        taps = input_taps(groups, self._with_gram)
        advance = self._segments.advance(params, self._step, start)
        observe = self._segments.observe(taps, params, start, stop)
        self._step = start
        totals = on_explicit_mesh(taps.zeros(scan), (params, self._batches))
        for i, (values, weights) in enumerate(self._batches):
            self._batches[i] = advance(values), weights
            totals = observe(totals, *self._batches[i])
        return calibrated(groups, totals)


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


def by_inputs(matrices: Iterable[WeightMatrices]) -> Groups:
    """Groups matrices that meet the same value, so that its statistics are taken once."""
    groups: dict[Hashable, list[WeightMatrices]] = {}
    for part in matrices:
        groups.setdefault(inputs_key(part), []).append(part)
    return list(groups.values())


def calibrated(groups: Groups, totals: Sequence[InputStatistics]) -> list[CalibratedMatrices]:
    """Gives matrices their statistics: `totals` of the taps that `input_taps` made of the groups."""
    entries = []
    for group, total in zip(groups, totals, strict=True):
        for part in group:
            statistics = total
            if not part.fills_stacks:  # other trips of the loop read other leaves
                trips = tuple(slice(*axis.range) for axis in part.stack if axis.loop)
                statistics = jax.tree.map(lambda x, trips=trips: x[trips] if x.ndim else x, total)
            entries.append(CalibratedMatrices(part, statistics))
    return entries


def input_taps(groups: Groups, with_gram: bool) -> Taps:
    """Takes the statistics of each value that meets matrices, once; a run may say how much samples count."""
    return Taps([parts[0].uses for parts in groups], functools.partial(_statistics_of, with_gram))


# What one product or convolution adds to the statistics of its inputs.


def _statistics_of(with_gram: bool, use: Use, operands, weights=None) -> InputStatistics:
    """Takes what a product adds to the statistics of its inputs."""

    def take(data: jax.Array, sizes: Sequence[jax.Array], weights: Any) -> InputStatistics:
        data = data.astype(tree_lib.at_least_float32(data.dtype))
        if weights is not None:
            data = _weighed(use, data, weights)
        if use.op == 'conv':
            count, moments = _moments_of_windows(use.site.equation, data, with_gram)
        else:
            count, moments = _moments_of_rows(use.site, data, sizes, with_gram)
        if weights is not None:
            count = count / weights.size * jnp.sum(weights)
        return InputStatistics(count, *moments)  # pyright: ignore[reportArgumentType]

    data = operands[1 - use.site.operand]
    return without_explicit_axes(take, data)(data, operands[2:], weights)


def _moments(samples: jax.Array, with_gram: bool) -> tuple[jax.Array, jax.Array | None]:
    """Sums squares, and products if asked, over the samples of `[..., samples, inputs]`."""
    if not with_gram:
        return jnp.sum(jnp.square(samples), -2), None
    gram = _gram_of(samples)
    return jnp.diagonal(gram, 0, -2, -1), gram


def _gram_of(samples: jax.Array) -> jax.Array:
    """Sums products of each two inputs, tile by tile: the matrix is symmetric, and one side of its diagonal enough."""
    number = max(min(samples.shape[-1] // _SMALLEST_TILE, _TILES), 1)
    parts = jnp.array_split(samples, number, -1)
    tiles = {}
    for i, j in itertools.combinations_with_replacement(range(number), 2):
        rows = parts[i].swapaxes(-2, -1)
        tiles[i, j] = jnp.matmul(rows, parts[j], precision=lax.Precision.HIGHEST)
        tiles[j, i] = tiles[i, j].swapaxes(-2, -1)
    return jnp.block([[tiles[i, j] for j in range(number)] for i in range(number)])


def _moments_of_rows(site: Any, data: Any, sizes: Any, with_gram: bool) -> tuple[Any, Any]:
    """Counts the rows of a product's data and sums their moments; groups of such sizes have a matrix each."""
    contract, batch = data_axes(site.equation, site.operand)
    rows = [axis for axis in range(data.ndim) if axis not in {*contract, *batch}]
    number, inputs = (math.prod(data.shape[axis] for axis in axes) for axes in (rows, contract))
    samples = data.transpose(*batch, *rows, *contract)
    samples = samples.reshape(*samples.shape[: len(batch)], number, inputs)
    if sizes:
        return _moments_of_groups(samples, sizes[0], with_gram)
    return jnp.float32(number), _moments(samples, with_gram)


def _moments_of_groups(samples: jax.Array, sizes: jax.Array, with_gram: bool) -> tuple[Any, Any]:
    """Counts the rows of groups of `[samples, inputs]` and sums their moments; those behind them meet no weights."""
    ends, numbers = jnp.cumsum(sizes), jnp.arange(len(samples))

    def of_group(start_and_end: Any) -> Any:
        start, end = start_and_end
        is_member = (numbers >= start) & (numbers < end)
        return _moments(jnp.where(is_member[:, None], samples, 0), with_gram)

    return sizes.astype(jnp.float32), lax.map(of_group, (ends - sizes, ends))


def _moments_of_windows(equation: Any, data: jax.Array, with_gram: bool) -> tuple[jax.Array, Any]:
    """Counts the windows of a convolution and sums their moments, image by image: windows take much memory."""
    dimension_numbers = equation.params['dimension_numbers']
    groups = equation.params['feature_group_count']
    images = data.transpose(channels_last(dimension_numbers.lhs_spec))
    channels = images.shape[-1] // groups

    def moments_of(image: jax.Array) -> Any:
        windows = windows_of(equation, image[None])
        in_groups = windows.reshape(-1, windows.shape[-1] // image.shape[-1], groups, channels)
        samples = jnp.moveaxis(in_groups, 2, 0).reshape(groups, len(in_groups), -1)
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


def weights_of(batch: Any, weights: SampleWeights) -> jax.Array:
    """Calls the function that a user gave; returns float32, and refuses what is negative or not finite."""
    array = jnp.asarray(weights(batch), jnp.float32)
    if not bool(jnp.all(jnp.isfinite(array) & (array >= 0))):
        raise ValueError('weights must be finite and not negative; 0 leaves a sample out')
    return array


def _weighed(use: Use, data: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighs the squares of the inputs of a product. A sample of weight 0 becomes zero, even if it is NaN."""
    (axes,) = sample_axes(use, weights.shape)
    own = weights.reshape([data.shape[i] if i in axes else 1 for i in range(data.ndim)])
    return jnp.where(own == 0, 0, data * jnp.sqrt(own).astype(data.dtype))


def check_samples_are_told(groups: Groups, weights: jax.Array) -> None:
    """Refuses leaves of whose inputs it is not clear which sample has which weight."""
    for part in itertools.chain.from_iterable(groups):
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
    if equation.primitive.name in RAGGED:
        return []
    roles = roles_of(equation, operand)
    flattened = [(math.prod(shape),)] if len(shape) > 1 and not roles.batch else []
    for own_shape in (shape, *flattened):
        starts = range(len(roles.free) - len(own_shape) + 1)
        places = [roles.free[start : start + len(own_shape)] for start in starts]
        places = [axes for axes in places if tuple(lengths[axis] for axis in axes) == own_shape]
        if places:
            return places
    return []
