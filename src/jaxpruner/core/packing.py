"""Masks at one bit per weight.

A packed mask is a plain uint8 array of the parameter's rank, `jnp.packbits(mask, axis=a)`. Packing chooses the
axis `a`, so that each device packs what it has of a sharded parameter. Unpacking reads the axis off the two shapes.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpruner.core import control

BITS = 8


def packed_axis(shape: Sequence[int], local_shape: Sequence[int] | None = None) -> int:
    """Chooses the axis along which a mask of this shape is packed, as a negative number.

    It is the first of these that exists:
    1. of the axes whose length on each device is a multiple of 8, the one whose whole length is divisible by the
       largest power of two (as a rule, one device would choose the same axis);
    2. of the axes that are not sharded, the longest;
    3. the longest axis.
    Of several such axes it is the last.

    Args:
      shape: the parameter's shape, of at least one dimension.
      local_shape: the shape of what one device holds of it; by default all.

    >>> packed_axis((3, 3, 16, 10)), packed_axis((300, 10)), packed_axis((64, 48)), packed_axis((60, 20), (15, 20))
    (-2, -2, -2, -1)
    """
    local_shape = shape if local_shape is None else local_shape
    axes = range(len(shape))
    whole_bytes = [axis for axis in axes if local_shape[axis] % BITS == 0]
    if whole_bytes:
        # The lowest bit that is set is the largest power of two that divides a length.
        chosen = max(whole_bytes, key=lambda axis: (shape[axis] & -shape[axis], axis))
    else:
        # What is packed along an axis of length 1 would look as if it were not packed.
        unsharded = [axis for axis in axes if local_shape[axis] == shape[axis] > 1]
        chosen = max(unsharded or axes, key=lambda axis: (shape[axis], axis))
    return chosen - len(shape)


def packed_shape(shape: Sequence[int], axis: int | None = None) -> tuple[int, ...]:
    """Computes the shape of the packed mask of a parameter of this shape.

    Args:
      shape: the parameter's shape.
      axis: the axis along which it is packed; by default `packed_axis(shape)`.

    >>> packed_shape((784, 300)), packed_shape((784, 300), -1), packed_shape(())
    ((98, 300), (784, 38), ())
    """
    if not shape:
        return ()
    if axis is None:
        axis = packed_axis(shape)
    lengths = list(shape)
    lengths[axis] = -(-lengths[axis] // BITS)
    return tuple(lengths)


def axis_of_bits(bits_shape: Sequence[int], shape: Sequence[int]) -> int | None:
    """Finds the axis along which a mask is packed, as a negative number: the one that is shorter than the parameter's.

    Args:
      bits_shape: the packed mask's shape.
      shape: the parameter's shape.

    Returns:
      The axis (any of length 1, where all are), or `None` if bits of that shape are not of such a parameter.

    >>> axis_of_bits((98, 300), (784, 300)), axis_of_bits((784, 38), (784, 300)), axis_of_bits((1, 1), (784, 300))
    (-2, -1, None)
    """
    for axis in range(-len(shape), 0):
        if packed_shape(shape, axis) == tuple(bits_shape):
            return axis
    return None


def pack(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Packs a mask into bits.

    Args:
      mask: uint8 0/1 array of any shape; a scalar is returned as it is.
      axis: the axis along which eight weights become a byte; by default `packed_axis(mask.shape)`.

    Returns:
      uint8 array of shape `packed_shape(mask.shape, axis)`.

    >>> pack(jnp.array([[1, 0, 1], [0, 0, 1]], jnp.uint8))
    Array([[160],
           [ 32]], dtype=uint8)
    """
    if mask.ndim == 0:
        return mask
    if axis is None:
        axis = packed_axis(mask.shape)
    return jnp.packbits(mask, axis=axis)


def unpack(bits: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Unpacks the mask of which `pack` made these bits, along whatever axis.

    Args:
      bits: uint8 array of shape `packed_shape(shape, axis)` for some axis.
      shape: the parameter's shape.

    Returns:
      uint8 0/1 array of the given shape.

    Raises:
      ValueError: the bits are of another shape.

    >>> unpack(jnp.array([[160], [32]], jnp.uint8), (2, 3))
    Array([[1, 0, 1],
           [0, 0, 1]], dtype=uint8)
    """
    if not shape and not bits.shape:
        return (bits != 0).astype(jnp.uint8)
    axis = axis_of_bits(bits.shape, shape)
    if axis is None:
        raise ValueError(_misfit(bits.shape, shape))
    axis += len(shape)
    return _unpack_along(bits, axis=axis, length=shape[axis])


@functools.partial(control.jit_when_eager, static_argnames=('axis', 'length'))
def _unpack_along(bits: jax.Array, axis: int, length: int) -> jax.Array:
    before, packed_length, after = bits.shape[:axis], bits.shape[axis], bits.shape[axis + 1 :]
    ones = (1,) * len(after)
    shifts = jnp.arange(BITS, dtype=jnp.uint8).reshape((BITS, *ones))
    # packbits puts the first weight into the highest bit, which is the sign of a signed byte: tests of signs are read
    # fast along every axis, tests of single bits are not.
    shifted = jnp.expand_dims(bits, axis + 1) << shifts
    is_kept = jax.lax.bitcast_convert_type(shifted, jnp.int8) < 0
    padded = is_kept.reshape(*before, packed_length * BITS, *after)
    mask = jax.lax.slice_in_dim(padded, 0, length, axis=axis)
    return mask.astype(jnp.uint8)


def unpack_like(mask: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Unpacks the mask of a parameter to 0 and 1, however it is stored.

    Args:
      mask: an unpacked mask, a packed one, or the flat array that `jnp.packbits(mask)` makes.
      shape: the parameter's shape.

    Returns:
      uint8 0/1 array of the given shape.

    Raises:
      ValueError: the mask's shape is none of these.

    >>> unpack_like(jnp.packbits(jnp.eye(3, dtype=jnp.uint8)), (3, 3))
    Array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]], dtype=uint8)
    """
    shape = tuple(shape)
    size = math.prod(shape)
    if mask.dtype != jnp.uint8:  # a user's own, of booleans say
        mask = (mask != 0).astype(jnp.uint8)
    if mask.shape == shape:
        if size > 1:
            return mask
        # Where nothing is longer than 1, packed (128) and unpacked (1) masks look alike.
        return (mask != 0).astype(jnp.uint8)
    is_flat = mask.shape == packed_shape((size,)) and axis_of_bits(mask.shape, shape) is None
    if is_flat:
        return unpack(mask, (size,)).reshape(shape)
    return unpack(mask, shape)


@control.jit_when_eager
def kept_weights(mask: jax.Array) -> jax.Array:
    """Counts the weights that a mask keeps, packed or not: the bits that are set.

    Args:
      mask: uint8 array.

    Returns:
      uint32 scalar.

    >>> int(kept_weights(jnp.array([160, 1], jnp.uint8)))
    3
    """
    return jnp.sum(jax.lax.population_count(mask), dtype=jnp.uint32)


def _misfit(stored_shape: Sequence[int], shape: Sequence[int]) -> str:
    """Describes a mask that fits no way to store the mask of a parameter."""
    packed = dict.fromkeys(packed_shape(shape, axis) for axis in range(len(shape)))
    return (
        f'a mask of shape {tuple(stored_shape)} does not fit a parameter of shape {tuple(shape)}; unpacked it has that '
        f'shape, packed {" or ".join(map(str, packed))}, packed flat {packed_shape((math.prod(shape),))}'
    )
