"""What the inputs of one contraction add to the statistics of its weight matrices.

The sum of squares of each input of a convolution is the transpose of the operation with the squares of its data, so
that strides, groups and dilation need no code of their own.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner import tree as tree_lib
from jaxpruner.explicit_meshes import without_explicit_axes
from jaxpruner.oneshot.contracted_axes import contracted_axes
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.matrix_layout import MatrixLayout
from jaxpruner.oneshot.sample_weights import weigh

# Patches of a convolution that are held at once, in bytes.
_PATCHES = 2**26


def statistics_of(
    equation: Any,
    operand: int,
    data: jax.Array,
    with_gram: bool,
    sizes: jax.Array | None = None,
    weights: jax.Array | None = None,
    axes: Sequence[int] = (),
) -> InputStatistics:
    """Takes statistics of the data that one product or convolution meets; its operand number `operand` is the weights.

    Sums over the samples (of a convolution: over its windows) are float32, at highest precision. `sizes` are those of
    the groups of rows, where each has a matrix. `weights` say how much each sample counts, along `axes` of the data.

    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> statistics = statistics_of(equation, 1, jnp.array([[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]]), with_gram=True)
    >>> int(statistics.count), statistics.second_moment.tolist(), statistics.gram[0].tolist()
    (2, [2.0, 4.0, 0.0], [2.0, 2.0, 0.0])
    """
    data = data.astype(tree_lib.at_least_float32(data.dtype))
    take = functools.partial(
        _statistics_of, equation=equation, operand=operand, with_gram=with_gram
    )

    def take_weighed(
        data: jax.Array, sizes: jax.Array | None, weights: jax.Array | None
    ) -> InputStatistics:
        if weights is None:
            return take(data, sizes)
        statistics = take(weigh(data, weights, axes), sizes)
        rows_of_sample = statistics.count / weights.size
        return statistics._replace(count=rows_of_sample * jnp.sum(weights))

    return without_explicit_axes(take_weighed, data, False)(data, sizes, weights)


def _statistics_of(
    data: jax.Array, sizes: jax.Array | None, equation: Any, operand: int, with_gram: bool
) -> InputStatistics:
    if sizes is not None:
        samples = _samples_of_dot(equation, operand, data)
        return _statistics_of_groups(samples, sizes, with_gram)
    name = equation.primitive.name
    if name == 'dot_general':
        samples = _samples_of_dot(equation, operand, data)
        count = jnp.float32(samples.shape[-2])
        if with_gram:
            return _statistics_of_gram(count, _gram(samples))
        second_moment = jnp.sum(jnp.square(samples), -2)
    elif name == 'conv_general_dilated':
        result = equation.outvars[0].aval.shape
        dimension_numbers = equation.params['dimension_numbers']
        channels = result[dimension_numbers.out_spec[1]]
        windows = math.prod(result) // channels
        count = jnp.float32(windows)
        if with_gram:
            return _statistics_of_gram(count, _gram_of_windows(equation, data))
        second_moment = _second_moment_of_windows(equation, operand, data)
    else:
        raise AssertionError(f'{name} is a contraction, and has no statistics of its inputs')
    return InputStatistics(count, second_moment)


def _statistics_of_gram(count: jax.Array, gram: jax.Array) -> InputStatistics:
    second_moment = jnp.diagonal(gram, 0, -2, -1)
    return InputStatistics(count, second_moment, gram)


def _statistics_of_groups(samples: jax.Array, sizes: jax.Array, with_gram: bool) -> InputStatistics:
    """Takes statistics for each group of rows; rows behind the last group meet no weights."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(len(samples))[:, None]
    is_member = (rows >= ends - sizes) & (rows < ends)
    is_member = is_member.astype(samples.dtype)

    def gram_of(is_member: jax.Array) -> jax.Array:
        return _gram(samples * is_member[:, None])

    count = sizes.astype(jnp.float32)
    if with_gram:
        grams = lax.map(gram_of, is_member.T)
        return _statistics_of_gram(count, grams)
    squares = jnp.square(samples)
    squares = jnp.matmul(is_member.T, squares, precision=lax.Precision.HIGHEST)
    return InputStatistics(count, squares)


def _second_moment_of_windows(equation: Any, operand: int, data: jax.Array) -> jax.Array:
    """Computes `[groups…, inputs]` from one output of each group: all outputs add the same."""
    shape = list(equation.invars[operand].aval.shape)
    contract = contracted_axes(equation, operand).of_weights
    (free,) = set(range(len(shape))).difference(contract)
    groups = equation.params['feature_group_count']
    shape[free] = groups
    params = equation.params | {
        'precision': (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        'preferred_element_type': data.dtype,
    }
    if 'out_sharding' in params:
        params['out_sharding'] = None

    def contracted(weights: jax.Array) -> jax.Array:
        operands = [jnp.square(data)] * 2
        operands[operand] = weights
        return equation.primitive.bind(*operands, **params)

    weights = jax.ShapeDtypeStruct(shape, data.dtype)
    result = jax.eval_shape(contracted, weights)
    ones = jnp.ones(result.shape, result.dtype)
    (sums,) = jax.linear_transpose(contracted, weights)(ones)
    layout = MatrixLayout(tuple(shape), contract, free=(free,), groups=groups)
    return layout.to_matrices(sums)[..., 0]


def _samples_of_dot(equation: Any, operand: int, data: jax.Array) -> jax.Array:
    """Makes samples `[batch…, samples, inputs]`."""
    _, _, contract, batch = contracted_axes(equation, operand)
    other = {*contract, *batch}
    samples = [axis for axis in range(data.ndim) if axis not in other]
    arranged = data.transpose(*batch, *samples, *contract)
    first_input = data.ndim - len(contract)
    batch_shape = arranged.shape[: len(batch)]
    count = math.prod(arranged.shape[len(batch) : first_input])
    inputs = math.prod(arranged.shape[first_input:])
    return arranged.reshape(*batch_shape, count, inputs)


def _gram(samples: jax.Array) -> jax.Array:
    transposed = samples.swapaxes(-2, -1)
    return jnp.matmul(transposed, samples, precision=lax.Precision.HIGHEST)


def _gram_of_windows(equation: Any, data: jax.Array) -> jax.Array:
    """Takes a few images at a time, whose windows fit into `_PATCHES` bytes."""
    params = equation.params
    dimension_numbers = params['dimension_numbers']
    kernel = equation.invars[1].aval.shape
    result = equation.outvars[0].aval.shape
    window = [kernel[axis] for axis in dimension_numbers.rhs_spec[2:]]
    positions = math.prod(result[axis] for axis in dimension_numbers.out_spec[2:])
    groups = params['feature_group_count']
    images = data.transpose(dimension_numbers.lhs_spec)
    pixels = math.prod(window)
    channels = images.shape[1] // groups
    inputs = pixels * channels
    bytes_of_image = positions * inputs * groups * data.dtype.itemsize
    fitting = _PATCHES // max(bytes_of_image, 1)
    size = max(min(fitting, len(images)), 1)
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
        samples = samples.reshape(groups, size * positions, inputs)
        return total + _gram(samples), None

    total = jnp.zeros((groups, inputs, inputs), data.dtype)
    portions = images.reshape(-1, size, *images.shape[1:])
    total, _ = lax.scan(add, total, portions)
    return total if groups > 1 else total[0]
