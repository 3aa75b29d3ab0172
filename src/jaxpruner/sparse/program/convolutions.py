"""The convolutions of a program, with the channels of images in the last axis."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.trace.program import bind


class Convolution(NamedTuple):
    """A convolution of images `[batch, *space, channels]` with kernels `[*window, channels, outputs]`."""

    equation: Any

    @property
    def dimension_numbers(self) -> lax.ConvDimensionNumbers:
        """The axes of batch, space, channels and outputs in the program."""
        return self.equation.params['dimension_numbers']

    @property
    def window(self) -> tuple[int, ...]:
        """The shape of the window."""
        kernel = self.equation.invars[1].aval
        return tuple([kernel.shape[axis] for axis in self.dimension_numbers.rhs_spec[2:]])

    @property
    def result_shape(self) -> tuple[int, ...]:
        """`[batch, *space, outputs]` in the program."""
        result = self.equation.outvars[0].aval
        order = _channels_last(self.dimension_numbers.out_spec)
        return tuple([result.shape[axis] for axis in order])

    @property
    def is_pointwise(self) -> bool:
        """Whether the window is a single element, so that this is a matrix product of pixels."""
        params = self.equation.params
        is_padded = any(map(any, params['padding']))
        is_dilated = any(step != 1 for step in params['lhs_dilation'])
        return math.prod(self.window) == 1 and not is_padded and not is_dilated

    def run(self, image: jax.Array, kernel: jax.Array) -> jax.Array:
        """Convolves; image and kernel may have other numbers of channels than in the program."""
        numbers = self.dimension_numbers
        outputs, channels, *window = numbers.rhs_spec
        image = image.transpose(_inverse(_channels_last(numbers.lhs_spec)))
        kernel = kernel.transpose(_inverse([*window, channels, outputs]))
        (result,) = bind(self.equation, [image, kernel])
        return result.transpose(_channels_last(numbers.out_spec))

    def run_with(self, operator: Any, data: jax.Array, result_dtype: Any) -> jax.Array:
        """Convolves data in the axes of the program, with an operator in the place of the kernel."""
        image = data.transpose(_channels_last(self.dimension_numbers.lhs_spec))
        if hasattr(operator, 'convolve'):
            result = operator.convolve(image, self)
        else:
            windows = self._windows(image)
            *image_shape, elements = windows.shape
            rows = windows.reshape(math.prod(image_shape), elements)
            products = operator.multiply(rows, result_dtype)
            result = products.reshape(*image_shape, products.shape[1])
        return result.transpose(_inverse(_channels_last(self.dimension_numbers.out_spec)))

    def _windows(self, image: jax.Array) -> jax.Array:
        """The windows of images as `[batch, *space, elements]`, channels innermost."""
        params = self.equation.params
        # Zeros around the images, and between their elements.
        sides = zip(params['padding'], params['lhs_dilation'], strict=True)
        inner = [(before, after, step - 1) for (before, after), step in sides]
        padded = lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
        batch, *space, channels = padded.shape
        dilation = params['rhs_dilation']
        strides = [1, *params['window_strides'], 1]
        elements = []
        for offsets in itertools.product(*map(range, self.window)):
            starts, stops = [0], [batch]
            for number, offset in enumerate(offsets):
                first = offset * dilation[number]
                # The distance from the first element of a window to the last.
                reach = (self.window[number] - 1) * dilation[number]
                starts.append(first)
                stops.append(first + space[number] - reach)
            elements.append(lax.slice(padded, [*starts, 0], [*stops, channels], strides))
        return jnp.concatenate(elements, axis=-1)


def _channels_last(spec: Sequence[int]) -> list[int]:
    """The order of axes that puts the channels of an image last."""
    batch, channels, *space = spec
    return [batch, *space, channels]


def _inverse(order: Sequence[int]) -> list[int]:
    """The order that moves axes back to where they were."""
    return [order.index(axis) for axis in range(len(order))]
