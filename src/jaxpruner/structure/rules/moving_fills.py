"""Fills after operations that compute elementwise, move elements, or place them beside others."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpruner.structure.analysis.axes import Axis, drop, pick
from jaxpruner.structure.analysis.fills import (
    NAN,
    EquationFills,
    Fill,
    Scalar,
    computed,
    is_finite,
    join,
)
from jaxpruner.structure.rules.scatter_axes import ScatterAxes
from jaxpruner.trace.rules import GatherAxes


def nothing(fills: EquationFills) -> list[Fill]:
    """Knows nothing of the results, except that scalars that are not finite may spread."""

    def find(axis: int, atom: Axis) -> Scalar:
        for fill in fills.of_operands:
            for channels in fill.channels:
                scalar = channels.get(atom)
                if not is_finite(scalar):
                    return NAN
        return None

    return fills.fill_results(find)


def elementwise(fills: EquationFills) -> list[Fill]:
    """Computes the scalars of the result from those of the operands."""
    everywhere = [fill.everywhere for fill in fills.of_operands]
    is_literal = [scalar is not None for scalar in everywhere]
    if any(is_literal):
        result = computed(fills.equation, everywhere, is_literal)
        is_certain = all(is_literal) or is_finite(result)
        if result is not None and is_certain:
            return [fills.constant(result)]

    def find(i: int, atom: Axis) -> Scalar:
        size = fills.results[0][i].size
        scalars = []
        for fill, axes in zip(fills.of_operands, fills.operands, strict=True):
            is_repeated = not axes or axes[i].size != size
            scalar = fill.everywhere if is_repeated else fill.at(i, atom)
            scalars.append(scalar)
        result = computed(fills.equation, scalars, is_literal)
        if not is_finite(result) and all(map(is_finite, scalars)):
            fills.note_cause(atom, _not_finite(fills, result, scalars))
        return result

    return fills.fill_results(find)


def _not_finite(fills: EquationFills, result: Scalar, scalars: Sequence[Scalar]) -> str:
    """Why these scalars have a result that is not finite, and the remedy."""
    if fills.equation.primitive.name == 'div' and scalars[1] == 0:
        dividend = 'x' if scalars[0] is None else f'{scalars[0]:g}'
        return f'{dividend} / 0 at zeroed channels; divide by what is never 0, such as jnp.maximum(divisor, 1e-6)'
    return f'{result} at zeroed channels'


def same(fills: EquationFills) -> list[Fill]:
    """Returns the fills of the operands."""
    return list(fills.of_operands)


def transpose(fills: EquationFills) -> list[Fill]:
    """Puts the axes in another order."""
    (fill,) = fills.of_operands
    channels = pick(fill.channels, fills.params['permutation'])
    return [Fill(fill.everywhere, channels)]


def squeeze(fills: EquationFills) -> list[Fill]:
    """Drops axes of one element."""
    (fill,) = fills.of_operands
    channels = drop(fill.channels, fills.params['dimensions'])
    return [Fill(fill.everywhere, channels)]


def unstack(fills: EquationFills) -> list[Fill]:
    """Takes the elements along an axis apart."""
    (fill,) = fills.of_operands
    channels = drop(fill.channels, [fills.params['axis']])
    return [Fill(fill.everywhere, channels)] * len(fills.results)


def broadcast(fills: EquationFills) -> list[Fill]:
    """Keeps the scalars along old axes. Along new axes nothing is known."""
    fill = fills.of_operands[0]
    axes_of_result = fills.params['broadcast_dimensions']
    source = _axis_before(enumerate(axes_of_result))

    def find(k: int, atom: Axis) -> Scalar:
        if k not in source:
            return None
        channels = fill.channels[source[k]]
        return channels.get(atom)

    return fills.fill_results(find, everywhere=fill.everywhere)


def _axis_before(moves: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Inverts pairs of an operand's axis and a result's axis."""
    return {after: before for before, after in moves}


def regrouped(fills: EquationFills) -> list[Fill]:
    """Splits and merges axes. An atom comes from all axes of the operand that have it."""
    fill = fills.of_operands[0]

    def find(k: int, atom: Axis) -> Scalar:
        return _join_along(fill, fills.axes_with(atom), atom)

    return fills.fill_results(find, everywhere=fill.everywhere)


def _join_along(fill: Fill, axes: Iterable[int], atom: Axis) -> Scalar:
    """Joins the scalars of an atom along several axes of a value; unknown if there are no axes."""
    scalars = [fill.at(i, atom) for i in axes]
    return join(scalars) if scalars else None


