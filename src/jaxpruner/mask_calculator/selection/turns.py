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
    meta_fields=['longest', 'prefixes'],
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
    # For each array how many scores of a row are looked at; `None`: all.
    prefixes: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, arrays: Sequence[jax.Array | Scores], row: jax.Array | int, counter: jnp.dtype
    ) -> 'Turn':
        """Finds a row by its number among the rows of all arrays `[rows, …]`."""
        numbers = [array.shape[0] for array in arrays]
        sizes = [array.size // array.shape[0] for array in arrays]
        return cls(
            [flat_rows(array) for array in arrays],
            array=look_up(np.repeat(np.arange(len(numbers), dtype=np.int32), numbers), row),
            row=look_up(np.concatenate([np.arange(n, dtype=np.int32) for n in numbers]), row),
            size=look_up(np.repeat(np.array(sizes, counter), numbers), row),
            longest=max(sizes),
        )

    def ask(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Calls a function of the row `[size]` and inputs; the result has one shape, whichever array it is.

        The function is in the program once for each array. What is computed from its results is there once for all.
        """

        def of_array(i: int) -> Callable[..., Any]:
            length = None if self.prefixes is None else self.prefixes[i]
            return lambda rows, row, *inputs: function(_row(rows[i], row, length), *inputs)

        if len(self.rows) == 1:
            return of_array(0)(self.rows, self.row, *inputs)
        branches = [of_array(i) for i in range(len(self.rows))]
        return lax.switch(self.array, branches, self.rows, self.row, *inputs)

    def copied(self, dtype: jnp.dtype, lengths: Sequence[int], length_of_row: jax.Array) -> 'Turn':
        """Copies the scores of the row to a buffer, padded with NaN.

        Args:
          dtype: the buffer's.
          lengths: so much of the buffer may be looked at; the first is how long it is.
          length_of_row: which of them it is for this row.
        """
        buffer = self.ask(functools.partial(_padded, lengths[0], dtype))
        return Turn(
            rows=[buffer] * len(lengths),
            array=length_of_row,
            row=jnp.int32(0),
            size=self.size,
            longest=lengths[0],
            prefixes=tuple(lengths),
        )


def look_up(table: np.ndarray, row: jax.Array | int) -> jax.Array:
    """Finds what a table of constants says of a row."""
    if np.all(table == table[0]):
        return jnp.asarray(table[0])
    return lax.dynamic_index_in_dim(jnp.asarray(table), row, keepdims=False)


def _row(rows: jax.Array | Scores, row: jax.Array, length: int | None = None) -> jax.Array | Scores:
    if rows.ndim > 1:
        rows = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), rows)
    return rows if length is None else jax.tree.map(lambda leaf: leaf[:length], rows)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all arrays of one shape
def _padded(length: int, dtype: jnp.dtype, row: jax.Array | Scores) -> jax.Array:
    scores = read(row).astype(dtype)
    return jnp.pad(scores, (0, length - row.size), constant_values=jnp.nan)
