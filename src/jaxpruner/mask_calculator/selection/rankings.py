"""What is ranked: each row of each array (`LeafByLeaf`), or all arrays together (`OverModel`).

`search.find_cut` works on any `Ranking`. The third that there is, `row_by_row.RowInTurn`, is a single row.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.mask_calculator.selection import counting, whole_numbers
from jaxpruner.mask_calculator.selection.ordered_floats import Order
from jaxpruner.mask_calculator.selection.scores import Scores
from jaxpruner.mask_calculator.selection.tables import RankedArray, Rows, rows_of, sizes_of_rows


class Ranking(Protocol):
    """`n` rankings, in tables with a row for each."""

    order: Order
    sizes: Any  # [n], how many scores each has
    counter: Any  # unsigned dtype that holds the sizes
    # How many scores each part of a single ranking has; `None`: rankings have no parts.
    sizes_of_parts: Any

    def thresholds(self, positions: jax.Array) -> jax.Array:
        """Makes what arrays have to reach from positions `[n, columns]`."""
        ...

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores that reach thresholds, `[n, columns]`; of a ranking with parts `[parts, columns]`."""
        ...


class LeafByLeaf:
    """Each row of each array is a ranking of its own; a pass reads all arrays.

    Arrays are floats `[rows, …]` of one dtype, or `Scores`, none of them empty.
    """

    sizes_of_parts = None

    def __init__(self, arrays: list[jax.Array | Scores], per_device: list[bool]):
        self.arrays = []
        for array, rows, flag in zip(arrays, rows_of(arrays), per_device, strict=True):
            self.arrays.append(RankedArray(array, rows, rows, flag))
        self.order = Order.of(arrays[0].dtype)
        self.sizes = sizes_of_rows(arrays)
        self.counter = whole_numbers.counter_for(max(self.sizes))

    def thresholds(self, positions: jax.Array) -> jax.Array:
        """Makes what each row has to reach from positions `[n, columns]`."""
        return self.order.value(positions)

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores that reach thresholds, `[n, columns]`."""
        return counting.count_reaching(self.arrays, thresholds, self.counter)


class OverModel:
    """All arrays are one ranking, by their scores over a scale; ties in the order of the arrays.

    Arrays are floats `[1, …]` or `Scores`, none of them empty; they are the parts of the ranking. Quotients are never
    materialised: each pass translates its thresholds to those of each array.
    """

    def __init__(
        self, arrays: list[jax.Array | Scores], divisors: jax.Array | None, per_device: bool
    ):
        dtypes = [array.dtype for array in arrays]
        if divisors is None:
            dtype = jnp.result_type(*dtypes)
            self.scales = jnp.ones(len(arrays), dtype)
        else:
            dtype = jnp.result_type(*dtypes, divisors)
            self.scales = divisors.astype(dtype)
        has_one_dtype = all(array.dtype == dtype for array in arrays)
        self._has_one_threshold = divisors is None and has_one_dtype
        self.arrays = []
        for array, rows in zip(arrays, rows_of(arrays), strict=True):
            threshold_rows = Rows(None, 1) if self._has_one_threshold else rows
            self.arrays.append(RankedArray(array, rows, threshold_rows, per_device))
        self.order = Order.of(dtype)
        self.sizes_of_parts = sizes_of_rows(arrays)
        self.sizes = [sum(self.sizes_of_parts)]
        self.counter = whole_numbers.counter_for(self.sizes[0])

    def thresholds(self, positions: jax.Array) -> jax.Array:
        """Makes what arrays have to reach from positions `[1, columns]`: `[1 or arrays, columns]`."""
        values = self.order.value(positions)
        if self._has_one_threshold:
            return values
        dtypes = [array.scores.dtype for array in self.arrays]
        return _smallest_reaching(dtypes, self.scales, values[0])

    def count_reaching(self, thresholds: jax.Array) -> jax.Array:
        """Counts the scores of each array that reach thresholds, `[arrays, columns]`."""
        return counting.count_reaching(self.arrays, thresholds, self.counter)


def _smallest_reaching(
    dtypes: Sequence[jnp.dtype], scales: jax.Array, values: jax.Array
) -> jax.Array:
    """Finds the smallest floats of each dtype that reach some values when they are divided by the scale beside it.

    Returns `[arrays, values]` in the dtype of the values, which holds each of them exactly.
    """
    thresholds = jnp.broadcast_to(values, (len(dtypes), len(values)))
    for dtype in dict.fromkeys(dtypes):
        indices = np.array([i for i in range(len(dtypes)) if dtypes[i] == dtype])
        scale = jnp.broadcast_to(scales[indices][:, None], (len(indices), len(values)))
        smallest = _smallest_quotients_reaching(Order.of(dtype), scale, values)
        thresholds = thresholds.at[indices].set(smallest.astype(values.dtype))
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
