"""Gathers weights by a mask, and their positions, in chunks that stay in the processor's cache.

NumPy takes several times as long to index a large array with a mask.
"""

from collections.abc import Iterator

import numpy as np

CHUNK = 1 << 17  # weights, a multiple of all lengths of groups and of the bits in a byte


def positions_in_chunks(mask: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the first index of each chunk of a flat mask, and the positions in the chunk that are set.

    >>> [(start, positions.tolist()) for start, positions in positions_in_chunks(np.array([True, False, True]))]
    [(0, [0, 2])]
    """
    for start in range(0, len(mask), CHUNK):
        chunk = mask[start : start + CHUNK]
        yield start, np.flatnonzero(chunk)


def kept_values(array: np.ndarray, mask: np.ndarray, kept: int) -> np.ndarray:
    """Returns `array[mask]`, which has `kept` values.

    >>> kept_values(np.array([[3.0, 4.0], [5.0, 6.0]]), np.array([[True, False], [False, True]]), 2)
    array([3., 6.])
    """
    flat = array.reshape(-1)
    flat_mask = mask.reshape(-1)
    values = np.empty(kept, array.dtype)
    first = 0
    for start, positions in positions_in_chunks(flat_mask):
        chunk = flat[start : start + CHUNK]
        last = first + len(positions)
        values[first:last] = chunk[positions]
        first = last
    return values
