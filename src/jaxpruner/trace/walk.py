"""`param_uses`: traces a model once, and walks through its program to find where parameters meet data.

A value of the program is data if it depends on an input. Otherwise it is made only of parameters and has views of them,
or it is constant. An operation on a value with views and on data is a use. The rules of `rules` are asked only if no
operand is data. Those of `rules.SAME` are always asked, since they treat each operand by itself. A primitive that
places parameters among data also goes into `_PLACES`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxpruner import tree as tree_lib
from jaxpruner.trace import rules, views
from jaxpruner.trace.graph import LEAVES, Roles, Site, Use, UseGraph, flops_of, roles_of
from jaxpruner.trace.program import (
    CONTRACTIONS,
    Cond,
    Interpreter,
    Loop,
    Position,
    Scan,
    ShardMap,
    While,
    inside,
    shape_of,
)
from jaxpruner.trace.rules import DATA, Constant, Value, has_views
from jaxpruner.trace.views import NoRuleError, View

Values = list[Value]

# Operations that place parameters among data, besides the elementwise ones.
_PLACES = frozenset('concatenate dynamic_update_slice pad stack'.split())
# These read memory that any earlier equation may have written.
_READS_MEMORY = frozenset(('addupdate', 'get', 'swap'))
_LOOKS_UP = frozenset(('dynamic_slice', 'gather'))
# Carried values are joined with those from the body until nothing changes, which takes two or three walks.
_MOST_WALKS = 20


def param_uses(apply_fn: Callable[..., Any], params: tree_lib.PyTree, *inputs: Any) -> UseGraph:
    """Finds how a model of any framework uses each of its parameters.

    The model is traced, not computed. So shapes (`jax.ShapeDtypeStruct`) are enough for parameters and inputs.

    Args:
      apply_fn: `(params, *inputs) -> results`, any function that JAX can trace.
      params: any pytree of arrays, or of their shapes.
      *inputs: the other arguments, pytrees of arrays or of their shapes.

    Returns:
      The uses of each leaf by its path. Leaves that cannot be followed are in `opaque`, and leaves that the results do
      not depend on are in `unused`.

    Raises:
      ValueError: there are no inputs, so data cannot be told from parameters.
      TypeError: a leaf of `params` is no array.

    >>> import jax.numpy as jnp
    >>> params = {'kernel': jnp.ones((3, 4)), 'bias': jnp.ones(4)}
    >>> print(param_uses(lambda p, x: x @ p['kernel'] + p['bias'], params, jnp.ones((2, 3))))
    leaf    operation    contract  free  batch  stack  exact  FLOPs  trips
    bias    elementwise  -         0     -      -      yes    8      1
    kernel  dot          0         1     -      -      yes    48     1
    56 FLOPs in all
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(params)
    shapes = list(map(tree_lib.leaf_shape, leaves, paths))
    if not jax.tree.leaves(inputs):
        raise ValueError(
            'param_uses needs the inputs of the model, as arrays or shapes: param_uses(apply_fn, params, x); an array '
            'that apply_fn holds itself counts as a constant, so that no parameter would meet data'
        )
    program = jax.make_jaxpr(apply_fn)(params, *inputs)
    walk = Walk(shapes)
    arguments = [Value(views=(views.whole(leaf, shape),)) for leaf, shape in enumerate(shapes)]
    arguments += [DATA] * (len(program.jaxpr.invars) - len(shapes))
    for number, result in enumerate(walk.visit_all(program, arguments)):
        walk.add_uses('output', None, number, result, Position())
    by_leaf: dict[int, list[Use]] = {}
    for use in sorted(walk.uses.values(), key=lambda use: (use.site.path, use.site.operand)):
        by_leaf.setdefault(use.site.view.leaf, []).append(use)
    followed = sorted(by_leaf.keys() - walk.opaque.keys())
    seen = walk.opaque.keys() | by_leaf.keys()
    return UseGraph(
        {paths[leaf]: tuple(by_leaf[leaf]) for leaf in followed},
        opaque={paths[leaf]: reason for leaf, reason in sorted(walk.opaque.items())},
        unused=tuple(paths[leaf] for leaf in range(len(paths)) if leaf not in seen),
        flops=sum(walk.flops.values()),
        program=program,
    )


