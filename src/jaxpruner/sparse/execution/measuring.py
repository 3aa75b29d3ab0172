"""Times the candidates of a product, each in turns with the dense one, on data of the model's shapes.

Layers of one shape are measured once, and so are candidates that differ in a few weights alone.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.core.call_times import in_turns, repeats_of
from jaxpruner.sparse.execution.formats import Arrays, Format
from jaxpruner.sparse.program.matrices import Product
from jaxpruner.sparse.program.places import Place
from jaxpruner.uses.bodies import bind

_LONG_ENOUGH = 5e-3  # seconds
# Numbers of weights that differ by less are measured as one.
_BUCKET = 1.05

# A format, and what it stores of the layers of one product.
Candidate = tuple[Format, Arrays]


class Timing(NamedTuple):
    """How long a product takes in one call of the model.

    Attributes:
      seconds: the median.
      gain: how many times as fast as the dense product it is at least, in three rounds of four.
    """

    seconds: float
    gain: float


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
        total = [Timing(0.0, math.inf)] * (len(candidates) + 1)
        for place in product.places:
            timings = self._times_at(place, product, candidates)
            for number, timing in enumerate(timings):
                seconds = total[number].seconds + place.trips * timing.seconds
                total[number] = Timing(seconds, min(total[number].gain, timing.gain))
        return total

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
        shapes = [variable.aval for variable in place.equation.invars]
        data = _random(shapes[1 - place.operand])
        weights = _random(shapes[place.operand])
        calls = [_dense_call(place, data, weights)]
        for each, arrays in candidates:
            layer = _one_layer(arrays, product, place)
            calls.append(_call(place, product, each, layer, data))
        repeats = [repeats_of(call, _LONG_ENOUGH) for call in calls]
        rounds = in_turns(calls, repeats, self.rounds)
        return [_timing(seconds, rounds[0]) for seconds in rounds]


def _timing(seconds: Sequence[float], dense: Sequence[float]) -> Timing:
    ratios = [other / mine for mine, other in zip(seconds, dense, strict=True)]
    return Timing(statistics.median(seconds), statistics.quantiles(ratios, n=4)[0])


def _dense_call(place: Place, data: jax.Array, weights: jax.Array) -> Any:
    @jax.jit
    def run(data: jax.Array, weights: jax.Array) -> Any:
        return bind(place.equation, place.operands(data, weights))

    return lambda: run(data, weights)


def _call(
    place: Place, product: Product, format: Format, arrays: Mapping[str, Any], data: jax.Array
) -> Any:
    @jax.jit
    def run(data: jax.Array, arrays: Mapping[str, Any]) -> jax.Array:
        operator = format.operator(arrays, product)
        return place.multiply(place.operands(data, None), operator)

    arrays = jax.tree.map(jnp.asarray, dict(arrays))
    return lambda: run(data, arrays)


def _one_layer(arrays: Arrays, product: Product, place: Place) -> Arrays:
    """What one trip of the loops around the place gets."""
    depth = len(place.use.site.view.stack)
    first = (0,) * depth
    layer = {}
    for name, array in arrays.items():
        layer[name] = array.reshape(*product.layers, *array.shape[1:])[first]
    return layer


def _random(shape: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape.shape, jnp.float32).astype(shape.dtype)


def _signature(place: Place) -> Hashable:
    shapes = [(variable.aval.shape, variable.aval.dtype) for variable in place.equation.invars]
    is_part = place.part is not None
    return str(place.equation.params), tuple(shapes), place.operand, is_part


def _bucket(candidate: Candidate) -> Hashable:
    format, arrays = candidate
    sizes = []
    for name, array in sorted(arrays.items()):
        weights = round(math.log(max(array[0].size, 1), _BUCKET))
        sizes.append((name, weights))
    return format, tuple(sizes)
