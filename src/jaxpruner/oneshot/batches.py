"""Batches that are looked at before they are read: some iterables can be read once."""

import itertools
from collections.abc import Iterable, Sized
from typing import Any

READ_AGAIN = 'give a list, or another iterable that begins anew each time'


def first_batch(batches: Iterable[Any], times: int = 1) -> tuple[Any, Iterable[Any]]:
    """Looks at the first batch.

    Args:
      batches: an iterable of batches.
      times: how often they will be read.

    Returns:
      The first batch, and an iterable of all, the first included.

    Raises:
      ValueError: there is none, or they cannot be read that often.

    >>> first_batch(iter([1, 2]))[0]
    1
    """
    iterator = iter(batches)
    if iterator is batches and times > 1:
        raise ValueError(f'batches are read {times} times, and an iterator can be read once; {READ_AGAIN}')
    for first in iterator:
        once = times == 1 and not isinstance(batches, Sized)  # it may be that they can be read no more often
        return first, itertools.chain([first], iterator) if once else batches
    raise ValueError('batches are empty; give at least one')
