"""How the walk goes through equations with programs inside: `scan`, `while`, `cond` and `shard_map`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxpruner.uses import bodies, constants, liveness, moves, views
from jaxpruner.uses.graph import Site
from jaxpruner.uses.moving_rules import shape_of
from jaxpruner.uses.numbers import Counter
from jaxpruner.uses.records import DATA, Scope, Value, Walker
from jaxpruner.uses.views import Axis, NoRuleError, View

# What is carried is joined with what comes out of the body until nothing changes, which is after two or three trips.
_MOST_TRIPS = 20

Path = tuple[int, ...]


def walk_scan(
    walker: Walker, scan: bodies.Scan, values: Sequence[Value], scope: Scope
) -> list[Value]:
    """A scan: the body is walked through until what is carried stays the same."""
    constant_values, carried, sliced = scan.split(values)
    if not scan.length:
        return [*carried, *[DATA] * (len(scan.equation.outvars) - scan.carried)]
    loop = scope.path
    needed = liveness.needed_of_scan_body(scan, scope.needed)
    inner = scope.inside(scan.equation, 0, needed)
    inner = inner._replace(trips=scope.trips * scan.length)
    variables = scan.split(scan.body.jaxpr.invars)[2]
    taken = []
    for value, variable in zip(sliced, variables, strict=True):
        taken.append(_element(value, variable, loop))
    counters = _counters(scan, carried, loop)

    def walk_body(carried: list[Value]) -> list[Value]:
        inside = list(carried)
        for number, counter in counters.items():
            inside[number] = counter
        results = walker.visit_program(scan.body, [*constant_values, *inside, *taken], inner)
        for number in counters:
            results[number] = carried[number]
        return results

    def to_next_trip(value: Value) -> Value:
        """Without the elements of the stacks: the next trip has others."""
        return value._replace(views=tuple(_without(view, loop) for view in value.views))

    body = _LoopBody(scan, scope, needed, walk_body, to_next_trip)
    carried, results = _settle(walker, body, carried)
    for number in counters:
        carried[number] = Value()
    stacked = []
    for value in scan.split_results(results)[1]:
        outside = tuple(leave_loop(view, loop, scan.length) for view in value.views)
        stacked.append(Value(value.data, outside))
    return [*carried, *stacked]


def walk_while(
    walker: Walker, loop: bodies.While, values: Sequence[Value], scope: Scope
) -> list[Value]:
    """A while loop, as a scan of which nothing is sliced and that runs as often as its condition says."""
    equation = loop.equation
    condition_constants, body_constants, first = loop.split(values)
    needed = liveness.needed_of_while_body(loop, scope.needed)
    inner = scope.inside(equation, 1, needed)._replace(certain=False)

    def walk_body(carried: list[Value]) -> list[Value]:
        return walker.visit_program(loop.body, [*body_constants, *carried], inner)

    carried, _ = _settle(walker, _LoopBody(loop, scope, needed, walk_body), first)
    inner = scope.inside(equation, 0, (True,))._replace(certain=False)
    (again,) = walker.visit_program(loop.condition, [*condition_constants, *carried], inner)
    walker.findings.add_opaque([again], 'it decides how often a loop runs', equation, scope)
    if not again.data:
        return carried
    # How far a counter has got depends on data, then.
    jaxpr = loop.body.jaxpr
    before = jaxpr.invars[loop.body_constants :]
    after = list(carried)
    for number, variable in enumerate(jaxpr.outvars):
        if variable is not before[number]:
            after[number] = DATA
    _record_lost(walker, equation, carried, after, scope.at(-2))
    return after


def walk_cond(
    walker: Walker, cond: bodies.Cond, values: Sequence[Value], scope: Scope
) -> list[Value]:
    """One of several branches: what holds of all of them."""
    index, *operands = values
    walker.findings.add_opaque([index], 'it decides which branch runs', cond.equation, scope)
    results_of_branches = []
    for number, branch in enumerate(cond.branches):
        inner = scope.inside(cond.equation, number)._replace(certain=False)
        results_of_branches.append(walker.visit_program(branch, operands, inner))
    results, *others = results_of_branches
    for other in others:
        results = list(map(_join, results, other))
    if index.data:
        results = [DATA] * len(results)
    for number, branch in enumerate(results_of_branches):
        _record_lost(walker, cond.equation, branch, results, scope.at(-1 - number))
    return results


def walk_shard_map(
    walker: Walker, shard_map: bodies.ShardMap, values: Sequence[Value], scope: Scope
) -> list[Value]:
    """Each device has a part of each axis; how large it is says which."""
    jaxpr = shard_map.program.jaxpr
    inside = _rescaled(walker, shard_map, values, jaxpr.invars, scope)
    devices = scope.devices * _devices(shard_map.equation.params)
    inner = scope.inside(shard_map.equation, 0)._replace(devices=devices)
    results = walker.visit_program(shard_map.program, inside, inner)
    return _rescaled(walker, shard_map, results, shard_map.equation.outvars, scope)


def enter_loop(view: View, loop: Path) -> View:
    """What each trip of a scan gets of a value: an element of its first axis, which becomes a stack."""
    first, *others = view.axes
    stack = (*view.stack, views.StackAxis(loop, first))
    return dataclasses.replace(view.moved(others, views.ENTER_LOOP), stack=stack)


def leave_loop(view: View, loop: Path, length: int) -> View:
    """What all trips of a scan have put in an array."""
    if view.stack and view.stack[-1].loop == loop:
        *stack, entry = view.stack
        outside = view.moved((entry.axis, *view.axes), views.LEAVE_LOOP)
        return dataclasses.replace(outside, stack=tuple(stack))
    view = _without(view, loop)
    return view.computed((views.copies(length), *view.axes))


def _without(view: View, loop: Path) -> View:
    stack = tuple(entry for entry in view.stack if entry.loop != loop)
    if stack == view.stack:
        return view
    return dataclasses.replace(view.computed(), stack=stack)


def _element(value: Value, variable: Any, loop: Path) -> Value:
    """What each trip of a scan gets of a value; of a list of whole numbers that is known, a counter."""
    inside = tuple(enter_loop(view, loop) for view in value.views)
    element = Value(value.data, inside)
    aval = variable.aval
    if value.constant is None or aval.shape or not jnp.issubdtype(aval.dtype, jnp.integer):
        return element
    array = value.constant.array()
    if array is None:
        return element
    return element._replace(number=Counter(loop, tuple(array.tolist())))


def _counters(scan: bodies.Scan, carried: Sequence[Value], loop: Path) -> dict[int, Value]:
    """What is carried and only counts, such as the number of a `fori_loop`'s trip: by its number among the carried."""
    made_by = {}
    for equation in scan.body.jaxpr.eqns:
        made_by.update(dict.fromkeys(map(id, equation.outvars), equation))
    before = scan.split(scan.body.jaxpr.invars)[1]
    after = scan.body.jaxpr.outvars
    counters = {}
    for number, value in enumerate(carried):
        equation = made_by.get(id(after[number]))
        increment = _increment(equation, before[number])
        if isinstance(value.number, int) and increment is not None:
            numbers = [value.number + trip * increment for trip in range(scan.length)]
            if scan.reverse:
                numbers.reverse()
            counters[number] = Value(number=Counter(loop, tuple(numbers)))
    return counters


