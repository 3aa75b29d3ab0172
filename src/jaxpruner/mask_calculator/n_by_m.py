"""N:M masks by a tournament inside each group."""

import collections
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import control

_MOST_BITS = 32  # of the numbers that stand for groups
_WORD = 32  # bits in which wins are counted
_MOST_THAT_SHARE = 16  # of more members so few fit in a word that sharing saves nothing


def keep_n_of_m(scores: jax.Array, n: jax.Array | int, m: int, axis: int = -1) -> jax.Array:
    """N:M masks by a tournament: each pair of a group is compared once, and a weight is kept if fewer than n beat it.

    Args:
      scores: float array.
      n: kept in each group; may be traced.
      m: the groups' length. Where it does not divide the axis, the last group is shorter and keeps min(n, its length).
      axis: the axis along which groups lie.

    Returns:
      uint8 array of the scores' shape.

    >>> keep_n_of_m(jnp.array([1.0, 2.0, 2.0, 0.0, 5.0]), 1, 4)
    Array([0, 0, 1, 0, 1], dtype=uint8)
    """
    axis %= scores.ndim
    length = scores.shape[axis]
    whole = length - length % m
    if whole == length:
        return _whole_groups_mask(scores, n, m, axis)
    first = jax.lax.slice_in_dim(scores, 0, whole, axis=axis)
    last = jax.lax.slice_in_dim(scores, whole, length, axis=axis)
    parts = [
        _whole_groups_mask(first, n, m, axis),
        _whole_groups_mask(last, n, length - whole, axis),
    ]
    return jnp.concatenate(parts, axis)


def _whole_groups_mask(scores: jax.Array, n: jax.Array | int, m: int, axis: int) -> jax.Array:
    grouped = scores.reshape(
        *scores.shape[:axis], scores.shape[axis] // m, m, *scores.shape[axis + 1 :]
    )
    kept = _winners(
        [jax.lax.index_in_dim(grouped, i, axis + 1, keepdims=False) for i in range(m)], n
    )
    if jax.default_backend() != 'cpu' or m > _MOST_BITS:
        return jnp.stack([one.astype(jnp.uint8) for one in kept], axis + 1).reshape(scores.shape)
    # Stacked, they would be found by a loop over all groups for each place, which reads all scores.
    dtype = next(
        dtype for dtype in (jnp.uint8, jnp.uint16, jnp.uint32) if m <= jnp.iinfo(dtype).bits
    )
    bits = functools.reduce(
        jnp.bitwise_or, [one << place for place, one in enumerate(kept)]
    ).astype(dtype)
    return control.compute_apart(functools.partial(_spread, m=m, axis=axis), bits).reshape(
        scores.shape
    )


def _winners(members: Sequence[jax.Array], n: jax.Array | int) -> list[jax.Array]:
    """For each member of the groups 1 where it is one of the best n, else 0, in uint32.

    Words hold a count of wins for several members each, if these are not too many: in one word, one addition counts for
    both of a pair. A member's field has a bit more than its wins need, which is set as soon as they are enough.
    """
    m = len(members)
    field = (m - 1).bit_length() + 1
    in_a_word = _WORD // field if m <= _MOST_THAT_SHARE else 1
    units = [1 << field * (place % in_a_word) for place in range(m)]
    words = [places // in_a_word for places in range(m)]
    # They begin as if the earlier one had won each pair, and with a head start: wins over all but n reach the last bit.
    most = jnp.clip(jnp.asarray(n).astype(jnp.int32), 0, m)
    head_start = (most + (2 ** (field - 1) - m)).astype(jnp.uint32)
    counts = []
    for word in range(words[-1] + 1):
        own = [place for place in range(m) if words[place] == word]
        start = head_start * np.uint32(sum(units[i] for i in own))
        start += np.uint32(sum((m - 1 - i) * units[i] for i in own))
        counts.append(jnp.broadcast_to(start, members[0].shape))
    for earlier, later in itertools.combinations(range(m), 2):
        # Ties go to the later one, and so does a NaN before it.
        later_wins = (members[later] >= members[earlier]) | jnp.isnan(members[earlier])
        changes = collections.Counter({words[later]: units[later]})
        changes[words[earlier]] -= units[earlier]
        for word, change in changes.items():
            counts[word] += jnp.where(later_wins, np.uint32(change % 2**_WORD), np.uint32(0))
    return [counts[words[i]] >> (field * (i % in_a_word) + field - 1) & 1 for i in range(m)]


def _spread(bits: jax.Array, m: int, axis: int) -> jax.Array:
    """The mask of groups of which each has a number whose bit `i` says whether the i-th of `m` is kept."""
    places = jnp.arange(m, dtype=bits.dtype).reshape(m, *[1] * (bits.ndim - axis - 1))
    return (jnp.expand_dims(bits, axis + 1) >> places & 1).astype(jnp.uint8)
