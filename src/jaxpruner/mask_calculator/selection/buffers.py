"""Many short arrays that take turns in one buffer.

What is done with a row while it is in the buffer is in the program once for all arrays. For each array there are only
two copies: of its scores to the buffer, and of its mask from a table of all masks.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.mask_calculator.selection.scores import (
    ScoresLike,
    Turn,
    look_up,
    rows_of,
    sizes_of_rows,
)

# The masks of arrays that share a buffer are made in a table of at most so many bytes.
LARGEST_TABLE = 2**25


class Buffer:
    """The buffer of some arrays `[rows, …]` of one dtype, in which their rows take turns.

    The masks are made in a table of bytes: first the bytes of each row's threshold, then the masks of all rows.

    Args:
      arrays: floats, or `Scores`, none of them empty.
      lengths: to how many scores the rows of each array are padded.
      counter: unsigned dtype that holds the sizes of rows.
    """

    def __init__(
        self,
        arrays: Sequence[ScoresLike],
        lengths: Sequence[int],
        counter: jnp.dtype,
    ):
        sizes = sizes_of_rows(arrays)
        self.number_of_rows = len(sizes)
        self._arrays = arrays
        self._counter = counter
        self._lengths = sorted(set(lengths), reverse=True)
        length_of_row: list[int] = []
        for i, array in enumerate(arrays):
            length_of_row += [self._lengths.index(lengths[i])] * array.shape[0]
        self._length_of_row = np.array(length_of_row, np.int32)
        self._threshold_bytes = arrays[0].dtype.itemsize
        bytes_of_thresholds = self._threshold_bytes * len(sizes)
        ends = bytes_of_thresholds + np.cumsum(sizes)
        self._begins = (ends - sizes).astype(np.int32)
        self._table_size = int(ends[-1])

    def turn(self, row: jax.Array) -> Turn:
        """Copies the row with this number among the rows of all arrays."""
        turn = Turn.of(self._arrays, row, self._counter)
        length = look_up(self._length_of_row, row)
        return turn.copied(self._arrays[0].dtype, self._lengths, length)

    def empty_table(self) -> jax.Array:
        """Makes a table for the thresholds and masks of all rows."""
        # A mask is written at the length of the buffer, and the next one overwrites what stands behind its row.
        longest = self._lengths[0]
        return jnp.zeros(self._table_size + longest, jnp.uint8)

    def with_mask(self, table: jax.Array, row: jax.Array, mask: jax.Array) -> jax.Array:
        """Writes the mask of a row, which is as long as the buffer, to the table; rows come in their order."""
        begin = look_up(self._begins, row)
        return lax.dynamic_update_slice_in_dim(table, mask, begin, 0)

    def with_threshold(self, table: jax.Array, row: jax.Array, threshold: jax.Array) -> jax.Array:
        """Writes the threshold of a row, a scalar, to the table.

        It stands in one array with the masks. A step of a straight-through method selects twice, once for thresholds
        alone, and XLA makes one loop of the two, unless it has dropped an array from one of them.
        """
        as_bytes = lax.bitcast_convert_type(threshold, jnp.uint8)
        written = as_bytes.reshape(self._threshold_bytes)
        return lax.dynamic_update_slice_in_dim(table, written, row * self._threshold_bytes, 0)

    def thresholds(self, table: jax.Array) -> jax.Array:
        """Reads the threshold of each row from the table."""
        shape = self.number_of_rows, self._threshold_bytes
        as_bytes = table[: math.prod(shape)].reshape(shape)
        return lax.bitcast_convert_type(as_bytes, self._arrays[0].dtype)

    def masks_of_arrays(self, table: jax.Array) -> list[jax.Array]:
        """Takes the mask of each array from the table."""
        masks = []
        for i, rows in enumerate(rows_of(self._arrays)):
            begin = lax.dynamic_index_in_dim(self._begins, rows.begin, keepdims=False)
            masks.append(_cut_out(self._arrays[i].shape, table, begin))
        return masks


@functools.partial(jax.jit, static_argnums=0)  # traced once for all arrays of one shape
def _cut_out(shape: tuple[int, ...], table: jax.Array, begin: jax.Array) -> jax.Array:
    mask = lax.dynamic_slice_in_dim(table, begin, math.prod(shape))
    return mask.reshape(shape)
