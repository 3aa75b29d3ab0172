"""Which blocks are stored: at first, and after some were dropped and others grown."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import selection
from jaxpruner.sparse.training.layouts import Layout


def balanced(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """Random blocks int32 `[*layers, groups, blocks]`; each block of inputs leads to n or n + 1 groups.

    Here n is the number of stored blocks divided by that of candidates, rounded down. A model cannot see inputs that no
    group reads, which costs more than blocks in the wrong places.

    >>> layout = Layout((), inputs=6, outputs=4, block=(1, 2), blocks=3)
    >>> np.sort(balanced(layout, np.random.default_rng(0)), axis=None)
    array([0, 1, 2, 3, 4, 5], dtype=int32)
    """
    positions = np.empty(layout.positions_shape, np.int32)
    layers = positions.reshape(-1, layout.groups, layout.blocks)
    for layer in layers:
        readers = np.zeros(layout.candidates)  # how many groups read each block of inputs
        for group in layer:
            # The blocks with the fewest readers come first; chance decides among equal ones.
            chance = rng.random(layout.candidates)
            order = np.argsort(readers + chance)
            chosen = order[: layout.blocks]
            group[:] = np.sort(chosen)
            readers[group] += 1
    return positions


def largest(norms: jax.Array, blocks: int) -> jax.Array:
    """The blocks with the largest norms of each group, ascending: int32 `[*layers, groups, blocks]`.

    >>> largest(jnp.array([[3.0, 1.0, 2.0]]), 2)
    Array([[0, 2]], dtype=int32)
    """
    _, positions = jax.lax.top_k(norms, blocks)
    positions = positions.astype(jnp.int32)
    return jnp.sort(positions, axis=-1)


class Replacement(NamedTuple):
    """The stored blocks of a leaf, after some were dropped and others grown."""

    positions: jax.Array  # int32[*layers, groups, blocks]
    is_new: jax.Array  # bool[*layers, groups, blocks]: a grown block stands here now


def replace(
    positions: jax.Array, magnitudes: jax.Array, scores: jax.Array, fraction: jax.Array | float
) -> Replacement:
    """Drops a share of the stored blocks of each matrix, and grows as many others in the same groups.

    In each matrix, `round(fraction * stored)` of the `stored` blocks are dropped, as many as of weights under a mask:
    those with the smallest magnitudes. One group may lose several blocks, and another none. Each group keeps its
    largest block, unless the fraction is 1: a group that loses all of its blocks forgets what it has learned. A dropped
    block may be grown again at once. It then keeps its place, as a kept block does.

    Args:
      positions: int32 `[*layers, groups, blocks]`.
      magnitudes: `[*layers, groups, blocks]`; blocks with the smallest are dropped.
      scores: `[*layers, groups, candidates]`; of blocks that are not kept, those with the largest are grown.
      fraction: the share that is dropped.

    >>> positions, magnitudes = jnp.array([[0, 2, 3]]), jnp.array([[5.0, 1.0, 4.0]])
    >>> replace(positions, magnitudes, scores=jnp.array([[9.0, 2.0, 1.0, 0.0]]), fraction=0.3).positions
    Array([[0, 1, 3]], dtype=int32)
    """
    drop_in_matrices = jnp.vectorize(_is_dropped, signature='(g,b),()->(g,b)')
    is_dropped = drop_in_matrices(magnitudes, fraction)
    replace_in_groups = jnp.vectorize(_replace_in_group, signature='(b),(b),(c)->(b),(b)')
    new_positions, is_new = replace_in_groups(positions, is_dropped, scores)
    return Replacement(new_positions, is_new)


def _is_dropped(magnitudes: jax.Array, fraction: jax.Array) -> jax.Array:
    """Which stored blocks of a matrix are dropped: bool`[groups, blocks]`, as the magnitudes are."""
    groups, blocks = magnitudes.shape
    stored = groups * blocks
    count = selection.share_of(jnp.uint32(stored), fraction, most=stored)
    count = jnp.minimum(count, jnp.where(fraction < 1, stored - groups, stored))
    largest = jnp.argmax(magnitudes, axis=1, keepdims=True)
    is_largest = jnp.arange(blocks) == largest
    # The largest block of each group is dropped after all others.
    ranks = _ranks(magnitudes.ravel(), last=is_largest.ravel())
    is_dropped = ranks < count
    return is_dropped.reshape(groups, blocks)


def _replace_in_group(
    positions: jax.Array, is_dropped: jax.Array, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Replaces blocks of one group. A dropped block that is grown again keeps its place; other places get new blocks.

    positions    0 2 3
    is_dropped   . x x      two blocks are dropped, so two are grown
    scores       9 2 1 0    block 0 is kept; of the others 1 and 2 score highest, and are grown
    is_new       . . x      block 2 stays, since it is grown again; block 1 takes the place of 3
    result       0 2 1
    """
    none = jnp.zeros(scores.shape, bool)
    was_stored = none.at[positions].set(True)
    is_kept = none.at[positions].set(~is_dropped)
    # NaN ranks behind all other scores, and kept blocks behind NaN.
    is_nan = jnp.isnan(scores)
    scores = jnp.where(is_nan, -jnp.inf, scores)
    ranks = _ranks(-scores, last=is_kept)
    count = jnp.sum(is_dropped)
    is_grown = (ranks < count) & ~is_kept
    is_grown_again = is_grown[positions]
    is_new = is_dropped & ~is_grown_again
    # The numbers of the new blocks stand first, ascending; the others are not read.
    new_blocks = jnp.argsort(~is_grown | was_stored, stable=True)
    which_new = jnp.cumsum(is_new) - 1
    grown = new_blocks[which_new]
    grown = grown.astype(positions.dtype)
    new_positions = jnp.where(is_new, grown, positions)
    return new_positions, is_new


def _ranks(values: jax.Array, last: jax.Array) -> jax.Array:
    """The rank of each value, 0 for the smallest; the first of equal values ranks first.

    Values that `last` flags rank behind all others.
    """
    order = jnp.lexsort((values, last))
    count = len(order)
    ascending = jnp.arange(count, dtype=jnp.int32)
    ranks = jnp.zeros(count, jnp.int32)
    return ranks.at[order].set(ascending)
