"""Times functions against one another: all of them in each round, in changing order, so that drift hits all alike."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """How long a function took, in seconds."""

    rounds: list[float]  # one time a round, in the order of the rounds

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)


class Ratio(NamedTuple):
    """How many times as long as a reference, round by round."""

    median: float
    low: float  # the first quartile
    high: float  # the third quartile

    def __str__(self) -> str:
        """As a table shows it."""
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f'{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})'


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Times each call once a round, waiting for its result; one call before the first round is not counted.

    Args:
      calls: functions without arguments by name.
      rounds: at least 2.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            began = time.perf_counter()
            jax.block_until_ready(calls[name]())
            times[name].append(time.perf_counter() - began)
    return {name: Timing(rounds) for name, rounds in times.items()}


def ratio(of: Timing, to: Timing) -> Ratio:
    """The quartiles of the ratios of the rounds."""
    ratios = [mine / other for mine, other in zip(of.rounds, to.rounds, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high)
