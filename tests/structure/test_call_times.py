"""How often calls are timed, with a clock of the test."""

from jaxpruner.structure.choosing import call_times


class Watch:
    """Passes the same time whenever someone looks at it."""

    def __init__(self, seconds_between_looks):
        self.between = seconds_between_looks
        self.now = 0.0

    def perf_counter(self):
        self.now += self.between
        return self.now


def test_rounds_end_when_time_is_over(monkeypatch):
    monkeypatch.setattr(call_times, 'time', Watch(seconds_between_looks=1.0))
    (times,) = call_times.in_turns([lambda: None], [1], 15)
    assert times == [1.0] * 3


def test_short_calls_are_repeated(monkeypatch):
    """A call takes a third of what is long enough."""
    monkeypatch.setattr(call_times, '_seconds', lambda call, repeats: repeats * 0.02 / 3)
    assert call_times.repeats_of(lambda: None) == 4
