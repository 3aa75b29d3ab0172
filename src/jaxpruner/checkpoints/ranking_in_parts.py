"""The largest of many scores that are never held together, digit by digit.

The same selection as `selection.keep_largest`, for scores on disk: each pass over them makes a histogram of
the next 16 bits of those that begin like the threshold, so that floats of 16 bits take one pass and of 32 two.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

_DIGIT = 16


class Threshold(NamedTuple):
    """What is kept of scores that come in parts.

    >>> Threshold(place=5, ties=2, everything=False).ties
    2
    """

    place: int  # scores above it are kept; see `places`
    ties: int  # of those on it so many are kept, the first in flat order
    everything: bool  # whether all are kept, NaN included


def places(scores: np.ndarray) -> np.ndarray:
    """The place of each magnitude among all floats of its dtype, NaN below all others.

    Args:
      scores: floats; the sign does not count.

    Returns:
      Unsigned integers as wide: 0 for NaN, 1 for zero, and so on.

    >>> places(np.array([-0.0, 0.0, np.nan, 1.0, np.inf], np.float16)).tolist()
    [1, 1, 0, 15361, 31745]
    """
    unsigned = np.dtype(f'uint{8 * scores.dtype.itemsize}')
    infinity = np.array(np.inf, scores.dtype).view(unsigned)[()]
    bits = scores.view(unsigned) & (np.iinfo(unsigned).max >> 1)
    numbers = bits <= infinity
    bits += 1
    bits *= numbers
    return bits


def threshold(parts: Callable[[], Iterable[np.ndarray]], count: int, total: int) -> Threshold:
    """Which scores are the `count` largest.

    Args:
      parts: begins a pass over the scores: contiguous non-negative float arrays of one dtype in flat order.
      count: how many to keep, at least 1 of any; `total` keeps everything. Otherwise NaN is never kept.
      total: how many there are.

    >>> threshold(lambda: [np.array([1.0, 4.0]), np.array([4.0, 3.0])], 1, 4).ties
    1
    """
    if count >= total:
        return Threshold(0, 0, everything=True)
    prefix, room, shift = 0, count, None
    while shift is None or shift:
        histogram = np.zeros(1 << _DIGIT, np.int64)
        for scores in parts():
            if shift is None:
                shift = 8 * scores.dtype.itemsize
            digits = places(scores).reshape(-1)
            if shift < 8 * scores.dtype.itemsize:
                digits = digits[digits >> shift == prefix]
            digits = (digits >> (shift - _DIGIT)) & ((1 << _DIGIT) - 1)
            histogram += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT)
        assert shift is not None
        above = np.cumsum(histogram[::-1])[::-1]  # scores with this digit or a higher one
        digit = int(np.flatnonzero(above >= room)[-1])
        room -= int(above[digit] - histogram[digit])
        prefix = (prefix << _DIGIT) | digit
        shift -= _DIGIT
    return Threshold(prefix, room if prefix else 0, everything=False)


class Verdicts:
    """Tells of scores, part after part in flat order, which are kept.

    Args:
      threshold: what `threshold` found for them.

    >>> parts = [np.array([1.0, 4.0]), np.array([4.0, 3.0])]
    >>> verdicts = Verdicts(threshold(lambda: parts, 1, 4))
    >>> [verdicts.of(part).tolist() for part in parts]
    [[0, 1], [0, 0]]
    """

    def __init__(self, threshold: Threshold):
        self._threshold, self._room = threshold, threshold.ties

    def of(self, scores: np.ndarray) -> np.ndarray:
        """The mask of the next part: uint8 of its shape, 1 = kept.

        Args:
          scores: the part, as in the passes before.

        >>> Verdicts(Threshold(0, 0, everything=True)).of(np.ones(2)).tolist()
        [1, 1]
        """
        if self._threshold.everything:
            return np.ones(scores.shape, np.uint8)
        found = places(scores)
        kept = (found > self._threshold.place).astype(np.uint8)
        if self._room:
            ties = np.flatnonzero(found == self._threshold.place)[: self._room]
            kept.reshape(-1)[ties] = 1
            self._room -= len(ties)
        return kept
