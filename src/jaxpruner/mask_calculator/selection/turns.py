"""Rows that take turns, so that one program serves the rows of many arrays."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.mask_calculator.selection.scores import Scores, read
from jaxpruner.mask_calculator.selection.tables import flat_rows

# A row of at most so many scores may be copied.
LONGEST_BUFFER = 2**19


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['rows', 'array', 'row', 'size'],
    meta_fields=['longest'],
)
@dataclasses.dataclass(frozen=True)
class Turn:
    """One row of one of several arrays: the row whose turn it is."""

    # For each array its only row [size], or its rows [rows, size].
    rows: Sequence[jax.Array | Scores]
    array: jax.Array  # which of the arrays
    row: jax.Array  # which row of that array
    size: jax.Array  # how many scores the row has
    longest: int  # how many scores a row has at most

    @classmethod
    def of(
        cls, arrays: Sequence[jax.Array | Scores], row: jax.Array | int, counter: jnp.dtype
    ) -> 'Turn':
        """Finds a row by its number among the rows of all arrays `[rows, …]`."""
        numbers = [array.shape[0] for array in arrays]
        sizes = [array.size // array.shape[0] for array in arrays]
        return cls(
            [flat_rows(array) for array in arrays],
            array=_look_up(np.repeat(np.arange(len(numbers), dtype=np.int32), numbers), row),
            row=_look_up(np.concatenate([np.arange(n, dtype=np.int32) for n in numbers]), row),
            size=_look_up(np.repeat(np.array(sizes, counter), numbers), row),
            longest=max(sizes),
        )

    def ask(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Calls a function of the row `[size]` and inputs; the result has one shape, whichever array it is.

        The function is in the program once for each array. What is computed from its results is there once for all.
        """

        def of_array(i: int) -> Callable[..., Any]:
            return lambda rows, row, *inputs: function(_row(rows[i], row), *inputs)

        if len(self.rows) == 1:
            return of_array(0)(self.rows, self.row, *inputs)
        branches = [of_array(i) for i in range(len(self.rows))]
        return lax.switch(self.array, branches, self.rows, self.row, *inputs)

    def copied(self, dtype: jnp.dtype) -> 'Turn':
        """Copies the scores of the row to an array that is as long as the longest, padded with NaN."""
        buffer = self.ask(functools.partial(_padded, self.longest, dtype))
        none = jnp.int32(0)
        return dataclasses.replace(self, rows=[buffer], array=none, row=none)


def _look_up(table: np.ndarray, row: jax.Array | int) -> jax.Array:
    if np.all(table == table[0]):
        return jnp.asarray(table[0])
    return lax.dynamic_index_in_dim(jnp.asarray(table), row, keepdims=False)


def _row(rows: jax.Array | Scores, row: jax.Array) -> jax.Array | Scores:
    if rows.ndim == 1:
        return rows
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), rows)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all arrays of one shape
def _padded(length: int, dtype: jnp.dtype, row: jax.Array | Scores) -> jax.Array:
    scores = read(row).astype(dtype)
    return jnp.pad(scores, (0, length - row.size), constant_values=jnp.nan)
