"""Checks of arrays that may come from elsewhere; the caller puts the leaf's name before the message."""

import math
from typing import Any

import numpy as np

MOST_AXES = 32  # of an array in the oldest NumPy that is allowed
# The largest ratio of unpacked to packed bytes, beyond the first MiB: a small file must not claim a terabyte of zeros.
# One row of 65,536 float32 zeros in CSR reaches it.
MOST_EXPANSION = 2**16
ALWAYS_ALLOWED_BYTES = 2**20


def is_too_large(dense_bytes: int, packed_bytes: int) -> bool:
    """Whether a leaf is larger than its packed arrays may claim."""
    return dense_bytes > MOST_EXPANSION * packed_bytes + ALWAYS_ALLOWED_BYTES


def shape_from(numbers: np.ndarray) -> tuple[int, ...]:
    """Returns the shape that an array of whole numbers holds."""
    check_array('shape', numbers, axes=1)
    shape = numbers.tolist()
    check_shape(shape)
    return tuple(shape)


def check_shape(shape: Any) -> None:
    """Refuses what is not a list of lengths of axes."""
    is_list = isinstance(shape, list | tuple)
    if not is_list or not all(map(_is_length, shape)):
        raise ValueError(f'its shape is {shape!r}, which is no list of lengths')
    if len(shape) > MOST_AXES:
        raise ValueError(f'it has {len(shape)} axes; at most {MOST_AXES} are read')
    # An axis of length 0 must not hide that the others are too long.
    size = math.prod(max(length, 1) for length in shape)
    if size >= 2**62:
        raise ValueError(f'its shape {tuple(shape)} is too large for any memory')


def _is_length(length: Any) -> bool:
    return type(length) is int and length >= 0


def check_array(key: str, array: np.ndarray, axes: int, dtypes: str = 'iu') -> None:
    """Refuses an array with another number of axes, or one that holds anything but whole numbers."""
    if array.ndim != axes or array.dtype.kind not in dtypes:
        raise ValueError(
            f'{key} has shape {array.shape} and dtype {array.dtype}; it must have {axes} axes and whole numbers'
        )


def check_length(key: str, array: np.ndarray, length: int) -> None:
    """Refuses an array of one axis that is too short or too long."""
    if array.shape != (length,):
        raise ValueError(f'{key} has shape {array.shape}, and by the other arrays {(length,)}')


def check_below(key: str, array: np.ndarray, bound: int) -> None:
    """Refuses numbers below 0, and those that are not below the bound."""
    if not array.size:
        return
    least = int(array.min())
    greatest = int(array.max())
    if least < 0 or greatest >= bound:
        wrong = least if least < 0 else greatest
        raise ValueError(f'{key} has {wrong}; all must be from 0 to {bound - 1}')


def check_ascending(key: str, groups: np.ndarray) -> None:
    """Refuses groups `[groups, numbers]` whose numbers do not ascend, each once."""
    before = groups[:, :-1]
    after = groups[:, 1:]
    if np.any(after <= before):
        raise ValueError(f'{key} of a group do not ascend; they must ascend, each once in a group')


def check_bits(key: str, array: np.ndarray, used_bits: int) -> None:
    """Refuses anything but the bytes that some number of bits fill, with zeros behind the last bit."""
    if array.dtype != np.uint8:
        raise ValueError(f'{key} has dtype {array.dtype}; it must have uint8')
    check_length(key, array, -(-used_bits // 8))
    unused = len(array) * 8 - used_bits
    if not unused:
        return
    mask_of_unused = (1 << unused) - 1
    if array[-1] & mask_of_unused:
        raise ValueError(f'{key} has bits beyond its {used_bits}, which must be 0')
