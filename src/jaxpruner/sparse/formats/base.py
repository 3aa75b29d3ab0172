"""What every format offers, and what is known about a leaf before it is packed."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

StoredArrays = Mapping[str, np.ndarray]  # those that a leaf is packed into, by name

# Arrays of a few numbers, whatever the size of the leaf.
SMALL_KEYS = frozenset({'shape', 'pattern'})


class ArraySpec(NamedTuple):
    """Shape and dtype of an array that does not exist yet."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def shape_spec(mask: np.ndarray) -> ArraySpec:
    """Shape and dtype of the array that holds the shape of a leaf with this mask."""
    return ArraySpec((mask.ndim,), np.dtype('int64'))


class KeptPattern(NamedTuple):
    """Which weights of a leaf are kept."""

    mask: np.ndarray  # bool, in the leaf's shape
    kept: int
    # If True, the format must reproduce the mask exactly, also where a kept weight is zero.
    is_given: bool

    @classmethod
    def of(cls, mask: np.ndarray, is_given: bool = False) -> 'KeptPattern':
        """Counts the kept weights of a mask of booleans."""
        kept = int(np.count_nonzero(mask))
        return cls(mask, kept, is_given)


class Plan(NamedTuple):
    """How a leaf is stored: the arrays that it takes in a format."""

    format_name: str
    arrays: dict[str, ArraySpec]
    settings: tuple[int, ...] = ()  # the format's own, such as the shape of a block

    @property
    def bytes(self) -> int:
        """The number of bytes in all arrays."""
        return sum(spec.bytes for spec in self.arrays.values())

    @property
    def weight_bytes(self) -> int:
        """The bytes that grow with the number of weights."""
        return sum(spec.bytes for key, spec in self.arrays.items() if key not in SMALL_KEYS)

    def within(self, most_bytes: int) -> 'Plan | None':
        """The plan, or `None` if its weights take more bytes."""
        return self if self.weight_bytes <= most_bytes else None


class StorageFormat(Protocol):
    """One way to leave out the zeros of a leaf."""

    name: str
    values_key: str  # the array of kept weights
    keys: frozenset[str]  # all arrays

    def plan(self, pattern: KeptPattern, dtype: np.dtype, most_bytes: int) -> Plan | None:
        """Plans the smallest arrays; `None` if the pattern does not fit, or they take more than `most_bytes`."""
        ...

    def pack(self, array: np.ndarray, mask: np.ndarray, plan: Plan) -> StoredArrays:
        """Returns the planned arrays."""
        ...

    def shape(self, arrays: StoredArrays) -> tuple[int, ...]:
        """Returns the leaf's shape; raises `ValueError` if the arrays have none."""
        ...

    def check(self, arrays: StoredArrays) -> None:
        """Raises `ValueError` if `pack` could not have made the arrays; needs no more memory than they do."""
        ...

    def unpack(self, arrays: StoredArrays) -> np.ndarray:
        """Returns the leaf; the arrays were checked before."""
        ...
