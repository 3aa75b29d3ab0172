"""Arrays that are ranked, and where the rows of each stand in tables that have a row for every row of all arrays."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from jaxpruner.core import control
from jaxpruner.mask_calculator.selection.scores import Scores


@functools.partial(jax.tree_util.register_dataclass, data_fields=['begin'], meta_fields=['number'])
@dataclasses.dataclass(frozen=True)
class Rows:
    """So many rows of a table from `begin` on; `None` is the whole table."""

    begin: jax.Array | None
    number: int

    def of(self, table: jax.Array) -> jax.Array:
        """Takes these rows of a table `[all rows, …]`."""
        if self.begin is None:
            return table
        return lax.dynamic_slice_in_dim(table, self.begin, self.number)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['scores', 'rows', 'threshold_rows'],
    meta_fields=['per_device'],
)
@dataclasses.dataclass(frozen=True)
class RankedArray:
    """An array, and its rows in tables."""

    scores: jax.Array | Scores  # floats [rows, …]
    rows: Rows
    threshold_rows: Rows  # in tables of thresholds, which may have one row for all arrays
    per_device: bool = False  # whether devices that share the array count their own parts

    def thresholds(self, table: jax.Array) -> jax.Array:
        """Takes the thresholds of its rows from a table `[rows, columns]`, in its own dtype."""
        return self.threshold_rows.of(table).astype(self.scores.dtype)


def rows_of(arrays: Sequence[jax.Array | Scores]) -> list[Rows]:
    """Finds where the rows of each array `[rows, …]` stand in tables of the rows of all arrays."""
    numbers = np.array([array.shape[0] for array in arrays], np.uint32)
    if len(numbers) == 1:
        return [Rows(None, arrays[0].shape[0])]
    # The programs of arrays of one shape differ in this number alone.
    begins = control.hide_constants(np.cumsum(numbers, dtype=np.uint32) - numbers, arrays[0])
    return [Rows(begin, int(number)) for begin, number in zip(begins, numbers, strict=True)]


def sizes_of_rows(arrays: Sequence[jax.Array | Scores]) -> list[int]:
    """Lists how many scores each row of each array has."""
    sizes = []
    for array in arrays:
        sizes += [array.size // array.shape[0]] * array.shape[0]
    return sizes


def flat_rows(array: jax.Array | Scores) -> jax.Array | Scores:
    """Views an array `[rows, …]` as rows `[rows, size]`, or as its only row `[size]`."""
    # Under vmap XLA would copy an array that has an axis of length 1 behind that of the batch.
    shape = (-1,) if array.shape[0] == 1 else (array.shape[0], -1)
    return jax.tree.map(lambda leaf: leaf.reshape(shape), array)
