"""Where the kept weights of a leaf stand, and values of kept weights that move along when masks change."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import tree_utils


def positions_of(kept: jax.Array, count: int) -> jax.Array:
    """The positions of so many flags that are true, ascending: `jnp.nonzero` without a whole number for each flag.

    Words of 32 flags are counted, and for each position the word is found that holds it; then the half of the word, the
    quarter, and so on.

    Args:
      kept: bool[n].
      count: how many are true.

    Returns:
      int32[count].

    >>> positions_of(jnp.array([False, True, True]), 2)
    Array([1, 2], dtype=int32)
    """
    bits = jnp.pad(kept, (0, -kept.size % 32)).reshape(-1, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)
    ends = jnp.cumsum(jax.lax.population_count(words).astype(jnp.int32))
    ranks = jnp.arange(count, dtype=jnp.int32)
    places = jnp.searchsorted(ends, ranks, side='right').astype(jnp.int32)
    word = words.at[places].get(mode='fill', fill_value=0)
    rank = ranks - jnp.where(places == 0, 0, ends[places - 1])
    positions = 32 * places
    for width in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << width) - 1)
        number = jax.lax.population_count(low).astype(jnp.int32)
        is_high = rank >= number
        positions += jnp.where(is_high, width, 0)
        rank -= jnp.where(is_high, number, 0)
        word = jnp.where(is_high, word >> width, low)
    return positions


def places_before(old: jax.Array, new: jax.Array) -> jax.Array:
    """For each kept weight its place among those that were kept before.

    Args:
      old: int32[kept], ascending.
      new: int32[kept], ascending.

    Returns:
      int32[kept]; the length of `old` for a weight that was not kept.

    >>> places_before(jnp.array([1, 4, 6]), jnp.array([1, 5, 6]))
    Array([0, 3, 2], dtype=int32)
    """
    places = jnp.searchsorted(old, new).astype(jnp.int32)
    before = old.at[places].get(mode='fill', fill_value=-1)
    return jnp.where(before == new, places, old.size)


def moved(values: jax.Array, places: jax.Array) -> jax.Array:
    """The values of kept weights in their new places, 0 where a weight was not kept.

    >>> moved(jnp.array([7.0, 8.0, 9.0]), jnp.array([0, 3, 2]))
    Array([7., 0., 9.], dtype=float32)
    """
    return values.reshape(-1).at[places].get(mode='fill', fill_value=0)


def move_moments(optimizer: optax.GradientTransformation, state: Any, places: Any) -> Any:
    """The state of an optimizer of kept weights, whose moments move along with them.

    Args:
      optimizer: whose state it is.
      state: for the weights that were kept before.
      places: a tree like the parameters, as `places_before` has them in the parameters' shapes; of no dimensions where
        nothing moves.

    >>> tx, weights = optax.sgd(0.1, momentum=0.9), {'w': jnp.array([7.0, 8.0])}
    >>> state = tx.update(weights, tx.init(weights))[1]
    >>> move_moments(tx, state, {'w': jnp.array([1, 2])})[0].trace
    {'w': Array([8., 0.], dtype=float32)}
    """

    def move(moment: Any, where: jax.Array) -> Any:
        if not where.ndim or getattr(moment, 'shape', None) != where.shape:
            return moment
        return moved(moment, where)

    return tree_utils.tree_map_params(
        optimizer,
        move,
        state,
        places,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
