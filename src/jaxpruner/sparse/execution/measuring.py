"""Times the formats of a product, each in turns with the dense one, on data of the model's shapes.

Layers of one shape are measured once, and so are formats that differ only in a few weights. NumPy draws the data: JAX
would compile a program for each shape, which takes longer than measuring.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.execution.formats import Arrays, ExecutedFormat
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.product_sites import ProductSite
from jaxpruner.structure.latency import Call, in_turns, repeats_of
from jaxpruner.trace.program import bind

_LONG_ENOUGH = 5e-3  # seconds
# Candidates whose numbers of weights differ by less than this factor are measured once.
_BUCKET = 1.05

Candidates = Mapping[ExecutedFormat, Arrays]  # each format with the arrays of all layers of a leaf


class Timing(NamedTuple):
    """How long a product takes at one site of the model, or all products with a leaf in one call.

    Attributes:
      seconds: the median.
      gain: in three rounds of four it is at least this many times as fast as the dense product.
    """

    seconds: float
    gain: float


class Measurements:
    """Times products, and remembers the times.

    Attributes:
      rounds: how often each candidate is timed.
    """

    def __init__(self, rounds: int):
        self.rounds = rounds
        self._timings: dict[Hashable, list[Timing]] = {}

    def times(self, leaf: MatrixLeaf, candidates: Candidates) -> list[Timing]:
        """The times of the dense product, then of each candidate, added up over product sites and trips of loops."""
        totals = [Timing(0.0, math.inf)] * (1 + len(candidates))
        # About as much of a layer, stored in the same formats.
        buckets = []
        for format, arrays in candidates.items():
            sizes = [max(array[0].size, 1) for array in arrays.values()]
            buckets.append((format, *[round(math.log(size, _BUCKET)) for size in sizes]))
        for site in leaf.product_sites:
            avals = [str(variable.aval) for variable in site.equation.invars]
            form = str(site.equation.params), *avals, site.operand, site.part is None
            key = form, *buckets
            if key not in self._timings:
                self._timings[key] = self._measure(site, leaf, candidates)
            for number, timing in enumerate(self._timings[key]):
                seconds, gain = totals[number]
                totals[number] = Timing(
                    seconds + site.trips * timing.seconds, min(gain, timing.gain)
                )
        return totals

    def _measure(self, site: ProductSite, leaf: MatrixLeaf, candidates: Candidates) -> list[Timing]:
        rng, operands = np.random.default_rng(0), []
        for number in (1 - site.operand, site.operand):
            aval = site.equation.invars[number].aval
            drawn = rng.standard_normal(aval.shape, np.float32)
            operands.append(jnp.asarray(drawn.astype(aval.dtype)))
        data, weights = operands

        def dense(data: jax.Array, weights: jax.Array) -> Any:
            return bind(site.equation, site.operands(data, weights))

        calls = [_call(dense, data, weights)]
        # The first trip of the loops around a product gets these arrays.
        first = (0,) * len(site.use.site.view.stack)
        for format, arrays in candidates.items():

            def in_format(data: jax.Array, arrays: Any, format: ExecutedFormat = format) -> Any:
                return site.multiply(data, format.operator(arrays, leaf))

            layer = {}
            for key, array in arrays.items():
                layer[key] = array.reshape(*leaf.layers, *array.shape[1:])[first]
            calls.append(_call(in_format, data, jax.tree.map(jnp.asarray, layer)))
        repeats = [repeats_of(call, _LONG_ENOUGH) for call in calls]
        seconds = in_turns(calls, repeats, self.rounds)
        timings = []
        for mine in seconds:
            gains = [dense / own for dense, own in zip(seconds[0], mine, strict=True)]
            timings.append(Timing(statistics.median(mine), statistics.quantiles(gains, n=4)[0]))
        return timings


def _call(function: Callable[..., Any], *operands: Any) -> Call:
    run = jax.jit(function)
    return lambda: run(*operands)
