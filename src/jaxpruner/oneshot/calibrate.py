"""Statistics of what the weight matrices of a model meet, taken while the model runs on some batches.

The model is traced once. Where it multiplies data by a leaf, the interpreter calls `_statistics_of`, which adds up the
inputs: their number, their squares, and for SparseGPT their products. Leaves that meet one value share its statistics.
"""

import logging
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
from jaxpruner.oneshot.matrices import MatrixLayout, WeightMatrices, contracted_axes
from jaxpruner.progress import progress_bar
from jaxpruner.trace import Use, contractions
from jaxpruner.trace.compiled_once import CompiledOnce
from jaxpruner.trace.taps import Taps

logger = logging.getLogger(__name__)

# A batch -> how much each of its samples counts.
SampleWeights = Callable[[Any], Any]
# Windows of a convolution that are held at once, in bytes.
_WINDOWS = 2**26


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
    >>> [entry.statistics.second_moment.tolist() for entry in calibration['w']]
    [[1.0, 1.0]]
    """

    # Of all leaves that were asked for: it says why some have no statistics.
    followed: leaves_lib.FollowedLeaves
    shapes: dict[tree_lib.Path, tuple[int, ...]]  # of all leaves of the parameters

    def __contains__(self, name: object) -> bool:
        return any(name in (path, tree_lib.path_string(path)) for path in self)

    def __missing__(self, name: Any) -> tuple[CalibratedMatrices, ...]:
        by_name = {tree_lib.path_string(path): entries for path, entries in self.items()}
        name = name if isinstance(name, str) else tree_lib.path_string(name)
        if name in by_name:
            return by_name[name]
        raise KeyError(f'no statistics of {name!r}; {tree_lib.nearest(name, by_name)}')


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
    goes through have statistics stacked in front. How much memory the statistics take is logged before they are made.

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
      ValueError: another kind, a name that matches no leaf, no batches or one without samples, a model that does not
        use its parameters, a leaf that `only` names in full and that no matrix can be read from (of other such leaves
        a warning tells), or leaves of whose inputs it is not clear which sample has which of the `weights`.
      UnsupportedPrimitive: a leaf that `only` names in full goes through an operation that is not understood.

    >>> params = {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}
    >>> batches = [jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0]])]
    >>> (entry,) = calibrate(lambda p, x: x @ p['w'] + p['b'], params, batches, kind='gram')['w']
    >>> int(entry.statistics.count), entry.statistics.gram.tolist()
    (2, [[10.0, 2.0], [2.0, 4.0]])
    """
    if kind not in ('second_moment', 'gram'):
        raise ValueError(f"kind is 'second_moment' or 'gram', got {kind!r}")
    program = shapes = totals = None
    batches = batches_lib.as_batches(batches)
    with progress_bar(len(batches) if isinstance(batches, Sized) else None, progress) as show:
        for number, batch in enumerate(batches):
            show('calibrating', number, totals)
            inputs = batches_lib.as_inputs(batch)
            own_weights = weights_of(batch, weights)
            if program is None or batches_lib.shapes_of((inputs, own_weights)) != shapes:
                shapes = batches_lib.shapes_of((inputs, own_weights))
                graph = leaves_lib.trace_model(apply_fn, params, batch, number)
                followed = leaves_lib.follow_named_leaves(graph, only)
                check_samples_are_told(followed.all_matrices, own_weights)
                by_inputs = uses_by_inputs(followed.all_matrices)
                taps = input_taps(by_inputs.values(), kind == 'gram')
                if program is None:
                    leaves_lib.check_used(followed, 'calibrate')
                    leaves_lib.warn_of_unclear(followed.unclear, 'have no statistics')
                    logger.info(
                        'calibration: statistics of %d leaves take %.1f MiB; only=… makes them fewer',
                        len(followed.matrices),
                        sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(taps.zeros)))
                        / 2**18,
                    )
                    totals = on_explicit_mesh(taps.zeros(), (params, inputs))
                else:
                    check_alike(program[0].all_matrices, followed.all_matrices)

                def step(totals, weights, params, *inputs, taps=taps, graph=graph):
                    return taps.run(graph, totals, params, *inputs, given=(weights,))[1]

                program = followed, by_inputs, CompiledOnce(step, donate_argnums=(0,))
            totals = program[2](totals, own_weights, params, *inputs)
    if program is None:
        raise ValueError('batches are empty; calibration needs at least one')
    followed, by_inputs, _ = program
    statistics = dict(zip(by_inputs, totals or (), strict=True))
    calibration = Calibration()
    calibration.followed = followed
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    calibration.shapes = {path: leaf.shape for path, leaf in zip(paths, leaves, strict=True)}
    for path, matrices in followed.matrices.items():
        entries = []
        for part in matrices:
            own = statistics[inputs_key(part)]
            if not part.fills_stacks:  # other trips of the loop read other leaves
                trips = tuple(slice(*axis.range) for axis in part.stack if axis.loop)
                own = jax.tree.map(lambda x, trips=trips: x[trips] if x.ndim else x, own)
            entries.append(CalibratedMatrices(part, own))
        calibration[path] = tuple(entries)
    return calibration