class Walk(Interpreter[Value]):
    """Walks through a program whose parameters have these shapes.

    Attributes:
      uses: by path of the equation, operand, leaf and region.
      opaque: leaf -> reason.
      flops: by path of the equation.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.shapes = shapes
        self.uses: dict[Any, Use] = {}
        self.opaque: dict[int, str] = {}
        self.flops: dict[Any, int] = {}

    def constant(self, value: Any, aval: Any) -> Value:
        return Value(constant=Constant(lambda: value))

    def unneeded(self, equation: Any, operands: Values) -> Values:
        return [Value()] * len(equation.outvars)

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        try:
            return super().visit_equation(equation, operands, position)
        except NoRuleError as reason:
            self._add_opaque(operands, str(reason), equation, position)
            return [Value(_is_data(equation, operands))] * len(equation.outvars)

    # Equations with no program inside.

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        name = equation.primitive.name
        is_data, has_parameters = _is_data(equation, operands), has_views(operands)
        is_contraction = name in CONTRACTIONS
        if is_contraction or (is_data and has_parameters and name in rules.ARITHMETIC):
            trips, _, devices = _runs(position)
            self.flops[position.path] = _flops(equation) * trips * devices
        if not has_parameters and is_data:
            return [DATA] * len(equation.outvars)
        if not has_parameters:
            constants = _results_of_constants(equation, [value.constant for value in operands])
            return [Value(constant=constant) for constant in constants]
        if name in rules.SAME:
            pairs = zip(operands, rules.same(equation, operands), strict=True)
            return [value._replace(views=moved) for value, moved in pairs]
        if not is_data:
            if name not in rules.RULES:
                raise NoRuleError(f'no rule for {name}')
            return [Value(views=made) for made in rules.RULES[name](equation, operands)]
        op = _meeting(equation, operands)
        for number, value in enumerate(operands):
            self.add_uses(op, equation, number, value, position)
        return [DATA] * len(equation.outvars)

    # Equations with programs inside.

    def visit_shard_map(self, shard_map: ShardMap, operands: Values, position: Position) -> Values:
        """Each device has a part of each axis."""
        parts = list(map(_resized, operands, shard_map.program.jaxpr.invars))
        results = self.visit_call(shard_map, parts, position)
        return list(map(_resized, results, shard_map.equation.outvars))

    def visit_scan(self, scan: Scan, operands: Values, position: Position) -> Values:
        loop = position.path
        _, first, sliced = scan.split(operands)
        if not scan.length:
            return first + [DATA] * (len(scan.equation.outvars) - scan.carried)
        elements = []
        for value in sliced:
            inside = tuple(views.enter_loop(view, loop) for view in value.views)
            constant = value.constant
            if constant is not None:
                constant = None if constant.loop is not None else Constant(constant.compute, loop)
            elements.append(Value(value.data, inside, constant))
        counters = _counters(scan, first, loop)

        def walk_body(carried: Values) -> Values:
            inside = [counters.get(number, value) for number, value in enumerate(carried)]
            results = self.visit_body(scan, operands, inside, elements, position)
            for number in counters:
                results[number] = carried[number]
            return results

        carried, results = self._settle(scan, first, walk_body, position)
        for number in counters:
            carried[number] = Value()
        _, stacked = scan.split_results(results)
        for value in stacked:
            outside = tuple(views.leave_loop(view, loop, scan.length) for view in value.views)
            carried.append(Value(value.data, outside))
        return carried

    def visit_while(self, loop: While, operands: Values, position: Position) -> Values:
        """Like a scan without slices whose number of trips is unknown."""
        constants, first, _ = loop.split(operands)

        def walk_body(carried: Values) -> Values:
            return self.visit_body(loop, operands, carried, [], position)

        carried, _ = self._settle(loop, first, walk_body, position)
        (again,) = self.visit_condition(loop, operands, carried, position)
        reason = 'it decides how often a loop runs'
        self._add_opaque([again], reason, loop.equation, position)
        if not again.data:
            return carried
        # Data decide the number of trips, so all values that the body changes are data.
        before = loop.body.jaxpr.invars[len(constants) :]
        after = []
        for value, old, new in zip(carried, before, loop.body.jaxpr.outvars, strict=True):
            after.append(value if new is old else DATA)
        self._record_lost(loop.equation, carried, after, position.at(LEAVES))
        return after

    def visit_cond(self, cond: Cond, operands: Values, position: Position) -> Values:
        """Walks through all branches, and joins their results."""
        index = operands[0]
        self._add_opaque([index], 'it decides which branch runs', cond.equation, position)
        branches = list(self.visit_branches(cond, operands, position))
        results, *others = branches
        for other in others:
            results = list(map(_join, results, other))
        if index.data:
            results = [DATA] * len(results)
        for number, branch in enumerate(branches):
            leaving = position.at(number).at(LEAVES)
            self._record_lost(cond.equation, branch, results, leaving)
        return results

    def _settle(
        self, loop: Loop, first: Values, walk_body: Callable[[Values], Values], position: Position
    ) -> tuple[Values, Values]:
        """Walks through a loop's body until the carried values stay the same. Only findings of the last walk are kept.

        Returns the carried values, and the results of the body.
        """
        carried, inside_loop = list(first), position.in_body(loop)
        for _ in range(_MOST_WALKS):
            findings = self.uses, self.opaque, self.flops
            self.uses, self.opaque, self.flops = map(dict.copy, findings)
            results = walk_body(carried)
            after = []
            for value in results[: len(first)]:
                # The next trip has other elements of stacks.
                inside = tuple(views.to_next_trip(view, position.path) for view in value.views)
                after.append(value._replace(views=inside))
            joined = []
            for number, value in enumerate(carried):
                is_needed = inside_loop.needed[number]
                joined.append(_join(value, after[number]) if is_needed else value)
            if joined == carried:
                self._record_lost(loop.equation, first, carried, position, loop.first_carried)
                self._record_lost(loop.equation, after, carried, inside_loop.at(LEAVES))
                return carried, results
            self.uses, self.opaque, self.flops = findings
            carried = joined
        raise NoRuleError(f'what {loop.equation.primitive.name} carries does not settle')

    # Findings.

    def _record_lost(
        self, equation: Any, values: Values, joined: Values, position: Position, first: int = 0
    ) -> None:
        """Records a use of each parameter that is joined with data, such as a learned first state.

        Args:
          equation: the loop or the branch.
          values: consecutive operands, or the results of the program inside.
          joined: the values that they are joined to.
          position: of the operands; for the results of a program inside, see `Site.path`.
          first: the number of the first operand.
        """
        for number, (value, other) in enumerate(zip(values, joined, strict=False), first):
            if other.data:
                self.add_uses('elementwise', equation, number, value, position)

    def _add_opaque(self, values: Values, reason: str, equation: Any, position: Position) -> None:
        """Notes that the parameters in these values cannot be followed further."""
        for value in values:
            for view in value.views:
                self.opaque.setdefault(view.leaf, f'{reason} ({_line(equation, position)})')

    def add_uses(
        self, op: str, equation: Any, operand: int, value: Value, position: Position
    ) -> None:
        """Notes a use for each view of an operand.

        Args:
          op: the operation, as in `Use`.
          equation: of the operand; `None` for a result of the program.
          operand: its number.
          value: the operand.
          position: of the equation.
        """
        trips, are_known, devices = _runs(position)
        for view in value.views:
            roles = Roles((), tuple(range(len(view.axes))), ())
            if op in ('dot', 'conv'):
                roles = roles_of(equation, operand)
            contract, free, batch = (self._leaf_axes(view, axes) for axes in roles)
            own_trips = trips * math.prod(axis.size / axis.length for axis in view.stack)
            # Parts of a concatenation count their shares.
            share = math.prod(axis.size / max(axis.length, 1) for axis in view.axes)
            self.uses[position.path, operand, view.leaf, view.region] = Use(
                op=op,
                contract=contract,
                free=free,
                batch=batch,
                stack=views.axes_of(f for axis in view.stack for f in axis.factors),
                flops=round(_flops(equation) * devices * own_trips * share),
                trips=round(own_trips) if are_known else None,
                exact=view.exact,
                where=_line(equation, position),
                site=Site(position.path, equation, operand, view, position.callers),
            )

    def _leaf_axes(self, view: View, axes: Sequence[int]) -> tuple[int, ...]:
        """The parameter's axes that lie along axes of an operand."""
        shape = self.shapes[view.leaf]
        factors = []
        for i in axes:
            for factor in view.axes[i].factors:
                # An axis that was indexed does not lie there any more.
                if factor.size > 1 or math.prod(shape[axis] for axis in factor.axes) == 1:
                    factors.append(factor)
        return views.axes_of(factors)


