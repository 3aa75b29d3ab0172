"""Groups of weights that are kept or removed whole, in leaves whose first axis may count layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import sparsity_types


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the weights of one leaf are grouped.

    Each layer of a stacked leaf has groups of its own, and its sparsity type sees one layer at a time.
    """

    sparsity_type: Any
    is_stacked: bool = False

    @property
    def is_unstructured(self) -> bool:
        """Whether each weight is a group."""
        return sparsity_types.is_unstructured(self.sparsity_type)

    def layer_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is ranked on its own: a layer of a stacked leaf, else all of it."""
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
