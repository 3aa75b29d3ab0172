"""Times functions against one another: all of them in each round, in changing order, so that drift hits all alike."""

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Seconds. A shorter call is repeated within a timing, so that neither the clock nor caches that others filled matter.
LONG_ENOUGH = 2e-2
FEWEST_ROUNDS = 3  # of functions that are slow
RESAMPLES = 1000
# If this is set in the environment, JAX runs programs on the thread that calls them.
IN_PLACE = 'BENCHMARKS_IN_PLACE'


class Timing(NamedTuple):
    """How long a function took, in seconds."""

    rounds: list[float]  # one time a round, in the order of the rounds

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)

    @property
    def milliseconds(self) -> float:
        """The median, in thousandths of a second."""
        return 1e3 * self.median


class Ratio(NamedTuple):
    """How many times as long as a reference, round by round."""

    median: float
    low: float  # the first quartile, or where an interval begins
    high: float  # the third quartile, or where an interval ends


class Lap(NamedTuple):
    """How long something took."""

    seconds: float
    core_seconds: float  # that the cores worked for this process, together


class Stopwatch:
    """Measures laps, one after another."""

    def __init__(self):
        self._last = time.perf_counter(), time.process_time()

    def lap(self) -> Lap:
        """What passed since the last lap."""
        seconds, core_seconds = self._last
        self._last = time.perf_counter(), time.process_time()
        return Lap(self._last[0] - seconds, self._last[1] - core_seconds)


def bound(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """The compiled function, called with these arguments; a function that closed over arrays would be folded away."""
    return functools.partial(jax.jit(function), *arguments)


def in_program(
    times: int, function: Callable[[jax.Array], jax.Array], x: jax.Array
) -> Callable[[], Any]:
    """One compiled program that calls the function so many times, as a training step calls it among other things.

    A short function takes less time than handing a program over from Python; here its calls share that time. Before
    each call one element of the array is written again, since XLA would compute the result of an unchanged array once.
    """

    def program(x: jax.Array) -> jax.Array:
        def call(_: Any, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            current, previous = carried
            first = (0,) * current.ndim
            # Plus 0 times a float, which a compiler may not leave out: it could be NaN.
            same = current[first] + previous[first].astype(current.dtype) * 0
            current = current.at[first].set(same)
            return current, function(current)

        shape = jax.eval_shape(function, x)
        return jax.lax.fori_loop(0, times, call, (x, jnp.zeros(shape.shape, shape.dtype)))[1]

    return bound(program, x)


def interleaved(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    seconds: float = float('inf'),
    warm: bool = True,
) -> dict[str, Timing]:
    """Times each call once a round, waiting for its result.

    Args:
      calls: functions without arguments by name.
      rounds: at least 2.
      seconds: once so much time has passed no round begins, but the first few.
      warm: one call before the first round is not counted, and short calls are repeated.
    """
    repeats = {name: _warmed_repeats(call) if warm else 1 for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    began = time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - began > seconds:
            break
        shuffle(order)
        for name in order:
            times[name].append(_seconds(calls[name], repeats[name]) / repeats[name])
    return {name: Timing(rounds) for name, rounds in times.items()}


def joined(parts: Iterable[Timing]) -> Timing:
    """The rounds of all parts, one after another."""
    return Timing([seconds for part in parts for seconds in part.rounds])


def ratio(of: Timing, to: Timing) -> Ratio:
    """The quartiles of the ratios of the rounds."""
    low, median, high = statistics.quantiles(_ratios(of, to), n=4)
    return Ratio(median, low, high)


def interval(of: Timing, to: Timing, parts: int = 1) -> Ratio:
    """The median of the ratios of the rounds, and between which values it lies at 95 %, by the bootstrap.

    Args:
      of: a function's times.
      to: the reference's.
      parts: of how many processes these are the rounds, as many of each: they are drawn first, and then their rounds.
    """
    ratios = np.array(_ratios(of, to)).reshape(parts, -1)
    draw = np.random.default_rng(0).integers
    drawn_parts = draw(parts, size=(RESAMPLES, parts, 1))
    drawn_rounds = draw(ratios.shape[1], size=(RESAMPLES, *ratios.shape))
    medians = np.median(ratios[drawn_parts, drawn_rounds], axis=(1, 2))
    low, high = np.quantile(medians, (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def _ratios(of: Timing, to: Timing) -> list[float]:
    return [mine / other for mine, other in zip(of.rounds, to.rounds, strict=True)]


def _warmed_repeats(call: Callable[[], Any]) -> int:
    """How often a call is repeated to take long enough; the first one compiles."""
    _seconds(call, 1)
    repeats = 1
    while _seconds(call, repeats) < LONG_ENOUGH:
        repeats *= 2
    return repeats


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return time.perf_counter() - began
