"""Groups of weights that are kept or removed whole, in leaves whose first axis may count layers.

Where it does, each layer has groups of its own, and types see one layer at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.sparsity_types import GroupedType


def per_layer(
    function: Callable[..., Any], in_layers: bool, in_axes: Any = 0
) -> Callable[..., Any]:
    """The function, for each layer if there are any.

    Args:
      function: of arrays of one layer.
      in_layers: whether arrays have a first axis that counts layers.
      in_axes: `None` for arguments that all layers share, as in `jax.vmap`.

    >>> per_layer(jnp.max, in_layers=True)(jnp.array([[1.0, 2.0], [4.0, 3.0]])).tolist()
    [2.0, 4.0]
    """
    return jax.vmap(function, in_axes) if in_layers else function


def pool(kind: GroupedType, scores: jax.Array, in_layers: bool) -> jax.Array:
    """Scores of groups from scores of weights.

    Args:
      kind: how weights are grouped.
      scores: float array of a leaf.
      in_layers: whether its first axis counts layers.

    Returns:
      One score for each group; `[layers, …]` where there are layers.

    >>> from jaxpruner.sparsity_types import Channel
    >>> pool(Channel(-1), jnp.array([[1.0, 2.0], [3.0, 4.0]]), in_layers=False).tolist()
    [4.0, 6.0]
    """
    if not scores.size:  # no weights make no groups: types need not know what to pool then
        return jnp.zeros((*scores.shape[:1], 0) if in_layers else (0,), scores.dtype)
    return per_layer(kind.group_scores, in_layers)(scores)


def spread(
    kind: GroupedType, verdicts: jax.Array, shape: tuple[int, ...], in_layers: bool
) -> jax.Array:
    """Gives each weight of a leaf the verdict of its group.

    Args:
      kind: how weights are grouped.
      verdicts: one for each group, as `pool` arranges them.
      shape: the leaf's.
      in_layers: whether its first axis counts layers.

    Returns:
      An array of the leaf's shape.

    >>> from jaxpruner.sparsity_types import Channel
    >>> spread(Channel(-1), jnp.array([1, 0]), (2, 2), in_layers=False).tolist()
    [[1, 0], [1, 0]]
    """
    if not verdicts.size:
        return jnp.ones(shape, verdicts.dtype)
    return per_layer(lambda one: kind.spread_groups(one, shape[in_layers:]), in_layers)(verdicts)
