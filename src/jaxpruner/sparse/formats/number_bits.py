"""Small whole numbers at as many bits as they need, the highest bit first."""

import numpy as np

_BITS = 8
_CHUNK = 1 << 20  # numbers, a multiple of 8, so that each chunk ends with a byte


def bits_below(bound: int) -> int:
    """Returns how many bits numbers below the bound need.

    >>> bits_below(4), bits_below(6)
    (2, 3)
    """
    return max(bound - 1, 1).bit_length()


def packed_length(count: int, width: int) -> int:
    """Returns how many bytes `count` numbers of `width` bits take."""
    return -(-count * width // _BITS)


def pack_numbers(numbers: np.ndarray, width: int) -> np.ndarray:
    """Packs whole numbers below 2^width into bytes.

    >>> pack_numbers(np.array([1, 0, 3, 2], np.uint8), 2)
    array([78], dtype=uint8)
    """
    packed = np.empty(packed_length(len(numbers), width), np.uint8)
    if _BITS % width == 0:
        _pack_in_bytes(numbers, width, packed)
        return packed
    unused = _BITS - width
    first = 0
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK]
        chunk = chunk.astype(np.uint8)
        bits = np.unpackbits(chunk[:, None], axis=1)
        packed_chunk = np.packbits(bits[:, unused:])
        last = first + len(packed_chunk)
        packed[first:last] = packed_chunk
        first = last
    return packed


def unpack_numbers(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """Returns the numbers of which `pack_numbers` made these bytes.

    >>> unpack_numbers(np.array([78], np.uint8), 2, 4)
    array([1, 0, 3, 2], dtype=uint8)
    """
    numbers = np.empty(count, np.uint8)
    if _BITS % width == 0:
        _unpack_from_bytes(packed, width, numbers)
        return numbers
    unused = _BITS - width
    first = 0
    for start in range(0, count, _CHUNK):
        chunk = numbers[start : start + _CHUNK]
        length = len(chunk)
        last = first + packed_length(length, width)
        bits = np.unpackbits(packed[first:last], count=length * width)
        padded = np.zeros((length, _BITS), np.uint8)
        padded[:, unused:] = bits.reshape(-1, width)
        chunk[:] = np.packbits(padded)
        first = last
    return numbers


def _pack_in_bytes(numbers: np.ndarray, width: int, packed: np.ndarray) -> None:
    """Packs numbers of a width that divides a byte, so that no number lies in two bytes."""
    packed[:] = 0
    per_byte = _BITS // width
    for place in range(per_byte):
        part = numbers[place::per_byte]
        part = part.astype(np.uint8, copy=False)
        shift = _BITS - width * (place + 1)
        filled = packed[: len(part)]
        filled |= part << shift


def _unpack_from_bytes(packed: np.ndarray, width: int, numbers: np.ndarray) -> None:
    per_byte = _BITS // width
    largest = 2**width - 1
    for place in range(per_byte):
        part = numbers[place::per_byte]
        shift = _BITS - width * (place + 1)
        filled = packed[: len(part)]
        part[:] = (filled >> shift) & largest
