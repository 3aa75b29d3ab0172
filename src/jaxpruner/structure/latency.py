"""How long a model takes on the device at hand, as a function of how many channels stay.

Machines drift, so seconds measured at different times cannot be compared. Each candidate is timed in turns with the
whole model. Its latency is the median ratio of the turns, times the seconds that the whole model took at first. A
candidate costs a compilation, so a search has to make do with a handful.
"""

import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpruner.progress import progress_bar
from jaxpruner.structure.programs import is_array
from jaxpruner.tree import PyTree

Call = Callable[[], Any]

LONG_ENOUGH = 2e-2  # seconds; a shorter call is repeated within a timing
_FEWEST_ROUNDS = 3
_MOST_SECONDS = 5.0  # after which no round begins but the fewest
_ROUNDS = 30
_MOST_CANDIDATES = 8  # that a search times, beside its two ends
_TOLERANCE = 0.04  # how far below the allowed time a search may end


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


def latency_function(
    graph: Any, params: PyTree, inputs: Sequence[Any] | None
) -> Callable[[Mapping[str, int]], float]:
    """How long smaller versions of a model take on the device at hand.

    The whole model is compiled and timed here, and each candidate when it is first asked for. The time does not depend
    on which channels stay, so the first ones are taken.

    Args:
      graph: a `ChannelGraph`.
      params: of the whole model, arrays.
      inputs: arrays that the model is called with after the parameters: a state if it has one, then a batch of the
        size that is to be fast.

    Returns:
      `{name of a group: how many of its channels stay} -> seconds`. Groups that are not named stay whole.

    Raises:
      TypeError: inputs have no values.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params, x = {'up': jnp.ones((512, 4096)), 'down': jnp.ones((4096, 512))}, jnp.ones((256, 512))
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, x)
    >>> latency = latency_function(graph, params, [x])
    >>> 0 < latency({'up[1]': 128}) < latency({})
    True
    """
    if inputs is None or not all(map(is_array, jax.tree.leaves(inputs))):
        raise TypeError(
            'the graph was made with shapes for inputs, which cannot be timed; give batches=… of arrays'
        )
    program = jax.jit(graph.model.apply_fn)

    def whole() -> Any:
        return program(params, *inputs)

    repeats_of_whole = repeats_of(whole)
    (times,) = in_turns([whole], [repeats_of_whole], _ROUNDS)
    seconds_of_whole = statistics.median(times)
    ratios = {frozenset[tuple[str, int]](): 1.0}  # the whole model, in which no group is smaller

    def seconds(counts: Mapping[str, int]) -> float:
        key = frozenset(counts.items())
        if key not in ratios:
            keep = {name: range(count) for name, count in counts.items()}
            cut = jax.jit(lambda tree: graph.shrink(tree, keep, allow_inexact=True, verify=False))
            arguments = [params, *inputs]
            has_state = graph.model.programs[0].has_state
            arguments[: 1 + has_state] = map(cut, arguments[: 1 + has_state])
            small_program = jax.jit(graph.small_apply(keep, allow_inexact=True))

            def small() -> Any:
                return small_program(*arguments)

            repeats = [repeats_of_whole, repeats_of(small)]
            whole_times, small_times = in_turns([whole, small], repeats, _ROUNDS)
            ratios[key] = statistics.median(map(operator.truediv, small_times, whole_times))
        return seconds_of_whole * ratios[key]

    return seconds


def least_removal(
    latency_at: Callable[[float], float], share: float, *, progress: bool = True
) -> float:
    """Finds how much has to be removed so that a model takes no more than a share of its time.

    A few candidates are timed. Their times are interpolated to find the next one, until a candidate takes between 96 %
    of the allowed time and all of it.

    Args:
      latency_at: what is removed, from 0 for nothing to 1 for as much as possible -> seconds.
      share: of the time of the whole model, `latency_at(0)`.
      progress: show a progress bar.

    Returns:
      The least removal, among the timed ones, that takes no longer than allowed.

    Raises:
      ValueError: the model takes longer even if as much as possible is removed.

    >>> round(least_removal(lambda removed: 3.0 - 2.0 * removed, 0.5, progress=False), 2)
    0.77
    """
    with progress_bar(_MOST_CANDIDATES + 2, progress) as show:
        show('timing the whole model', 0)
        whole = latency_at(0.0)
        target = share * whole
        show('timing the smallest', 1)
        slow, slow_seconds = 0.0, whole
        fast, fast_seconds = 1.0, latency_at(1.0)
        if fast_seconds > target:
            ratio = fast_seconds / whole
            raise ValueError(
                f'latency={share} cannot be met: if as much as possible is removed, the model still takes '
                f'{ratio:.2f} of its {1e3 * whole:.3g} ms; give a share of {ratio:.2f} or more'
            )
        for number in range(_MOST_CANDIDATES):
            if fast_seconds >= (1 - _TOLERANCE) * target:
                break
            # Interpolation alone creeps along a bent curve, so every second step halves the interval.
            aim = (1 - _TOLERANCE / 2) * target
            step = 0.5 if number % 2 else (slow_seconds - aim) / (slow_seconds - fast_seconds)
            removed = slow + min(max(step, 0.1), 0.9) * (fast - slow)
            show(f'{fast_seconds / whole:.2f} of the latency', 2 + number)
            seconds = latency_at(removed)
            if seconds <= target:
                fast, fast_seconds = removed, seconds
            else:
                slow, slow_seconds = removed, seconds
    return fast
