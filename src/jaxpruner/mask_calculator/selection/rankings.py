"""What a ranking is over: each row of each array (`LeafByLeaf`), or all arrays together (`OverModel`).

A search of thresholds asks a ranking five things, in tables that have a row for each of its `n` rankings, or for each
row of all arrays. Both kinds have `n = len(sizes)` rankings with `sizes` scores each.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxpruner.mask_calculator.selection import counting, tables, whole_numbers
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores


class LeafByLeaf:
    """Each row of each array is a ranking of its own.

    Arrays are floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
    """

    def __init__(self, arrays: list[jax.Array | Scores], per_device: list[bool]):
        self.arrays = arrays
        self.order = Order.of(arrays[0].dtype)
        self.rows = [array.shape[0] for array in arrays]
        self.sizes = sizes_of_rows(arrays)
        self.counter = whole_numbers.counter_for(max(self.sizes))
        self._per_device = per_device

    def thresholds(self, positions: jax.Array) -> list[jax.Array]:
        """Makes what each array has to reach, `[rows, columns]`, from positions `[n, columns]`."""
        return tables.split(self.order.value(positions), self.rows)

    def count_reaching(self, thresholds: list[jax.Array]) -> jax.Array:
        """Counts the scores that reach thresholds, `[n, columns]`."""
        return counting.count_reaching(self.arrays, thresholds, self.counter, self._per_device)

    def count_ties(self, thresholds: list[jax.Array], ends: jax.Array) -> jax.Array:
        """Counts the ties before ends `[all rows, columns]`; `[n, columns]`."""
        own_ends = tables.split(ends, self.rows)
        return counting.count_between_before(
            self.arrays, thresholds, own_ends, self.counter, self._per_device
        )

    def ends_of_rows(self, ends: jax.Array) -> jax.Array:
        """Translates ends in the flat order of the rankings, `[n, columns]`, to the rows of all arrays."""
        return ends

    def rooms_of_rows(self, room: jax.Array, thresholds: list[jax.Array]) -> jax.Array:
        """Shares the room for ties of the rankings, `[n]`, among the rows of all arrays."""
        del thresholds
        return room


class OverModel:
    """All arrays are one ranking, by their scores over a scale; ties in the order of the arrays.

    Arrays are floats `[1, …]` or `Scores`, none of them empty. Quotients are never materialised: each pass translates
    its thresholds to those of each array.
    """

    def __init__(
        self, arrays: list[jax.Array | Scores], divisors: Sequence | None, per_device: bool
    ):
        sizes = [array.size for array in arrays]
        dtypes = [array.dtype for array in arrays]
        dtype = jnp.result_type(*dtypes, *(divisors or ()))
        scales = []
        for divisor in divisors or [1] * len(arrays):
            scales.append(jnp.asarray(divisor).astype(dtype))
        offsets = itertools.accumulate(sizes[:-1], initial=0)
        self.arrays = arrays
        self.order = Order.of(dtype)
        self.rows = [1] * len(arrays)
        self.sizes = [sum(sizes)]
        self.counter = whole_numbers.counter_for(sum(sizes))
        self.scales = jnp.stack(scales)
        has_one_dtype = all(array.dtype == dtype for array in arrays)
        self._has_one_threshold = divisors is None and has_one_dtype
        self._offsets = jnp.array(list(offsets), self.counter)[:, None]
        self._lengths = jnp.array(sizes, self.counter)[:, None]
        self._per_device = [per_device] * len(arrays)

    def thresholds(self, positions: jax.Array) -> list[jax.Array]:
        """Makes what each array has to reach, `[1, columns]`, from positions `[1, columns]`."""
        values = self.order.value(positions)
        if self._has_one_threshold:
            return [values] * len(self.arrays)
        return _smallest_reaching(self.arrays, self.scales, values[0])

    def count_reaching(self, thresholds: list[jax.Array]) -> jax.Array:
        """Counts the scores that reach thresholds, `[1, columns]`."""
        return self._sum(self._count_each(thresholds))

    def count_ties(self, thresholds: list[jax.Array], ends: jax.Array) -> jax.Array:
        """Counts the ties before ends `[arrays, columns]`; `[1, columns]`."""
        own_ends = tables.split(ends, self.rows)
        counts = counting.count_between_before(
            self.arrays, thresholds, own_ends, self.counter, self._per_device
        )
        return self._sum(counts)

    def ends_of_rows(self, ends: jax.Array) -> jax.Array:
        """Translates ends in the flat order of the model, `[1, columns]`, to that of each array."""
        own_ends = jnp.minimum(ends - self._offsets, self._lengths)
        return jnp.where(ends > self._offsets, own_ends, 0)

    def rooms_of_rows(self, room: jax.Array, thresholds: list[jax.Array]) -> jax.Array:
        """Shares the room for ties, `[1]`, among the arrays: earlier ones fill up first."""
        counts = self._count_each(thresholds)
        ties = counts[:, :1] - counts[:, 1:2]
        running = jnp.cumsum(ties, 0, dtype=self.counter)
        earlier = jnp.concatenate([jnp.zeros_like(ties[:1]), running[:-1]])
        own_room = jnp.minimum(room - earlier, ties)
        return jnp.where(room > earlier, own_room, 0)[:, 0]

    def _count_each(self, thresholds: list[jax.Array]) -> jax.Array:
        return counting.count_reaching(self.arrays, thresholds, self.counter, self._per_device)

    def _sum(self, counts: jax.Array) -> jax.Array:
        return jnp.sum(counts, 0, keepdims=True, dtype=self.counter)


Ranking = LeafByLeaf | OverModel


def sizes_of_rows(arrays: Sequence[jax.Array | Scores]) -> list[int]:
    """Lists how many scores each row of each array has."""
    sizes = []
    for array in arrays:
        sizes += [math.prod(array.shape[1:])] * array.shape[0]
    return sizes


def _smallest_reaching(arrays: list, scales: jax.Array, values: jax.Array) -> list[jax.Array]:
    """Finds the smallest floats of each array that reach some values when they are divided by its scale."""
    thresholds: list[jax.Array] = [values] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        indices = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        scale = jnp.stack([scales[i] for i in indices])[:, None]
        scale = jnp.broadcast_to(scale, (len(indices), len(values)))
        table = _smallest_quotients_reaching(Order.of(dtype), scale, values)
        own = tables.split(table, [1] * len(indices))
        for i, own_thresholds in zip(indices, own, strict=True):
            thresholds[i] = own_thresholds
    return thresholds


def _smallest_quotients_reaching(order: Order, scale: jax.Array, values: jax.Array) -> jax.Array:
    """Finds floats `[arrays, values]`. Division rounds, so that value times scale is only near; a search begins there.

    All divisions stand in the loop. Elsewhere XLA may multiply by a reciprocal instead, which rounds in another way,
    and a threshold that was counted with would not be found again.
    """
    near = order.position((values * scale).astype(order.dtype))
    # `low` does not reach the value; `high` does, or stands after all numbers.
    low = jnp.full_like(near, order.lowest - 1)
    high = jnp.full_like(near, order.highest + 1)

    def halve(state):
        turn, low, high = state
        middle = low + (high - low) // 2
        below_or_middle = jnp.where(turn == 1, near - 8, middle)
        guess = jnp.where(turn == 0, near + 8, below_or_middle)
        is_inside = (guess > low) & (guess < high)
        probe = jnp.where(is_inside, guess, middle)
        is_open = high - low > 1
        is_enough = order.value(probe).astype(values.dtype) / scale >= values
        low = jnp.where(is_open & ~is_enough, probe, low)
        high = jnp.where(is_open & is_enough, probe, high)
        return turn + 1, low, high

    def is_any_open(state):
        _, low, high = state
        return jnp.any(high - low > 1)

    _, _, high = lax.while_loop(is_any_open, halve, (jnp.int32(0), low, high))
    return order.value(high)
