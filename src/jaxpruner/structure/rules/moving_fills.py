"""Fills after operations that compute elementwise, move elements, or place them beside others."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from jaxpruner.structure.analysis.axes import Axis, drop, pick
from jaxpruner.structure.analysis.fills import NAN, Fill, Flow, Number, computed, is_finite, join
from jaxpruner.structure.rules.scatter_axes import ScatterAxes
from jaxpruner.uses.indexing_rules import GatherAxes

# (axis, atom) -> the number at the atom's removed indices along this axis.
Find = Callable[[int, Axis], Number]


def nothing(flow: Flow) -> list[Fill]:
    """Knows nothing of the results, but that what is not finite may spread."""

    def find(i: int, atom: Axis) -> Number:
        for fill in flow.fills:
            for channels in fill.channels:
                if not is_finite(channels.get(atom)):
                    return NAN
        return None

    return _each_result(flow, None, find)


def _each_result(flow: Flow, everywhere: Number, find: Find) -> list[Fill]:
    """The same fill for each result."""
    results = []
    for number in range(len(flow.results)):
        results.append(flow.result(everywhere, find, number))
    return results


def elementwise(flow: Flow) -> list[Fill]:
    """Computes the result from the operands' numbers, if they are known."""
    everywhere = [fill.everywhere for fill in flow.fills]
    literals = [number is not None for number in everywhere]
    if any(literals):
        number = computed(flow.equation, everywhere, literals)
        is_certain = all(literals) or is_finite(number)
        if number is not None and is_certain:
            return [flow.constant(number)]

    def find(i: int, atom: Axis) -> Number:
        size = flow.results[0][i].size
        values = []
        for fill, axes in zip(flow.fills, flow.operands, strict=True):
            if axes and axes[i].size == size:
                values.append(fill.at(i, atom))
            else:  # it is repeated along this axis
                values.append(fill.everywhere)
        return computed(flow.equation, values, literals)

    return [flow.result(None, find)]


def same(flow: Flow) -> list[Fill]:
    """Returns the operands: each result is one."""
    return list(flow.fills)


def transpose(flow: Flow) -> list[Fill]:
    """Puts the axes in another order."""
    (fill,) = flow.fills
    channels = pick(fill.channels, flow.params['permutation'])
    return [Fill(fill.everywhere, channels)]


def squeeze(flow: Flow) -> list[Fill]:
    """Drops axes of one element."""
    (fill,) = flow.fills
    channels = drop(fill.channels, flow.params['dimensions'])
    return [Fill(fill.everywhere, channels)]


def broadcast(flow: Flow) -> list[Fill]:
    """Keeps what is known along old axes; along new ones nothing is."""
    fill = flow.fills[0]
    source = _reversed(enumerate(flow.params['broadcast_dimensions']))

    def find(k: int, atom: Axis) -> Number:
        if k not in source:
            return None
        return fill.channels[source[k]].get(atom)

    return [flow.result(fill.everywhere, find)]


def _reversed(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The first number of each pair, by the second."""
    return {second: first for first, second in pairs}


def regrouped(flow: Flow) -> list[Fill]:
    """Splits and merges axes: an atom comes from all axes of the operand that have it."""
    fill = flow.fills[0]

    def find(k: int, atom: Axis) -> Number:
        return _joined_along(fill, flow.axes_with(atom), atom)

    return [flow.result(fill.everywhere, find)]


def _joined_along(fill: Fill, axes: Iterable[int], atom: Axis) -> Number:
    """What is known of an element that comes from one of these axes of a value, or from none of them."""
    values = [fill.at(i, atom) for i in axes]
    return join(values) if values else None


def part(flow: Flow) -> list[Fill]:
    """Takes parts of the first operand, of which the same is known as of the whole."""
    fill = flow.fills[0]
    return _each_result(flow, fill.everywhere, fill.at)


def concatenate(flow: Flow) -> list[Fill]:
    """Joins what is known of the operands; along the axis of the concatenation, of those that have the atom."""
    along = flow.params['dimension']

    def find(i: int, atom: Axis) -> Number:
        values = []
        for fill, axes in zip(flow.fills, flow.operands, strict=True):
            if i != along or atom in flow.candidates(axes[i]):
                values.append(fill.at(i, atom))
        return join(values)

    return [flow.result(_common(flow.fills), find)]


def _common(fills: Iterable[Fill]) -> Number:
    """The number that all elements of all these values are, if there is one."""
    numbers = {fill.everywhere for fill in fills}
    return numbers.pop() if len(numbers) == 1 else None


def stack(flow: Flow) -> list[Fill]:
    """Places the operands along a new axis."""
    along = flow.params['axis']

    def find(k: int, atom: Axis) -> Number:
        if k == along:
            return None
        i = k - 1 if k > along else k
        return join([fill.at(i, atom) for fill in flow.fills])

    return [flow.result(_common(flow.fills), find)]


def pad(flow: Flow) -> list[Fill]:
    """Pads removed channels like others, along all axes but their own."""
    fill, padding = flow.fills
    config = flow.params['padding_config']
    padded = {i for i, amounts in enumerate(config) if max(amounts) > 0}

    def find(i: int, atom: Axis) -> Number:
        value = fill.at(i, atom)
        if padded <= {i}:
            return value
        return join((value, padding.everywhere))

    return [flow.result(_common(flow.fills), find)]


def update(flow: Flow) -> list[Fill]:
    """Replaces a window of the first operand by the second."""
    base, window = flow.fills[:2]

    def find(i: int, atom: Axis) -> Number:
        return join((base.at(i, atom), window.at(i, atom)))

    return [flow.result(None, find)]


def gather(flow: Flow) -> list[Fill]:
    """Takes windows at indices; an index beyond the end may fill in a number."""
    base = flow.fills[0]
    axes = GatherAxes.of(flow.equation)
    source = _reversed(axes.kept.items())
    dtype = flow.equation.outvars[0].aval.dtype
    has_other = _fills_in(flow.params, dtype)

    def find(k: int, atom: Axis) -> Number:
        sources = [source[k]] if k in source else flow.axes_with(atom, axes.gone)
        if not sources:
            return None
        value = _joined_along(base, sources, atom)
        return join((value, flow.params.get('fill_value'))) if has_other else value

    return [flow.result(None if has_other else base.everywhere, find)]


def _fills_in(params: Mapping[str, Any], dtype: Any) -> bool:
    """Whether a number fills in for an index beyond the end. NaN spoils the whole model, and needs no care."""
    if 'FILL' not in str(params.get('mode')):
        return False
    value = params.get('fill_value')
    is_number = value is not None and is_finite(value)
    return is_number or not jnp.issubdtype(dtype, jnp.inexact)


def scatter(flow: Flow) -> list[Fill]:
    """Replaces elements of the first operand by windows of the third, or combines them."""
    base, _, updates = flow.fills
    kept = ScatterAxes.of(flow.equation).kept
    chooses = flow.equation.primitive.name in ('scatter', 'scatter_max', 'scatter_min')

    def find(i: int, atom: Axis) -> Number:
        sources = [kept[i]] if i in kept else flow.axes_with(atom, operand=2)
        values = [base.at(i, atom)]
        for k in sources:
            values.append(updates.at(k, atom))
        value = join(values)
        keeps_value = chooses or value == 0 or not is_finite(value)
        return value if keeps_value else None

    return [flow.result(None, find)]
