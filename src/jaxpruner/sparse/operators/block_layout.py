"""A matrix cut into blocks, and put together from them; `blocks` shows how they are stored."""

import jax
import jax.numpy as jnp

BlockShape = tuple[int, int]  # inputs and outputs of a block


def gather_blocks(matrix: jax.Array, indices: jax.Array, block: BlockShape) -> jax.Array:
    """Cuts the stored blocks `[groups, blocks, in, out]` out of a matrix `[inputs, outputs]`; padding is zero.

    >>> gather_blocks(jnp.arange(6).reshape(3, 2), jnp.array([[1], [0]]), (2, 1))
    Array([[[[4],
             [0]]],
    <BLANKLINE>
    <BLANKLINE>
           [[[1],
             [3]]]], dtype=int32)
    """
    block_inputs, block_outputs = block
    groups = len(indices)
    padded = pad_to_multiple(matrix, 0, block_inputs)
    padded = pad_to_multiple(padded, 1, block_outputs)
    cut = padded.reshape(-1, block_inputs, groups, block_outputs)
    by_group = cut.transpose(2, 0, 1, 3)
    of_whole_blocks = indices[:, :, None, None]
    return jnp.take_along_axis(by_group, of_whole_blocks, axis=1)


def scatter_blocks(values: jax.Array, indices: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """Puts blocks into a matrix `[inputs, outputs]` of zeros, and cuts their padding off.

    >>> scatter_blocks(jnp.ones((2, 1, 1, 2), int), jnp.array([[1], [0]]), 2, 3)
    Array([[0, 0, 1],
           [1, 1, 0]], dtype=int32)
    """
    groups, _, block_inputs, block_outputs = values.shape
    blocks_of_inputs = -(-inputs // block_inputs)
    shape = groups, blocks_of_inputs, block_inputs, block_outputs
    zeros = jnp.zeros(shape, values.dtype)
    group_numbers = jnp.arange(groups)
    stored = group_numbers[:, None], indices
    by_group = zeros.at[stored].set(values)
    in_order = by_group.transpose(1, 2, 0, 3)
    padded_inputs = blocks_of_inputs * block_inputs
    padded_outputs = groups * block_outputs
    padded = in_order.reshape(padded_inputs, padded_outputs)
    return padded[:inputs, :outputs]


def pad_to_multiple(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Adds zeros at the end of an axis, so that its length is a multiple of some number."""
    length = array.shape[axis]
    lacking = -length % multiple
    if not lacking:
        return array
    padding = [(0, 0)] * array.ndim
    padding[axis] = 0, lacking
    return jnp.pad(array, padding)
