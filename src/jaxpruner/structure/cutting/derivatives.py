"""Custom derivative rules at smaller shapes.

A call with a rule of its own, `jax.custom_jvp` or `jax.custom_vjp`, was traced as a program and a rule for the old
shapes. To run it with smaller ones, its derivative is traced as a program, too, as JAX takes it by the rule. The axes
of that program are inferred, and it is run with smaller shapes as the model is. So the rule stays. Where it pins an
axis that gets smaller, nobody knows the rule for the small shape, and taking a derivative is an error that says so.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, product, total
from jaxpruner.structure.analysis.inference import Inference
from jaxpruner.structure.analysis.records import Position
from jaxpruner.structure.analysis.ties import Ties
from jaxpruner.structure.cutting.cut import Cut, Lists
from jaxpruner.structure.rules.resizing import SmallEquation
from jaxpruner.uses.bodies import Program, bind
from jaxpruner.uses.calls import RULED_BACKWARDS

Values = list[Any]
Function = Callable[..., Values]
# (trace, cut) -> what runs the program: `replay.Replay`.
Replayed = Callable[..., Any]


class _Trace(NamedTuple):
    """A `records.Traced`."""

    program: Any
    equations: Any
    constants: Any
    trips: Any


class RuledCall:
    """A call with a derivative rule of its own, run with smaller shapes.

    Args:
      run: runs the program of the call.
      small: the call.
      place: of the call.
      replayed: makes a run of a program with smaller shapes.
    """

    def __init__(self, run: Function, small: SmallEquation, position: Position, replayed: Replayed):
        self._run = run
        self._small = small
        self._position = position
        self._replayed = replayed
        self._operands = _differentiable(small.equation.invars)
        self._results = _differentiable(small.equation.outvars)
        is_backwards = small.equation.primitive.name in RULED_BACKWARDS
        self._function = self._with_vjp() if is_backwards else self._with_jvp()

    def __call__(self, *values: Any) -> Values:
        """Runs the call; operands without a part in the results are `None`.

        Raises:
          ValueError: when a derivative is taken, and the rule pins an axis that gets smaller.
        """
        whole = []
        small = self._small
        for value, variable, axes in zip(
            values, small.equation.invars, small.axes.operands, strict=True
        ):
            missing = value is None
            zeros = jnp.zeros(small.cut.shape(axes), variable.aval.dtype) if missing else value
            whole.append(zeros)
        return self._function(*whole)

    def _with_vjp(self) -> Function:
        def forward(*values: Any) -> tuple[Values, Sequence[Any]]:
            return self._run(*values), values

        def backward(values: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            seeds = [cotangents[i] for i in self._results]
            derivatives = self._derivative([*values, *seeds])
            gradients: Values = [None] * len(values)
            for i, gradient in zip(self._operands, derivatives, strict=True):
                gradients[i] = gradient
            return tuple(gradients)

        function = jax.custom_vjp(lambda *values: self._run(*values))
        function.defvjp(forward, backward)
        return function

    def _with_jvp(self) -> Function:
        function = jax.custom_jvp(lambda *values: self._run(*values))

        @function.defjvp
        def _(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
            results = function(*values)
            seeds = [tangents[i] for i in self._operands]
            moved: Values = []
            for result in results:
                is_there = result is not None
                moved.append(np.zeros(result.shape, jax.dtypes.float0) if is_there else None)
            derivatives = self._derivative([*values, *seeds])
            for i, tangent in zip(self._results, derivatives, strict=True):
                moved[i] = None if results[i] is None else tangent
            return results, moved

        return function

    @functools.cached_property
    def _derivative(self) -> Callable[[Values], Values]:
        return _derivative(self._small, self._position, self._replayed)


def _differentiable(variables: Sequence[Any]) -> list[int]:
    """The numbers of the values that have a derivative."""
    numbers = []
    for i, variable in enumerate(variables):
        if jnp.issubdtype(variable.aval.dtype, jnp.inexact):
            numbers.append(i)
    return numbers


def _derivative(
    small: SmallEquation, position: Position, replayed: Replayed
) -> Callable[[Values], Values]:
    """What runs the derivative of a call: of operands, then tangents of operands or cotangents of results."""
    equation = small.equation
    is_backwards = equation.primitive.name in RULED_BACKWARDS
    operands = _differentiable(equation.invars)
    results = _differentiable(equation.outvars)
    seeds, derived = (results, operands) if is_backwards else (operands, results)
    of_seeds, of_derived = small.axes.operands, small.axes.results
    if is_backwards:
        of_seeds, of_derived = of_derived, of_seeds
    program = _traced(equation)

    copies = _Copies()
    inputs = [copies.of(axes) for axes in small.axes.operands]
    inputs += [copies.of(of_seeds[i]) for i in seeds]
    inference = Inference(())
    inside = position.inside(equation, 0, (True,) * len(derived))
    inside = inside._replace(path=())
    outputs = inference.visit_program(Program.of(program), inputs, inside)
    ties = Ties(lambda reason: position.pin(equation, reason))
    for axes, i in zip(outputs, derived, strict=True):
        ties.unify_each(axes, copies.of(of_derived[i]))
    cut = copies.cut(small.cut, f'{equation.primitive.name} at {position.line(equation)}')
    trace = _Trace(program, inference.equations, inference.constants, inference.trips)
    return replayed(trace, cut).run


def _traced(equation: Any) -> Any:
    """The derivative of a call as a program for the old shapes."""
    is_backwards = equation.primitive.name in RULED_BACKWARDS
    operands = _differentiable(equation.invars)
    results = _differentiable(equation.outvars)

    def derivative(values: Values, seeds: Values) -> Any:
        def function(*inexact: Any) -> Values:
            merged = list(values)
            for i, value in zip(operands, inexact, strict=True):
                merged[i] = value
            outputs = bind(equation, merged)
            return [outputs[i] for i in results]

        inexact = [values[i] for i in operands]
        if is_backwards:
            return jax.vjp(function, *inexact)[1](seeds)
        return jax.jvp(function, inexact, seeds)[1]

    def shapes(variables: Iterable[Any]) -> Values:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]

    numbers, variables = (
        (results, equation.outvars) if is_backwards else (operands, equation.invars)
    )
    seeds = shapes([variables[i] for i in numbers])
    return jax.make_jaxpr(derivative)(shapes(equation.invars), seeds)


class _Copies:
    """Copies of axes, of which more can be stated than of the axes themselves."""

    def __init__(self) -> None:
        self._atoms: dict[Axis, Axis] = {}

    def of(self, axes: Axes) -> Axes:
        """The copies of a value's axes."""
        return tuple(map(self._copy, axes))

    def _copy(self, axis: Axis) -> Axis:
        axis = axis.resolved()
        if axis.form == 'atom':
            return self._atoms.setdefault(axis, Axis(axis.size))
        parts = map(self._copy, axis.parts)
        return product(parts) if axis.form == 'product' else total(parts)

    def cut(self, cut: Cut, rule_of: str) -> Cut:
        """The same cut of the copies; raises ValueError where what was stated of them does not allow it."""
        lists: dict[Axis, Lists] = {}
        for original, copy in self._atoms.items():
            if original not in cut.lists:
                continue
            copy = copy.resolved()
            owners, table = cut.lists[original]
            owners = tuple([self._atoms.get(owner, owner).resolved() for owner in owners])
            is_free = copy.form == 'atom' and copy.pin is None
            other = lists.setdefault(copy, Lists(owners, table))
            if not is_free or other.owners != owners or not np.array_equal(other.table, table):
                raise ValueError(_refusal(rule_of, original.size, copy))
        for original, copy in self._atoms.items():
            if original not in cut.lists and not lists.keys().isdisjoint(atoms(copy)):
                raise ValueError(_refusal(rule_of, original.size, copy))
        return Cut(lists, cut.trips)


def _refusal(rule_of: str, size: int, copy: Axis) -> str:
    reason = f': {copy.pin}' if copy.form == 'atom' and copy.pin is not None else ''
    return (
        f'the derivative rule of {rule_of} cannot be used after an axis of {size} was cut{reason}; keep all channels '
        'of its group, or take no derivative'
    )
