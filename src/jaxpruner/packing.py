"""Masks at one bit per weight.

A packed mask is a plain uint8 array of the parameter's rank, `jnp.packbits(mask, axis=a)`. The axis `a` is
negative and depends on the shape alone: the last axis whose length is a multiple of 8, else the longest axis. So a
sharded parameter keeps its mask sharded alike, and parameters stacked along a new first axis pack alike.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

BITS = 8
# packbits puts the first weight into the highest bit.
_BIT_VALUES = np.left_shift(np.uint8(1), np.arange(BITS - 1, -1, -1, dtype=np.uint8))


def packed_axis(shape: Sequence[int]) -> int:
    """The axis along which a mask of this shape is packed, as a negative number.

    Args:
      shape: the parameter's shape, of at least one dimension.

    >>> packed_axis((3, 3, 16, 10)), packed_axis((300, 10))
    (-2, -2)
    """
    rank = len(shape)
    for axis in range(rank - 1, -1, -1):
        if shape[axis] % BITS == 0:
            return axis - rank
    # Of several longest axes the last, like the rule for multiples of 8.
    return max(range(rank), key=lambda axis: (shape[axis], axis)) - rank


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the packed mask of a parameter of this shape.

    >>> packed_shape((784, 300)), packed_shape(())
    ((98, 300), ())
    """
    if not shape:
        return ()
    axis = packed_axis(shape) + len(shape)
    return tuple(-(-length // BITS) if i == axis else length for i, length in enumerate(shape))


def pack(mask: jax.Array) -> jax.Array:
    """Packs a mask into bits.

    Args:
      mask: uint8 0/1 array of any shape; a scalar is returned as it is.

    Returns:
      uint8 array of shape `packed_shape(mask.shape)`.

    >>> pack(jnp.array([[1, 0, 1], [0, 0, 1]], jnp.uint8))
    Array([[160],
           [ 32]], dtype=uint8)
    """
    return mask if mask.ndim == 0 else jnp.packbits(mask, axis=packed_axis(mask.shape))


def unpack(bits: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The mask of which `pack` made these bits.

    Args:
      bits: uint8 array of shape `packed_shape(shape)`.
      shape: the parameter's shape.

    Returns:
      uint8 0/1 array of the given shape.

    >>> unpack(jnp.array([[160], [32]], jnp.uint8), (2, 3))
    Array([[1, 0, 1],
           [0, 0, 1]], dtype=uint8)
    """
    if not shape:
        return (bits != 0).astype(jnp.uint8)
    axis = packed_axis(shape) + len(shape)
    values = jnp.asarray(_BIT_VALUES).reshape((BITS,) + (1,) * (len(shape) - 1 - axis))
    # Testing one bit of a repeated byte fuses into the consumer; shifting each byte does not.
    spread = (jnp.expand_dims(bits, axis + 1) & values) != 0
    padded = spread.reshape(*bits.shape[:axis], bits.shape[axis] * BITS, *bits.shape[axis + 1 :])
    return jax.lax.slice_in_dim(padded, 0, shape[axis], axis=axis).astype(jnp.uint8)


def unpack_like(mask: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The 0/1 mask of a parameter, however the mask is stored.

    Args:
      mask: an unpacked mask, a packed one, or the flat array that `jnp.packbits(mask)` makes.
      shape: the parameter's shape.

    Returns:
      uint8 0/1 array of the given shape.

    Raises:
      ValueError: the mask's shape is none of the three.

    >>> unpack_like(jnp.packbits(jnp.eye(3, dtype=jnp.uint8)), (3, 3))
    Array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]], dtype=uint8)
    """
    shape, size = tuple(shape), math.prod(shape)
    if mask.dtype != jnp.uint8:  # a user's own, of booleans say
        mask = (mask != 0).astype(jnp.uint8)
    if mask.shape == shape:
        # Where nothing is longer than 1, packed (128) and unpacked (1) masks look alike.
        return mask if size > 1 else (mask != 0).astype(jnp.uint8)
    if mask.shape == packed_shape(shape):
        return unpack(mask, shape)
    if mask.shape == (-(-size // BITS),):
        return unpack(mask, (size,)).reshape(shape)
    raise ValueError(
        f'a mask of shape {mask.shape} does not fit a parameter of shape {shape}; unpacked it has that shape, packed '
        f'{packed_shape(shape)}'
    )


def kept_weights(mask: jax.Array) -> jax.Array:
    """How many weights a mask keeps, packed or not: the number of bits that are set.

    Args:
      mask: uint8 array.

    Returns:
      uint32 scalar.

    >>> int(kept_weights(jnp.array([160, 1], jnp.uint8)))
    3
    """
    return jnp.sum(jax.lax.population_count(mask), dtype=jnp.uint32)
