"""Clocks that say how long products and models take, whatever they compute."""

import pytest

from jaxpruner.sparse.execution import choosing, compiling


class Clock:
    """Says that a call takes as long as its number in a row says."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.calls = 0

    def in_turns(self, calls, rounds, long_enough=None):
        self.calls += 1
        times = []
        for number in range(len(calls)):
            seconds = self.seconds[min(number, len(self.seconds) - 1)]
            # A tenth of the rounds is disturbed.
            times.append([seconds * (10 if i % 10 == 9 else 1) for i in range(rounds)])
        return times


@pytest.fixture
def timed(monkeypatch):
    """Sets the times of products, dense first, and those of the whole model; returns the clock of products."""

    def set_clocks(products, whole):
        clock = Clock(products)
        monkeypatch.setattr(choosing, 'in_turns', clock.in_turns)
        monkeypatch.setattr(compiling, 'in_turns', Clock(whole).in_turns)
        return clock

    return set_clocks