# Which matrices meet the same value.


def inputs_key(matrices: WeightMatrices) -> Hashable:
    """Tells what the statistics of the inputs depend on; valid within one trace of the model."""
    return tuple(map(_value_key, matrices.uses))


def _value_key(use: Use) -> Hashable:
    site, equation = use.site, use.site.equation
    data = equation.invars[1 - site.operand]
    loops = tuple(axis.loop for axis in site.view.stack)
    if use.op == 'dot':
        _, _, *data_axes = contracted_axes(equation, site.operand)
        how = tuple(map(id, equation.invars[2:])), tuple(data_axes)  # sizes of groups of rows
    else:
        how = id(equation)
    return site.path[:-1], id(data), how, loops


def uses_by_inputs(matrices: Iterable[WeightMatrices]) -> dict[Hashable, tuple[Use, ...]]:
    """Lists the uses that meet each value, in the order in which the values come first."""
    uses: dict[Hashable, tuple[Use, ...]] = {}
    for part in matrices:
        uses.setdefault(inputs_key(part), part.uses)
    return uses


def check_alike(first: Sequence[WeightMatrices], other: Sequence[WeightMatrices]) -> None:
    """Refuses a model that uses its leaves in another way when its inputs have another shape.

    Raises:
      ValueError: leaves are read in other ways, or other leaves meet the same value.
    """

    def sharing(matrices: Sequence[WeightMatrices]) -> list[Any]:
        numbers: dict[Hashable, int] = {}
        values = [numbers.setdefault(inputs_key(part), len(numbers)) for part in matrices]
        return [
            (part.path, part.reading, value) for part, value in zip(matrices, values, strict=True)
        ]

    if sharing(first) != sharing(other):
        raise ValueError(
            'with batches of different shapes the model uses its leaves in different ways, or other leaves meet the '
            'same value, so that their statistics cannot be added up; give batches of one shape'
        )


def input_taps(values: Iterable[Sequence[Use]], with_gram: bool) -> Taps:
    """Takes the statistics of each value from one of the uses that meet it; a run may say how much samples count."""

    def statistic(
        use: Use, operands: list[jax.Array], weights: jax.Array | None = None
    ) -> InputStatistics:
        data = operands[1 - use.site.operand]
        data = data.astype(tree_lib.at_least_float32(data.dtype))
        sizes = operands[2] if len(operands) > 2 else None

        def take(data: Any, sizes: Any, weights: Any) -> InputStatistics:
            return _statistics_of(use, data, sizes, weights, with_gram)

        return without_explicit_axes(take, data, False)(data, sizes, weights)

    return Taps(list(values), statistic)


# What one product or convolution adds to the statistics of its inputs.


