"""The walk through a `shard_map`."""

import functools
from collections.abc import Sequence
from typing import Any

from jaxpruner.uses import views
from jaxpruner.uses.bodies import ShardMap
from jaxpruner.uses.moving_rules import shape_of
from jaxpruner.uses.records import Value, Values, Walker, WalkPosition
from jaxpruner.uses.views import NoRuleError, View, ViewAxis


def walk_shard_map(
    walker: Walker, shard_map: ShardMap, values: Values, position: WalkPosition
) -> Values:
    """Walks through the program of a `shard_map`, in which each device has a part of each axis."""
    jaxpr = shard_map.program.jaxpr
    inside = _rescaled(walker, shard_map, values, jaxpr.invars, position)
    devices = position.devices * shard_map.device_count()
    inner = position.inside(shard_map.equation, 0)._replace(devices=devices)
    results = walker.visit_program(shard_map.program, inside, inner)
    return _rescaled(walker, shard_map, results, shard_map.equation.outvars, position)


def _rescaled(
    walker: Walker,
    shard_map: ShardMap,
    values: Values,
    variables: Sequence[Any],
    position: WalkPosition,
) -> Values:
    """What is known of the devices' parts of some arrays, or of the arrays that are made of such parts."""
    results = []
    for value, variable in zip(values, variables, strict=True):
        resized = functools.partial(_resized, new_shape=shape_of(variable))
        try:
            inside = tuple(map(resized, value.views))
        except NoRuleError as reason:
            walker.findings.add_opaque([value], str(reason), shard_map.equation, position)
            inside = ()
        results.append(Value(value.data, inside))
    return results


def _resized(view: View, new_shape: Sequence[int]) -> View:
    if view.shape == new_shape:
        return view.computed()
    axes: list[ViewAxis] = []
    for axis, length in zip(view.axes, new_shape, strict=True):
        if not axis.is_whole:
            raise NoRuleError('no rule for shard_map of a concatenation')
        if axis.length != length:
            axis = views.mixed(axis.factors, length)
        axes.append(axis)
    return view.computed(axes)
