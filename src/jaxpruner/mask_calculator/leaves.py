"""What is known of each leaf of a model before its masks are made, and the groups that its weights are kept in."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_types
from jaxpruner.core import tree as tree_lib
from jaxpruner.sparsity_types import SparsityType

# A glob or a path, or several.
Stacked = str | Sequence[str | tree_lib.Path]


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of weights of one leaf.

    Each layer of a stacked leaf has groups of its own, and its sparsity type sees one layer at a time.
    """

    sparsity_type: Any
    is_stacked: bool = False

    @property
    def is_unstructured(self) -> bool:
        """Tells whether each weight is a group."""
        return sparsity_types.is_unstructured(self.sparsity_type)

    def layer_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what is ranked on its own: a layer of a stacked leaf, else all of it."""
        return shape[1:] if self.is_stacked else shape

    def per_layer(self, function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        """Maps a function over layers, if there are any; `in_axes` is that of `jax.vmap`."""
        return jax.vmap(function, in_axes) if self.is_stacked else function

    def pool(self, scores: jax.Array) -> jax.Array:
        """Scores groups by the scores of their weights: one score a group, `[layers, …]` where stacked."""
        if not scores.size:  # no weights make no groups: types need not know what to pool then
            shape = (*scores.shape[:1], 0) if self.is_stacked else (0,)
            return jnp.zeros(shape, scores.dtype)
        return self.per_layer(self.sparsity_type.group_scores)(scores)

    def spread(self, verdicts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each weight of a leaf of this shape the verdict of its group."""
        if not verdicts.size:
            return jnp.ones(shape, verdicts.dtype)
        layer_shape = self.layer_shape(shape)

        def spread_layer(layer: jax.Array) -> jax.Array:
            return self.sparsity_type.spread_groups(layer, layer_shape)

        return self.per_layer(spread_layer)(verdicts)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a model.

    Attributes:
      path: the leaf's.
      shape: its shape, with the axis of layers where it is stacked.
      dtype: of its elements; `None` where there is no array.
      sparsity_type: which of its weights are removed together; `None` where it is dense.
      is_stacked: its first axis counts layers, each of which is ranked on its own.
      target: the share to remove in the end; `None` where it has no target, or where that is being traced.
    """

    path: tree_lib.Path
    shape: tuple[int, ...]
    dtype: Any
    sparsity_type: SparsityType | None
    is_stacked: bool
    target: float | None

    @property
    def name(self) -> str:
        """The path as text."""
        return tree_lib.path_string(self.path)

    @property
    def groups(self) -> Groups:
        """The groups of the leaf's weights."""
        return Groups(self.sparsity_type, self.is_stacked)

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of what is ranked on its own."""
        return self.groups.layer_shape(self.shape)


def leaf_of(
    path: tree_lib.Path,
    array: Any,
    sparsity_type: SparsityType | None,
    is_stacked: bool,
) -> Leaf:
    """Describes a leaf by its array, or by its shape; it has no target yet."""
    shape = tuple(getattr(array, 'shape', ()))
    dtype = getattr(array, 'dtype', None)
    return Leaf(path, shape, dtype, sparsity_type, is_stacked, target=None)


def resolve_leaves(
    paths: Sequence[tree_lib.Path],
    arrays: Sequence[Any],
    types: Sequence[SparsityType | None],
    stacked: Stacked,
) -> list[Leaf]:
    """Describes all leaves of a model, given the sparsity type of each and the names of stacked ones."""
    names = tree_lib.as_names(stacked)
    leaves = []
    for i, path in enumerate(paths):
        is_stacked = tree_lib.matches_any(names, path)
        leaves.append(leaf_of(path, arrays[i], types[i], is_stacked))
    return leaves
