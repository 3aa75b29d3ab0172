"""The cost of a model, and how long it takes on the device at hand, as functions of how many channels stay.

Costs are counted without tracing the smaller model. The parameters of a leaf are a product of the sizes of its axes. So
are the multiplications of a contraction. An axis is an expression over atoms, and the atom of a group has one index for
each channel that stays. So a cost is a sum of products of counts, which is read off the trace once:

    x @ up @ down, 5 rows of 3, u units, 2 results:  3*u + u*2 parameters,  2 * (5*3*u + 5*u*2) operations

Latency is measured. Machines drift, so seconds measured at different times cannot be compared. Each candidate is timed
in turns with the whole model. Its latency is the median ratio of the turns, times the seconds that the whole model took
at first. A candidate costs a compilation, so a search has to make do with a handful.
"""

import functools
import math
import operator
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpruner.oneshot.leaves import as_inputs
from jaxpruner.structure.axes import Axis, size_with
from jaxpruner.structure.programs import Trace, is_array
from jaxpruner.trace.graph import factors_of
from jaxpruner.trace.program import ProgramPath
from jaxpruner.tree import PyTree

Counts = Mapping[str, int]  # name of a group -> how many of its channels stay
Call = Callable[[], Any]

LONG_ENOUGH = 2e-2  # seconds
_FEWEST_ROUNDS = 3
_MOST_SECONDS = 5.0  # after which no round begins but the fewest
_ROUNDS = 30


class Cost(NamedTuple):
    """What a model costs.

    Attributes:
      parameters: elements of its leaves.
      flops: floating point operations of its matrix products and convolutions: two for each product that is summed.
        Each trip of a scan counts. A `while` loop counts once, and a `cond` counts as its most expensive branch. Other
        operations are not counted. Of several programs the first one counts.
      bytes: of the parameters, in their dtypes.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> channel_groups(lambda p, x: x @ p, jnp.ones((3, 2)), jnp.ones((5, 3))).cost()
    Cost(parameters=6, flops=60, bytes=24)
    """

    parameters: int
    flops: int
    bytes: int


def cost_function(graph: Any) -> Callable[[Counts], Cost]:
    """Makes a function for the costs of a model's smaller versions.

    Args:
      graph: a `ChannelGraph`.

    Returns:
      `{name of a group: how many of its channels stay} -> Cost`. Groups that are not named stay whole.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'up': jnp.ones((3, 8)), 'down': jnp.ones((8, 2))}
    >>> graph = channel_groups(lambda p, x: (x @ p['up']) @ p['down'], params, jnp.ones((5, 3)))
    >>> cost = cost_function(graph)
    >>> cost({})
    Cost(parameters=40, flops=400, bytes=160)
    >>> cost({'up[1]': 4})
    Cost(parameters=20, flops=200, bytes=80)
    """
    trace: Trace = graph.trace
    bytes_of_each = [leaf.dtype.itemsize for leaf in jax.tree.leaves(graph.params)]
    conds = [at for at, axes in trace.equations.items() if axes.equation.primitive.name == 'cond']

    def branch_around(path: ProgramPath) -> ProgramPath:
        """The innermost branch of a `cond` that a path lies in; `()` for the program itself."""
        ends = [end for end in range(2, len(path), 2) if path[: end - 1] in conds]
        return path[: max(ends, default=0)]

    # For each contraction its branch, and the axes whose indices number the products that it sums.
    contracted = []
    for path, axes in trace.equations.items():
        if axes.is_contraction:
            values = [*axes.operands[:2], axes.results[0]]
            factors = [values[i][axis] for i, axis in factors_of(axes.equation)]
            contracted.append((branch_around(path), factors + trace.trips_around(path)))

    def cost(counts: Counts) -> Cost:
        sizes = {graph.groups[name].atom: int(count) for name, count in counts.items()}

        def count_elements(axes: Iterable[Axis]) -> int:
            return math.prod([size_with(axis, sizes) for axis in axes])

        elements = list(map(count_elements, trace.leaves.values()))
        flops: Counter[ProgramPath] = Counter()
        for branch, factors in contracted:
            flops[branch] += 2 * count_elements(factors)
        for cond in conds:  # those inside others come first
            of_branches = [count for branch, count in flops.items() if branch[:-1] == cond]
            flops[branch_around(cond)] += max(of_branches, default=0)
        return Cost(sum(elements), flops[()], sum(map(operator.mul, elements, bytes_of_each)))

    return cost


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
