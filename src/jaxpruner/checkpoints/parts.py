"""Arrays in contiguous parts, so that leaves larger than the memory can be read, ranked and written."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Weights of a part: what is done to one takes some tens of bytes a weight, and some tens of megabytes in all.
PART_SIZE = 1 << 21


class Part(NamedTuple):
    """A contiguous run of an array's weights that is an array itself.

    >>> Part(start=8, offset=(2, 0), shape=(1, 4)).size
    4
    """

    start: int  # flat index of the first weight
    offset: tuple[int, ...]  # index of the first weight along each axis
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)


def parts_of(
    shape: Sequence[int], deepest: int | None = None, multiple: int = 1, size: int = PART_SIZE
) -> Iterator[Part]:
    """Cuts an array along the first axis whose rows are small enough.

    Args:
      shape: the array's.
      deepest: the last axis that may be cut; by default the last.
      multiple: parts along axis `deepest` start at multiples of this; along others where there is room for it.
      size: how many weights a part has, at most; more only if axis `deepest` cannot be cut finer.

    Returns:
      The parts in flat order.

    >>> [part.shape for part in parts_of((5, 4), size=8)], [part.start for part in parts_of((5, 4), size=8)]
    ([(2, 4), (2, 4), (1, 4)], [0, 8, 16])
    """
    shape = tuple(shape)
    rank = len(shape)
    if not rank or not math.prod(shape):
        yield Part(0, (0,) * rank, shape)
        return
    deepest = rank - 1 if deepest is None else deepest
    # Of the weights behind one index of each axis.
    rows = [math.prod(shape[axis + 1 :]) for axis in range(rank)]
    axis = next((axis for axis in range(deepest) if rows[axis] <= size), deepest)
    length = max(size // rows[axis], multiple if axis == deepest else 1)
    if length >= multiple:
        length -= length % multiple
    for outer, before in enumerate(np.ndindex(shape[:axis])):
        for first in range(0, shape[axis], length):
            count = min(length, shape[axis] - first)
            start = (outer * shape[axis] + first) * rows[axis]
            yield Part(
                start,
                (*before, first, *(0,) * (rank - axis - 1)),
                (*(1,) * axis, count, *shape[axis + 1 :]),
            )
