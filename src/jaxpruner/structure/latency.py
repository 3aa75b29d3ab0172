"""How long a model takes on the device at hand, as a function of how many channels stay.

Machines drift, so seconds measured at different times cannot be compared. Each candidate is timed in turns with the
whole model. Its latency is the median ratio of the turns, times the seconds that the whole model took at first. A
candidate costs a compilation, so a search has to make do with a handful.
"""

import functools
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpruner.oneshot.leaves import as_inputs
from jaxpruner.structure.costs import Counts
from jaxpruner.structure.programs import is_array
from jaxpruner.tree import PyTree

Call = Callable[[], Any]

LONG_ENOUGH = 2e-2  # seconds
_FEWEST_ROUNDS = 3
_MOST_SECONDS = 5.0  # after which no round begins but the fewest
_ROUNDS = 30


def in_turns(
    calls: Sequence[Call], rounds: int, long_enough: float | None = None
) -> list[list[float]]:
    """Times each call in each round; returns seconds of single calls. Before the first round each is compiled.

    Args:
      calls: what is timed.
      rounds: how many there are, fewer if they take long.
      long_enough: seconds, by default `LONG_ENOUGH`. A call that takes less is repeated within a timing.

    >>> first, second = in_turns([lambda: 1, lambda: 2], 3, long_enough=1e-4)
    >>> len(first), len(second)
    (3, 3)
    """
    long_enough = LONG_ENOUGH if long_enough is None else long_enough
    repeats: list[int] = []
    for call in calls:
        _seconds(call, 1)
        repeats.append(1)
        while _seconds(call, repeats[-1]) < long_enough:
            repeats[-1] *= 2
    times: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    for number in range(rounds):
        if number >= _FEWEST_ROUNDS and time.perf_counter() - began > _MOST_SECONDS:
            break
        for call, count, seconds in zip(calls, repeats, times, strict=True):
            seconds.append(_seconds(call, count) / count)
    return times


def _seconds(call: Call, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return time.perf_counter() - began


def latency_function(graph: Any, params: PyTree, batch: Any) -> Callable[[Counts], float]:
    """How long smaller versions of a model take on the device at hand.

    The whole model is compiled and timed here, and each candidate when it is first asked for. The time does not depend
    on which channels stay, so the first ones are taken.

    Args:
      graph: a `ChannelGraph`.
      params: of the whole model, arrays.
      batch: arrays that the model is called with after the parameters, of the size that is to be fast. A tuple holds
        several, the state first if there is one.

    Returns:
      `{name of a group: how many of its channels stay} -> seconds`. Groups that are not named stay whole.

    Raises:
      TypeError: inputs have no values.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params, x = {'up': jnp.ones((512, 4096)), 'down': jnp.ones((4096, 512))}, jnp.ones((256, 512))
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, x)
    >>> latency = latency_function(graph, params, x)
    >>> 0 < latency({'up[1]': 128}) < latency({})
    True
    """
    if batch is None or not all(map(is_array, jax.tree.leaves(batch))):
        raise TypeError('the graph was made with shapes; give batches=… of arrays, to time it')
    arguments = [params, *as_inputs(batch)]
    whole = functools.partial(jax.jit(graph.trace.source.apply_fn), *arguments)
    seconds_of_whole = statistics.median(*in_turns([whole], _ROUNDS))
    ratios = {frozenset[tuple[str, int]](): 1.0}  # the whole model, in which no group is smaller

    def seconds(counts: Counts) -> float:
        key = frozenset(counts.items())
        if key not in ratios:
            keep = {name: range(count) for name, count in counts.items()}
            cut = jax.jit(lambda tree: graph.shrink(tree, keep, allow_inexact=True, verify=False))
            trees = 1 + graph.trace.source.has_state
            small_arguments = [*map(cut, arguments[:trees]), *arguments[trees:]]
            small_apply = jax.jit(graph.small_apply(keep, allow_inexact=True))
            small = functools.partial(small_apply, *small_arguments)
            whole_times, small_times = in_turns([whole, small], _ROUNDS)
            ratios[key] = statistics.median(map(operator.truediv, small_times, whole_times))
        return seconds_of_whole * ratios[key]

    return seconds
