"""What operations make of removed channels that compute by element, move elements or place them beside others."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner.structure.axes import Axis
from jaxpruner.structure.fills import NAN, Fill, Flow, Number, computed, is_finite, join


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
    literals = [fill.everywhere is not None for fill in fills]
    sizes = [[axis.size for axis in axes] for axes in flow.operands]
    everywhere = None
    if all(literals):
        everywhere = computed(flow.equation, [fill.everywhere for fill in fills], literals)

    def find(i: int, atom: Axis) -> Number:
        size = flow.results[0][i].size
        values = []
        for fill, own_sizes in zip(fills, sizes, strict=True):
            has_axis = bool(own_sizes) and own_sizes[i] == size
            values.append(fill.at(i, atom) if has_axis else fill.everywhere)
        return computed(flow.equation, values, literals)

    if everywhere is not None:
        return [Fill(everywhere, ({},) * len(flow.results[0]))]
    return [flow.result(None, find)]


def same(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Each result is an operand."""
    return list(fills)


def transpose(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Axes in another order."""
    (fill,) = fills
    order = flow.equation.params['permutation']
    return [Fill(fill.everywhere, tuple([fill.channels[i] for i in order]))]


def squeeze(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Without axes of one element."""
    (fill,) = fills
    dropped = flow.equation.params['dimensions']
    kept = [channels for i, channels in enumerate(fill.channels) if i not in dropped]
    return [Fill(fill.everywhere, tuple(kept))]


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
        values = []
        for i, axis in enumerate(flow.operands[0]):
            if atom in flow.candidates(axis):
                values.append(fill.at(i, atom))
        return join(values) if values else None

    return [flow.result(fill.everywhere, find)]


def part(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Parts of the first operand: along each axis what is known of the whole."""
    fill = fills[0]
    return [flow.result(fill.everywhere, fill.at, number) for number in range(len(flow.results))]


def concatenate(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """Along the axis of the concatenation only the operands that have an atom say what is known of it."""
    along = flow.equation.params['dimension']
    everywhere = [fill.everywhere for fill in fills]

    def find(i: int, atom: Axis) -> Number:
        values = []
        for fill, axes in zip(fills, flow.operands, strict=True):
            if i != along or atom in flow.candidates(axes[i]):
                values.append(fill.at(i, atom))
        return join(values)

    return [flow.result(everywhere[0] if len(set(everywhere)) == 1 else None, find)]


def stack(flow: Flow, fills: Sequence[Fill]) -> list[Fill]:
    """The operands along a new axis."""
    along = flow.equation.params['axis']
    everywhere = [fill.everywhere for fill in fills]

    def find(k: int, atom: Axis) -> Number:
        if k == along:
            return None
        return join([fill.at(k - (k > along), atom) for fill in fills])

    return [flow.result(everywhere[0] if len(set(everywhere)) == 1 else None, find)]


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
    params = flow.equation.params
    numbers = params['dimension_numbers']
    batching = tuple(getattr(numbers, 'operand_batching_dims', ()))
    gone = (*numbers.collapsed_slice_dims, *batching)
    kept = [i for i in range(len(flow.operands[0])) if i not in gone]
    source = dict(zip(numbers.offset_dims, kept, strict=True))
    filled_in = _filled_in(params, flow.equation.outvars[0].aval.dtype)

    def find(k: int, atom: Axis) -> Number:
        if k in source:
            value = base.at(source[k], atom)
        else:
            values = [
                base.at(i, atom) for i in batching if atom in flow.candidates(flow.operands[0][i])
            ]
            value = join(values) if values else None
        return join((value, *filled_in)) if value is not None else None

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
    numbers = flow.equation.params['dimension_numbers']
    batching = tuple(getattr(numbers, 'operand_batching_dims', ()))
    gone = (*numbers.inserted_window_dims, *batching)
    kept = [i for i in range(len(flow.operands[0])) if i not in gone]
    source = dict(zip(kept, numbers.update_window_dims, strict=True))

    def find(i: int, atom: Axis) -> Number:
        values = [base.at(i, atom)]
        if i in source:
            values.append(updates.at(source[i], atom))
        else:
            values += [
                updates.at(k, atom)
                for k, axis in enumerate(flow.operands[2])
                if atom in flow.candidates(axis)
            ]
        value = join(values)
        keeps = name in ('scatter', 'scatter_max', 'scatter_min') or value == 0
        return value if keeps or not is_finite(value) else None

    return [flow.result(None, find)]
