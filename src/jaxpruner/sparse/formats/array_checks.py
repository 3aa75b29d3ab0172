"""Checks of arrays that somebody else may have made; the caller puts the leaf's name before the message."""

import math
from typing import Any

import numpy as np

MOST_AXES = 32  # of an array in the oldest NumPy that is allowed
# Max unpacked/packed size ratio, ignoring the first MiB: a small file must not claim a terabyte of zeros. One row of
# 65,536 float32 zeros in CSR reaches it.
MOST_EXPANSION = 2**16
ALWAYS_ALLOWED_BYTES = 2**20


def is_too_large(dense_bytes: int, packed_bytes: int) -> bool:
    """Whether a leaf is larger than what its packed arrays may stand for."""
    return dense_bytes > MOST_EXPANSION * packed_bytes + ALWAYS_ALLOWED_BYTES


def shape_from(numbers: np.ndarray) -> tuple[int, ...]:
    """Returns the shape that an array of whole numbers spells."""
    check_array('shape', numbers, axes=1)
    check_shape(numbers.tolist())
    return tuple(numbers.tolist())


def check_shape(shape: Any) -> None:
    """Refuses what is not a list of lengths of axes."""
    is_list = isinstance(shape, list | tuple)
    if not is_list or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f'its shape is {shape!r}, which is no list of lengths')
    if len(shape) > MOST_AXES:
        raise ValueError(f'it has {len(shape)} axes; at most {MOST_AXES} are read')
    if math.prod(max(length, 1) for length in shape) >= 2**62:
        raise ValueError(f'its shape {tuple(shape)} is too large for any memory')


def check_array(key: str, array: np.ndarray, axes: int, dtypes: str = 'iu') -> None:
    """Refuses an array with another number of axes, or of other than whole numbers."""
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
    least, greatest = int(array.min()), int(array.max())
    if least < 0 or greatest >= bound:
        wrong = least if least < 0 else greatest
        raise ValueError(f'{key} has {wrong}; all must be from 0 to {bound - 1}')


def check_padding(key: str, array: np.ndarray, used_bits: int) -> None:
    """Refuses bits behind the last one that counts."""
    unused = len(array) * 8 - used_bits
    if unused and array[-1] & ((1 << unused) - 1):
        raise ValueError(f'{key} has bits beyond its {used_bits}, which must be 0')
