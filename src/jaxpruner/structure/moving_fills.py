"""What operations make of removed channels that compute by element, move elements or place them beside others."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner.structure.axes import Axis, all_but, pick
from jaxpruner.structure.fills import NAN, Fill, Flow, Number, computed, is_finite, join
from jaxpruner.structure.scatter_axes import ScatterAxes
from jaxpruner.uses.indexing_rules import GatherAxes


def nothing(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Nothing is known but what is not finite."""

    def find(i: int, atom: Axis) -> Number:
        for fill in fills:
            for channels in fill.channels:
                if not is_finite(channels.get(atom)):
                    return NAN
        return None

    return [flow.result(None, find, number) for number in range(len(flow.results))]


def elementwise(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """A function of the operands' numbers, where these are known."""
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
    """Each result is an operand."""
    return list(fills)


def transpose(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Axes in another order."""
    (fill,) = fills
    return [Fill(fill.everywhere, pick(fill.channels, flow.equation.params['permutation']))]


def squeeze(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Without axes of one element."""
    (fill,) = fills
    kept = all_but(flow.equation.params['dimensions'], fill.channels)
    return [Fill(fill.everywhere, pick(fill.channels, kept))]


def broadcast(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Nothing is known along new axes."""
    fill = fills[0]
    source = {k: i for i, k in enumerate(flow.equation.params['broadcast_dimensions'])}

    def find(k: int, atom: Axis) -> Number:
        return fill.channels[source[k]].get(atom) if k in source else None

    return [flow.result(fill.everywhere, find)]


def regrouped(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Axes taken apart or merged: an atom comes from all axes of the operand in which it is."""
    fill = fills[0]

    def find(k: int, atom: Axis) -> Number:
        values = [fill.at(i, atom) for i in flow.axes_with(atom)]
        return join(values) if values else None

    return [flow.result(fill.everywhere, find)]


def part(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Parts of the first operand: along each axis what is known of the whole."""
    fill = fills[0]
    return [flow.result(fill.everywhere, fill.at, number) for number in range(len(flow.results))]


def concatenate(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Along the axis of the concatenation only the operands that have an atom say what is known of it."""
    along = flow.equation.params['dimension']

    def find(i: int, atom: Axis) -> Number:
        values = []
        for fill, axes in zip(fills, flow.operands, strict=True):
            if i != along or atom in flow.candidates(axes[i]):
                values.append(fill.at(i, atom))
        return join(values)

    return [flow.result(_common(fills), find)]


def _common(fills: Sequence[Fill]) -> Number:
    """The number that all elements of all these values are."""
    numbers = {fill.everywhere for fill in fills}
    return numbers.pop() if len(numbers) == 1 else None


def stack(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """The operands along a new axis."""
    along = flow.equation.params['axis']

    def find(k: int, atom: Axis) -> Number:
        if k == along:
            return None
        i = k - 1 if k > along else k
        return join([fill.at(i, atom) for fill in fills])

    return [flow.result(_common(fills), find)]


def pad(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Removed channels are padded, too, along all axes but their own."""
    fill, padding = fills
    config = flow.equation.params['padding_config']

    def find(i: int, atom: Axis) -> Number:
        is_padded = any(max(each) > 0 for k, each in enumerate(config) if k != i)
        value = fill.at(i, atom)
        return join((value, padding.everywhere)) if is_padded else value

    is_one_number = fill.everywhere is not None and fill.everywhere == padding.everywhere
    return [flow.result(fill.everywhere if is_one_number else None, find)]


def update(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """A window of the first operand is replaced by the second."""
    base, window = fills[:2]

    def find(i: int, atom: Axis) -> Number:
        return join((base.at(i, atom), window.at(i, atom)))

    return [flow.result(None, find)]


def gather(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Windows at indices; an index beyond the end may fill in a number."""
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
    """What stands where an index is beyond the end. NaN spoils the whole model, so that it needs no care."""
    value = params.get('fill_value')
    is_nan = jnp.issubdtype(dtype, jnp.inexact) and (value is None or not is_finite(value))
    return () if is_nan or 'FILL' not in str(params.get('mode')) else (value,)


def scatter(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Windows of the third operand replace elements of the first, or are combined with them."""
    base, _, updates = fills
    name = flow.equation.primitive.name
    kept = ScatterAxes.of(flow.equation).kept

    def find(i: int, atom: Axis) -> Number:
        sources = [kept[i]] if i in kept else flow.axes_with(atom, operand=2)
        value = join([base.at(i, atom), *[updates.at(k, atom) for k in sources]])
        keeps = name in ('scatter', 'scatter_max', 'scatter_min') or value == 0
        return value if keeps or not is_finite(value) else None

    return [flow.result(None, find)]
