"""Counts of scores, taken where the scores are.

A pass reads every array once, in its own shape, and counts for several bounds at a time. On one device the array may be
viewed in shares for threads. Where there are more devices, each counts its own part of an array and the sums are
made of these counts: scores are never sent, and no axis that they share is reshaped.

An array has a first axis of rows that are counted each for itself (of length 1 where there is one ranking).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.mask_calculator.selection.counts_of_parts import (
    Predicates,
    before,
    count_all,
    of_rows,
    reaching,
)
from jaxpruner.mask_calculator.selection.counts_over_devices import count_apart, count_by_xla
from jaxpruner.mask_calculator.selection.scores import Scores


def count_reaching(
    arrays: Sequence[jax.Array | Scores],
    thresholds: Sequence[jax.Array],
    counter: jnp.dtype,
    apart: Sequence[bool] | None = None,
) -> jax.Array:
    """How many scores of each row reach each threshold; NaN reaches none.

    Args:
      arrays: floats `[rows, …]`, or `Scores`.
      thresholds: for each array `[rows, columns]` of its dtype.
      counter: unsigned dtype that holds the counts.
      apart: for each array whether devices that share it count their own parts; none by default.

    Returns:
      Counts `[all rows, columns]`.

    >>> count_reaching([jnp.array([[1.0, 2.0, 3.0]])], [jnp.array([[2.0, 3.0]])], jnp.uint32)
    Array([[2, 1]], dtype=uint32)
    """
    return _counts(reaching, arrays, [(bounds,) for bounds in thresholds], counter, apart)


def count_between_before(
    arrays: Sequence[jax.Array | Scores],
    brackets: Sequence[jax.Array],
    ends: Sequence[jax.Array],
    counter: jnp.dtype,
    apart: Sequence[bool] | None = None,
) -> jax.Array:
    """How many scores of each row lie in a bracket, and stand before each end in flat order.

    Args:
      arrays: floats `[rows, …]`, or `Scores`.
      brackets: for each array `[rows, 2 or more]` of its dtype: the first bound is to be reached, the second not.
      ends: for each array `[rows, columns]` of the counter's dtype.
      counter: unsigned dtype that holds the counts.
      apart: as in `count_reaching`.

    Returns:
      Counts `[all rows, columns]`.

    >>> bracket, ends = jnp.array([[2.0, 3.0]]), jnp.array([[1, 2]], jnp.uint32)
    >>> count_between_before([jnp.array([[2.0, 2.0, 3.0]])], [bracket], [ends], jnp.uint32)
    Array([[1, 2]], dtype=uint32)
    """
    return _counts(_between_before, arrays, list(zip(brackets, ends, strict=True)), counter, apart)


def _between_before(array, place, bounds):
    bracket, ends = bounds
    between = (array >= of_rows(bracket, 0, array.ndim)) & ~(
        array >= of_rows(bracket, 1, array.ndim)
    )
    found = place(ends)
    return [between & before(found, array.shape, column) for column in range(ends.shape[1])]


def _counts(
    predicates: Predicates,
    arrays: Sequence[jax.Array | Scores],
    bounds: Sequence[tuple],
    counter: Any,
    apart: Sequence[bool] | None,
) -> jax.Array:
    if jax.device_count() == 1:
        return count_all(predicates, counter, arrays, bounds)
    apart = apart or [False] * len(arrays)
    tables: dict[int, jax.Array] = {}
    for in_parts, count in ((True, count_apart), (False, count_by_xla)):
        some = [i for i, flag in enumerate(apart) if bool(flag) is in_parts]
        if some:
            table = count(
                predicates,
                jnp.dtype(counter),
                *(tuple(column[i] for i in some) for column in (arrays, bounds)),
            )
            ends = np.cumsum([arrays[i].shape[0] for i in some])
            tables.update(zip(some, jnp.split(table, ends[:-1]), strict=True))
    return jnp.concatenate([tables[i] for i in range(len(arrays))])
