"""How the walk goes through equations with programs inside: `jit`, `scan`, `while`, `cond` and `shard_map`."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxpruner.uses import bodies, liveness, moves, numbers, views
from jaxpruner.uses.moving_rules import shape_of
from jaxpruner.uses.records import DATA, Scope, Value
from jaxpruner.uses.views import NoRuleError, View

if TYPE_CHECKING:
    from jaxpruner.uses.walk import Walk

# What is carried is joined with what comes out of the body until nothing changes, which is after two or three trips.
_MOST_TRIPS = 20

Rule = Callable[['Walk', Any, list[Value], Scope, liveness.Wanted], list[Value]]


def _call(
    walk: 'Walk', equation: Any, values: list[Value], scope: Scope, wanted: liveness.Wanted
) -> list[Value]:
    return walk.program(bodies.called(equation), values, scope.at(0), wanted)


def _join(before: Value, after: Value) -> Value:
    """What holds of either of two values."""
    if before.data or after.data:
        return DATA
    if before.views != after.views:
        return Value(views=moves.joined([*before.views, *after.views]))
    return before if before == after else Value(views=before.views)


def _record_lost(
    walk: 'Walk',
    equation: Any,
    values: Sequence[Value],
    joined: Sequence[Value],
    scope: Scope,
    first: int = 0,
) -> None:
    """Parameters that go where data go, too, are used there: a learned first state, or one of two branches.

    Args:
      walk: what records.
      equation: the loop or the branch.
      values: of operands that follow one another, or of results of the program inside.
      joined: what they become.
      scope: where they stand: a negative number for the results of a program inside.
      first: the number of the first of them.
    """
    for number, (value, result) in enumerate(zip(values, joined, strict=True), first):
        for view in value.views if result.data else ():
            walk.record('elementwise', equation, number, view, scope)


def _until_stable(
    walk: 'Walk',
    equation: Any,
    carried: list[Value],
    body: Callable[[list[Value]], list[Value]],
    wanted: liveness.Wanted,
    scope: Scope,
    leave: Callable[[Value], Value] = lambda value: value,
) -> tuple[list[Value], list[Value]]:
    """Walks through a loop's body until what is carried stays the same; only the last walk is kept.

    Returns:
      What is carried, and the results of the body.
    """
    first, count = carried, len(carried)
    for _ in range(_MOST_TRIPS):
        records = walk.records.copy()
        results = body(carried)
        after = [leave(value) for value in results[:count]]
        joined = [
            _join(*pair) if part else pair[0]
            for *pair, part in zip(carried, after, wanted, strict=False)
        ]
        if joined == carried:
            _record_lost(walk, equation, first, carried, scope, bodies.first_carried(equation))
            _record_lost(walk, equation, after, carried, scope.at(-1))
            return carried, results
        walk.records, carried = records, joined
    walk.make_opaque(
        carried, f'what {equation.primitive.name} carries does not settle', equation, scope
    )
    carried = [DATA if value.views else value for value in carried]
    return carried, body(carried)


def _scan(
    walk: 'Walk', equation: Any, values: list[Value], scope: Scope, wanted: liveness.Wanted
) -> list[Value]:
    scan = bodies.Scan.of(equation)
    constants, carried, sliced = scan.split(values)
    if not scan.length:
        return [*carried, *[DATA] * (len(equation.outvars) - scan.carried)]
    wanted = liveness.wanted_of_scan(equation, wanted)
    inner = scope.at(0)._replace(trips=scope.trips * scan.length)
    inputs = scan.body.jaxpr.invars[scan.constants + scan.carried :]
    taken = [_element(*pair, scope.path, scan.length) for pair in zip(sliced, inputs, strict=True)]
    counters = _counters(equation, scan, carried, scope.path)

    def body(carried: list[Value]) -> list[Value]:
        inside = [counters.get(number, value) for number, value in enumerate(carried)]
        results = walk.program(scan.body, [*constants, *inside, *taken], inner, wanted)
        return [
            carried[number] if number in counters else value for number, value in enumerate(results)
        ]

    def leave(value: Value) -> Value:
        """As it is carried to the next trip, where other elements of the stacks are at hand."""
        return value._replace(views=tuple(_without(view, scope.path) for view in value.views))

    carried, results = _until_stable(walk, equation, carried, body, wanted, scope, leave)
    after = [Value() if number in counters else value for number, value in enumerate(carried)]
    stacked = [
        Value(value.data, tuple(_leave(view, scope.path, scan.length) for view in value.views))
        for value in results[scan.carried :]
    ]
    return [*after, *stacked]


def _counters(
    equation: Any, scan: bodies.Scan, carried: Sequence[Value], loop: tuple[int, ...]
) -> dict[int, Value]:
    """What is carried and only counts, such as the number of a `fori_loop`'s trip: by its number among the carried."""
    jaxpr, found = scan.body.jaxpr, {}
    made_by = {id(variable): inside for inside in jaxpr.eqns for variable in inside.outvars}
    for number, value in enumerate(carried):
        before, after = (
            jaxpr.invars[scan.constants + number],
            made_by.get(id(jaxpr.outvars[number])),
        )
        if not isinstance(value.number, int) or after is None or after.primitive.name != 'add':
            continue
        steps = [numbers.of_literal(v) for v in after.invars if isinstance(v, Literal)]
        if (
            before in [v for v in after.invars if not isinstance(v, Literal)]
            and len(steps) == 1
            and steps[0] is not None
        ):
            values = [value.number + trip * steps[0] for trip in range(scan.length)]
            in_order = values[::-1] if equation.params['reverse'] else values
            found[number] = Value(number=numbers.Counter(loop, tuple(in_order)))
    return found


