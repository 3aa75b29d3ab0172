"""What is known about a leaf before it is packed, and what a format would take."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

StoredArrays = Mapping[str, np.ndarray]  # those that a leaf is packed into, by name


class Kept(NamedTuple):
    """Which weights of a leaf are kept.

    Attributes:
      mask: bool, in the leaf's shape.
      count: how many are kept.
      is_given: whether the format must reproduce the mask exactly, also where a kept weight is zero.
    """

    mask: np.ndarray
    count: int
    is_given: bool = False

    @classmethod
    def of(cls, mask: np.ndarray, is_given: bool = False) -> 'Kept':
        """Counts the kept weights of a mask of booleans."""
        return cls(mask, int(np.count_nonzero(mask)), is_given)


class Plan(NamedTuple):
    """What a leaf takes in a format.

    Attributes:
      bytes: of all arrays but those of a few numbers, whatever the size of the leaf.
      settings: the format's own, such as the shape of a block.
    """

    bytes: int
    settings: tuple[int, ...] = ()
