"""A matrix cut into blocks, and put together from them; `blocks` shows how they are stored."""

import jax
import jax.numpy as jnp

BlockShape = tuple[int, int]  # inputs and outputs of a block


def gather_blocks(matrix: jax.Array, indices: jax.Array, block: BlockShape) -> jax.Array:
    """The stored blocks `[groups, blocks, in, out]` of a matrix `[inputs, outputs]`, zeros in the padding.

    >>> gather_blocks(jnp.arange(6).reshape(3, 2), jnp.array([[1], [0]]), (2, 1))
    Array([[[[4],
             [0]]],
    <BLANKLINE>
    <BLANKLINE>
           [[[1],
             [3]]]], dtype=int32)
    """
    block_inputs, block_outputs = block
    padded = pad_to_multiple(matrix, 0, block_inputs)
    padded = pad_to_multiple(padded, 1, block_outputs)
    cut = padded.reshape(-1, block_inputs, len(indices), block_outputs)
    by_group = cut.transpose(2, 0, 1, 3)
    return jnp.take_along_axis(by_group, indices[:, :, None, None], axis=1)


def scatter_blocks(values: jax.Array, indices: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """The matrix `[inputs, outputs]` that has these blocks, and zeros elsewhere; the padding is cut off.

    >>> scatter_blocks(jnp.ones((2, 1, 1, 2), int), jnp.array([[1], [0]]), 2, 3)
    Array([[0, 0, 1],
           [1, 1, 0]], dtype=int32)
    """
    groups, _, block_inputs, block_outputs = values.shape
    blocks_of_inputs = -(-inputs // block_inputs)
    shape = groups, blocks_of_inputs, block_inputs, block_outputs
    group_numbers = jnp.arange(groups)[:, None]
    by_group = jnp.zeros(shape, values.dtype).at[group_numbers, indices].set(values)
    matrix = by_group.transpose(1, 2, 0, 3)
    matrix = matrix.reshape(blocks_of_inputs * block_inputs, groups * block_outputs)
    return matrix[:inputs, :outputs]


def pad_to_multiple(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """The array with zeros at the end of an axis, up to a multiple of some length."""
    lacking = -array.shape[axis] % multiple
    if not lacking:
        return array
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, lacking)
    return jnp.pad(array, padding)
