"""Fills after operations that compute elementwise, move elements, or place them beside others."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from jaxpruner.structure.analysis.axes import Axis, drop, pick
from jaxpruner.structure.analysis.fills import NAN, Fill, Flow, Number, computed, is_finite, join
from jaxpruner.structure.rules.scatter_axes import ScatterAxes
from jaxpruner.uses.indexing_rules import GatherAxes


def nothing(flow: Flow) -> list[Fill]:
    """Knows nothing of the results, but that what is not finite may spread."""

    def find(axis: int, atom: Axis) -> Number:
        for fill in flow.fills:
            for channels in fill.channels:
                number = channels.get(atom)
                if not is_finite(number):
                    return NAN
        return None

    return flow.fill_results(find)


def elementwise(flow: Flow) -> list[Fill]:
    """Computes the result from the operands' numbers, if they are known."""
    everywhere = [fill.everywhere for fill in flow.fills]
    is_literal = [number is not None for number in everywhere]
    if any(is_literal):
        result = computed(flow.equation, everywhere, is_literal)
        is_certain = all(is_literal) or is_finite(result)
        if result is not None and is_certain:
            return [flow.constant(result)]

    def find(i: int, atom: Axis) -> Number:
        size = flow.results[0][i].size
        numbers = []
        for fill, axes in zip(flow.fills, flow.operands, strict=True):
            is_repeated = not axes or axes[i].size != size
            number = fill.everywhere if is_repeated else fill.at(i, atom)
            numbers.append(number)
        return computed(flow.equation, numbers, is_literal)

    return flow.fill_results(find)


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
    axes_of_result = flow.params['broadcast_dimensions']
    source = _axis_before(enumerate(axes_of_result))

    def find(k: int, atom: Axis) -> Number:
        if k not in source:
            return None
        channels = fill.channels[source[k]]
        return channels.get(atom)

    return flow.fill_results(find, everywhere=fill.everywhere)


def _axis_before(moves: Iterable[tuple[int, int]]) -> dict[int, int]:
    """For each axis of a result the axis of the operand; the moves are pairs, that of the operand first."""
    return {after: before for before, after in moves}


def regrouped(flow: Flow) -> list[Fill]:
    """Splits and merges axes: an atom comes from all axes of the operand that have it."""
    fill = flow.fills[0]

    def find(k: int, atom: Axis) -> Number:
        return _join_along(fill, flow.axes_with(atom), atom)

    return flow.fill_results(find, everywhere=fill.everywhere)


def _join_along(fill: Fill, axes: Iterable[int], atom: Axis) -> Number:
    """What is known of an element that comes from one of these axes of a value, or from none of them."""
    numbers = [fill.at(i, atom) for i in axes]
    return join(numbers) if numbers else None


def part(flow: Flow) -> list[Fill]:
    """Takes parts of the first operand, of which the same is known as of the whole."""
    fill = flow.fills[0]
    return flow.fill_results(fill.at, everywhere=fill.everywhere)


def concatenate(flow: Flow) -> list[Fill]:
    """Joins what is known of the operands; along the axis of the concatenation, of those that have the atom."""
    along = flow.params['dimension']

    def find(i: int, atom: Axis) -> Number:
        numbers = []
        for fill, axes in zip(flow.fills, flow.operands, strict=True):
            if i != along or atom in flow.candidates(axes[i]):
                numbers.append(fill.at(i, atom))
        return join(numbers)

    return flow.fill_results(find, everywhere=_common(flow.fills))


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
        numbers = [fill.at(i, atom) for fill in flow.fills]
        return join(numbers)

    return flow.fill_results(find, everywhere=_common(flow.fills))


def pad(flow: Flow) -> list[Fill]:
    """Pads removed channels like others, along all axes but their own."""
    fill, padding = flow.fills
    config = flow.params['padding_config']
    padded_axes = {i for i, amounts in enumerate(config) if max(amounts) > 0}

    def find(i: int, atom: Axis) -> Number:
        number = fill.at(i, atom)
        other_axes = padded_axes - {i}
        if not other_axes:
            return number
        return join((number, padding.everywhere))

    return flow.fill_results(find, everywhere=_common(flow.fills))


def update(flow: Flow) -> list[Fill]:
    """Replaces a window of the first operand by the second."""
    base, window = flow.fills[:2]

    def find(i: int, atom: Axis) -> Number:
        outside = base.at(i, atom)
        inside = window.at(i, atom)
        return join((outside, inside))

    return flow.fill_results(find)


def gather(flow: Flow) -> list[Fill]:
    """Takes windows at indices; an index beyond the end may fill in a number."""
    base = flow.fills[0]
    axes = GatherAxes.of(flow.equation)
    source = _axis_before(axes.kept.items())
    dtype = flow.equation.outvars[0].aval.dtype
    fills_in = _fills_in(flow.params, dtype)
    everywhere = None if fills_in else base.everywhere

    def find(k: int, atom: Axis) -> Number:
        sources = flow.axes_with(atom, axes.gone)
        if k in source:
            sources = [source[k]]
        if not sources:
            return None
        number = _join_along(base, sources, atom)
        if fills_in:
            return join((number, flow.params.get('fill_value')))
        return number

    return flow.fill_results(find, everywhere=everywhere)


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
    name = flow.equation.primitive.name
    chooses = name in ('scatter', 'scatter_max', 'scatter_min')

    def find(i: int, atom: Axis) -> Number:
        axes_of_updates = flow.axes_with(atom, operand=2)
        if i in kept:
            axes_of_updates = [kept[i]]
        numbers = [base.at(i, atom)]
        for k in axes_of_updates:
            numbers.append(updates.at(k, atom))
        number = join(numbers)
        stays = chooses or number == 0 or not is_finite(number)
        return number if stays else None

    return flow.fill_results(find)
