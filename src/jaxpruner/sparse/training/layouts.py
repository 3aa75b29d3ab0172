"""How a leaf is stored: in blocks, or as single weights. All that tells the two apart stands here.

A matrix `[inputs, outputs]` is cut into rows of candidates, of which each row keeps the same number:

    blocks          a row for each group of outputs; its candidates are blocks of inputs
    single weights  one row; its candidates are all weights of the matrix transposed

Positions say which candidates are kept, ascending in each row. Drop and grow is that of masks, one row after another:
`mask_calculator.drop_and_grow` with each row as a layer.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.block_matrix import BlockMatrix, BlockShape
from jaxpruner.sparse.csr_matrix import CsrMatrix, csr_arrays
from jaxpruner.sparse.formats.blocks import in_blocks

Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is stored of a leaf: blocks, and perhaps a term of low rank; or single weights, in CSR.

    Attributes:
      layers: lengths of the axes along which there are several matrices; () for one matrix.
      inputs: rows of a matrix.
      outputs: its columns.
      kept: candidates that each row keeps.
      block: inputs and outputs of a block, which divides the matrix. `None` for single weights.
      rank: the rank of the term of low rank, 0 for none.

    >>> layout = Layout((), inputs=6, outputs=4, kept=3, block=(1, 2))
    >>> layout.words
    '2 groups of 3 of 6 blocks 1×2'
    """

    layers: tuple[int, ...]
    inputs: int
    outputs: int
    kept: int
    block: BlockShape | None = None
    rank: int = 0

    @property
    def values_key(self) -> str:
        """The name of the array of kept candidates."""
        return 'values' if self.block else 'compressed'

    @property
    def unit(self) -> tuple[int, ...]:
        """The shape of a candidate."""
        return self.block or ()

    @property
    def groups(self) -> int:
        """The number of rows in a matrix."""
        return self.outputs // self.block[1] if self.block else 1

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of an array with a number for each row."""
        return (*self.layers, self.groups) if self.block else self.layers

    @property
    def candidates(self) -> int:
        """The number of candidates in a row."""
        return self.inputs // self.block[0] if self.block else self.inputs * self.outputs

    @property
    def words(self) -> str:
        """How a plan describes it."""
        if not self.block:
            each = f'each of {math.prod(self.layers)} ' if self.layers else ''
            return f'unstructured, {self.kept:,} weights of {each}{self.inputs}×{self.outputs}'
        height, width = self.block
        words = f'{self.groups} groups of {self.kept} of {self.candidates} blocks {height}×{width}'
        return f'{words}, rank {self.rank}' if self.rank else words

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draws positions int32 `[*rows, kept]`, such that each block of inputs leads to n or n + 1 groups.

        A model cannot see inputs that no group reads, which costs more than blocks in the wrong places.
        """
        positions = np.empty((*self.rows, self.kept), np.int32)
        for layer in positions.reshape(-1, self.groups, self.kept):
            readers = np.zeros(self.candidates)  # how many rows have each candidate
            for group in layer:
                # Those with the fewest readers come first; chance decides among equal ones.
                order = np.argpartition(readers + rng.random(self.candidates), self.kept - 1)
                group[:] = np.sort(order[: self.kept])
                readers[group] += 1
        return positions

    def cut(self, matrices: Any) -> Any:
        """The candidates `[*rows, candidates, *unit]` of matrices `[*layers, inputs, outputs]`."""
        if not self.block:
            return matrices.swapaxes(-1, -2).reshape(*self.layers, self.candidates)
        cut = in_blocks(matrices, *self.block)
        return cut.reshape(*self.rows, self.candidates, *self.block)

    def join(self, candidates: jax.Array) -> jax.Array:
        """The matrices of which these are the candidates."""
        if not self.block:
            transposed = candidates.reshape(*self.layers, self.outputs, self.inputs)
            return transposed.swapaxes(-1, -2)
        shape = *self.layers, self.inputs, self.outputs
        return jnp.moveaxis(candidates, -4, -2).reshape(shape)

    @property
    def size(self) -> int:
        """How many weights are kept, with those of the term of low rank."""
        weights = math.prod((*self.rows, self.kept, *self.unit))
        return weights + math.prod(self.layers) * self.rank * (self.inputs + self.outputs)

    def magnitudes(self, values: jax.Array) -> jax.Array:
        """The sizes of candidates, of blocks their norms; the smallest are dropped first."""
        if not self.block:
            return jnp.abs(values)
        values = values.astype(tree_lib.at_least_float32(values.dtype))
        return jnp.linalg.norm(values, axis=(-2, -1))

    def topology(self, positions: Any) -> dict[str, jax.Array]:
        """The whole numbers that say where its weights are, by name; `'positions'` is among them."""
        positions = jnp.asarray(positions, jnp.int32)
        if self.block:
            return {'positions': positions}
        arrays: Any = functools.partial(csr_arrays, inputs=self.inputs, outputs=self.outputs)
        for _ in self.layers:
            arrays = jax.vmap(arrays)
        return arrays(positions)

    def operator(self, stored: Arrays, topology: Arrays, probe: jax.Array | None) -> Any:
        """The operator that multiplies in the place of the leaf."""
        if self.block:
            return BlockMatrix(**stored, indices=topology['positions'], probe=probe)
        if probe is not None:
            probe = probe.reshape(*self.layers, self.outputs, self.inputs)
        return CsrMatrix(**stored, **topology, probe=probe)

    def store(self, matrices: jax.Array, positions: jax.Array, key: jax.Array) -> Arrays:
        """What an optimizer trains, by name; a term of low rank is zero: `'down'` is random, `'up'` is zero."""
        stored = {self.values_key: _take(self.cut(matrices), positions)}
        if self.rank:
            # It maps inputs as a dense layer does at its start.
            down = jax.random.normal(key, (*self.layers, self.inputs, self.rank))
            stored['down'] = (down / np.sqrt(self.inputs)).astype(matrices.dtype)
            stored['up'] = jnp.zeros((*self.layers, self.rank, self.outputs), matrices.dtype)
        return stored

    def restore(self, stored: Arrays, positions: jax.Array) -> jax.Array:
        """The dense matrices: zeros where nothing is kept, and the term of low rank added."""
        matrices = self.scatter(stored[self.values_key], positions)
        return matrices + stored['down'] @ stored['up'] if self.rank else matrices

    def scatter(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        """Puts values `[*rows, kept, *unit]` into matrices of zeros."""
        positions = positions.reshape(-1, self.kept)
        rows = jnp.arange(len(positions))[:, None]
        zeros = jnp.zeros((len(positions), self.candidates, *self.unit), values.dtype)
        candidates = zeros.at[rows, positions].set(values.reshape(*positions.shape, *self.unit))
        return self.join(candidates.reshape(*self.rows, self.candidates, *self.unit))

    def mask(self, positions: jax.Array) -> jax.Array:
        """The masks of the matrices, uint8."""
        ones = jnp.ones((*self.rows, self.kept, *self.unit), jnp.uint8)
        return self.scatter(ones, positions)

    def largest(self, matrices: jax.Array) -> jax.Array:
        """The positions of the largest candidates of each row."""
        _, positions = jax.lax.top_k(self.magnitudes(self.cut(matrices)), self.kept)
        return jnp.sort(positions.astype(jnp.int32), axis=-1)

    def replace(
        self, values: jax.Array, positions: jax.Array, scores: jax.Array, fraction: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Drops the smallest candidates, and grows as many others of the same row: those with the largest scores.

        Args:
          values: `[*rows, kept, *unit]`.
          positions: int32 `[*rows, kept]`.
          scores: of all candidates, `[*rows, candidates]` or a shape of as many numbers.
          fraction: of the kept candidates of each matrix, which are dropped.

        Returns:
          New positions, and for each the place in its row at which the same candidate stood before, or `kept` for one
          that was grown.
        """
        old = positions.reshape(-1, self.kept)
        rows = jnp.arange(len(old))[:, None]
        magnitudes = self.magnitudes(values).reshape(old.shape)
        nothing = jnp.zeros((len(old), self.candidates), magnitudes.dtype)

        def replace(share: jax.Array, mask: Any, drop: Any, grow: Any) -> jax.Array:
            leaf = mask_calculator.MaskedLeaf(mask, drop, grow, sparsity_types.Unstructured())
            return mask_calculator.drop_and_grow([leaf], share)[0]

        shares = self._shares(magnitudes, fraction) if self.block else jnp.full(len(old), fraction)
        mask = jax.vmap(replace)(
            shares,
            nothing.astype(jnp.uint8).at[rows, old].set(1),
            nothing.at[rows, old].set(magnitudes),
            scores.reshape(nothing.shape),
        )
        new = jax.vmap(lambda row: jnp.flatnonzero(row, size=self.kept))(mask).astype(jnp.int32)
        places = jax.vmap(jnp.searchsorted)(old, new).astype(jnp.int32)
        is_old = jnp.take_along_axis(old, places, axis=1, mode='fill', fill_value=-1) == new
        places = jnp.where(is_old, places, self.kept)
        return new.reshape(positions.shape), places.reshape(positions.shape)

    def _shares(self, magnitudes: jax.Array, fraction: Any) -> jax.Array:
        """The share of its blocks that each row drops, so that a matrix drops a fraction, whatever group they are in.

        Each group keeps its largest block, unless all are dropped: otherwise it would forget what it has learned.
        """
        is_largest = jnp.arange(self.kept) == jnp.argmax(magnitudes, axis=1)[:, None]
        magnitudes = jnp.where(is_largest & (fraction < 1), jnp.inf, magnitudes)
        of_matrices = magnitudes.reshape(-1, self.groups * self.kept)
        stored = of_matrices.shape[1]
        count = selection.share_of(jnp.uint32(stored), jnp.float32(fraction), most=stored)
        ranks = jnp.argsort(jnp.argsort(of_matrices))
        is_dropped = (ranks < count) & (of_matrices < jnp.inf)
        return is_dropped.reshape(-1, self.kept).mean(axis=1)


def moved(values: jax.Array, places: jax.Array) -> jax.Array:
    """Moves values `[*rows, kept, …]` to their new places, as `replace` returns them; those that were grown are 0.

    >>> moved(jnp.array([7.0, 8.0, 9.0]), jnp.array([0, 3, 2]))
    Array([7., 0., 9.], dtype=float32)
    """
    return _take(values, places, mode='fill', fill_value=0)


def _take(array: jax.Array, places: jax.Array, **settings: Any) -> jax.Array:
    """Takes entries along the last axis of `places`."""
    indices = jnp.expand_dims(places, tuple(range(places.ndim, array.ndim)))
    return jnp.take_along_axis(array, indices, axis=places.ndim - 1, **settings)
