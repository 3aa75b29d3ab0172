"""One product of a program: data become rows, an operator multiplies them, and its results become the program's."""

import contextlib
import itertools
import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.oneshot.matrices import CASTS, contracted_axes, step_name
from jaxpruner.trace import Use
from jaxpruner.trace.program import bind


class Operator(Protocol):
    """What stands in the place of a leaf: a pytree whose arrays have the layers of the leaf in front.

    An operator may also have `convolve(image, convolution)`, which maps `[batch, *space, channels]` to `[batch, *space,
    outputs]`; otherwise the windows of an image are gathered into rows.
    """

    def multiply(self, rows: jax.Array, result_dtype: Any) -> jax.Array:
        """`[n, inputs] -> [n, outputs]`, inside the model, for one layer.

        Products are added up in another type than that of the operands where a program asks for it with
        `preferred_element_type`: int32 for products of int8, or float32 for those of bfloat16.
        """
        ...


def multiply(use: Use, data: jax.Array, operator: Any) -> jax.Array:
    """Runs the operation in which a leaf is used on data, with an operator in the place of the leaf."""
    equation, steps = use.site.equation, use.site.view.steps
    dtype = equation.invars[use.site.operand].aval.dtype
    result_dtype = equation.outvars[0].aval.dtype
    # The numbers of an operator are rounded as the model rounds those of the leaf.
    casts = [step.equation for step in steps if step_name(step) in CASTS]

    def cast(array: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return array
        for each in casts:
            (array,) = bind(each, [array])
        return array.astype(dtype)

    operator = jax.tree.map(cast, operator)
    with _precision(equation.params['precision']):
        if use.op == 'conv':
            result = Convolution(equation).run_with(operator, data, result_dtype)
        else:
            result = _dot(equation, use.site.operand, data, operator, result_dtype)
    return result.astype(result_dtype)


def _dot(
    equation: Any, operand: int, data: jax.Array, operator: Any, result_dtype: Any
) -> jax.Array:
    weights = equation.invars[operand].aval
    contracted = contracted_axes(equation, operand)
    batch, inputs = contracted.batch_of_data, contracted.of_data
    free = _other_axes(data, {*batch, *inputs})
    batch_shape, free_shape = _lengths(data, batch), _lengths(data, free)
    input_size = math.prod(_lengths(data, inputs))
    arranged = data.transpose(*batch, *free, *inputs)
    rows = arranged.reshape(*batch_shape, math.prod(free_shape), input_size)

    def multiply_rows(operator: Operator, rows: jax.Array) -> jax.Array:
        return operator.multiply(rows, result_dtype)

    for _ in batch:
        multiply_rows = jax.vmap(multiply_rows)
    output_shape = _lengths(weights, _other_axes(weights, contracted.summed_or_shared))
    products = multiply_rows(operator, rows).reshape(*batch_shape, *free_shape, *output_shape)
    if operand == 1:
        return products
    # The program has the outputs before the free axes of the data.
    first, last = len(batch), len(batch) + len(free)
    order = [*range(first), *range(last, products.ndim), *range(first, last)]
    return products.transpose(order)


def _other_axes(array: Any, axes: Container[int]) -> list[int]:
    return [axis for axis in range(array.ndim) if axis not in axes]


def _lengths(array: Any, axes: Sequence[int]) -> list[int]:
    return [array.shape[axis] for axis in axes]


def _precision(precision: Any) -> Any:
    """A context in which an operator multiplies with the precision that the program asks for."""
    if precision is None:
        return contextlib.nullcontext()
    first = precision[0] if isinstance(precision, tuple) else precision
    is_algorithm = isinstance(first, lax.DotAlgorithmPreset) and first.name != 'DEFAULT'
    return jax.default_matmul_precision(first.name if is_algorithm else first.name.lower())


class Convolution(NamedTuple):
    """A convolution of images `[batch, *space, channels]` with kernels `[*window, channels, outputs]`."""

    equation: Any

    @property
    def _numbers(self) -> lax.ConvDimensionNumbers:
        return self.equation.params['dimension_numbers']

    @property
    def window(self) -> tuple[int, ...]:
        """The shape of the window."""
        return tuple(_lengths(self.equation.invars[1].aval, self._numbers.rhs_spec[2:]))

    def run(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        """Convolves; image and kernel may have other numbers of channels than in the program."""
        outputs, channels, *window = self._numbers.rhs_spec
        image = image.transpose(_inverse(_channels_last(self._numbers.lhs_spec)))
        kernel = kernel.transpose(_inverse([*window, channels, outputs]))
        (result,) = bind(self.equation, [image, kernel])
        return result.transpose(_channels_last(self._numbers.out_spec))

    def run_with(self, operator: Any, data: jax.Array, result_dtype: Any) -> jax.Array:
        """Convolves data in the axes of the program, with an operator in the place of the kernel."""
        image = data.transpose(_channels_last(self._numbers.lhs_spec))
        if hasattr(operator, 'convolve'):
            result = operator.convolve(image, self)
        else:
            windows = self._windows(image)
            *image_shape, elements = windows.shape
            rows = windows.reshape(math.prod(image_shape), elements)
            result = operator.multiply(rows, result_dtype).reshape(*image_shape, -1)
        return result.transpose(_inverse(_channels_last(self._numbers.out_spec)))

    def _windows(self, image: jax.Array) -> jax.Array:
        """The windows of images as `[batch, *space, elements]`, channels innermost."""
        params = self.equation.params
        # Zeros around the images, and between their elements.
        sides = zip(params['padding'], params['lhs_dilation'], strict=True)
        inner = [(before, after, step - 1) for (before, after), step in sides]
        padded = lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
        batch, *space, channels = padded.shape
        strides = [1, *params['window_strides'], 1]
        elements = []
        for offsets in itertools.product(*map(range, self.window)):
            starts, stops = [0], [batch]
            for number, offset in enumerate(offsets):
                dilation = params['rhs_dilation'][number]
                starts.append(offset * dilation)
                # As far behind the element as the last element of the window is.
                behind = (self.window[number] - 1 - offset) * dilation
                stops.append(space[number] - behind)
            elements.append(lax.slice(padded, [*starts, 0], [*stops, channels], strides))
        return jnp.concatenate(elements, axis=-1)


def _channels_last(spec: Sequence[int]) -> list[int]:
    """The order of axes that puts the channels of an image last."""
    batch, channels, *space = spec
    return [batch, *space, channels]


def _inverse(order: Sequence[int]) -> list[int]:
    """The order that moves axes back to where they were."""
    return [order.index(axis) for axis in range(len(order))]
