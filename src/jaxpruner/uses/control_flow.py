"""How the walk goes through equations with programs inside: `scan`, `while` and `cond`."""

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

# What is carried is joined with what comes out of the body until nothing changes, which is after two or three trips.
_MOST_TRIPS = 20


def walk_scan(walker: Walker, scan: Scan, values: Values, position: WalkPosition) -> Values:
    """A scan: the body is walked through until what is carried stays the same."""
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
        """Without the elements of the stacks: the next trip has others."""
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
    """A while loop, as a scan of which nothing is sliced and that runs as often as its condition says."""
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
    # How far a counter has got depends on data, then.
    jaxpr = loop.body.jaxpr
    before = jaxpr.invars[loop.body_constants :]
    after = list(carried)
    for number, variable in enumerate(jaxpr.outvars):
        if variable is not before[number]:
            after[number] = DATA
    _record_lost(walker, equation, carried, after, position.at(AFTER_LOOP))
    return after


def walk_cond(walker: Walker, cond: Cond, values: Values, position: WalkPosition) -> Values:
    """One of several branches: what holds of all of them."""
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
    """What each trip of a scan gets of a value: an element of its first axis, which becomes a stack."""
    first, *others = view.axes
    inside = view.moved(others, views.ENTER_LOOP)
    return inside.stacked(views.StackAxis(loop, first))


def leave_loop(view: View, loop: ProgramPath, length: int) -> View:
    """What all trips of a scan have put in an array."""
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
    """What each trip of a scan gets of a value; of a list of whole numbers that is known, a counter."""
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
    """What is carried and only counts, such as the number of a `fori_loop`'s trip: by its number among the carried."""
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
    """The whole number that an equation adds to a variable; `None` where it does not."""
    if equation is None or equation.primitive.name != 'add':
        return None
    first, second = equation.invars
    if second is counter:
        first, second = second, first
    if first is not counter or not isinstance(second, Literal):
        return None
    return constants.known_integer(constants.of_value(second.val), second.aval)


def _join(before: Value, after: Value) -> Value:
    """What holds of either of two values."""
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
      walk: from what is carried to the results of the body.
      to_next_trip: from what is carried out of a trip to what the next one gets.
    """

    loop: Scan | While
    position: WalkPosition
    needed: tuple[bool, ...]
    walk: Callable[[Values], Values]
    to_next_trip: Callable[[Value], Value] = lambda value: value


def _settle(walker: Walker, body: _LoopBody, first: Values) -> tuple[Values, Values]:
    """Walks through a loop's body until what is carried stays the same; only the last walk is kept.

    Returns what is carried, and the results of the body.
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
    """Parameters that go where data go, too, are used there: a learned first state, or one of two branches.

    Args:
      walker: what records.
      equation: the loop or the branch.
      values: of operands that follow one another, or of results of the program inside.
      joined: what they become.
      position: where they stand; for the results of a program inside, see `Site.path`.
      first: the number of the first of them.
    """
    for number, value in enumerate(values):
        if joined[number].data:
            for view in value.views:
                site = Site(position.path, equation, first + number, view)
                walker.findings.add_use('elementwise', site, position)
