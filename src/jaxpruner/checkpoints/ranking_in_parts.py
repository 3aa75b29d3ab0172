"""The largest of many scores that are never held together, digit by digit.

The same selection as `selection.keep_largest`, for scores on disk. Floats become integers in the same order,
their ordinals, and an ordinal is read as digits of 16 bits. Each pass over the scores counts the next digit among those
whose ordinals begin like the threshold, and so fixes one digit of it: one pass for floats of 16 bits, two for 32.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

_DIGIT_BITS = 16
_DIGITS = 1 << _DIGIT_BITS


class Threshold(NamedTuple):
    """What is kept of scores that come in parts."""

    ordinal: int  # scores above it are kept; see `ordinals`
    ties: int  # of those on it so many are kept, the first in flat order
    keeps_everything: bool  # NaN included


def ordinals(scores: np.ndarray) -> np.ndarray:
    """Finds the position of each magnitude among all floats of its dtype: 0 for NaN, 1 for zero, and so on.

    >>> ordinals(np.array([-0.0, 0.0, np.nan, 1.0, np.inf], np.float16)).tolist()
    [1, 1, 0, 15361, 31745]
    """
    unsigned = np.dtype(f'uint{8 * scores.dtype.itemsize}')
    infinity = np.array(np.inf, scores.dtype).view(unsigned)[()]
    bits = scores.view(unsigned) & (np.iinfo(unsigned).max >> 1)
    is_number = bits <= infinity
    bits += 1
    bits *= is_number
    return bits


def threshold(parts: Callable[[], Iterable[np.ndarray]], count: int, total: int) -> Threshold:
    """Finds which of `total` scores are the `count` largest; a count of all keeps NaN, too, any other none.

    Each call of `parts` begins a pass over the scores: contiguous non-negative float arrays of one dtype in flat order.
    """
    if count >= total:
        return Threshold(0, 0, keeps_everything=True)
    prefix = 0
    room = count
    position = 0
    is_last = False
    while not is_last:
        histogram, is_last = _count_digits(parts(), prefix, position)
        at_least = np.cumsum(histogram[::-1])[::-1]  # scores with this digit or a higher one
        digit = int(np.flatnonzero(at_least >= room)[-1])
        room -= int(at_least[digit] - histogram[digit])
        prefix = (prefix << _DIGIT_BITS) | digit
        position += 1
    is_nan = prefix == 0
    return Threshold(prefix, 0 if is_nan else room, keeps_everything=False)


def _count_digits(
    parts: Iterable[np.ndarray], prefix: int, position: int
) -> tuple[np.ndarray, bool]:
    """Counts the digits at a position of the ordinals that begin with the prefix, and says if it is the last."""
    histogram = np.zeros(_DIGITS, np.int64)
    is_last = True
    for scores in parts:
        candidates = ordinals(scores).reshape(-1)
        shift = 8 * scores.dtype.itemsize - _DIGIT_BITS * (position + 1)
        is_last = shift == 0
        if position:
            candidates = candidates[candidates >> (shift + _DIGIT_BITS) == prefix]
        digits = (candidates >> shift) & (_DIGITS - 1)
        histogram += np.bincount(digits.astype(np.int64), minlength=_DIGITS)
    return histogram, is_last


class Verdicts:
    """Turns scores, part after part in flat order, into masks.

    >>> parts = [np.array([1.0, 4.0]), np.array([4.0, 3.0])]
    >>> verdicts = Verdicts(threshold(lambda: parts, 1, 4))
    >>> [verdicts.of(part).tolist() for part in parts]
    [[0, 1], [0, 0]]
    """

    def __init__(self, threshold: Threshold):
        self._threshold = threshold
        self._ties_left = threshold.ties

    def of(self, scores: np.ndarray) -> np.ndarray:
        """Returns the mask of the next part: uint8 of its shape, 1 = kept."""
        if self._threshold.keeps_everything:
            return np.ones(scores.shape, np.uint8)
        positions = ordinals(scores)
        kept = (positions > self._threshold.ordinal).astype(np.uint8)
        if self._ties_left:
            ties = np.flatnonzero(positions == self._threshold.ordinal)[: self._ties_left]
            kept.reshape(-1)[ties] = 1
            self._ties_left -= len(ties)
        return kept
