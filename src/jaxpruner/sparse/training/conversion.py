"""Converts between the leaf of a dense model and what is stored of it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.operators import block_layout
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.training import block_positions
from jaxpruner.sparse.training.layouts import Layout

Stored = Mapping[str, jax.Array]  # 'values', and with a term of low rank 'down' and 'up'


def largest_blocks(leaf: jax.Array, matrix_leaf: MatrixLeaf, layout: Layout) -> jax.Array:
    """The positions of the blocks with the largest norms, the same number in each group."""
    every = jnp.broadcast_to(jnp.arange(layout.candidates), (layout.groups, layout.candidates))

    def choose(matrix: jax.Array) -> jax.Array:
        norms = block_norms(block_layout.gather_blocks(matrix, every, layout.block))
        return block_positions.largest(norms, layout.blocks)

    return _over_layers(choose, layout)(matrix_leaf.to_matrix(leaf))


def block_norms(values: jax.Array) -> jax.Array:
    """The norms of stored blocks, float`[*layers, groups, blocks]`."""
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(values * values, axis=(-2, -1)))


def mean_magnitudes(values: jax.Array, positions: jax.Array, layout: Layout) -> jax.Array:
    """The root of the mean square of the weights of each stored block, float`[*layers, groups, blocks]`.

    Padding does not count, so that blocks at the edge compare with whole ones.
    """
    of_candidates = jnp.broadcast_to(layout.block_sizes(), layout.candidates_shape)
    sizes = jnp.take_along_axis(of_candidates, positions, axis=-1)
    return block_norms(values) / jnp.sqrt(sizes)


def store(
    leaf: jax.Array, positions: jax.Array, matrix_leaf: MatrixLeaf, layout: Layout, key: jax.Array
) -> dict[str, jax.Array]:
    """The blocks of a leaf, and a term of low rank that is zero: its first matrix is random, the second one zero."""

    def gather(matrix: jax.Array, positions: jax.Array) -> jax.Array:
        return block_layout.gather_blocks(matrix, positions, layout.block)

    matrices = matrix_leaf.to_matrix(leaf)
    stored = {'values': _over_layers(gather, layout)(matrices, positions)}
    if layout.rank:
        # It maps inputs as a dense layer does at its start.
        down = jax.random.normal(key, (*layout.layers, layout.inputs, layout.rank))
        stored['down'] = (down / np.sqrt(layout.inputs)).astype(matrices.dtype)
        stored['up'] = jnp.zeros((*layout.layers, layout.rank, layout.outputs), matrices.dtype)
    return stored


def restore(
    stored: Stored, positions: jax.Array, matrix_leaf: MatrixLeaf, layout: Layout
) -> jax.Array:
    """The leaf that a model with these blocks stands for."""

    def scatter(stored: Stored, positions: jax.Array) -> jax.Array:
        values = stored['values']
        matrix = block_layout.scatter_blocks(values, positions, layout.inputs, layout.outputs)
        return matrix + stored['down'] @ stored['up'] if layout.rank else matrix

    return matrix_leaf.from_matrix(_over_layers(scatter, layout)(stored, positions))


def mask_of(positions: jax.Array, matrix_leaf: MatrixLeaf, layout: Layout) -> jax.Array:
    """The mask of the blocks, uint8 in the leaf's shape."""

    def scatter(positions: jax.Array) -> jax.Array:
        ones = jnp.ones((layout.groups, layout.blocks, *layout.block), jnp.uint8)
        return block_layout.scatter_blocks(ones, positions, layout.inputs, layout.outputs)

    return matrix_leaf.from_matrix(_over_layers(scatter, layout)(positions))


def _over_layers(function: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """The function of one matrix, for each of a stack."""
    for _ in layout.layers:
        function = jax.vmap(function)
    return function
