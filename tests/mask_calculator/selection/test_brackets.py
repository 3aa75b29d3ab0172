"""Brackets close around the place where a falling count passes a wanted number, and do so in few iterations."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.mask_calculator.selection import brackets
from jaxpruner.mask_calculator.selection.brackets import Brackets

WIDTH = 4**5
# Three probes settle two bits; each iteration that narrows by little is followed by one that divides evenly.
ITERATIONS = 2 * 5 + 1


@functools.partial(jax.jit, static_argnames=('probe_count', 'iterations'))
def settle(counts, wanted, probe_count=3, iterations=None):
    low, high = jnp.zeros(len(counts), jnp.uint32), jnp.full(len(counts), WIDTH, jnp.uint32)
    start = Brackets.between(low, high, counts[:, 0], counts[:, -1], wanted)
    return brackets.settle(
        start,
        prepare=lambda probes: probes,
        count=lambda probes: jnp.take_along_axis(counts, probes.astype(jnp.int32), 1),
        probe_count=probe_count,
        iterations=iterations,
    )


def falling(places):
    """Counts at 0 … WIDTH of things at some places: how many stand at or after each."""
    return np.array([sum(place >= i for place in places) for i in range(WIDTH + 1)], np.uint32)


places = st.one_of(
    st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=60),
    st.lists(
        st.sampled_from([0, 1, 7, WIDTH // 2, WIDTH - 1]), min_size=1, max_size=60
    ),  # steps: the worst to guess
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    places,
    places,
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([(3, None), (3, ITERATIONS), (15, 3)]),
)
def test_each_bracket_settles(first, second, share, other_share, how):
    counts = np.stack([falling(first), falling(second)])
    wanted = np.array(
        [max(1, round(s * len(p))) for s, p in ((share, first), (other_share, second))], np.uint32
    )
    probe_count, iterations = how
    found = settle(counts, wanted, probe_count, iterations)
    assert not found.is_unsettled.any()
    for i in range(2):
        (low,), (high,) = found.low[i], found.high[i]
        assert found.count_low[i] == counts[i, low] >= wanted[i]
        assert found.count_high[i] == counts[i, high] < wanted[i]


def test_an_even_fall_is_guessed_at_once():
    counts = falling(range(0, WIDTH, 2))[None]
    found = settle(
        counts, np.array([100], np.uint32), iterations=2
    )  # the first divides evenly, since nothing is known
    assert found.count_low.tolist() == [[100]]


@pytest.mark.parametrize('width', [2, 3, 4, 5, 8, 2**32 - 1])
def test_probes_rise_inside_the_bracket(width):
    low = 7 if width < 2**31 else 0
    for wanted in (1, 500, 1000):
        start = Brackets.between(
            *(jnp.array([n], jnp.uint32) for n in (low, low + width, 1000, 0, wanted))
        )
        for probes in (brackets.likely_probes(start), brackets.even_probes(start, 3)):
            (row,) = np.asarray(probes).astype(np.int64)
            assert np.all((row > low) & (row < low + width))
            assert np.all(np.diff(row) >= 0)
            assert len(set(row.tolist())) == min(3, width - 1) or width < 8
