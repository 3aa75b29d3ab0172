"""Times calls in turns: machines drift, so that seconds taken at different times do not compare."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Call = Callable[[], Any]

LONG_ENOUGH = 2e-2  # seconds; a shorter call is repeated within a timing
_FEWEST_ROUNDS = 3
_MOST_SECONDS = 5.0  # after which no round begins but the fewest


def in_turns(calls: Sequence[Call], repeats: Sequence[int], rounds: int) -> list[list[float]]:
    """Times each call in each round; returns seconds.

    >>> first, second = in_turns([lambda: 1, lambda: 2], [1, 10], rounds=3)
    >>> len(first), len(second)
    (3, 3)
    """
    times: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    for number in range(rounds):
        if number >= _FEWEST_ROUNDS and time.perf_counter() - began > _MOST_SECONDS:
            break
        for call, count, seconds in zip(calls, repeats, times, strict=True):
            seconds.append(_seconds(call, count) / count)
    return times


def repeats_of(call: Call, long_enough: float | None = None) -> int:
    """Finds how often to repeat a call until it takes long enough, `LONG_ENOUGH` by default; the first compiles."""
    long_enough = LONG_ENOUGH if long_enough is None else long_enough
    _seconds(call, 1)
    repeats = 1
    while _seconds(call, repeats) < long_enough:
        repeats *= 2
    return repeats


def _seconds(call: Call, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return time.perf_counter() - began
