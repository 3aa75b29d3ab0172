"""How a leaf is stored: in blocks, or as single weights. All that tells the two apart stands here.

A matrix `[inputs, outputs]` is cut into rows of candidates, of which each row keeps the same number:

    blocks          a row for each group of outputs; its candidates are blocks of inputs
    kept weights    one row; its candidates are all weights of the matrix transposed

Positions say which candidates are kept, ascending in each row. Drop and grow is that of masks, one row after another:
`mask_calculator.drop_and_grow` with each row as a layer.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator, selection, sparsity_types
from jaxpruner import tree as tree_lib
from jaxpruner.sparse.operators.blocks import BlockMatrix, BlockShape
from jaxpruner.sparse.operators.csr import CsrMatrix, csr_arrays
from jaxpruner.sparsity_types import Groups

Arrays = Mapping[str, jax.Array]


class NoLayoutError(ValueError):
    """A matrix cannot be stored as was asked; the text is the reason, without the name of the leaf."""


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """What is stored of a leaf.

    Attributes:
      layers: lengths of the axes along which there are several matrices; () for one matrix.
      inputs: rows of a matrix.
      outputs: its columns.
      kept: candidates that each row keeps.
    """

    layers: tuple[int, ...]
    inputs: int
    outputs: int
    kept: int

    values_key: ClassVar[str]  # the array of kept candidates

    @property
    def unit(self) -> tuple[int, ...]:
        """The shape of a candidate."""
        return ()

    @property
    @abc.abstractmethod
    def rows(self) -> tuple[int, ...]:
        """The shape of an array with a number for each row."""

    @property
    @abc.abstractmethod
    def candidates(self) -> int:
        """The number of candidates in a row."""

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """How a plan describes it."""

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draws positions int32 `[*rows, kept]`."""

    @abc.abstractmethod
    def cut(self, matrices: jax.Array) -> jax.Array:
        """The candidates `[*rows, candidates, *unit]` of matrices `[*layers, inputs, outputs]`."""

    @abc.abstractmethod
    def join(self, candidates: jax.Array) -> jax.Array:
        """The matrices of which these are the candidates."""

    @abc.abstractmethod
    def magnitudes(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        """The sizes of kept candidates `[*rows, kept]`; those of the smallest are dropped first."""

    @abc.abstractmethod
    def shares(self, magnitudes: jax.Array, fraction: Any) -> Any:
        """The share that each row drops, so that a matrix drops a fraction.

        Args:
          magnitudes: `[all rows, kept]`.
          fraction: in [0, 1].
        """

    @abc.abstractmethod
    def weights_at(self, positions: np.ndarray) -> int:
        """How many weights are stored."""

    @abc.abstractmethod
    def topology(self, positions: Any) -> dict[str, jax.Array]:
        """The whole numbers that say where its weights are, by name; `'positions'` is among them."""

    @abc.abstractmethod
    def operator(self, stored: Arrays, topology: Arrays, probe: jax.Array | None) -> Any:
        """The operator that multiplies in the place of the leaf."""

    @property
    def size(self) -> int:
        """Weights of the dense leaf."""
        return math.prod(self.layers) * self.inputs * self.outputs

    def store(self, matrices: jax.Array, positions: jax.Array, key: jax.Array) -> Arrays:
        """What an optimizer trains, by name."""
        del key
        return {self.values_key: _take(self.cut(matrices), positions)}

    def restore(self, stored: Arrays, positions: jax.Array) -> jax.Array:
        """The dense matrices, with zeros where nothing is kept."""
        return self.scatter(stored[self.values_key], positions)

    def scatter(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        """Puts values `[*rows, kept, *unit]` into matrices of zeros."""
        positions = self._flat(positions)
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
        everything = jnp.broadcast_to(jnp.arange(self.candidates), (*self.rows, self.candidates))
        magnitudes = self.magnitudes(self.cut(matrices), everything)
        _, positions = jax.lax.top_k(magnitudes, self.kept)
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
        old = self._flat(positions)
        rows = jnp.arange(len(old))[:, None]
        magnitudes = self._flat(self.magnitudes(values, positions))
        nothing = jnp.zeros((len(old), self.candidates), magnitudes.dtype)
        masked = mask_calculator.MaskedLeaf(
            mask=nothing.astype(jnp.uint8).at[rows, old].set(1),
            drop_scores=nothing.at[rows, old].set(magnitudes),
            grow_scores=scores.reshape(nothing.shape),
            groups=Groups(sparsity_types.Unstructured(), is_stacked=True),
        )
        shares = self.shares(magnitudes, fraction)
        (mask,) = mask_calculator.drop_and_grow([masked], shares)
        new = jax.vmap(lambda row: jnp.flatnonzero(row, size=self.kept))(mask).astype(jnp.int32)
        places = jax.vmap(_places)(old, new)
        return new.reshape(positions.shape), places.reshape(positions.shape)

    def _flat(self, array: jax.Array) -> jax.Array:
        """`[*rows, kept]` as `[all rows, kept]`."""
        return jnp.reshape(array, (-1, self.kept))


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


def _places(old: jax.Array, new: jax.Array) -> jax.Array:
    places = jnp.searchsorted(old, new).astype(jnp.int32)
    is_old = old.at[places].get(mode='fill', fill_value=-1) == new
    return jnp.where(is_old, places, len(old))


@dataclasses.dataclass(frozen=True)
class KeptWeights(Layout):
    """Single weights, in CSR.

    >>> KeptWeights((), inputs=2, outputs=3, kept=6).draw(np.random.default_rng(0)).tolist()
    [0, 1, 2, 3, 4, 5]
    """

    values_key: ClassVar[str] = 'compressed'

    @property
    def rows(self) -> tuple[int, ...]:
        return self.layers

    @property
    def candidates(self) -> int:
        return self.inputs * self.outputs

    @property
    def words(self) -> str:
        each = f'each of {math.prod(self.layers)} ' if self.layers else ''
        return f'unstructured, {self.kept:,} weights of {each}{self.inputs}×{self.outputs}'

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        rows = []
        for _ in range(math.prod(self.layers)):
            chosen = rng.choice(self.candidates, self.kept, replace=False, shuffle=False)
            rows.append(np.sort(chosen))
        return np.reshape(rows, (*self.layers, self.kept)).astype(np.int32)

    def cut(self, matrices: jax.Array) -> jax.Array:
        return matrices.swapaxes(-1, -2).reshape(*self.layers, self.candidates)

    def join(self, candidates: jax.Array) -> jax.Array:
        transposed = candidates.reshape(*self.layers, self.outputs, self.inputs)
        return transposed.swapaxes(-1, -2)

    def magnitudes(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.abs(values)

    def shares(self, magnitudes: jax.Array, fraction: Any) -> Any:
        return fraction

    def weights_at(self, positions: np.ndarray) -> int:
        return positions.size

    def topology(self, positions: Any) -> dict[str, jax.Array]:
        arrays: Any = functools.partial(csr_arrays, inputs=self.inputs, outputs=self.outputs)
        for _ in self.layers:
            arrays = jax.vmap(arrays)
        return arrays(jnp.asarray(positions))

    def operator(self, stored: Arrays, topology: Arrays, probe: jax.Array | None) -> CsrMatrix:
        if probe is not None:
            probe = probe.reshape(*self.layers, self.outputs, self.inputs)
        return CsrMatrix(**stored, **topology, probe=probe)


@dataclasses.dataclass(frozen=True)
class BlockLayout(Layout):
    """Blocks, and perhaps a term of low rank.

    Attributes:
      kept: how many blocks each group of outputs stores. A group is `block[1]` neighbouring outputs.
      block: inputs and outputs of a block. The last blocks may be padded.
      rank: the rank of the term of low rank, 0 for none.

    >>> layout = BlockLayout((), inputs=6, outputs=4, kept=3, block=(1, 2))
    >>> layout.words
    '2 groups of 3 of 6 blocks 1×2'
    """

    block: BlockShape
    rank: int = 0

    values_key: ClassVar[str] = 'values'

    @classmethod
    def nearest(
        cls,
        layers: tuple[int, ...],
        shape: tuple[int, int],
        block: BlockShape,
        sparsity: float,
        rank: int = 0,
    ) -> 'BlockLayout':
        """The layout that comes nearest to a sparsity; the weights of the term of low rank count, too.

        Raises:
          NoLayoutError: the block is larger than the matrix, or the term of low rank alone has too many weights.

        >>> BlockLayout.nearest((), (64, 256), (8, 128), sparsity=0.75).kept
        2
        """
        inputs, outputs = shape
        if block[0] > inputs or block[1] > outputs:
            raise NoLayoutError(
                f'a matrix of {inputs} inputs and {outputs} outputs is smaller than a block of {block[0]} x {block[1]}'
            )
        of_rank = (inputs + outputs) / (inputs * outputs)  # weights of a rank, as a share
        share = 1 - sparsity - rank * of_rank
        if rank and share <= 0:
            raise NoLayoutError(
                f'a term of rank {rank} has more weights than sparsity {sparsity} leaves of {inputs} x {outputs}; '
                f'the rank can be at most {math.ceil((1 - sparsity) / of_rank) - 1}'
            )
        layout = cls(layers, inputs, outputs, kept=1, block=block, rank=rank)
        kept = min(max(1, round(share * layout.candidates)), layout.candidates)
        return dataclasses.replace(layout, kept=kept)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return -(-self.outputs // self.block[1])

    @property
    def rows(self) -> tuple[int, ...]:
        return *self.layers, self.groups

    @property
    def candidates(self) -> int:
        return -(-self.inputs // self.block[0])

    @property
    def unit(self) -> tuple[int, ...]:
        return self.block

    @property
    def words(self) -> str:
        height, width = self.block
        words = f'{self.groups} groups of {self.kept} of {self.candidates} blocks {height}×{width}'
        return f'{words}, rank {self.rank}' if self.rank else words

    @property
    def input_coverage(self) -> float:
        """The largest share of the inputs that blocks can reach; 1 with a term of low rank, which reaches all."""
        return 1.0 if self.rank else min(1.0, self.groups * self.kept / self.candidates)

    @property
    def kept_share(self) -> float:
        """The share of the weights that is kept, if no block is padded."""
        low_rank = self.rank * (self.inputs + self.outputs)
        return self.kept / self.candidates + low_rank / (self.inputs * self.outputs)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draws such that each block of inputs leads to n or n + 1 groups.

        A model cannot see inputs that no group reads, which costs more than blocks in the wrong places.
        """
        positions = np.empty((*self.rows, self.kept), np.int32)
        for layer in positions.reshape(-1, self.groups, self.kept):
            readers = np.zeros(self.candidates)  # how many groups read each block of inputs
            for group in layer:
                # The blocks with the fewest readers come first; chance decides among equal ones.
                order = np.argsort(readers + rng.random(self.candidates))
                group[:] = np.sort(order[: self.kept])
                readers[group] += 1
        return positions

    def cut(self, matrices: jax.Array) -> jax.Array:
        height, width = self.block
        lacking = (0, -self.inputs % height), (0, -self.outputs % width)
        padded = jnp.pad(matrices, [*[(0, 0)] * len(self.layers), *lacking])
        cut = padded.reshape(*self.layers, self.candidates, height, self.groups, width)
        return jnp.moveaxis(cut, -2, -4)

    def join(self, candidates: jax.Array) -> jax.Array:
        height, width = self.block
        shape = *self.layers, self.candidates * height, self.groups * width
        padded = jnp.moveaxis(candidates, -4, -2).reshape(shape)
        return padded[..., : self.inputs, : self.outputs]

    def magnitudes(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        """The root of the mean square of the weights in each block. Padding does not count."""
        values = values.astype(tree_lib.at_least_float32(values.dtype))
        sizes = jnp.broadcast_to(self._block_sizes(), (*self.rows, self.candidates))
        return jnp.linalg.norm(values, axis=(-2, -1)) / jnp.sqrt(_take(sizes, positions))

    def shares(self, magnitudes: jax.Array, fraction: Any) -> jax.Array:
        """Of the blocks of a matrix the smallest are dropped, whatever group they are in.

        Each group keeps its largest block, unless all are dropped: otherwise it would forget what it has learned.
        """
        is_largest = jnp.arange(self.kept) == jnp.argmax(magnitudes, axis=1)[:, None]
        magnitudes = jnp.where(is_largest & (fraction < 1), jnp.inf, magnitudes)
        of_matrices = magnitudes.reshape(-1, self.groups * self.kept)
        stored = of_matrices.shape[1]
        count = selection.share_of(jnp.uint32(stored), fraction, most=stored)
        ranks = jnp.argsort(jnp.argsort(of_matrices))
        is_dropped = (ranks < count) & (of_matrices < jnp.inf)
        return is_dropped.reshape(-1, self.kept).mean(axis=1)

    def weights_at(self, positions: np.ndarray) -> int:
        sizes = np.broadcast_to(self._block_sizes(), (*self.rows, self.candidates))
        low_rank = math.prod(self.layers) * self.rank * (self.inputs + self.outputs)
        return int(np.take_along_axis(sizes, positions, -1).sum()) + low_rank

    def topology(self, positions: Any) -> dict[str, jax.Array]:
        return {'positions': jnp.asarray(positions, jnp.int32)}

    def operator(self, stored: Arrays, topology: Arrays, probe: jax.Array | None) -> BlockMatrix:
        return BlockMatrix(
            **stored, indices=topology['positions'], outputs=self.outputs, probe=probe
        )

    def store(self, matrices: jax.Array, positions: jax.Array, key: jax.Array) -> Arrays:
        """The blocks, and a term of low rank that is zero: `'down'` is random, `'up'` is zero."""
        stored = super().store(matrices, positions, key)
        if not self.rank:
            return stored
        # It maps inputs as a dense layer does at its start.
        down = jax.random.normal(key, (*self.layers, self.inputs, self.rank)) / np.sqrt(self.inputs)
        up = jnp.zeros((*self.layers, self.rank, self.outputs), matrices.dtype)
        return {**stored, 'down': down.astype(matrices.dtype), 'up': up}

    def restore(self, stored: Arrays, positions: jax.Array) -> jax.Array:
        """The matrices that the blocks, and the term of low rank, stand for."""
        matrices = super().restore(stored, positions)
        return matrices + stored['down'] @ stored['up'] if self.rank else matrices

    def _block_sizes(self) -> np.ndarray:
        """Weights of each block that are not padding: int[groups, candidates]."""
        lengths = []
        for size, length in zip((self.outputs, self.inputs), reversed(self.block), strict=True):
            lengths.append(np.minimum(size - np.arange(0, size, length), length))
        return np.outer(*lengths)
