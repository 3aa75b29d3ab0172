"""Which weights are kept: at first, and after some were dropped and others grown."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator, sparsity_types
from jaxpruner.sparse.operators.csr import CsrPattern, csr_pattern
from jaxpruner.sparse.training import kept_positions
from jaxpruner.sparsity_types import Groups

# The arrays of a pattern, by name. They are a plain dictionary, which checkpoints and other libraries accept.
PatternArrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class KeptWeights:
    """How many weights of the matrices of a leaf are kept.

    Attributes:
      layers: lengths of the axes along which there are several matrices; () for one matrix.
      inputs: rows of a matrix.
      outputs: its columns.
      kept: weights of each matrix.
    """

    layers: tuple[int, ...]
    inputs: int
    outputs: int
    kept: int

    @property
    def positions_shape(self) -> tuple[int, ...]:
        """The shape of the positions of kept weights."""
        return *self.layers, self.kept

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape of the kept weights."""
        return self.positions_shape

    @property
    def topology_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays that say where its weights are, by name."""
        return {
            'positions': self.positions_shape,
            'row_offsets': (*self.layers, self.inputs + 1),
            'transposed_order': self.positions_shape,
            'transposed_row_offsets': (*self.layers, self.outputs + 1),
        }

    @property
    def candidates_shape(self) -> tuple[int, ...]:
        """The shape of an array with a number for each weight that could be kept."""
        return *self.layers, self.inputs, self.outputs

    @property
    def words(self) -> str:
        """How a plan describes it."""
        each = f'each of {self.matrices} ' if self.layers else ''
        return f'unstructured, {self.kept:,} weights of {each}{self.inputs}×{self.outputs}'

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return math.prod(self.layers)

    @property
    def matrix_size(self) -> int:
        """Weights of a dense matrix."""
        return self.inputs * self.outputs

    def map_layers(self, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Applies a function of one matrix to each of a stack."""
        for _ in self.layers:
            function = jax.vmap(function)
        return function(*arrays)

    def arrays_of(self, positions: jax.Array) -> PatternArrays:
        """The pattern of positions int32[*layers, kept], ascending."""

        def of_matrix(positions: jax.Array) -> PatternArrays:
            pattern = csr_pattern(positions, self.inputs, self.outputs)
            return pattern._asdict()

        return self.map_layers(of_matrix, positions)


def pattern_of(arrays: Mapping[str, Any]) -> CsrPattern:
    """The pattern whose arrays these are."""
    return CsrPattern(**arrays)


def draw(leaf: KeptWeights, rng: np.random.Generator) -> np.ndarray:
    """Draws positions, all equally likely: int32[*layers, kept].

    >>> draw(KeptWeights((), 2, 3, kept=6), np.random.default_rng(0)).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    positions = np.empty((leaf.matrices, leaf.kept), np.int32)
    for layer in positions:
        chosen = rng.choice(leaf.matrix_size, leaf.kept, replace=False, shuffle=False)
        layer[:] = np.sort(chosen)
    return positions.reshape(leaf.positions_shape)


def largest(leaf: KeptWeights, matrices: jax.Array) -> jax.Array:
    """The positions of the largest weights: int32[*layers, kept]."""

    def of_matrix(matrix: jax.Array) -> jax.Array:
        magnitudes = jnp.abs(matrix.reshape(-1))
        _, positions = jax.lax.top_k(magnitudes, leaf.kept)
        return jnp.sort(positions)

    return leaf.map_layers(of_matrix, matrices)


def scatter(leaf: KeptWeights, compressed: jax.Array, positions: jax.Array) -> jax.Array:
    """Puts weights into matrices [*layers, inputs, outputs] of zeros."""

    def of_matrix(compressed: jax.Array, positions: jax.Array) -> jax.Array:
        zeros = jnp.zeros(leaf.matrix_size, compressed.dtype)
        kept = zeros.at[positions]
        flat = kept.set(compressed, unique_indices=True, indices_are_sorted=True)
        return flat.reshape(leaf.inputs, leaf.outputs)

    return leaf.map_layers(of_matrix, compressed, positions)


def gather(leaf: KeptWeights, matrices: jax.Array, positions: jax.Array) -> jax.Array:
    """Takes the kept weights [*layers, kept] out of matrices."""

    def of_matrix(matrix: jax.Array, positions: jax.Array) -> jax.Array:
        flat = matrix.reshape(-1)
        return flat[positions]

    return leaf.map_layers(of_matrix, matrices, positions)


def replace(
    leaf: KeptWeights,
    compressed: jax.Array,
    positions: jax.Array,
    grow_scores: jax.Array,
    fraction: Any,
) -> tuple[jax.Array, jax.Array]:
    """Drops the smallest weights of each matrix and grows as many others, as RigL and SET do with masks.

    Args:
      leaf: how many weights are kept.
      compressed: float[*layers, kept].
      positions: int32[*layers, kept].
      grow_scores: [*layers, inputs, outputs]; of weights that are not kept, those with the largest are grown.
      fraction: the share of the kept weights that is dropped, and grown elsewhere.

    Returns:
      New positions, and the place of each weight among all that the leaf kept before. The place of a grown weight is
      their number, behind the last.
    """
    ones = jnp.ones_like(compressed, jnp.uint8)
    masks = scatter(leaf, ones, positions)
    drop_scores = scatter(leaf, jnp.abs(compressed), positions)
    stacked = leaf.matrices, leaf.matrix_size
    masked = mask_calculator.MaskedLeaf(
        masks.reshape(stacked),
        drop_scores.reshape(stacked),
        grow_scores.reshape(stacked),
        Groups(sparsity_types.Unstructured(), is_stacked=True),
    )
    (new_masks,) = mask_calculator.drop_and_grow([masked], fraction)

    def find(mask: jax.Array) -> jax.Array:
        is_kept = mask.reshape(-1) != 0
        return kept_positions.positions_of(is_kept, leaf.kept)

    new_masks = new_masks.reshape(masks.shape)
    new_positions = leaf.map_layers(find, new_masks)
    places = leaf.map_layers(kept_positions.places_before, positions, new_positions)
    was_kept = places < leaf.kept
    # Places in a matrix become places in the leaf.
    first_of_matrix = leaf.kept * jnp.arange(leaf.matrices)
    first_of_matrix = first_of_matrix.reshape(*leaf.layers, 1)
    places = jnp.where(was_kept, first_of_matrix + places, positions.size)
    return new_positions, places
