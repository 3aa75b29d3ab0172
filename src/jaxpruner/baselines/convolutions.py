"""A convolution as a matrix product: on a CPU it trains several times as fast as XLA's own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def convolution_as_matmul(
    images: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Any, **_: Any
) -> jax.Array:
    """Convolves as `lax.conv_general_dilated` does, by a matrix product over shifted images.

    Images are [batch, height, width, channels], the kernel is [height, width, channels, filters];
    `padding` is 'SAME', 'VALID', or the pixels before and after each axis.

    >>> kernel = jnp.ones((3, 3, 2, 5))
    >>> convolution_as_matmul(jnp.ones((1, 4, 4, 2)), kernel, (2, 2), 'SAME').shape
    (1, 2, 2, 5)
    """
    height, width = kernel.shape[:2]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(images.shape[1:3], (height, width), strides, padding)
    padded = jnp.pad(images, ((0, 0), *padding, (0, 0)))
    rows = padded.shape[1] - height + 1
    columns = padded.shape[2] - width + 1
    shifted = []
    for row in range(height):
        for column in range(width):
            of_rows = slice(row, row + rows, strides[0])
            of_columns = slice(column, column + columns, strides[1])
            shifted.append(padded[:, of_rows, of_columns])
    patches = jnp.concatenate(shifted, axis=-1)
    return patches @ kernel.reshape(-1, kernel.shape[-1])


def fastest_convolution() -> Any:
    """The convolution that is fastest to train with on this machine, as flax takes it."""
    if jax.default_backend() == 'cpu':
        return convolution_as_matmul
    return jax.lax.conv_general_dilated