def part(fills: EquationFills) -> list[Fill]:
    """Takes a part of the first operand, which has the scalars of the whole."""
    fill = fills.of_operands[0]
    return fills.fill_results(fill.at, everywhere=fill.everywhere)


def concatenate(fills: EquationFills) -> list[Fill]:
    """Joins the scalars of the operands; along the axis of the concatenation, of operands with the atom."""
    along = fills.params['dimension']

    def find(i: int, atom: Axis) -> Scalar:
        scalars = []
        for fill, axes in zip(fills.of_operands, fills.operands, strict=True):
            if i != along or atom in fills.candidates(axes[i]):
                scalars.append(fill.at(i, atom))
        return join(scalars)

    return fills.fill_results(find, everywhere=_common(fills.of_operands))


def _common(fills: Iterable[Fill]) -> Scalar:
    """The scalar that all elements of all values equal, if there is one."""
    scalars = {fill.everywhere for fill in fills}
    return scalars.pop() if len(scalars) == 1 else None


def stack(fills: EquationFills) -> list[Fill]:
    """Places the operands along a new axis."""
    along = fills.params['axis']

    def find(k: int, atom: Axis) -> Scalar:
        if k == along:
            return None
        i = k - 1 if k > along else k
        scalars = [fill.at(i, atom) for fill in fills.of_operands]
        return join(scalars)

    return fills.fill_results(find, everywhere=_common(fills.of_operands))


def pad(fills: EquationFills) -> list[Fill]:
    """Pads removed channels like others, along all other axes."""
    fill, padding = fills.of_operands
    config = fills.params['padding_config']
    padded_axes = {i for i, amounts in enumerate(config) if max(amounts) > 0}

    def find(i: int, atom: Axis) -> Scalar:
        scalar = fill.at(i, atom)
        other_axes = padded_axes - {i}
        if not other_axes:
            return scalar
        return join((scalar, padding.everywhere))

    return fills.fill_results(find, everywhere=_common(fills.of_operands))


def update(fills: EquationFills) -> list[Fill]:
    """Replaces a window of the first operand by the second."""
    base, window = fills.of_operands[:2]

    def find(i: int, atom: Axis) -> Scalar:
        outside = base.at(i, atom)
        inside = window.at(i, atom)
        return join((outside, inside))

    return fills.fill_results(find)


def gather(fills: EquationFills) -> list[Fill]:
    """Takes windows at indices. For an index beyond the end a scalar may be filled in."""
    base = fills.of_operands[0]
    axes = GatherAxes.of(fills.equation)
    source = _axis_before(axes.kept.items())
    dtype = fills.equation.outvars[0].aval.dtype
    fills_in = _fills_in(fills.params, dtype)
    everywhere = None if fills_in else base.everywhere

    def find(k: int, atom: Axis) -> Scalar:
        sources = fills.axes_with(atom, axes.gone)
        if k in source:
            sources = [source[k]]
        if not sources:
            return None
        scalar = _join_along(base, sources, atom)
        if fills_in:
            return join((scalar, fills.params.get('fill_value')))
        return scalar

    return fills.fill_results(find, everywhere=everywhere)


def _fills_in(params: Mapping[str, Any], dtype: Any) -> bool:
    """Whether a finite scalar is filled in beyond the end. NaN would spoil the whole model anyway."""
    if 'FILL' not in str(params.get('mode')):
        return False
    value = params.get('fill_value')
    is_scalar = value is not None and is_finite(value)
    return is_scalar or not jnp.issubdtype(dtype, jnp.inexact)


def scatter(fills: EquationFills) -> list[Fill]:
    """Replaces elements of the first operand by windows of the third, or combines both."""
    base, _, updates = fills.of_operands
    kept = ScatterAxes.of(fills.equation).kept
    name = fills.equation.primitive.name
    chooses = name in ('scatter', 'scatter-max', 'scatter-min')

    def find(i: int, atom: Axis) -> Scalar:
        axes_of_updates = fills.axes_with(atom, operand=2)
        if i in kept:
            axes_of_updates = [kept[i]]
        scalars = [base.at(i, atom)]
        for k in axes_of_updates:
            scalars.append(updates.at(k, atom))
        scalar = join(scalars)
        stays = chooses or scalar == 0 or not is_finite(scalar)
        return scalar if stays else None

    return fills.fill_results(find)
