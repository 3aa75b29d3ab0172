"""Fills after operations that compute elementwise, move elements, or place them beside others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner.structure.analysis.axes import Axis, all_but, pick
from jaxpruner.structure.analysis.fills import NAN, Fill, Flow, Number, computed, is_finite, join
from jaxpruner.structure.rules.scatter_axes import ScatterAxes
from jaxpruner.uses.indexing_rules import GatherAxes

# (axis, atom) -> the number at the atom's removed indices along this axis.
Find = Callable[[int, Axis], Number]


def nothing(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Knows nothing of the results, but that what is not finite may spread."""

    def find(i: int, atom: Axis) -> Number:
        for fill in fills:
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


def elementwise(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Computes the result from the operands' numbers, if they are known."""
    everywhere = [fill.everywhere for fill in fills]
    literals = [number is not None for number in everywhere]
    if any(literals):
        number = computed(flow.equation, everywhere, literals)
        if number is not None and (all(literals) or is_finite(number)):
            return [flow.constant(number)]

    def find(i: int, atom: Axis) -> Number:
        size = flow.results[0][i].size
        values = []
        for fill, axes in zip(fills, flow.operands, strict=True):
            has_axis = bool(axes) and axes[i].size == size  # others are repeated
            values.append(fill.at(i, atom) if has_axis else fill.everywhere)
        return computed(flow.equation, values, literals)

    return [flow.result(None, find)]


def same(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Returns the operands: each result is one."""
    return list(fills)


def transpose(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Puts the axes in another order."""
    (fill,) = fills
    return [Fill(fill.everywhere, pick(fill.channels, flow.equation.params['permutation']))]


def squeeze(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Drops axes of one element."""
    (fill,) = fills
    kept = all_but(flow.equation.params['dimensions'], fill.channels)
    return [Fill(fill.everywhere, pick(fill.channels, kept))]


def broadcast(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Keeps what is known along old axes; along new ones nothing is."""
    fill = fills[0]
    source = {k: i for i, k in enumerate(flow.equation.params['broadcast_dimensions'])}

    def find(k: int, atom: Axis) -> Number:
        return fill.channels[source[k]].get(atom) if k in source else None

    return [flow.result(fill.everywhere, find)]


def regrouped(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Splits and merges axes: an atom comes from all axes of the operand that have it."""
    fill = fills[0]

    def find(k: int, atom: Axis) -> Number:
        values = [fill.at(i, atom) for i in flow.axes_with(atom)]
        return join(values) if values else None

    return [flow.result(fill.everywhere, find)]


def part(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Takes parts of the first operand, of which the same is known as of the whole."""
    fill = fills[0]
    return _each_result(flow, fill.everywhere, fill.at)


def concatenate(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Joins what is known of the operands; along the axis of the concatenation, of those that have the atom."""
    along = flow.equation.params['dimension']

    def find(i: int, atom: Axis) -> Number:
        values = []
        for fill, axes in zip(fills, flow.operands, strict=True):
            if i != along or atom in flow.candidates(axes[i]):
                values.append(fill.at(i, atom))
        return join(values)

    return [flow.result(_common(fills), find)]


def _common(fills: Sequence[Fill]) -> Number:
    """The number that all elements of all these values are, if there is one."""
    numbers = {fill.everywhere for fill in fills}
    return numbers.pop() if len(numbers) == 1 else None


def stack(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Places the operands along a new axis."""
    along = flow.equation.params['axis']

    def find(k: int, atom: Axis) -> Number:
        if k == along:
            return None
        i = k - 1 if k > along else k
        return join([fill.at(i, atom) for fill in fills])

    return [flow.result(_common(fills), find)]


def pad(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Pads removed channels like others, along all axes but their own."""
    fill, padding = fills
    config = flow.equation.params['padding_config']

    def find(i: int, atom: Axis) -> Number:
        is_padded = any(max(each) > 0 for k, each in enumerate(config) if k != i)
        value = fill.at(i, atom)
        return join((value, padding.everywhere)) if is_padded else value

    is_one_number = fill.everywhere is not None and fill.everywhere == padding.everywhere
    return [flow.result(fill.everywhere if is_one_number else None, find)]


def update(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Replaces a window of the first operand by the second."""
    base, window = fills[:2]

    def find(i: int, atom: Axis) -> Number:
        return join((base.at(i, atom), window.at(i, atom)))

    return [flow.result(None, find)]


def gather(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Takes windows at indices; an index beyond the end may fill in a number."""
    base = fills[0]
    axes = GatherAxes.of(flow.equation)
    source = {k: i for i, k in axes.kept.items()}
    filled_in = _filled_in(flow.equation.params, flow.equation.outvars[0].aval.dtype)

    def find(k: int, atom: Axis) -> Number:
        sources = [source[k]] if k in source else flow.axes_with(atom, axes.gone)
        values = [base.at(i, atom) for i in sources]
        return join((*values, *filled_in)) if values else None

    return [flow.result(None if filled_in else base.everywhere, find)]


def _filled_in(params: Any, dtype: Any) -> tuple[Number, ...]:
    """The number that fills in for an index beyond the end. NaN spoils the whole model, and needs no care."""
    value = params.get('fill_value')
    is_nan = jnp.issubdtype(dtype, jnp.inexact) and (value is None or not is_finite(value))
    return () if is_nan or 'FILL' not in str(params.get('mode')) else (value,)


def scatter(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Replaces elements of the first operand by windows of the third, or combines them."""
    base, _, updates = fills
    name = flow.equation.primitive.name
    kept = ScatterAxes.of(flow.equation).kept

    def find(i: int, atom: Axis) -> Number:
        sources = [kept[i]] if i in kept else flow.axes_with(atom, operand=2)
        values = [base.at(i, atom)]
        for k in sources:
            values.append(updates.at(k, atom))
        value = join(values)
        keeps = name in ('scatter', 'scatter_max', 'scatter_min') or value == 0
        return value if keeps or not is_finite(value) else None

    return [flow.result(None, find)]
