"""Counts scores where they are: a pass reads every array once, in its own shape, for several bounds at a time.

On one device an array may be viewed in shares for threads. On several devices each counts its own part of an array, and
the counts are summed: scores are never sent, and no axis that devices share is reshaped.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.mask_calculator.selection.counts_of_parts import (
    Predicates,
    between_before,
    count_all,
    reaching,
)
from jaxpruner.mask_calculator.selection.counts_over_devices import count_by_xla, count_per_device
from jaxpruner.mask_calculator.selection.scores import Scores


def count_reaching(
    arrays: Sequence[jax.Array | Scores],
    thresholds: Sequence[jax.Array],
    counter: jnp.dtype,
    per_device: Sequence[bool] | None = None,
) -> jax.Array:
    """Counts how many scores of each row reach each threshold; NaN reaches none.

    Args:
      arrays: floats `[rows, …]`, or `Scores`.
      thresholds: for each array `[rows, columns]` of its dtype.
      counter: unsigned dtype that holds the counts.
      per_device: for each array whether devices that share it count their own parts; none by default.

    Returns:
      Counts `[all rows, columns]`.
    """
    bounds = [(own_thresholds,) for own_thresholds in thresholds]
    return _count(reaching, arrays, bounds, counter, per_device)


def count_between_before(
    arrays: Sequence[jax.Array | Scores],
    thresholds: Sequence[jax.Array],
    ends: Sequence[jax.Array],
    counter: jnp.dtype,
    per_device: Sequence[bool] | None = None,
) -> jax.Array:
    """Counts how many scores of each row lie between two thresholds and before each end in flat order.

    The first of the thresholds `[rows, 2 or more]` is to be reached, the second not; ends are `[rows, columns]` of the
    counter's dtype. All else is as in `count_reaching`.
    """
    bounds = list(zip(thresholds, ends, strict=True))
    return _count(between_before, arrays, bounds, counter, per_device)


def _count(
    predicates: Predicates,
    arrays: Sequence[jax.Array | Scores],
    bounds: Sequence[tuple[jax.Array, ...]],
    counter: jnp.dtype,
    per_device: Sequence[bool] | None,
) -> jax.Array:
    if jax.device_count() == 1:
        return count_all(predicates, counter, arrays, bounds)
    is_per_device = per_device or [False] * len(arrays)
    tables: dict[int, jax.Array] = {}
    for count, flag in ((count_per_device, True), (count_by_xla, False)):
        indices = [i for i in range(len(arrays)) if bool(is_per_device[i]) is flag]
        if indices:
            own_arrays = tuple(arrays[i] for i in indices)
            own_bounds = tuple(bounds[i] for i in indices)
            table = count(predicates, jnp.dtype(counter), own_arrays, own_bounds)
            ends = np.cumsum([array.shape[0] for array in own_arrays])
            tables.update(zip(indices, jnp.split(table, ends[:-1]), strict=True))
    return jnp.concatenate([tables[i] for i in range(len(arrays))])
