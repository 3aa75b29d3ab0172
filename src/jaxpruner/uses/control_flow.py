"""The walk through equations with programs inside: `scan`, `while` and `cond`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxpruner.uses import constants, liveness, moves, views
from jaxpruner.uses.bodies import Cond, ProgramPath, Scan, While
from jaxpruner.uses.graph import AFTER_LOOP, NEXT_TRIP, Site, branch_result
from jaxpruner.uses.known_integers import Counter
from jaxpruner.uses.records import DATA, Value, Values, Walker, WalkPosition
from jaxpruner.uses.views import View

# Carried values are joined with those from the body until nothing changes, which takes two or three walks.
_MOST_TRIPS = 20


def walk_scan(walker: Walker, scan: Scan, values: Values, position: WalkPosition) -> Values:
    """Walks through the body of a scan until its carried values stay the same."""
    constant_values, carried, sliced = scan.split(values)
    if not scan.length:
        count = len(scan.equation.outvars) - scan.carried
        return carried + [DATA] * count
    loop = position.path
    needed = liveness.needed_of_scan_body(scan, position.needed)
    inner = position.inside(scan.equation, 0, needed)
    inner = inner._replace(trips=position.trips * scan.length)
    *_, variables = scan.split(scan.body.jaxpr.invars)
    taken = []
    for value, variable in zip(sliced, variables, strict=True):
        taken.append(_element(value, variable, loop))
    counters = _counters(scan, carried, loop)

    def walk_body(carried: Values) -> Values:
        inside = list(carried)
        for number, counter in counters.items():
            inside[number] = counter
        inputs = [*constant_values, *inside, *taken]
        results = walker.visit_program(scan.body, inputs, inner)
        for number in counters:
            results[number] = carried[number]
        return results

    def to_next_trip(value: Value) -> Value:
        """Drops views of the trip's elements of stacks, since the next trip has others."""
        return _with_views(value, functools.partial(_without, loop=loop))

    body = _LoopBody(scan, position, needed, walk_body, to_next_trip)
    settled, results = _settle(walker, body, carried)
    carried = list(settled)
    for number in counters:
        carried[number] = Value()
    leave = functools.partial(leave_loop, loop=loop, length=scan.length)
    _, stacked = scan.split_results(results)
    for value in stacked:
        outside = tuple(map(leave, value.views))
        carried.append(Value(value.data, outside))
    return carried


def _with_views(value: Value, function: Callable[[View], View]) -> Value:
    return value._replace(views=tuple(map(function, value.views)))


def walk_while(walker: Walker, loop: While, values: Values, position: WalkPosition) -> Values:
    """Walks through a while loop, like a scan without slices whose number of trips is unknown."""
    equation = loop.equation
    condition_constants, body_constants, first = loop.split(values)
    needed = liveness.needed_of_while_body(loop, position.needed)
    in_body = position.inside(equation, 1, needed)
    in_body = in_body._replace(trips_are_known=False)
    in_condition = position.inside(equation, 0, needed=(True,))
    in_condition = in_condition._replace(trips_are_known=False)

    def walk_body(carried: Values) -> Values:
        inputs = body_constants + carried
        return walker.visit_program(loop.body, inputs, in_body)

    body = _LoopBody(loop, position, needed, walk_body)
    carried, _ = _settle(walker, body, first)
    inputs = condition_constants + carried
    (again,) = walker.visit_program(loop.condition, inputs, in_condition)
    walker.findings.add_opaque([again], 'it decides how often a loop runs', equation, position)
    if not again.data:
        return carried
    # Data decide the number of trips, so all values that the body changes are data.
    jaxpr = loop.body.jaxpr
    before = jaxpr.invars[loop.body_constants :]
    after = list(carried)
    for number, variable in enumerate(jaxpr.outvars):
        if variable is not before[number]:
            after[number] = DATA
    _record_lost(walker, equation, carried, after, position.at(AFTER_LOOP))
    return after


def walk_cond(walker: Walker, cond: Cond, values: Values, position: WalkPosition) -> Values:
    """Walks through all branches, and joins their results."""
    index, *operands = values
    walker.findings.add_opaque([index], 'it decides which branch runs', cond.equation, position)
    results_of_branches = []
    for number, branch in enumerate(cond.branches):
        inner = position.inside(cond.equation, number)._replace(trips_are_known=False)
        results_of_branches.append(walker.visit_program(branch, operands, inner))
    results, *others = results_of_branches
    for other in others:
        results = list(map(_join, results, other))
    if index.data:
        results = [DATA] * len(results)
    for number, branch in enumerate(results_of_branches):
        leaving = position.at(branch_result(number))
        _record_lost(walker, cond.equation, branch, results, leaving)
    return results


def enter_loop(view: View, loop: ProgramPath) -> View:
    """The view of a value's element in each trip of a scan. Its first axis becomes a stack."""
    first, *others = view.axes
    inside = view.moved(others, views.ENTER_LOOP)
    return inside.stacked(views.StackAxis(loop, first))


