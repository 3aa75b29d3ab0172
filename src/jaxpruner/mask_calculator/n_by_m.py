"""N:M masks by a tournament inside each group.

Each pair of a group is compared once, and a score is kept if it beats at least m - n others. The wins of several scores
are counted in one word, each in a field of bits of its own. Which are the best 2 of the 4 scores 5 1 7 3?

1. A field needs 3 bits: wins go up to 3, which takes two, and the last bit is set as soon as they are enough. That is
   so from 4 on. Two wins are enough, so that each field has a head start of 2.
2. At first the earlier of each pair counts as the winner: the scores have 3, 2, 1 and 0 wins.
3. Where the later is at least as large, one addition gives it the win of the earlier. The third score beats the first:
   add 1 to its field and take 1 from the first, which is to add 001000000 - 000000001.

        score              3    7    1    5      the first stands in the lowest bits
        at first          010  011  100  101     2 + 0, 2 + 1, 2 + 2, 2 + 3
        7 beats 5         010  100  100  100
        7 beats 1         010  101  011  100
        3 beats 1         011  101  010  100
        last bits          0    1    0    1      keep 7 and 5

Where the two fields are in different words, the word of the earlier has 1 taken from its field: in unsigned words of 32
bits that is to add 2^32 less the unit of the field.
"""

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

_MOST_BITS = 32  # of a word whose bits are the mask of a group
_WORD = 32  # bits in which wins are counted
_MOST_THAT_SHARE = 16  # with more members few fit in a word, and sharing saves nothing


def keep_n_of_m(
    scores: jax.Array,
    n: jax.Array | int,
    m: int,
    axis: int | tuple[int, ...] = -1,
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
    scores: jax.Array,
    n: jax.Array | int,
    m: int,
    axes: tuple[int, ...],
) -> jax.Array:
    """Makes the mask of groups along several axes, the last of which is the innermost."""
    first = min(axis % scores.ndim for axis in axes)
    beside = tuple(range(first, first + len(axes)))
    # Axes that are beside each other already stay where they are.
    moved = jnp.moveaxis(scores, axes, beside)
    before = moved.shape[:first]
    after = moved.shape[first + len(axes) :]
    length = math.prod(scores.shape[axis] for axis in axes)
    as_one_axis = moved.reshape(*before, length, *after)
    mask = keep_n_of_m(as_one_axis, n, m, first)
    return jnp.moveaxis(mask.reshape(moved.shape), beside, axes)


def _full_groups_mask(
    scores: jax.Array,
    n: jax.Array | int,
    m: int,
    axis: int,
) -> jax.Array:
    before = scores.shape[:axis]
    after = scores.shape[axis + 1 :]
    group_count = scores.shape[axis] // m
    groups = scores.reshape(*before, group_count, m, *after)
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
    narrow_bits = bits.astype(_bits_dtype(m))
    mask = control.compute_apart(spread, narrow_bits)
    return mask.reshape(scores.shape)


def _bits_dtype(m: int) -> Any:
    """Finds the narrowest unsigned integer of at least m bits."""
    for dtype in (jnp.uint8, jnp.uint16):
        if m <= jnp.iinfo(dtype).bits:
            return dtype
    return jnp.uint32


def _winners(members: Sequence[jax.Array], n: jax.Array | int) -> list[jax.Array]:
    """Tells of each member of the groups whether it is among the best n: 1, else 0, in uint32."""
    m = len(members)
    field_bits = (m - 1).bit_length() + 1
    per_word = _WORD // field_bits if m <= _MOST_THAT_SHARE else 1
    counts = _counts_at_first(m, n, field_bits, per_word)
    counts = [jnp.broadcast_to(count, members[0].shape) for count in counts]

    def unit_of(member: int) -> int:
        """Makes one win of a member, in its word."""
        return 1 << field_bits * (member % per_word)

    for earlier, later in itertools.combinations(range(m), 2):
        # Ties go to the later member, and so does a NaN before it.
        is_later_better = (members[later] >= members[earlier]) | jnp.isnan(members[earlier])
        changes = collections.Counter()
        changes[later // per_word] += unit_of(later)
        changes[earlier // per_word] -= unit_of(earlier)
        for word, change in changes.items():
            step = np.uint32(change % 2**_WORD)
            counts[word] += jnp.where(is_later_better, step, np.uint32(0))
    winners = []
    for i in range(m):
        last_bit = field_bits * (i % per_word) + field_bits - 1
        winners.append(counts[i // per_word] >> last_bit & 1)
    return winners


def _counts_at_first(
    m: int,
    n: jax.Array | int,
    field_bits: int,
    per_word: int,
) -> list[jax.Array]:
    """Makes the words of `m` members, as if the earlier of each pair had won.

    Each field has a head start, with which `m - n` wins set its last bit.
    """
    last_bit = 2 ** (field_bits - 1)
    most = jnp.asarray(n).astype(jnp.int32)
    most = jnp.clip(most, 0, m)
    head_start = most + (last_bit - m)
    head_start = head_start.astype(jnp.uint32)
    counts = []
    for first in range(0, m, per_word):
        units, wins = 0, 0
        for i in range(first, min(first + per_word, m)):
            unit = 1 << field_bits * (i % per_word)
            units += unit
            wins += (m - 1 - i) * unit
        head_starts = head_start * np.uint32(units)
        counts.append(head_starts + np.uint32(wins))
    return counts


def _spread(
    bits: jax.Array,
    m: int,
    axis: int,
) -> jax.Array:
    """Makes the mask of groups; bit `i` of a group's word says whether the i-th of `m` is kept."""
    after = [1] * (bits.ndim - axis - 1)
    index = jnp.arange(m, dtype=bits.dtype).reshape(m, *after)
    kept = jnp.expand_dims(bits, axis + 1) >> index & 1
    return kept.astype(jnp.uint8)