def _results_of_constants(
    equation: Any, operands: Sequence[Constant | None]
) -> list[Constant | None]:
    """The results of an equation with no program inside: `None` unless all operands are constants."""
    known = [operand for operand in operands if operand is not None]
    loops = {operand.loop for operand in known} - {None}
    if len(known) < len(operands) or len(loops) > 1 or equation.effects:
        return [None] * len(equation.outvars)
    loop = next(iter(loops), None)

    def compute(number: int) -> Any:
        function = functools.partial(equation.primitive.bind, **equation.params)
        if loop is not None:
            axes = tuple(None if operand.loop is None else 0 for operand in known)
            function = jax.vmap(function, axes)
        results = function(*[operand.compute() for operand in known])
        return results[number] if equation.primitive.multiple_results else results

    return [
        Constant(functools.partial(compute, number), loop)
        for number in range(len(equation.outvars))
    ]


def _is_data(equation: Any, operands: Values) -> bool:
    return equation.primitive.name in _READS_MEMORY or any(value.data for value in operands)


def _meeting(equation: Any, operands: Values) -> str:
    """The operation, as in `Use`, in which parameters meet data."""
    name = equation.primitive.name
    numbers = [number for number, value in enumerate(operands) if value.views]
    if name in CONTRACTIONS:
        if len(numbers) > 1:
            raise NoRuleError(f'no rule for {name} of several parameters')
        return CONTRACTIONS[name]
    if name in _LOOKS_UP and numbers == [0]:
        return 'gather'
    if name not in rules.ELEMENTWISE | _PLACES | rules.SCATTERS:
        raise NoRuleError(f'no rule for {name} of a parameter and data')
    indices = [1] if name in rules.SCATTERS else []
    if name == 'dynamic_update_slice':
        indices = list(range(2, len(operands)))
    if not set(indices).isdisjoint(numbers):
        raise NoRuleError(f'no rule for {name} at indices made of parameters')
    return 'elementwise'


