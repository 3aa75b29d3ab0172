"""N:M masks by a tournament inside each group."""

import collections
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import control

_MOST_BITS = 32  # of the numbers that stand for groups
_WORD = 32  # bits in which wins are counted
_MOST_THAT_SHARE = 16  # of more members so few fit in a word that sharing saves nothing


def keep_n_of_m(
    scores: jax.Array, n: jax.Array | int, m: int, axis: int | tuple[int, ...] = -1
) -> jax.Array:
    """Keeps the best n of each m scores along an axis, or along several as one; returns a uint8 mask.

    Each pair of a group is compared once, and a weight is kept if fewer than n beat it. `n` may be traced. Where m does
    not divide the axis, the last group is shorter and keeps min(n, its length).

    >>> keep_n_of_m(jnp.array([1.0, 2.0, 2.0, 0.0, 5.0]), 1, 4)
    Array([0, 0, 1, 0, 1], dtype=uint8)
    """
    if isinstance(axis, tuple):
        return _keep_along_several(scores, n, m, axis)
    axis %= scores.ndim
    length = scores.shape[axis]
    in_full_groups = length - length % m
    if in_full_groups == length:
        return _full_groups_mask(scores, n, m, axis)
    full = jax.lax.slice_in_dim(scores, 0, in_full_groups, axis=axis)
    last = jax.lax.slice_in_dim(scores, in_full_groups, length, axis=axis)
    full_mask = _full_groups_mask(full, n, m, axis)
    last_mask = _full_groups_mask(last, n, length - in_full_groups, axis)
    return jnp.concatenate([full_mask, last_mask], axis)


def _keep_along_several(
    scores: jax.Array, n: jax.Array | int, m: int, axes: tuple[int, ...]
) -> jax.Array:
    """The mask of groups along several axes, the last of which is the innermost."""
    first = min(axis % scores.ndim for axis in axes)
    beside = tuple(range(first, first + len(axes)))
    # Axes that are beside each other already stay where they are.
    moved = jnp.moveaxis(scores, axes, beside)
    before, after = moved.shape[:first], moved.shape[first + len(axes) :]
    length = math.prod(scores.shape[axis] for axis in axes)
    mask = keep_n_of_m(moved.reshape(*before, length, *after), n, m, first)
    return jnp.moveaxis(mask.reshape(moved.shape), beside, axes)


def _full_groups_mask(scores: jax.Array, n: jax.Array | int, m: int, axis: int) -> jax.Array:
    before, after = scores.shape[:axis], scores.shape[axis + 1 :]
    groups = scores.reshape(*before, scores.shape[axis] // m, m, *after)
    members = []
    for i in range(m):
        members.append(jax.lax.index_in_dim(groups, i, axis + 1, keepdims=False))
    winners = _winners(members, n)
    if jax.default_backend() != 'cpu' or m > _MOST_BITS:
        flags = [winner.astype(jnp.uint8) for winner in winners]
        return jnp.stack(flags, axis + 1).reshape(scores.shape)
    # Stacked, each would be computed by a loop over all groups, which reads all scores.
    bits = winners[0] << 0
    for i in range(1, m):
        bits = jnp.bitwise_or(bits, winners[i] << i)
    spread = functools.partial(_spread, m=m, axis=axis)
    return control.compute_apart(spread, bits.astype(_bits_dtype(m))).reshape(scores.shape)


def _bits_dtype(m: int) -> Any:
    """The narrowest unsigned integer of at least m bits."""
    for dtype in (jnp.uint8, jnp.uint16):
        if m <= jnp.iinfo(dtype).bits:
            return dtype
    return jnp.uint32


def _winners(members: Sequence[jax.Array], n: jax.Array | int) -> list[jax.Array]:
    """For each member of the groups 1 where it is among the best n, else 0, in uint32.

    A word counts the wins of several members, if these are not too many: one addition counts for both of a pair. A
    member's field has a bit more than its wins need, which is set as soon as they are enough.
    """
    m = len(members)
    field = (m - 1).bit_length() + 1
    per_word = _WORD // field if m <= _MOST_THAT_SHARE else 1
    counts = _first_counts(m, n, field, per_word)
    counts = [jnp.broadcast_to(count, members[0].shape) for count in counts]
    for earlier, later in itertools.combinations(range(m), 2):
        # Ties go to the later member, and so does a NaN before it.
        is_later_better = (members[later] >= members[earlier]) | jnp.isnan(members[earlier])
        changes = collections.Counter({later // per_word: 1 << field * (later % per_word)})
        changes[earlier // per_word] -= 1 << field * (earlier % per_word)
        for word, change in changes.items():
            step = np.uint32(change % 2**_WORD)
            counts[word] += jnp.where(is_later_better, step, np.uint32(0))
    winners = []
    for i in range(m):
        last_bit = field * (i % per_word) + field - 1
        winners.append(counts[i // per_word] >> last_bit & 1)
    return winners


def _first_counts(m: int, n: jax.Array | int, field: int, per_word: int) -> list[jax.Array]:
    """The words of `m` members, as if the earlier of each pair had won.

    Each field has a head start, so that more wins than all but n reach its last bit.
    """
    most = jnp.clip(jnp.asarray(n).astype(jnp.int32), 0, m)
    head_start = (most + (2 ** (field - 1) - m)).astype(jnp.uint32)
    counts = []
    for first in range(0, m, per_word):
        units, wins = 0, 0
        for i in range(first, min(first + per_word, m)):
            unit = 1 << field * (i % per_word)
            units += unit
            wins += (m - 1 - i) * unit
        counts.append(head_start * np.uint32(units) + np.uint32(wins))
    return counts


def _spread(bits: jax.Array, m: int, axis: int) -> jax.Array:
    """The mask of groups of which each has a number whose bit `i` says whether the i-th of `m` is kept."""
    after = [1] * (bits.ndim - axis - 1)
    positions = jnp.arange(m, dtype=bits.dtype).reshape(m, *after)
    return (jnp.expand_dims(bits, axis + 1) >> positions & 1).astype(jnp.uint8)
