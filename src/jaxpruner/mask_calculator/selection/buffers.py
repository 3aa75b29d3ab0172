"""Many short arrays that take turns in one buffer.

What is done with a row while it is in the buffer is in the program once for all arrays. For each array there are only
two copies: of its scores to the buffer, and of its mask from a table of all masks.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpruner.mask_calculator.selection.scores import Scores
from jaxpruner.mask_calculator.selection.tables import rows_of, sizes_of_rows
from jaxpruner.mask_calculator.selection.turns import LONGEST_BUFFER, Turn, look_up

# A buffer pays for so many arrays.
_WORTH_A_BUFFER = 6
# Rows are padded to the longest of them, if that adds at most this share to what is read.
_MOST_PADDING = 0.5
# The longest row of a buffer is at most so many times as long as what is looked at of it for the shortest: to fill the
# buffer takes time, too.
_MOST_OF_BUFFER = 16
# The masks of arrays that share a buffer are made in a table of at most so many bytes.
_LARGEST_TABLE = 2**25


class Buffer:
    """The buffer of some arrays `[rows, …]` of one dtype, in which their rows take turns.

    Args:
      arrays: floats, or `Scores`, none of them empty.
      lengths: as in `Group`.
      counter: unsigned dtype that holds the sizes of rows.
    """

    def __init__(
        self,
        arrays: Sequence[jax.Array | Scores],
        lengths: Sequence[int],
        counter: jnp.dtype,
    ):
        sizes = np.array(sizes_of_rows(arrays))
        numbers = [array.shape[0] for array in arrays]
        self.number_of_rows = len(sizes)
        self._arrays = arrays
        self._counter = counter
        self._lengths = sorted(set(lengths), reverse=True)
        length_of_array = np.array([self._lengths.index(length) for length in lengths], np.int32)
        self._length_of_row = np.repeat(length_of_array, numbers)
        self._bytes = arrays[0].dtype.itemsize
        # The table begins with the bytes of each row's threshold.
        head = self._bytes * len(sizes)
        self._begins = (head + np.cumsum(sizes) - sizes).astype(np.int32)
        self._size = int(head + sum(sizes))

    def turn(self, row: jax.Array) -> Turn:
        """Copies the row with this number among the rows of all arrays."""
        turn = Turn.of(self._arrays, row, self._counter)
        length = look_up(self._length_of_row, row)
        return turn.copied(self._arrays[0].dtype, self._lengths, length)

    def no_masks(self) -> jax.Array:
        """Makes a table for the masks of all rows."""
        # A mask is written at the length of the buffer, and the next one overwrites what stands behind its row.
        return jnp.zeros(self._size + self._lengths[0], jnp.uint8)

    def with_mask(self, masks: jax.Array, row: jax.Array, mask: jax.Array) -> jax.Array:
        """Writes the mask of a row, which is as long as the buffer, to the table; rows come in their order."""
        return lax.dynamic_update_slice_in_dim(masks, mask, look_up(self._begins, row), 0)

    def with_threshold(self, masks: jax.Array, row: jax.Array, threshold: jax.Array) -> jax.Array:
        """Writes the threshold of a row, a scalar, to the table.

        It stands in one array with the masks. A step of a straight-through method selects twice, once for thresholds
        alone, and XLA makes one loop of the two, unless it has dropped an array from one of them.
        """
        written = lax.bitcast_convert_type(threshold, jnp.uint8).reshape(self._bytes)
        return lax.dynamic_update_slice_in_dim(masks, written, row * self._bytes, 0)

    def thresholds(self, masks: jax.Array) -> jax.Array:
        """Reads the threshold of each row from the table."""
        head = masks[: self._bytes * self.number_of_rows].reshape(self.number_of_rows, self._bytes)
        return lax.bitcast_convert_type(head, self._arrays[0].dtype)

    def masks_of_arrays(self, masks: jax.Array) -> list[jax.Array]:
        """Takes the mask of each array from the table."""
        results = []
        for array, rows in zip(self._arrays, rows_of(self._arrays), strict=True):
            begin = lax.dynamic_index_in_dim(self._begins, rows.begin, keepdims=False)
            results.append(_cut_out(array.shape, masks, begin))
        return results


@functools.partial(jax.jit, static_argnums=0)  # traced once for all arrays of one shape
def _cut_out(shape: tuple[int, ...], masks: jax.Array, begin: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(masks, begin, math.prod(shape)).reshape(shape)


class Group(NamedTuple):
    """Arrays that take turns in one program.

    Attributes:
      indices: which arrays.
      lengths: of how many scores the beginning of the buffer is that each array's rows are padded to; `None`: rows are
        read where they are.
    """

    indices: list[int]
    lengths: list[int] | None


def groups(arrays: Sequence[jax.Array | Scores]) -> list[Group]:
    """Divides arrays into groups: few, since each is a program."""
    lengths = [array.size // array.shape[0] for array in arrays]
    others = []
    short = []
    for i, length in enumerate(lengths):
        fits = length <= LONGEST_BUFFER and arrays[i].size <= _LARGEST_TABLE
        (short if fits else others).append(i)
    short.sort(key=lambda i: -lengths[i])
    divided = []
    for together in _sharing_a_buffer(short, [array.size for array in arrays], lengths):
        if len(together) < _WORTH_A_BUFFER:
            others += together
        else:
            divided.append(Group(together, _padded_lengths([lengths[i] for i in together])))
    if others:
        divided.append(Group(others, None))
    return divided


def _sharing_a_buffer(
    falling: Sequence[int], sizes: Sequence[int], lengths: Sequence[int]
) -> list[list[int]]:
    """Divides arrays of falling lengths into those that share a buffer and a table of masks."""
    divided: list[list[int]] = []
    room = 0
    for i in falling:
        is_much_shorter = divided and _MOST_OF_BUFFER * lengths[i] < lengths[divided[-1][0]]
        if not divided or is_much_shorter or sizes[i] > room:
            divided.append([])
            room = _LARGEST_TABLE
        divided[-1].append(i)
        room -= sizes[i]
    return divided


def _padded_lengths(falling: Sequence[int]) -> list[int]:
    """Finds the lengths to which rows of falling lengths are padded: few of them, since each is compiled."""
    padded: list[int] = []
    rest = total = sum(falling)
    for i, length in enumerate(falling):
        is_first = not padded
        padding_of_rest = 0 if is_first else padded[-1] * (len(falling) - i) - rest
        padded.append(length if is_first or padding_of_rest > _MOST_PADDING * total else padded[-1])
        rest -= length
    return padded
