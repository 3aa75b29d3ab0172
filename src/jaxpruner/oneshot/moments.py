"""What the inputs of one contraction add to the statistics of its weight matrices.

The sum of squares of each input of a convolution is the transpose of the operation with the squares of its data, so
that strides, groups and dilation need no code of their own.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.core.explicit_meshes import without_explicit_axes
from jaxpruner.oneshot.contracted_axes import contracted_axes
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.matrices import MatrixLayout

# Patches of a convolution that are written down at once, in bytes.
_PATCHES = 2**26


def statistics_of(
    equation: Any, operand: int, data: jax.Array, with_gram: bool, sizes: jax.Array | None = None
) -> InputStatistics:
    """Statistics of the data that one contraction meets.

    Args:
      equation: a product, or a convolution.
      operand: which operand the weights are; a convolution's are its kernel.
      data: the other operand.
      with_gram: whether to take the Gram matrix.
      sizes: of the groups of rows, where each has a matrix.

    Returns:
      Sums over the samples (of a convolution: over its windows) in float32, at highest precision.

    >>> equation = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns[0]
    >>> found = statistics_of(equation, 1, jnp.array([[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]]), with_gram=True)
    >>> int(found.count), found.second_moment.tolist(), found.gram[0].tolist()
    (2, [2.0, 4.0, 0.0], [2.0, 2.0, 0.0])
    """
    data = data.astype(jnp.promote_types(data.dtype, jnp.float32))
    take = functools.partial(
        _statistics_of, equation=equation, operand=operand, with_gram=with_gram
    )
    return without_explicit_axes(take, data, False)(data, sizes)


def _statistics_of(
    data: jax.Array, sizes: jax.Array | None, equation: Any, operand: int, with_gram: bool
) -> InputStatistics:
    if sizes is not None:
        return _statistics_of_groups(_samples_of_dot(equation, operand, data), sizes, with_gram)
    if equation.primitive.name == 'dot_general':
        samples = _samples_of_dot(equation, operand, data)
        count = samples.shape[-2]
        gram = _gram(samples) if with_gram else None
        second_moment = jnp.sum(jnp.square(samples), -2) if gram is None else _diagonal(gram)
    else:
        result, numbers = equation.outvars[0].aval.shape, equation.params['dimension_numbers']
        count = math.prod(result) // result[numbers.out_spec[1]]
        gram = _gram_of_windows(equation, data) if with_gram else None
        second_moment = (
            _second_moment_of_windows(equation, operand, data) if gram is None else _diagonal(gram)
        )
    return InputStatistics(jnp.float32(count), second_moment, gram)


def _statistics_of_groups(samples: jax.Array, sizes: jax.Array, with_gram: bool) -> InputStatistics:
    """Rows that follow one another are a group; those behind the last group meet no weights."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(len(samples))[:, None]
    is_member = ((rows >= ends - sizes) & (rows < ends)).astype(samples.dtype)

    def gram_of(is_member: jax.Array) -> jax.Array:
        return _gram(samples * is_member[:, None])

    gram = lax.map(gram_of, is_member.T) if with_gram else None
    squares = jnp.matmul(is_member.T, jnp.square(samples), precision=lax.Precision.HIGHEST)
    return InputStatistics(
        sizes.astype(jnp.float32), squares if gram is None else _diagonal(gram), gram
    )


def _diagonal(gram: jax.Array) -> jax.Array:
    return jnp.diagonal(gram, 0, -2, -1)


def _second_moment_of_windows(equation: Any, operand: int, data: jax.Array) -> jax.Array:
    """`[groups…, inputs]`: one output takes part for all, since each adds the same."""
    shape = list(equation.invars[operand].aval.shape)
    contract = contracted_axes(equation, operand).of_weights
    (free,) = (axis for axis in range(len(shape)) if axis not in contract)
    groups = shape[free] = equation.params['feature_group_count']
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
    (sums,) = jax.linear_transpose(contracted, weights)(jnp.ones(result.shape, result.dtype))
    return MatrixLayout(tuple(shape), contract, (free,), (), groups).to_matrices(sums)[..., 0]


def _samples_of_dot(equation: Any, operand: int, data: jax.Array) -> jax.Array:
    """`[batch…, samples, inputs]`."""
    contract, batch = contracted_axes(equation, operand)[2:]
    rest = tuple(i for i in range(data.ndim) if i not in (*contract, *batch))
    lengths = [math.prod(data.shape[axis] for axis in axes) for axes in (rest, contract)]
    return data.transpose(*batch, *rest, *contract).reshape(
        *(data.shape[axis] for axis in batch), *lengths
    )


def _gram(samples: jax.Array) -> jax.Array:
    return jnp.matmul(samples.swapaxes(-2, -1), samples, precision=lax.Precision.HIGHEST)


def _gram_of_windows(equation: Any, data: jax.Array) -> jax.Array:
    """As many images at a time as their windows fit into a bound of memory."""
    params, numbers = equation.params, equation.params['dimension_numbers']
    kernel = equation.invars[1].aval.shape
    window = [kernel[axis] for axis in numbers.rhs_spec[2:]]
    groups = params['feature_group_count']
    images = data.transpose(numbers.lhs_spec)
    result = equation.outvars[0].aval.shape
    positions = math.prod(result[axis] for axis in numbers.out_spec[2:])
    inputs = math.prod(window) * images.shape[1] // groups
    most = max(_PATCHES // max(positions * inputs * groups * data.dtype.itemsize, 1), 1)
    size = next(
        size for size in range(min(most, images.shape[0]), 0, -1) if images.shape[0] % size == 0
    )

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
        patches = patches.reshape(
            size, groups, images.shape[1] // groups, math.prod(window), positions
        )
        samples = patches.transpose(1, 0, 4, 3, 2).reshape(groups, size * positions, inputs)
        return total + _gram(samples), None

    total = jnp.zeros((groups, inputs, inputs), data.dtype)
    total, _ = lax.scan(add, total, images.reshape(-1, size, *images.shape[1:]))
    return total if groups > 1 else total[0]
