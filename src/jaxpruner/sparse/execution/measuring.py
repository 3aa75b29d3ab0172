"""Times the candidates of a product, each in turns with the dense one, on data of the model's shapes.

Layers of one shape are measured once, and so are candidates that differ only in a few weights. NumPy draws the data:
JAX would compile a program for each shape, which takes longer than measuring.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.execution.executed_formats.base import ExecutedFormat, PackedArrays
from jaxpruner.sparse.program.matrix_leaves import MatrixLeaf
from jaxpruner.sparse.program.product_sites import ProductSite
from jaxpruner.structure.latency import Call, in_turns, repeats_of
from jaxpruner.trace.program import bind

_LONG_ENOUGH = 5e-3  # seconds
# Candidates whose numbers of weights differ by less than this factor are measured once.
_BUCKET = 1.05


class Candidate(NamedTuple):
    """A format, and the arrays that it stores for the layers of one leaf."""

    format: ExecutedFormat
    arrays: PackedArrays


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

    def times(self, matrix_leaf: MatrixLeaf, candidates: Sequence[Candidate]) -> list[Timing]:
        """The times of the dense product, then of each candidate, added up over product sites and trips of loops."""
        at_sites = []
        for product_site in matrix_leaf.product_sites:
            at_sites.append(self._times_at(product_site, matrix_leaf, candidates))
        totals = []
        for timings in zip(*at_sites, strict=True):
            seconds = 0.0
            for product_site, timing in zip(matrix_leaf.product_sites, timings, strict=True):
                seconds += product_site.trips * timing.seconds
            gain = min(timing.gain for timing in timings)
            totals.append(Timing(seconds, gain))
        return totals

    def _times_at(
        self, product_site: ProductSite, matrix_leaf: MatrixLeaf, candidates: Sequence[Candidate]
    ) -> list[Timing]:
        buckets = tuple(map(_bucket, candidates))
        key = _signature(product_site), buckets
        if key not in self._timings:
            self._timings[key] = self._measure(product_site, matrix_leaf, candidates)
        return self._timings[key]

    def _measure(
        self, product_site: ProductSite, matrix_leaf: MatrixLeaf, candidates: Sequence[Candidate]
    ) -> list[Timing]:
        variables = product_site.equation.invars
        data = _random(variables[1 - product_site.operand].aval)
        weights = _random(variables[product_site.operand].aval)
        calls = [_dense_call(product_site, data, weights)]
        for format, arrays in candidates:
            layer = _one_layer(arrays, matrix_leaf, product_site)
            calls.append(_candidate_call(format, matrix_leaf, product_site, data, layer))
        of_products = self._seconds(calls)
        dense, *_ = of_products
        return [Timing(statistics.median(each), _gain(each, dense)) for each in of_products]

    def _seconds(self, calls: Sequence[Call]) -> list[list[float]]:
        """The seconds of each call in each round."""
        repeats = []
        for call in calls:
            repeats.append(repeats_of(call, _LONG_ENOUGH))
        return in_turns(calls, repeats, self.rounds)


def _gain(seconds: Sequence[float], dense: Sequence[float]) -> float:
    """How many times as fast as dense a product is at least, in three rounds of four."""
    gains = []
    for mine, other in zip(seconds, dense, strict=True):
        gains.append(other / mine)
    lowest_quarter, *_ = statistics.quantiles(gains, n=4)
    return lowest_quarter


def _dense_call(product_site: ProductSite, data: jax.Array, weights: jax.Array) -> Call:
    @jax.jit
    def run(data: jax.Array, weights: jax.Array) -> Any:
        return bind(product_site.equation, product_site.operands(data, weights))

    return lambda: run(data, weights)


def _candidate_call(
    format: ExecutedFormat,
    matrix_leaf: MatrixLeaf,
    product_site: ProductSite,
    data: jax.Array,
    layer: PackedArrays,
) -> Call:
    @jax.jit
    def run(data: jax.Array, arrays: Mapping[str, Any]) -> jax.Array:
        return product_site.multiply(data, format.operator(arrays, matrix_leaf))

    arrays = jax.tree.map(jnp.asarray, layer)
    return lambda: run(data, arrays)


def _one_layer(
    arrays: PackedArrays, matrix_leaf: MatrixLeaf, product_site: ProductSite
) -> PackedArrays:
    """The arrays that the first trip of the loops around a product gets."""
    depth = len(product_site.use.site.view.stack)
    first = (0,) * depth
    layer = {}
    for name, array in arrays.items():
        _, *shape = array.shape
        of_layers = array.reshape(*matrix_leaf.layers, *shape)
        layer[name] = of_layers[first]
    return layer


def _random(aval: Any) -> jax.Array:
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(aval.shape, np.float32)
    return jnp.asarray(numbers.astype(aval.dtype))


def _signature(product_site: ProductSite) -> Hashable:
    """What the time of a product depends on, apart from the candidates."""
    equation = product_site.equation
    shapes = []
    for variable in equation.invars:
        aval = variable.aval
        shapes.append((aval.shape, aval.dtype))
    is_part = product_site.part is not None
    return str(equation.params), tuple(shapes), product_site.operand, is_part


def _bucket(candidate: Candidate) -> Hashable:
    """A key that candidates share if they store about as much of a layer in the same format."""
    sizes = []
    for name, array in sorted(candidate.arrays.items()):
        size = max(array[0].size, 1)
        rounded = round(math.log(size, _BUCKET))
        sizes.append((name, rounded))
    return candidate.format, tuple(sizes)
