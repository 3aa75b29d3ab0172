"""Arrays in contiguous parts, so that leaves larger than the memory can be read, ranked and written."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Weights of a part. Work on a part takes some tens of bytes a weight, so some tens of megabytes in all.
PART_SIZE = 1 << 21


class Part(NamedTuple):
    """A contiguous run of an array's weights that is an array itself."""

    start: int  # flat index of the first weight
    offset: tuple[int, ...]  # index of the first weight along each axis
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def of(self, array: np.ndarray) -> np.ndarray:
        """Returns a view of this part of the array."""
        return array.reshape(-1)[self.start : self.start + self.size].reshape(self.shape)


def parts_of(
    shape: Sequence[int], deepest: int | None = None, multiple: int = 1, size: int = PART_SIZE
) -> Iterator[Part]:
    """Cuts an array, in flat order, along the first axis whose rows are small enough.

    Args:
      shape: the array's.
      deepest: the last axis that may be cut; by default the last.
      multiple: parts along axis `deepest` start at multiples of this; along others where there is room for it.
      size: how many weights a part has, at most; more only if axis `deepest` cannot be cut finer.

    >>> [part.shape for part in parts_of((5, 4), size=8)], [part.start for part in parts_of((5, 4), size=8)]
    ([(2, 4), (2, 4), (1, 4)], [0, 8, 16])
    """
    shape = tuple(shape)
    rank = len(shape)
    if not rank or not math.prod(shape):
        yield Part(0, (0,) * rank, shape)
        return
    deepest = rank - 1 if deepest is None else deepest
    axis = 0
    while axis < deepest and math.prod(shape[axis + 1 :]) > size:
        axis += 1
    inner_shape = shape[axis + 1 :]
    row_size = math.prod(inner_shape)
    length = max(size // row_size, multiple if axis == deepest else 1)
    if length >= multiple:
        length -= length % multiple
    for row, outer_offset in enumerate(np.ndindex(shape[:axis])):
        for first in range(0, shape[axis], length):
            start = (row * shape[axis] + first) * row_size
            offset = (*outer_offset, first, *(0,) * len(inner_shape))
            part_length = min(length, shape[axis] - first)
            yield Part(start, offset, (*(1,) * axis, part_length, *inner_shape))
