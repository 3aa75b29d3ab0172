"""Times the candidates of a product, each in turns with the dense one, on data of the model's shapes.

Layers of one shape are measured once, and so are candidates that differ in a few weights alone. Data are NumPy's: JAX
would compile a program for each shape to draw them, which takes longer than to measure.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core.call_times import Call, in_turns, repeats_of
from jaxpruner.sparse.execution.empty_operators import EmptyDense
from jaxpruner.sparse.execution.formats import Arrays, Format
from jaxpruner.sparse.program.matrices import Product
from jaxpruner.sparse.program.places import Place
from jaxpruner.uses.bodies import bind

_LONG_ENOUGH = 5e-3  # seconds
# Numbers of weights that differ by less are measured as one.
_BUCKET = 1.05


class Candidate(NamedTuple):
    """A format, and what it stores of the layers of one product."""

    format: Format
    arrays: Arrays


class Timing(NamedTuple):
    """How long a product takes at one place of the model, or at all of them in one call.

    Attributes:
      seconds: the median.
      gain: how many times as fast as the dense product it is at least, in three rounds of four.
      empty: seconds of an operator that reads and writes as it does, and multiplies nothing.
    """

    seconds: float
    gain: float
    empty: float


class Measurements:
    """Times products; what was timed once is remembered.

    Attributes:
      rounds: how often each candidate is timed.
    """

    def __init__(self, rounds: int):
        self.rounds = rounds
        self._timings: dict[Hashable, list[Timing]] = {}

    def times(self, product: Product, candidates: Sequence[Candidate]) -> list[Timing]:
        """Of the dense product, then of each candidate; places and trips of loops are added up."""
        at_places = [self._times_at(place, product, candidates) for place in product.places]
        totals = []
        for timings in zip(*at_places, strict=True):
            seconds = empty = 0.0
            for place, timing in zip(product.places, timings, strict=True):
                seconds += place.trips * timing.seconds
                empty += place.trips * timing.empty
            gain = min(timing.gain for timing in timings)
            totals.append(Timing(seconds, gain, empty))
        return totals

    def _times_at(
        self, place: Place, product: Product, candidates: Sequence[Candidate]
    ) -> list[Timing]:
        key = _signature(place), tuple(map(_bucket, candidates))
        if key not in self._timings:
            self._timings[key] = self._measure(place, product, candidates)
        return self._timings[key]

    def _measure(
        self, place: Place, product: Product, candidates: Sequence[Candidate]
    ) -> list[Timing]:
        variables = place.equation.invars
        data = _random(variables[1 - place.operand].aval)
        weights = _random(variables[place.operand].aval)
        # Each product, and behind it the empty one that reads and writes alike.
        calls = [
            _dense_call(place, data, weights),
            _empty_call(EmptyDense(product.outputs), place, data),
        ]
        for format, arrays in candidates:
            layer = _one_layer(arrays, product, place)
            calls.append(_candidate_call(format, product, place, data, layer))
            calls.append(_empty_call(format.empty(product), place, data))
        rounds = self._seconds(calls)
        dense, *_ = rounds
        timings = []
        for seconds, empty in zip(rounds[::2], rounds[1::2], strict=True):
            gain = _gain(seconds, dense)
            timings.append(Timing(statistics.median(seconds), gain, statistics.median(empty)))
        return timings

    def _seconds(self, calls: Sequence[Call]) -> list[list[float]]:
        """Of each call in each round."""
        repeats = []
        for call in calls:
            repeats.append(repeats_of(call, _LONG_ENOUGH))
        return in_turns(calls, repeats, self.rounds)


def _gain(seconds: Sequence[float], dense: Sequence[float]) -> float:
    """How many times as fast as dense, in three rounds of four."""
    gains = []
    for mine, other in zip(seconds, dense, strict=True):
        gains.append(other / mine)
    lowest_quarter, *_ = statistics.quantiles(gains, n=4)
    return lowest_quarter


def _dense_call(place: Place, data: jax.Array, weights: jax.Array) -> Call:
    @jax.jit
    def run(data: jax.Array, weights: jax.Array) -> Any:
        return bind(place.equation, place.operands(data, weights))

    return lambda: run(data, weights)


def _candidate_call(
    format: Format, product: Product, place: Place, data: jax.Array, layer: Arrays
) -> Call:
    def operator_of(arrays: Mapping[str, Any]) -> Any:
        return format.operator(arrays, product)

    return _call(operator_of, place, data, layer)


def _empty_call(empty: Any, place: Place, data: jax.Array) -> Call:
    return _call(lambda _: empty, place, data, {})


def _call(
    operator_of: Callable[[Mapping[str, Any]], Any],
    place: Place,
    data: jax.Array,
    layer: Arrays,
) -> Call:
    """A call of the product at a place, in which an operator of the arrays of a layer multiplies."""

    @jax.jit
    def run(data: jax.Array, arrays: Mapping[str, Any]) -> jax.Array:
        return place.multiply(data, operator_of(arrays))

    arrays = jax.tree.map(jnp.asarray, layer)
    return lambda: run(data, arrays)


def _one_layer(arrays: Arrays, product: Product, place: Place) -> Arrays:
    """What one trip of the loops around the place gets."""
    depth = len(place.use.site.view.stack)
    first = (0,) * depth
    layer = {}
    for name, array in arrays.items():
        of_layers = array.reshape(*product.layers, *array.shape[1:])
        layer[name] = of_layers[first]
    return layer


def _random(aval: Any) -> jax.Array:
    numbers = np.random.default_rng(0).standard_normal(aval.shape, np.float32)
    return jnp.asarray(numbers.astype(aval.dtype))


def _signature(place: Place) -> Hashable:
    shapes = []
    for variable in place.equation.invars:
        aval = variable.aval
        shapes.append((aval.shape, aval.dtype))
    is_part = place.part is not None
    return str(place.equation.params), tuple(shapes), place.operand, is_part


def _bucket(candidate: Candidate) -> Hashable:
    """A candidate, and roughly how much it stores of a layer."""
    sizes = []
    for name, array in sorted(candidate.arrays.items()):
        size = max(array[0].size, 1)
        sizes.append((name, round(math.log(size, _BUCKET))))
    return candidate.format, tuple(sizes)