def _flops(equation: Any) -> int:
    """Floating point operations of one run of a contraction, or of arithmetic."""
    if equation is None:
        return 0
    name = equation.primitive.name
    if name in CONTRACTIONS:
        return flops_of(equation)
    return math.prod(shape_of(equation.outvars[0])) if name in rules.ARITHMETIC else 0


def _line(equation: Any, position: Position) -> str:
    return 'the result' if equation is None else position.line(equation) or 'an unknown line'


def _runs(position: Position) -> tuple[int, bool, int]:
    """How often an equation runs, whether that is known, and on how many devices. What data decide counts once."""
    trips, are_known, devices = 1, True, 1
    for caller in position.callers:
        match inside(caller):
            case Scan() as scan:
                trips *= scan.length
            case ShardMap() as shard_map:
                devices *= shard_map.devices
            case While() | Cond():
                are_known = False
    return trips, are_known, devices


def _resized(value: Value, variable: Any) -> Value:
    """A device's part of an array, or the array that is made of such parts."""
    shape, resized = shape_of(variable), []
    for view in value.views:
        if view.shape != shape and not all(axis.is_whole for axis in view.axes):
            raise NoRuleError('no rule for shard_map of a concatenation')
        resized.append(view.computed(map(views.ViewAxis.resized, view.axes, shape)))
    return Value(value.data, tuple(resized))


def _join(before: Value, after: Value) -> Value:
    """What is known of a value that is one of two."""
    if before.data or after.data:
        return DATA
    if before == after:
        return before
    is_same = before.views == after.views
    return Value(views=before.views if is_same else views.join(before.views + after.views))


def _counters(scan: Scan, carried: Values, loop: tuple[int, ...]) -> dict[int, Value]:
    """Carried values that only count, such as the trips of a `fori_loop`, by their numbers among the carried values."""
    jaxpr = scan.body.jaxpr
    additions = {id(eqn.outvars[0]): eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'add'}
    _, before, _ = scan.split(jaxpr.invars)
    counters = {}
    for number, (variable, value) in enumerate(zip(before, carried, strict=True)):
        addition = additions.get(id(jaxpr.outvars[number]))
        dtype = variable.aval.dtype
        if addition is None or variable.aval.shape or not jnp.issubdtype(dtype, jnp.integer):
            continue
        increments = [operand for operand in addition.invars if operand is not variable]
        start = value.array
        if len(increments) == 1 and isinstance(increments[0], Literal) and start is not None:
            counts = (start + np.arange(scan.length) * increments[0].val).astype(dtype)
            counts = counts[::-1] if scan.reverse else counts
            counters[number] = Value(constant=Constant(lambda counts=counts: counts, loop))
    return counters