def _increment(equation: Any, counter: Any) -> int | None:
    """The whole number that an equation adds to a variable; `None` where it does not."""
    if equation is None or equation.primitive.name != 'add':
        return None
    first, second = equation.invars
    if second is counter:
        first, second = second, first
    if first is not counter or not isinstance(second, Literal):
        return None
    return constants.whole_number(constants.of_value(second.val), second.aval)


def _join(before: Value, after: Value) -> Value:
    """What holds of either of two values."""
    if before.data or after.data:
        return DATA
    if before.views != after.views:
        return Value(views=moves.join([*before.views, *after.views]))
    return before if before == after else Value(views=before.views)


class _LoopBody(NamedTuple):
    """The body of a loop.

    Attributes:
      loop: the loop.
      scope: where it stands.
      needed: which results of the body are needed.
      walk: from what is carried to the results of the body.
      to_next_trip: from what is carried out of a trip to what the next one gets.
    """

    loop: bodies.Scan | bodies.While
    scope: Scope
    needed: tuple[bool, ...]
    walk: Callable[[list[Value]], list[Value]]
    to_next_trip: Callable[[Value], Value] = lambda value: value


def _settle(walker: Walker, body: _LoopBody, first: list[Value]) -> tuple[list[Value], list[Value]]:
    """Walks through a loop's body until what is carried stays the same; only the last walk is kept.

    Returns what is carried, and the results of the body.
    """
    equation, scope = body.loop.equation, body.scope
    carried = first
    for _ in range(_MOST_TRIPS):
        findings = walker.findings.copy()
        results = body.walk(carried)
        after = list(map(body.to_next_trip, results[: len(first)]))
        joined = list(map(_join, carried, after))
        for number, is_needed in enumerate(body.needed[: len(first)]):
            if not is_needed:
                joined[number] = carried[number]
        if joined == carried:
            first_operand = body.loop.first_carried
            _record_lost(walker, equation, first, carried, scope, first_operand)
            _record_lost(walker, equation, after, carried, scope.at(-1))
            return carried, results
        walker.findings = findings
        carried = joined
    reason = f'what {equation.primitive.name} carries does not settle'
    walker.findings.add_opaque(carried, reason, equation, scope)
    carried = [DATA if value.views else value for value in carried]
    return carried, body.walk(carried)


