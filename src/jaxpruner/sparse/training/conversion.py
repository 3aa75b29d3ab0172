"""Converts between a leaf of the dense model and its stored blocks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators import block_layout
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.training import block_positions
from jaxpruner.sparse.training.layouts import Layout

Stored = Mapping[str, jax.Array]  # 'values', and with a term of low rank 'down' and 'up'


def block_norms(values: jax.Array) -> jax.Array:
    """The norms of stored blocks, float`[*layers, groups, blocks]`."""
    dtype = tree_lib.at_least_float32(values.dtype)
    values = values.astype(dtype)
    squares = values * values
    sums = jnp.sum(squares, axis=(-2, -1))
    return jnp.sqrt(sums)


def mean_magnitudes(values: jax.Array, positions: jax.Array, layout: Layout) -> jax.Array:
    """The root of the mean square of the weights of each stored block, float`[*layers, groups, blocks]`.

    Padding does not count, so blocks at the edge compare fairly with whole ones.
    """
    sizes = jnp.broadcast_to(layout.block_sizes(), layout.candidates_shape)
    stored_sizes = jnp.take_along_axis(sizes, positions, axis=-1)
    return block_norms(values) / jnp.sqrt(stored_sizes)


@dataclasses.dataclass(frozen=True)
class BlockLeaf:
    """A leaf that is trained in blocks.

    Attributes:
      matrix_leaf: how the leaf is a matrix.
      layout: how the matrix is cut into blocks.
    """

    matrix_leaf: MatrixLeaf
    layout: Layout

    def largest_blocks(self, leaf: jax.Array) -> jax.Array:
        """The positions of the blocks with the largest norms, the same number in each group."""
        layout = self.layout
        numbers = jnp.arange(layout.candidates)
        every_block = jnp.broadcast_to(numbers, (layout.groups, layout.candidates))

        def choose(matrix: jax.Array) -> jax.Array:
            blocks = block_layout.gather_blocks(matrix, every_block, layout.block)
            norms = block_norms(blocks)
            return block_positions.largest(norms, layout.blocks)

        matrices = self.matrix_leaf.to_matrix(leaf)
        return self._map_layers(choose, matrices)

    def store(self, leaf: jax.Array, positions: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        """The blocks of a leaf, and a term of low rank that is zero: `'down'` is random, `'up'` is zero."""
        layout = self.layout

        def gather(matrix: jax.Array, positions: jax.Array) -> jax.Array:
            return block_layout.gather_blocks(matrix, positions, layout.block)

        matrices = self.matrix_leaf.to_matrix(leaf)
        values = self._map_layers(gather, matrices, positions)
        if not layout.rank:
            return {'values': values}
        down_shape = *layout.layers, layout.inputs, layout.rank
        up_shape = *layout.layers, layout.rank, layout.outputs
        # It maps inputs as a dense layer does at its start.
        down = jax.random.normal(key, down_shape)
        down = down / np.sqrt(layout.inputs)
        return {
            'values': values,
            'down': down.astype(matrices.dtype),
            'up': jnp.zeros(up_shape, matrices.dtype),
        }

    def restore(self, stored: Stored, positions: jax.Array) -> jax.Array:
        """The dense leaf that these blocks, and the term of low rank, stand for."""
        matrices = self._map_layers(self._scatter, stored['values'], positions)
        if self.layout.rank:
            matrices = matrices + stored['down'] @ stored['up']
        return self.matrix_leaf.from_matrix(matrices)

    def mask(self, positions: jax.Array) -> jax.Array:
        """The mask of the blocks, uint8 in the leaf's shape."""
        ones = jnp.ones(self.layout.values_shape, jnp.uint8)
        matrices = self._map_layers(self._scatter, ones, positions)
        return self.matrix_leaf.from_matrix(matrices)

    def _scatter(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        """One matrix that has these blocks."""
        layout = self.layout
        return block_layout.scatter_blocks(values, positions, layout.inputs, layout.outputs)

    def _map_layers(self, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Applies a function of one matrix to each of a stack."""
        for _ in self.layout.layers:
            function = jax.vmap(function)
        return function(*arrays)
