"""Counts scores where they are: a pass reads every array once, in its own shape, for several bounds at a time.

On one device an array may be viewed in shares for threads. On several devices each counts its own part of an array, and
the counts are summed: scores are never sent, and no axis that devices share is reshaped.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.mask_calculator.selection.counts_of_parts import (
    Predicates,
    between_before,
    count_array,
    reaching,
)
from jaxpruner.mask_calculator.selection.counts_over_devices import count_by_xla, count_per_device
from jaxpruner.mask_calculator.selection.scores import RankedArray

# Threads share an array if one is at least this part of all; else each takes arrays.
_SHARE_TO_SPLIT = 1 / 16


def count_reaching(
    arrays: Sequence[RankedArray], thresholds: jax.Array, counter: jnp.dtype
) -> jax.Array:
    """Counts how many scores of each row reach each threshold; NaN reaches none.

    Args:
      arrays: whose scores are counted.
      thresholds: table `[rows, columns]`.
      counter: unsigned dtype that holds the counts.

    Returns:
      Counts `[all rows, columns]`.
    """
    return _count(reaching, arrays, (thresholds,), counter)


def count_between_before(
    arrays: Sequence[RankedArray], thresholds: jax.Array, ends: jax.Array, counter: jnp.dtype
) -> jax.Array:
    """Counts how many scores of each row lie between two thresholds and before each end in flat order.

    The first of the thresholds `[rows, 2 or more]` is to be reached, the second not; ends are `[all rows, columns]` of
    the counter's dtype. All else is as in `count_reaching`.
    """
    return _count(between_before, arrays, (thresholds, ends), counter)


def _count(
    predicates: Predicates,
    arrays: Sequence[RankedArray],
    tables: tuple[jax.Array, ...],
    counter: jnp.dtype,
) -> jax.Array:
    if jax.device_count() == 1:
        largest = max(array.scores.size for array in arrays)
        may_split = largest >= _SHARE_TO_SPLIT * sum(array.scores.size for array in arrays)
        counts = []
        for array in arrays:
            counts.append(_count_on_one_device(predicates, counter, may_split, array, tables))
        return jnp.concatenate(counts)
    counts_of: dict[int, jax.Array] = {}
    for count, is_per_device in ((count_per_device, True), (count_by_xla, False)):
        indices = [i for i in range(len(arrays)) if arrays[i].per_device is is_per_device]
        if indices:
            scores = tuple(arrays[i].scores for i in indices)
            bounds = tuple(_bounds(arrays[i], tables) for i in indices)
            table = count(predicates, jnp.dtype(counter), scores, bounds)
            ends = np.cumsum([array.shape[0] for array in scores])
            counts_of.update(zip(indices, jnp.split(table, ends[:-1]), strict=True))
    return jnp.concatenate([counts_of[i] for i in range(len(arrays))])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # traced once for all arrays of one shape
def _count_on_one_device(
    predicates: Predicates,
    counter: jnp.dtype,
    may_split: bool,
    array: RankedArray,
    tables: tuple[jax.Array, ...],
) -> jax.Array:
    return count_array(predicates, counter, array.scores, _bounds(array, tables), may_split)


def _bounds(array: RankedArray, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    thresholds, *ends = tables
    return array.thresholds(thresholds), *[array.rows.of(table) for table in ends]