def _record_lost(
    walker: Walker,
    equation: Any,
    values: Sequence[Value],
    joined: Sequence[Value],
    scope: Scope,
    first: int = 0,
) -> None:
    """Parameters that go where data go, too, are used there: a learned first state, or one of two branches.

    Args:
      walker: what records.
      equation: the loop or the branch.
      values: of operands that follow one another, or of results of the program inside.
      joined: what they become.
      scope: where they stand: a negative number for the results of a program inside.
      first: the number of the first of them.
    """
    for number, (value, result) in enumerate(zip(values, joined, strict=True), first):
        if result.data:
            for view in value.views:
                site = Site(scope.path, equation, number, view)
                walker.findings.add_use('elementwise', site, scope)


def _devices(params: Mapping[str, Any]) -> int:
    """How many parts a shard_map has: axes of the mesh that are left to the compiler divide nothing."""
    sizes = dict(params['mesh'].shape)
    manual = params.get('newly_manual_axes', params.get('manual_axes'))
    if manual is None:
        manual = set(sizes) - set(params.get('auto', ()))
    return math.prod(sizes[name] for name in manual)


def _rescaled(
    walker: Walker,
    shard_map: bodies.ShardMap,
    values: Sequence[Value],
    variables: Sequence[Any],
    scope: Scope,
) -> list[Value]:
    """What is known of arrays of which each device has a part, or of the arrays that the parts make."""
    results = []
    for value, variable in zip(values, variables, strict=True):
        resized = functools.partial(_resized, new_shape=shape_of(variable))
        try:
            results.append(Value(value.data, tuple(map(resized, value.views))))
        except NoRuleError as reason:
            walker.findings.add_opaque([value], str(reason), shard_map.equation, scope)
            results.append(Value(value.data))
    return results


def _resized(view: View, new_shape: Sequence[int]) -> View:
    if view.shape == new_shape:
        return view.computed()
    axes: list[Axis] = []
    for axis, length in zip(view.axes, new_shape, strict=True):
        if not axis.is_whole:
            raise NoRuleError('no rule for shard_map of a concatenation')
        axes.append(axis if axis.length == length else views.mixed(axis.factors, length))
    return view.computed(axes)