def _statistics_of(
    use: Use,
    data: jax.Array,
    sizes: jax.Array | None,
    weights: jax.Array | None,
    with_gram: bool,
) -> InputStatistics:
    """Sums over samples, of a convolution over its windows; `sizes` are those of groups with a matrix each."""
    equation, operand = use.site.equation, use.site.operand
    if weights is not None:
        (axes,) = sample_axes(use, weights.shape)
        data = weigh(data, weights, axes)
    gram = second_moment = None
    if use.op == 'conv':
        result = equation.outvars[0].aval.shape
        channels = result[equation.params['dimension_numbers'].out_spec[1]]
        count = jnp.float32(math.prod(result) // channels)
        if with_gram:
            gram = _gram_of_windows(equation, data)
        else:
            second_moment = _second_moment_of_windows(equation, operand, data)
    else:
        _, _, contract, batch = contracted_axes(equation, operand)
        rows = [axis for axis in range(data.ndim) if axis not in {*contract, *batch}]
        inputs = math.prod(data.shape[axis] for axis in contract)
        lengths = [data.shape[axis] for axis in batch]
        count = jnp.float32(math.prod(data.shape[axis] for axis in rows))
        samples = data.transpose(*batch, *rows, *contract)
        samples = samples.reshape(*lengths, math.prod(data.shape[axis] for axis in rows), inputs)
        if sizes is not None:  # rows behind the last group meet no weights
            ends = jnp.cumsum(sizes)
            numbers = jnp.arange(len(samples))[:, None]
            is_member = (numbers >= ends - sizes) & (numbers < ends)
            is_member = is_member.astype(samples.dtype).T
            count = sizes.astype(jnp.float32)
            if with_gram:
                gram = lax.map(lambda own: _gram(samples * own[:, None]), is_member)
            else:
                second_moment = _product(is_member, jnp.square(samples))
        elif with_gram:
            gram = _gram(samples)
        else:
            second_moment = jnp.sum(jnp.square(samples), -2)
    if weights is not None:
        count = count / weights.size * jnp.sum(weights)
    if gram is not None:
        second_moment = jnp.diagonal(gram, 0, -2, -1)
    assert second_moment is not None
    return InputStatistics(count, second_moment, gram)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _gram(samples: jax.Array) -> jax.Array:
    return _product(samples.swapaxes(-2, -1), samples)


def _second_moment_of_windows(equation: Any, operand: int, data: jax.Array) -> jax.Array:
    """Computes `[groups…, inputs]`: the transpose of the operation with squares of the data.

    So strides, groups and dilation need no code of their own. One output of each group is enough: all add the same.
    """
    shape = list(equation.invars[operand].aval.shape)
    contract = contracted_axes(equation, operand).of_weights
    (free,) = set(range(len(shape))).difference(contract)
    shape[free] = groups = equation.params['feature_group_count']
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    params = equation.params | {'precision': highest, 'preferred_element_type': data.dtype}
    if 'out_sharding' in params:
        params['out_sharding'] = None

    def contracted(weights: jax.Array) -> jax.Array:
        operands = [jnp.square(data)] * 2
        operands[operand] = weights
        return equation.primitive.bind(*operands, **params)

    weights = jax.ShapeDtypeStruct(shape, data.dtype)
    result = jax.eval_shape(contracted, weights)
    (sums,) = jax.linear_transpose(contracted, weights)(jnp.ones(result.shape, result.dtype))
    layout = MatrixLayout(tuple(shape), contract, free=(free,), groups=groups)
    return layout.to_matrices(sums)[..., 0]


def _gram_of_windows(equation: Any, data: jax.Array) -> jax.Array:
    """Takes a few images at a time, whose windows fit into `_WINDOWS` bytes."""
    params = equation.params
    dimension_numbers = params['dimension_numbers']
    kernel = equation.invars[1].aval.shape
    result = equation.outvars[0].aval.shape
    window = [kernel[axis] for axis in dimension_numbers.rhs_spec[2:]]
    positions = math.prod(result[axis] for axis in dimension_numbers.out_spec[2:])
    groups = params['feature_group_count']
    images = data.transpose(dimension_numbers.lhs_spec)
    pixels, channels = math.prod(window), images.shape[1] // groups
    bytes_of_image = positions * pixels * channels * groups * data.dtype.itemsize
    size = max(min(_WINDOWS // max(bytes_of_image, 1), len(images)), 1)
    while len(images) % size:
        size -= 1

    def add(total: jax.Array, images: jax.Array) -> tuple[jax.Array, None]:
        patches = lax.conv_general_dilated_patches(
            images,
            window,
            params['window_strides'],
            params['padding'],
            params['lhs_dilation'],
            params['rhs_dilation'],
            precision=lax.Precision.HIGHEST,
        )
        # Channels come first in the patches, and last in the order of inputs.
        patches = patches.reshape(size, groups, channels, pixels, positions)
        samples = patches.transpose(1, 0, 4, 3, 2)
        return total + _gram(samples.reshape(groups, size * positions, pixels * channels)), None

    total = jnp.zeros((groups, pixels * channels, pixels * channels), data.dtype)
    total, _ = lax.scan(add, total, images.reshape(-1, size, *images.shape[1:]))
    return total if groups > 1 else total[0]


# How much each sample of a batch counts: padding, for one, counts nothing.
#
# Weights have the shape of the leading axes of a model's inputs, such as `(batch, length)`. The inputs of a product
# must have these axes side by side and in this order, among those that are neither summed over nor shared with the
# weight matrices; or one axis that all of them are flattened into. A convolution takes one weight for each image. Axes
# are told apart by their lengths alone. A product that leaves no place for the weights, or several, is refused: pooled
# inputs have no positions any more, and rows that are sorted by experts have others.


def weights_of(batch: Any, weights: SampleWeights | None) -> jax.Array | None:
    """Calls the function that a user gave; returns float32.

    Raises:
      TypeError: it is no function.
      ValueError: a weight is negative or not finite.
    """
    if weights is None:
        return None
    if not callable(weights):
        raise TypeError(
            "weights is a function of a batch, such as weights=lambda batch: batch['mask']; got "
            f'{type(weights).__name__}'
        )
    array = jnp.asarray(weights(batch), jnp.float32)
    if not bool(jnp.all(jnp.isfinite(array) & (array >= 0))):
        raise ValueError('weights must be finite and not negative; 0 leaves a sample out')
    return array


def check_samples_are_told(matrices: Iterable[WeightMatrices], weights: jax.Array | None) -> None:
    """Refuses all leaves of whose inputs it is not clear which sample has which weight.

    Raises:
      ValueError: there is such a leaf.
    """
    if weights is None:
        return
    refused = {}
    for part in matrices:
        for use in part.uses:
            if len(sample_axes(use, weights.shape)) != 1:
                shape = use.site.equation.invars[1 - use.site.operand].aval.shape
                refused[tree_lib.path_string(part.path)] = f'inputs {shape} at {use.where}'
    if refused:
        dense = ', '.join(f'{name!r}: None' for name in refused)
        reasons = '; '.join(f'{name}: {reason}' for name, reason in refused.items())
        raise ValueError(
            f'weights of shape {weights.shape} do not tell how much each sample of these leaves counts: {reasons}. '
            'Inputs need these axes side by side, or flattened into one, and a convolution has one weight for each '
            'image; rows that are sorted by experts have none. Where lengths coincide give batches of another size. Or '
            f"leave the leaves dense: sparsity_type={{{dense}, '*': …}}"
        )


def weigh(data: jax.Array, weights: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Scales the inputs of a product by the roots of the weights, so that their squares are weighed.

    `axes` are those of the samples. A sample of weight 0 becomes zero, even if it is NaN.

    >>> weigh(jnp.array([[1.0, 2.0], [jnp.nan, 4.0]]), jnp.array([4.0, 0.0]), [0]).tolist()
    [[2.0, 4.0], [0.0, 0.0]]
    """
    weights = weights.reshape(
        [data.shape[axis] if axis in axes else 1 for axis in range(data.ndim)]
    )
    return jnp.where(weights == 0, 0, data * jnp.sqrt(weights).astype(data.dtype))


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
