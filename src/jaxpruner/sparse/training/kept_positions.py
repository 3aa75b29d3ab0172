"""Where the kept weights of a leaf stand, and values of kept weights that move along when masks change."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import tree_utils

_WORD = 32  # bits


def positions_of(kept: jax.Array, count: int) -> jax.Array:
    """Finds the positions of the flags that are true, ascending: `jnp.nonzero` without a whole number for each flag.

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
    words = _words_of(kept)
    ends = jnp.cumsum(_bits_in(words))
    ranks = jnp.arange(count, dtype=jnp.int32)
    places = jnp.searchsorted(ends, ranks, side='right').astype(jnp.int32)
    before = jnp.where(places == 0, 0, ends[places - 1])
    word = words.at[places].get(mode='fill', fill_value=0)
    return _WORD * places + _position_in_word(word, ranks - before)


def _words_of(flags: jax.Array) -> jax.Array:
    """Packs flags into uint32, the first in the lowest bit; fills up the last word with 0."""
    padded = jnp.pad(flags, (0, -flags.size % _WORD))
    bits = padded.reshape(-1, _WORD).astype(jnp.uint32)
    shifted = bits << jnp.arange(_WORD, dtype=jnp.uint32)
    return jnp.sum(shifted, axis=1, dtype=jnp.uint32)


def _bits_in(words: jax.Array) -> jax.Array:
    """Counts the bits that are set in each."""
    return jax.lax.population_count(words).astype(jnp.int32)


def _position_in_word(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Finds the set bit that has `rank` set bits before it: in which half of the word, then in which quarter."""
    position = jnp.zeros_like(rank)
    width = _WORD // 2
    while width:
        low = word & jnp.uint32((1 << width) - 1)
        in_low = _bits_in(low)
        is_high = rank >= in_low
        position += jnp.where(is_high, width, 0)
        rank -= jnp.where(is_high, in_low, 0)
        word = jnp.where(is_high, word >> width, low)
        width //= 2
    return position


def places_before(old: jax.Array, new: jax.Array) -> jax.Array:
    """Finds for each kept weight its place among those that were kept before.

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
    """Moves the values of kept weights to their new places; they are 0 where a weight was not kept.

    >>> moved(jnp.array([7.0, 8.0, 9.0]), jnp.array([0, 3, 2]))
    Array([7., 0., 9.], dtype=float32)
    """
    flat = values.reshape(-1)
    return flat.at[places].get(mode='fill', fill_value=0)


def move_moments(optimizer: optax.GradientTransformation, state: Any, places: Any) -> Any:
    """Moves the moments of kept weights, in the state of their optimizer, along with the weights.

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