def _element(value: Value, inside: Any, loop: tuple[int, ...], length: int) -> Value:
    """What each trip of a scan gets of a value; of a list of whole numbers that is known."""
    found = Value(value.data, tuple(_enter(view, loop, length) for view in value.views))
    if (
        value.constant is None
        or inside.aval.shape
        or not jnp.issubdtype(inside.aval.dtype, jnp.integer)
    ):
        return found
    array = value.constant.array()
    return (
        found
        if array is None
        else found._replace(number=numbers.Counter(loop, tuple(array.tolist())))
    )


def _enter(view: View, loop: tuple[int, ...], length: int) -> View:
    """What each trip of a scan gets of a value."""
    entry = views.StackAxis(loop, view.axes[0], view.region[0], length)
    inside = views.moved(view, view.axes[1:], view.region[1:], views.ENTER_LOOP)
    return dataclasses.replace(inside, stack=(*view.stack, entry))


def _leave(view: View, loop: tuple[int, ...], length: int) -> View:
    """What all trips of a scan have put in an array."""
    if view.stack and view.stack[-1].loop == loop:
        entry = view.stack[-1]
        outside = views.moved(
            view, (entry.factors, *view.axes), (entry.range, *view.region), views.LEAVE_LOOP
        )
        return dataclasses.replace(outside, stack=view.stack[:-1])
    view = _without(view, loop)
    return views.computed(view, (views.copies(length), *view.axes), ((0, length), *view.region))


def _without(view: View, loop: tuple[int, ...]) -> View:
    stack = tuple(entry for entry in view.stack if entry.loop != loop)
    if stack == view.stack:
        return view
    return dataclasses.replace(views.computed(view), stack=stack)


def _while(
    walk: 'Walk', equation: Any, values: list[Value], scope: Scope, wanted: liveness.Wanted
) -> list[Value]:
    loop = bodies.While.of(equation)
    condition_constants, body_constants, carried = loop.split(values)
    wanted = liveness.wanted_of_while(equation, wanted)
    inner = scope._replace(certain=False)

    def body(carried: list[Value]) -> list[Value]:
        return walk.program(loop.body, [*body_constants, *carried], inner.at(1), wanted)

    first = carried
    carried, _ = _until_stable(walk, equation, carried, body, wanted, scope)
    (again,) = walk.program(loop.condition, [*condition_constants, *carried], inner.at(0), (True,))
    walk.make_opaque([again], 'it decides how often a loop runs', equation, scope)
    if again.data:  # how far a counter has got depends on data, then
        passed = [
            a is b
            for a, b in zip(
                loop.body.jaxpr.outvars, loop.body.jaxpr.invars[-len(first) :], strict=True
            )
        ]
        after = [value if same else DATA for value, same in zip(carried, passed, strict=True)]
        _record_lost(walk, equation, carried, after, scope.at(-2))
        return after
    return carried


def _cond(
    walk: 'Walk', equation: Any, values: list[Value], scope: Scope, wanted: liveness.Wanted
) -> list[Value]:
    index, operands = values[0], values[1:]
    walk.make_opaque([index], 'it decides which branch runs', equation, scope)
    inner = scope._replace(certain=False)
    each = [
        walk.program(branch, operands, inner.at(number), wanted)
        for number, branch in enumerate(bodies.branches(equation))
    ]
    results = list(each[0])
    for other in each[1:]:
        results = [_join(*pair) for pair in zip(results, other, strict=True)]
    if index.data:
        results = [DATA] * len(results)
    for number, branch in enumerate(each):
        _record_lost(walk, equation, branch, results, scope.at(-1 - number))
    return results


def _shard_map(
    walk: 'Walk', equation: Any, values: list[Value], scope: Scope, wanted: liveness.Wanted
) -> list[Value]:
    """Each device has a part of each axis; how large it is says which."""
    program = bodies.called(equation)
    inside = []
    for value, outer, inner in zip(values, equation.invars, program.jaxpr.invars, strict=True):
        try:
            found = tuple(_scaled(view, shape_of(outer), shape_of(inner)) for view in value.views)
        except NoRuleError as reason:
            walk.make_opaque([value], str(reason), equation, scope)
            found = ()
        inside.append(Value(value.data, found))
    devices = scope.devices * _devices(equation.params)
    results = walk.program(program, inside, scope.at(0)._replace(devices=devices), wanted)
    outside = []
    for value, inner, outer in zip(results, program.jaxpr.outvars, equation.outvars, strict=True):
        found = tuple(_scaled(view, shape_of(inner), shape_of(outer)) for view in value.views)
        outside.append(Value(value.data, found))
    return outside


def _devices(params: Mapping[str, Any]) -> int:
    """How many parts a shard_map has: axes of the mesh that are left to the compiler divide nothing."""
    sizes = dict(params['mesh'].shape)
    manual = params.get('newly_manual_axes', params.get('manual_axes'))
    if manual is None:
        manual = set(sizes) - set(params.get('auto', ()))
    return math.prod(sizes[name] for name in manual)


def _scaled(view: View, shape: Sequence[int], new_shape: Sequence[int]) -> View:
    """A view of an array of which each device has a part, or of the array that the parts make."""
    if tuple(shape) == tuple(new_shape):
        return views.computed(view)
    if any(part != (0, n) for part, n in zip(view.region, shape, strict=True)):
        raise NoRuleError('no rule for shard_map of a concatenation')
    axes = [
        factors if n == new else views.mixed(factors, new)
        for factors, n, new in zip(view.axes, shape, new_shape, strict=True)
    ]
    return views.computed(view, axes, [(0, n) for n in new_shape])


RULES: dict[str, Rule] = {
    **dict.fromkeys(bodies.CALLS, _call),
    'cond': _cond,
    'scan': _scan,
    'shard_map': _shard_map,
    'while': _while,
}
