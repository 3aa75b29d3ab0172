"""How long a model takes on the device at hand, as a function of how many channels stay.

Machines drift, so seconds measured at different times cannot be compared. Each candidate is timed in turns with the
whole model. Its latency is the median ratio of the turns, times the seconds that the whole model took at first. A
candidate costs a compilation, so a search has to make do with a handful.
"""

import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.progress import progress_bar
from jaxpruner.structure.choosing import costs
from jaxpruner.structure.choosing.call_times import in_turns, repeats_of
from jaxpruner.structure.cutting.keeping import check_keep
from jaxpruner.structure.programs import is_array
from jaxpruner.tree import PyTree

Counts = Mapping[str, int]

_ROUNDS = 30
_MOST_CANDIDATES = 8  # that a search times, beside its two ends
_TOLERANCE = 0.04  # how far below the allowed time a search may end
_SHORTEST_STEP = 0.1  # of the way between the ends of a search


class Latency:
    """Seconds that smaller versions of a model take; made by `latency_function`.

    Attributes:
      whole: seconds that the whole model takes.
    """

    def __init__(self, graph: Any, params: PyTree, inputs: tuple[Any, ...], rounds: int):
        self._graph = graph
        self._params = params
        self._inputs = inputs
        self._rounds = rounds
        self._apply = _call(graph.model.apply_fn, params, inputs)
        self._repeats = repeats_of(self._apply)
        (times,) = in_turns([self._apply], [self._repeats], rounds)
        self.whole = statistics.median(times)
        whole: frozenset[tuple[str, int]] = frozenset()  # no group has fewer channels
        self._ratios = {whole: 1.0}

    def __call__(self, counts: Counts) -> float:
        """Seconds that the model takes if these numbers of channels stay; times a candidate once.

        Args:
          counts: name of a group -> how many of its channels stay; groups that are not named stay whole.

        Raises:
          KeyError, TypeError, ValueError: as in `costs.cost_function`.
        """
        costs.check_counts(self._graph.groups, counts)
        groups = self._graph.groups
        smaller = {}
        for name, count in counts.items():
            if count != groups[name].size:
                smaller[name] = int(count)
        key = frozenset(smaller.items())
        if key not in self._ratios:
            self._ratios[key] = self._ratio(smaller)
        return self.whole * self._ratios[key]

    def _ratio(self, counts: Counts) -> float:
        graph, trace = self._graph, self._graph.trace
        keep = {}
        for name, count in counts.items():
            keep[name] = np.arange(count)
        cut = check_keep(graph.groups, keep, allow_inexact=True)
        params = _first_channels(self._params, map(cut.shape, trace.leaves))
        arguments = self._inputs
        if graph.model.programs[0].has_state:
            state, *inputs = arguments
            small_state = _first_channels(state, map(cut.shape, trace.states))
            arguments = (small_state, *inputs)
        small_apply = graph.small_apply(keep, allow_inexact=True)
        small = _call(small_apply, params, arguments)
        repeats = [self._repeats, repeats_of(small)]
        whole_times, small_times = in_turns([self._apply, small], repeats, self._rounds)
        ratios = map(operator.truediv, small_times, whole_times)
        return statistics.median(ratios)


