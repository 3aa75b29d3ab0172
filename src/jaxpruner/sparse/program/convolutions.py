"""The convolutions of a program, with the channels of images in the last axis."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.trace.program import bind


@runtime_checkable
class Convolving(Protocol):
    """An operator that convolves by itself."""

    def convolve(self, image: jax.Array, convolution: 'Convolution') -> jax.Array:
        """`[batch, *space, channels] -> [batch, *space, outputs]`."""
        ...


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
        _, _, *axes = self.dimension_numbers.rhs_spec
        return tuple([kernel.shape[axis] for axis in axes])

    @property
    def result_shape(self) -> tuple[int, ...]:
        """`[batch, *space, outputs]` in the program."""
        result = self.equation.outvars[0].aval
        order = _from_spec(self.dimension_numbers.out_spec)
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
        image_order = _to_spec(self.dimension_numbers.lhs_spec)
        image = image.transpose(image_order)
        outputs, channels, *window = self.dimension_numbers.rhs_spec
        kernel_axes = [*window, channels, outputs]
        kernel_order = [kernel_axes.index(axis) for axis in range(kernel.ndim)]
        kernel = kernel.transpose(kernel_order)
        (result,) = bind(self.equation, [image, kernel])
        result_order = _from_spec(self.dimension_numbers.out_spec)
        return result.transpose(result_order)

    def run_with(self, operator: Any, data: jax.Array) -> jax.Array:
        """Convolves data in the axes of the program, with an operator in the place of the kernel."""
        order = _from_spec(self.dimension_numbers.lhs_spec)
        image = data.transpose(order)
        if isinstance(operator, Convolving):
            result = operator.convolve(image, self)
        else:
            result = self._multiply_windows(operator, image)
        order = _to_spec(self.dimension_numbers.out_spec)
        return result.transpose(order)

    def _multiply_windows(self, operator: Any, image: jax.Array) -> jax.Array:
        windows = self._windows(image)
        *image_shape, elements = windows.shape
        rows = windows.reshape(math.prod(image_shape), elements)
        products = operator.multiply(rows)
        _, outputs = products.shape
        return products.reshape(*image_shape, outputs)

    def _windows(self, image: jax.Array) -> jax.Array:
        """The windows of images as `[batch, *space, elements]`, channels innermost."""
        image = self._padded(image)
        batch, *space, channels = image.shape
        params = self.equation.params
        settings = space, self.window, params['window_strides'], params['rhs_dilation']
        axes = list(map(_WindowAxis, *settings))
        strides = [1, *[axis.stride for axis in axes], 1]
        offsets_along = [range(axis.window) for axis in axes]
        elements = []
        for offsets in itertools.product(*offsets_along):
            starts, stops = [0], [batch]
            for axis, offset in zip(axes, offsets, strict=True):
                first = offset * axis.dilation
                starts.append(first)
                stops.append(first + axis.length - axis.reach)
            starts.append(0)
            stops.append(channels)
            elements.append(lax.slice(image, starts, stops, strides))
        if len(elements) == 1:
            return elements[0]
        return jnp.concatenate(elements, axis=-1)

    def _padded(self, image: jax.Array) -> jax.Array:
        """The images with zeros around them, and between their elements."""
        params = self.equation.params
        none = (0, 0, 0)
        config = [none]
        for sides, dilation in zip(params['padding'], params['lhs_dilation'], strict=True):
            before, after = sides
            config.append((before, after, dilation - 1))
        config.append(none)
        if not any(map(any, config)):
            return image
        zero = jnp.zeros((), image.dtype)
        return lax.pad(image, zero, config)


class _WindowAxis(NamedTuple):
    """How windows lie along an axis of a padded image.

    Attributes:
      length: of the image.
      window: elements of a window.
      stride: from one window to the next.
      dilation: from one element to the next.
    """

    length: int
    window: int
    stride: int
    dilation: int

    @property
    def reach(self) -> int:
        """The distance from the first element of a window to the last."""
        return (self.window - 1) * self.dilation


def _from_spec(spec: Sequence[int]) -> list[int]:
    """The order that puts the channels of an image last."""
    batch, channels, *space = spec
    return [batch, *space, channels]


def _to_spec(spec: Sequence[int]) -> list[int]:
    """The order that moves channels from the last axis back to where the convolution has them."""
    order = _from_spec(spec)
    return [order.index(axis) for axis in range(len(order))]
