"""Latencies of candidates, with a clock for which a model takes a millisecond for each hidden unit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.structure import channel_groups, latency
from jaxpruner.structure.latency import latency_function, least_removal
from uses.table import floats


def units(p, x):
    """Where all parameters and inputs are 1, the result is the number of hidden units."""
    return (x @ p['up'] @ p['down']).mean()


PARAMS = {'up': jnp.ones((1, 64)), 'down': jnp.ones((64, 1))}
X = jnp.ones((2, 1))


class Clock:
    """Runs calls, and says that they took their result in milliseconds."""

    def __init__(self):
        self.timings = 0
        self.slower = 1.0

    def seconds(self, call, repeats):
        self.timings += 1
        # The machine gets slower before each round of two (after 15 of one).
        # Each fifth timing takes ten times as long.
        self.slower *= 1.0 if self.timings % 2 else 1.1
        disturbed = 10 if self.timings % 5 == 0 else 1
        result, *_ = jax.tree.leaves(call())
        return float(result) * repeats * self.slower * disturbed


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(latency, '_seconds', lambda call, repeats: clock.seconds(call, repeats))
    monkeypatch.setattr(latency, 'repeats_of', lambda call: 1)
    return clock


@pytest.fixture(scope='module')
def graph():
    return channel_groups(units, PARAMS, X)


def test_a_candidate_is_timed_beside_the_whole_model(graph, clock):
    seconds = latency_function(graph, PARAMS, rounds=15)
    for count in (32, 8, 63):
        assert seconds({'up[1]': count}) == pytest.approx(seconds({}) * count / 64)
    assert seconds({}) == seconds({'up[1]': 64})


def test_inputs_of_another_size_are_timed(clock):
    """The graph has shapes alone, and the result is that of the inputs which are given."""
    graph = channel_groups(units, jax.eval_shape(lambda: PARAMS), floats(2, 1))
    seconds = latency_function(graph, PARAMS, [3 * jnp.ones((5, 1))], rounds=15)
    assert seconds({}) >= 3 * 64
    assert seconds({'up[1]': 16}) == pytest.approx(seconds({}) / 4)


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ((floats(2, 2), [X]), TypeError, 'params are shapes, or traced'),
        ((PARAMS, [floats(2, 1)]), TypeError, 'inputs are shapes, or traced'),
        ((PARAMS,), TypeError, 'made with shapes for inputs'),
    ],
)
def test_what_has_no_values_cannot_be_timed(arguments, error, message):
    graph = channel_groups(units, jax.eval_shape(lambda: PARAMS), floats(2, 1))
    with pytest.raises(error, match=message):
        latency_function(graph, *arguments)


CURVES = {  # what is removed -> seconds
    'linear': lambda removed: 1 - 0.9 * removed,
    'quadratic': lambda removed: 0.05 + (1 - removed) ** 2,
    'flat at first': lambda removed: 1 - 0.95 * removed**8,
    'falling at once': lambda removed: 0.1 + 0.9 / (1 + 10 * removed),
    'in steps': lambda removed: (2 + np.ceil(64 * (1 - removed) / 8)) / 10,
    'a step': lambda removed: 1.0 if removed < 0.3 else 0.2,
}


@pytest.mark.parametrize('share', [0.9, 0.5, 0.25])
@pytest.mark.parametrize('curve', CURVES)
def test_a_budget_is_met_with_few_candidates(curve, share):
    asked = []

    def seconds(removed):
        asked.append(removed)
        return CURVES[curve](removed)

    removed = least_removal(seconds, share, progress=False)
    allowed = share * CURVES[curve](0.0)
    meeting = [each for each in asked if CURVES[curve](each) <= allowed]
    assert removed == min(meeting)
    assert len(asked) <= 2 + 8
    if 'step' not in curve:
        assert CURVES[curve](removed) >= 0.96 * allowed


def test_a_budget_that_cannot_be_met_says_what_can():
    with pytest.raises(ValueError, match=r'latency=0.3 cannot be met: .* 0.40 of its 2e\+03 ms'):
        least_removal(lambda removed: 2 - 1.2 * removed, 0.3, progress=False)


def test_rounds_end_when_time_is_over_and_short_calls_are_repeated(monkeypatch):
    now = iter(np.arange(100.0))  # a second passes with each look at the watch
    monkeypatch.setattr(latency.time, 'perf_counter', lambda: next(now))
    assert latency.in_turns([lambda: None], [1], 15) == [[1.0] * 3]
    monkeypatch.setattr(latency, '_seconds', lambda call, repeats: repeats * 0.02 / 3)
    assert latency.repeats_of(lambda: None) == 4