def latency_function(
    graph: Any,
    params: PyTree,
    inputs: Sequence[Any] | None = None,
    *,
    rounds: int = _ROUNDS,
) -> Latency:
    """How long smaller versions of a model take on the device at hand.

    The whole model is compiled and timed here, and each candidate when it is first asked for. The time does not depend
    on which channels stay, so the first ones are taken.

    Args:
      graph: a `ChannelGraph`.
      params: of the whole model, arrays.
      inputs: arrays that the model is called with after the parameters: a state if it has one, then a batch of the
        size that is to be fast. By default those of the graph.
      rounds: how often the model and a candidate are timed in turns; fewer for models that take seconds.

    Returns:
      `{name of a group: how many of its channels stay} -> seconds`.

    Raises:
      TypeError: parameters or inputs have no values.
      ValueError: `rounds` is less than 1.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.ones((512, 4096)), 'down': jnp.ones((4096, 512))}
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((256, 512)))
    >>> latency = latency_function(graph, params, rounds=3)
    >>> 0 < latency({'up[1]': 128}) < latency({})
    True
    """
    if rounds < 1:
        raise ValueError(f'rounds is {rounds}; time each candidate once at least')
    arrays = graph.model.examples if inputs is None else inputs
    if arrays is None:
        raise TypeError(
            'the graph was made with shapes for inputs, which cannot be timed; give arrays as inputs'
        )
    for name, tree in (('params', params), ('inputs', arrays)):
        leaves = jax.tree.leaves(tree)
        if not all(map(is_array, leaves)):
            raise TypeError(f'{name} are shapes, or traced, and cannot be timed; give arrays')
    return Latency(graph, params, tuple(arrays), rounds)


def least_removal(
    latency_at: Callable[[float], float],
    share: float,
    *,
    progress: bool = True,
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
      ValueError: the share is not between 0 and 1, or the model takes longer even if as much as possible is removed.

    >>> round(least_removal(lambda removed: 3.0 - 2.0 * removed, 0.5, progress=False), 2)
    0.77
    """
    if not 0 < share <= 1:
        raise ValueError(
            f'a budget of {share} of the latency is no share; give one with 0 < share <= 1'
        )
    with progress_bar(_MOST_CANDIDATES + 2, progress) as show:
        show('timing the whole model', 0)
        whole = latency_at(0.0)
        target = share * whole
        if whole <= target:
            return 0.0
        show('timing the smallest', 1)
        slow = _Timing(0.0, whole)
        fast = _Timing(1.0, latency_at(1.0))
        if fast.seconds > target:
            ratio = fast.seconds / whole
            raise ValueError(
                f'latency={share} cannot be met: if as much as possible is removed, the model still takes '
                f'{ratio:.2f} of its {1e3 * whole:.3g} ms; give a share of {ratio:.2f} or more'
            )
        for number in range(_MOST_CANDIDATES):
            if fast.seconds >= (1 - _TOLERANCE) * target:
                break
            # Interpolation alone creeps along a bent curve, so every second step halves the interval.
            middle = (slow.removed + fast.removed) / 2
            aim = (1 - _TOLERANCE / 2) * target
            removed = middle if number % 2 else _interpolate(slow, fast, aim)
            show(f'{fast.seconds / whole:.2f} of the latency', 2 + number)
            timing = _Timing(removed, latency_at(removed))
            if timing.seconds <= target:
                fast = timing
            else:
                slow = timing
    return fast.removed


class _Timing(NamedTuple):
    """How much is removed of a candidate, from 0 to 1, and how long it takes."""

    removed: float
    seconds: float


def _interpolate(slow: _Timing, fast: _Timing, seconds: float) -> float:
    """Interpolates how much has to be removed to take this long."""
    step = (slow.seconds - seconds) / (slow.seconds - fast.seconds)
    step = min(max(step, _SHORTEST_STEP), 1 - _SHORTEST_STEP)
    return slow.removed + step * (fast.removed - slow.removed)


def _first_channels(tree: PyTree, shapes: Iterable[tuple[int, ...]]) -> Any:
    """Cuts arrays to these shapes in one program; `shrink` would compile a gather for each shape."""
    leaves, treedef = jax.tree.flatten(tree)
    small_shapes = list(shapes)

    @jax.jit
    def first(leaves: list[Any]) -> list[Any]:
        parts = []
        for leaf, shape in zip(leaves, small_shapes, strict=True):
            start = (0,) * len(shape)
            parts.append(jax.lax.slice(leaf, start, shape))
        return parts

    return jax.tree.unflatten(treedef, first(leaves))


def _call(function: Callable[..., Any], params: Any, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    """A compiled program with its arguments."""
    program = jax.jit(function)
    return lambda: program(params, *inputs)