def leave_loop(view: View, loop: ProgramPath, length: int) -> View:
    """The view of the array that all trips of a scan put together."""
    if view.stack and view.stack[-1].loop == loop:
        axes = (view.stack[-1].axis, *view.axes)
        outside = view.moved(axes, views.LEAVE_LOOP)
        return dataclasses.replace(outside, stack=view.stack[:-1])
    view = _without(view, loop)
    return view.computed((views.copies(length), *view.axes))


def _without(view: View, loop: ProgramPath) -> View:
    stack = tuple(entry for entry in view.stack if entry.loop != loop)
    if stack == view.stack:
        return view
    return dataclasses.replace(view.computed(), stack=stack)


def _element(value: Value, variable: Any, loop: ProgramPath) -> Value:
    """The element of a value in each trip of a scan. Known integers become a counter."""
    enter = functools.partial(enter_loop, loop=loop)
    element = Value(value.data, tuple(map(enter, value.views)))
    is_whole_number = jnp.issubdtype(variable.aval.dtype, jnp.integer)
    if value.constant is None or variable.aval.shape or not is_whole_number:
        return element
    array = value.constant.array()
    if array is None:
        return element
    counter = Counter(loop, tuple(array.tolist()))
    return element._replace(known_integer=counter)


def _counters(scan: Scan, carried: Values, loop: ProgramPath) -> dict[int, Value]:
    """Carried values that only count, such as the trips of a `fori_loop`, by their numbers among the carried values."""
    jaxpr = scan.body.jaxpr
    made_by = {}
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            made_by[id(variable)] = equation
    _, before, _ = scan.split(jaxpr.invars)
    counters = {}
    for number, value in enumerate(carried):
        equation = made_by.get(id(jaxpr.outvars[number]))
        increment = _increment(equation, before[number])
        first = value.known_integer
        if not isinstance(first, int) or increment is None:
            continue
        counts = [first + trip * increment for trip in range(scan.length)]
        if scan.reverse:
            counts.reverse()
        counter = Counter(loop, tuple(counts))
        counters[number] = Value(known_integer=counter)
    return counters


def _increment(equation: Any, counter: Any) -> int | None:
    """The integer that an equation adds to a variable; `None` if it does something else."""
    if equation is None or equation.primitive.name != 'add':
        return None
    first, second = equation.invars
    if second is counter:
        first, second = second, first
    if first is not counter or not isinstance(second, Literal):
        return None
    return constants.known_integer(constants.of_value(second.val), second.aval)


def _join(before: Value, after: Value) -> Value:
    """What is known of a value that is one of two."""
    if before.data or after.data:
        return DATA
    if before == after:
        return before
    if before.views == after.views:
        return Value(views=before.views)
    return Value(views=moves.join(before.views + after.views))


class _LoopBody(NamedTuple):
    """The body of a loop.

    Attributes:
      loop: the loop.
      position: of the loop.
      needed: which results of the body are needed.
      walk: from carried values to the results of the body.
      to_next_trip: from a value that a trip carries out to the value that the next one gets.
    """

    loop: Scan | While
    position: WalkPosition
    needed: tuple[bool, ...]
    walk: Callable[[Values], Values]
    to_next_trip: Callable[[Value], Value] = lambda value: value


def _settle(walker: Walker, body: _LoopBody, first: Values) -> tuple[Values, Values]:
    """Walks through a loop's body until the carried values stay the same. Only findings of the last walk are kept.

    Returns the carried values, and the results of the body.
    """
    equation = body.loop.equation
    position = body.position
    count = len(first)
    carried = first
    for _ in range(_MOST_TRIPS):
        findings = walker.findings.copy()
        results = body.walk(carried)
        after = list(map(body.to_next_trip, results[:count]))
        joined = list(map(_join, carried, after))
        for number in range(count):
            if not body.needed[number]:
                joined[number] = carried[number]
        if joined == carried:
            first_operand = body.loop.first_carried
            _record_lost(walker, equation, first, carried, position, first_operand)
            _record_lost(walker, equation, after, carried, position.at(NEXT_TRIP))
            return carried, results
        walker.findings = findings
        carried = joined
    reason = f'what {equation.primitive.name} carries does not settle'
    walker.findings.add_opaque(carried, reason, equation, position)
    carried = [DATA if value.views else value for value in carried]
    return carried, body.walk(carried)


def _record_lost(
    walker: Walker,
    equation: Any,
    values: Values,
    joined: Values,
    position: WalkPosition,
    first: int = 0,
) -> None:
    """Records a use of each parameter that is joined with data, such as a learned first state.

    Args:
      walker: has the findings.
      equation: the loop or the branch.
      values: consecutive operands, or the results of the program inside.
      joined: the values that they are joined to.
      position: of the operands; for the results of a program inside, see `Site.path`.
      first: the number of the first operand.
    """
    for number, value in enumerate(values):
        if joined[number].data:
            for view in value.views:
                site = Site(position.path, equation, first + number, view)
                walker.findings.add_use('elementwise', site, position)
