"""Runs a traced program with smaller shapes.

An equation with an axis that gets smaller runs as its row of the table says. All other equations run as they were
traced, with their derivative rules.

A call with a derivative rule of its own (`jax.custom_jvp`, `jax.custom_vjp`) has a program and a rule, both made for
the old shapes. The program runs with smaller shapes, as the rest of the model does. The rule is a Python function and
cannot run like that. Instead, the derivative by the rule is traced as a second program, at the old shapes. The axes of
the second program are inferred, and it, too, runs with smaller shapes. A rule may pin an axis that gets smaller. Then
the call itself still runs, but taking its derivative is an error.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes, Axis, Ties, atoms, pick, product, sizes_of, total
from jaxpruner.structure.cut import Cut, EquationCut, Lists
from jaxpruner.structure.programs import Trace
from jaxpruner.structure.traces import pin_at
from jaxpruner.trace.interpreter import Position, Run, keep
from jaxpruner.trace.program import RULED, RULED_BACKWARDS, Call, Program, Scan, bind

Values = list[Any]


class Replay(Run):
    """A run of a program on values that have been cut.

    Attributes:
      trace: of the whole program.
      cut: the channels that stay.
    """

    def __init__(self, trace: Trace, cut: Cut):
        self.trace = trace
        self.cut = cut

    def run(self, arguments: Sequence[Any]) -> Values:
        """Runs the whole program."""
        position = Position.of_whole(self.trace.program)
        return self.visit_program(Program.of(self.trace.program), arguments, position)

    def visit_constants(self, program: Program, position: Position) -> Values:
        return list(map(self.cut.take, program.constants, self.trace.constants[position.path]))

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        axes = self.trace.equations[position.path]
        is_cut = any(map(self.cut.shrinks, axes.values))
        run = self.enter if is_cut else super().visit_equation
        return run(equation, operands, position)

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        small = EquationCut(equation, self.trace.equations[position.path], self.cut)
        run = small.axes.row.resized or EquationCut.run
        return run(small, operands)

    def visit_call(self, call: Call, operands: Values, position: Position) -> Values:
        equation = call.equation
        if equation.primitive.name not in RULED:
            return super().visit_call(call, operands, position)
        inner = position.inside(equation, 0, position.needed)

        def run(*operands: Any) -> Values:
            return keep(self.visit_program(call.program, operands, inner), inner.needed)

        small = EquationCut(equation, self.trace.equations[position.path], self.cut)
        return _run_ruled(run, small, position, operands)

    def slices(self, scan: Scan, position: Position) -> tuple[Any, int]:
        """The numbers of the trips that stay, if channels are listed for each trip."""
        trips = self.trace.trips[position.path]
        stay = None
        if not self.cut.owners.isdisjoint(atoms(trips)):
            stay = self.cut.take(jnp.arange(scan.length), (trips,))
        return stay, self.cut.size(trips)

    def inside(self, position: Position, state: Any, element: Any = None) -> 'Replay':
        if element is None:
            return self
        trip_atoms = atoms(self.trace.trips[position.path])
        indices = jnp.unravel_index(element, sizes_of(trip_atoms))
        trips = {**self.cut.trips, **dict(zip(trip_atoms, indices, strict=True))}
        return Replay(self.trace, Cut(self.cut.lists, trips))


def _run_ruled(
    run: Callable[..., Values], small: EquationCut, position: Position, values: Values
) -> Values:
    """Runs a call with a derivative rule of its own with smaller shapes.

    Args:
      run: runs the program of the call.
      small: the call.
      position: of the call.
      values: of the operands; `None` for those that the results do not depend on. Results may be `None`, too.

    Raises:
      ValueError: a derivative is taken, and the rule pins an axis that gets smaller.
    """
    equation, axes, cut = small
    operands = []
    for value, variable, own in zip(values, equation.invars, axes.operands, strict=True):
        missing = value is None
        operands.append(jnp.zeros(cut.shape(own), variable.aval.dtype) if missing else value)
    inputs, outputs = _differentiable(equation.invars), _differentiable(equation.outvars)

    def pull_back(values: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        seeds = pick(cotangents, outputs)
        derivatives = dict(zip(inputs, _derivative(small, position, values, seeds), strict=True))
        return tuple([derivatives.get(i) for i in range(len(values))])

    def push_forward(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        results = function(*values)
        seeds = pick(tangents, inputs)
        derivatives = dict(zip(outputs, _derivative(small, position, values, seeds), strict=True))
        tangents_out: Values = []
        for i, result in enumerate(results):
            none = None if result is None else np.zeros(result.shape, jax.dtypes.float0)
            tangents_out.append(none if result is None else derivatives.get(i, none))
        return results, tangents_out

    function: Any
    if equation.primitive.name in RULED_BACKWARDS:
        function = jax.custom_vjp(lambda *values: run(*values))
        function.defvjp(lambda *values: (run(*values), values), pull_back)
    else:
        function = jax.custom_jvp(lambda *values: run(*values))
        function.defjvp(push_forward)
    return function(*operands)


def _derivative(
    small: EquationCut, position: Position, operands: Sequence[Any], seeds: Sequence[Any]
) -> Values:
    """The derivative of a call at some operands, for tangents of operands or cotangents of results.

    Raises:
      ValueError: the rule pins an axis that gets smaller, or ties it to one that is cut differently.
    """
    equation, axes, cut = small
    inputs, outputs = _differentiable(equation.invars), _differentiable(equation.outvars)
    is_backwards = equation.primitive.name in RULED_BACKWARDS

    def derivative(values: Values, seeds: Values) -> Any:
        def call(*inexact: Any) -> Values:
            merged = list(values)
            for i, value in zip(inputs, inexact, strict=True):
                merged[i] = value
            return list(pick(bind(equation, merged), outputs))

        inexact = list(pick(values, inputs))
        if is_backwards:
            _, pull_back = jax.vjp(call, *inexact)
            return pull_back(seeds)
        return jax.jvp(call, inexact, seeds)[1]

    def shapes(variables: Iterable[Any]) -> Values:
        avals = [variable.aval for variable in variables]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    # At the old shapes.
    ends = (equation.invars, axes.operands, inputs), (equation.outvars, axes.results, outputs)
    (seeded, seed_axes, numbers), (_, result_axes, results) = ends[::-1] if is_backwards else ends
    program = jax.make_jaxpr(derivative)(shapes(equation.invars), shapes(pick(seeded, numbers)))
    copies: dict[Axis, Axis] = {}
    trace = Trace(program)
    inside = position.inside(equation, 0, (True,) * len(results))._replace(path=())
    given, returned = axes.operands + pick(seed_axes, numbers), pick(result_axes, results)
    found = trace.infer([_copy(axes, copies) for axes in given], inside)
    ties = Ties(functools.partial(pin_at, position, equation))
    ties.unify_values(found, [_copy(own, copies) for own in returned])
    lists: dict[Axis, Lists] = {}
    for atom in copies.keys() & cut.lists.keys():
        owners, table = cut.lists[atom]
        owners = tuple([copies.get(owner, owner).resolved() for owner in owners])
        lists[copies[atom].resolved()] = Lists(owners, table)
    cut_of_copies = Cut(lists, cut.trips)
    for own in (*given, *returned):
        copied = _copy(own, copies)
        for i, axis in enumerate(copied):
            pins = [atom.pin for atom in atoms(axis) if atom in lists and atom.pin is not None]
            # The rule may have split a copy, or unified it with one that is cut differently.
            is_same = np.array_equal(cut.stays(own, i), cut_of_copies.stays(copied, i))
            if pins or not is_same:
                name = f'{equation.primitive.name} at {position.line(equation)}'
                reason = ''.join([f': {pin}' for pin in pins[:1]])
                raise ValueError(
                    f'the derivative rule of {name} cannot be used after an axis of {axis.size} was cut{reason}; keep '
                    'all channels of its group, or take no derivative'
                )
    return Replay(trace, cut_of_copies).run([*operands, *seeds])


def _differentiable(variables: Sequence[Any]) -> list[int]:
    """The numbers of the variables that have a derivative."""
    dtypes = [variable.aval.dtype for variable in variables]
    return [i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact)]


def _copy(axes: Axes, copies: dict[Axis, Axis]) -> Axes:
    """The axes made of copies of their atoms, so that a rule can unify them without changing the model."""

    def copy(axis: Axis) -> Axis:
        axis = axis.resolved()
        if axis.form == 'atom':
            return copies.setdefault(axis, Axis(axis.size))
        parts = map(copy, axis.parts)
        return product(parts) if axis.form == 'product' else total(parts)

    return tuple(map(copy, axes))
