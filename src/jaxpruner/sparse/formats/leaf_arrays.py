"""What is known about a leaf before it is packed, and checks of packed arrays that may come from elsewhere.

The caller of a check puts the leaf's name before the message.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

StoredArrays = Mapping[str, np.ndarray]  # those that a leaf is packed into, by name
MOST_AXES = 32  # of an array in the oldest NumPy that is allowed


class Kept(NamedTuple):
    """Which weights of a leaf are kept.

    Attributes:
      mask: bool, in the leaf's shape.
      is_given: whether the format must reproduce the mask exactly, also where a kept weight is zero.
    """

    mask: np.ndarray
    is_given: bool = False

    @property
    def count(self) -> int:
        """How many are kept."""
        return int(np.count_nonzero(self.mask))


class Plan(NamedTuple):
    """What a leaf takes in a format.

    Attributes:
      bytes: of all arrays but those of a few numbers, whatever the size of the leaf.
      settings: the format's own, such as the shape of a block.
    """

    bytes: int
    settings: tuple[int, ...] = ()


def index_dtype(bound: int) -> np.dtype:
    """The shortest dtype of at least 16 bits for numbers from 0 to below a bound."""
    return np.min_scalar_type(max(bound - 1, 2**8))


def shape_from(numbers: np.ndarray) -> tuple[int, ...]:
    """Returns the shape that an array of whole numbers holds."""
    check_array('shape', numbers, axes=1)
    shape = numbers.tolist()
    check_shape(shape)
    return tuple(shape)


def check_shape(shape: Any) -> None:
    """Refuses what is not a list of lengths of axes."""
    is_list = isinstance(shape, list | tuple)
    if not is_list or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f'its shape is {shape!r}, which is no list of lengths')
    if len(shape) > MOST_AXES:
        raise ValueError(f'it has {len(shape)} axes; at most {MOST_AXES} are read')
    # An axis of length 0 must not hide that the others are too long.
    size = math.prod(max(length, 1) for length in shape)
    if size >= 2**62:
        raise ValueError(f'its shape {tuple(shape)} is too large for any memory')


def check_array(key: str, array: np.ndarray, axes: int) -> None:
    """Refuses an array with another number of axes, or one that holds anything but whole numbers."""
    if array.ndim != axes or array.dtype.kind not in 'iu':
        raise ValueError(
            f'{key} has shape {array.shape} and dtype {array.dtype}; it must have {axes} axes and whole numbers'
        )


def check_lengths(key: str, array: np.ndarray, *shape: int) -> None:
    """Refuses an array of another shape."""
    if array.shape != shape:
        raise ValueError(f'{key} has shape {array.shape}, and by the other arrays {shape}')


def check_groups(key: str, groups: np.ndarray, bound: int) -> None:
    """Refuses groups `[groups, numbers]` of which not all ascend, each number once, from 0 to below a bound."""
    wrong = groups[(groups < 0) | (groups >= bound)]
    if wrong.size:
        raise ValueError(f'{key} has {wrong[0]}; all must be from 0 to {bound - 1}')
    if np.any(groups[:, 1:] <= groups[:, :-1]):
        raise ValueError(f'{key} of a group do not ascend; they must ascend, each once in a group')


def check_bits(key: str, array: np.ndarray, used_bits: int) -> None:
    """Refuses anything but the bytes that some number of bits fill, with zeros behind the last bit."""
    if array.dtype != np.uint8:
        raise ValueError(f'{key} has dtype {array.dtype}; it must have uint8')
    check_lengths(key, array, -(-used_bits // 8))
    unused = len(array) * 8 - used_bits
    if unused and array[-1] & ((1 << unused) - 1):
        raise ValueError(f'{key} has bits beyond its {used_bits}, which must be 0')
