"""Custom derivative rules at smaller shapes.

A call with a derivative rule of its own (`jax.custom_jvp`, `jax.custom_vjp`) has a program and a rule, both made for
the old shapes. The program runs with smaller shapes, as the rest of the model does. The rule is a Python function and
cannot run like that. Instead, the derivative by the rule is traced as a second program, at the old shapes. The axes of
the second program are inferred, and it, too, runs with smaller shapes.

A rule may pin an axis that gets smaller. Then the rule for the small shape is unknown. The call itself still runs, but
taking its derivative is an error.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, pick, product, total
from jaxpruner.structure.analysis.inference import Inference
from jaxpruner.structure.analysis.records import TracePosition
from jaxpruner.structure.analysis.ties import Ties
from jaxpruner.structure.cutting.cut import Cut, Lists
from jaxpruner.structure.rules.resizing import EquationCut
from jaxpruner.trace.program import RULED_BACKWARDS, Program, bind

T = TypeVar('T')
Values = list[Any]
Function = Callable[..., Values]
# (trace, cut) -> what runs the program: `replay.Replay`.
Replayed = Callable[..., Any]


class _Trace(NamedTuple):
    """A `records.TraceLike`."""

    program: Any
    equations: Any
    constants: Any
    trips: Any


class RuledCall:
    """A call with a derivative rule of its own, run with smaller shapes.

    Args:
      run: runs the program of the call.
      small: the call.
      position: of the call.
      replayed: makes a run of a program with smaller shapes.
    """

    def __init__(
        self, run: Function, small: EquationCut, position: TracePosition, replayed: Replayed
    ):
        self._run = run
        self._small = small
        self._position = position
        self._replayed = replayed
        self._operands = _differentiable(small.equation.invars)
        self._results = _differentiable(small.equation.outvars)
        is_backwards = small.equation.primitive.name in RULED_BACKWARDS
        self._function = self._with_vjp() if is_backwards else self._with_jvp()

    def __call__(self, *values: Any) -> Values:
        """Runs the call. Operands that the results do not depend on are `None`.

        Raises:
          ValueError: a derivative is taken, and the rule pins an axis that gets smaller.
        """
        small = self._small
        operands = []
        for i, value in enumerate(values):
            if value is None:
                shape = small.cut.shape(small.axes.operands[i])
                dtype = small.equation.invars[i].aval.dtype
                value = jnp.zeros(shape, dtype)
            operands.append(value)
        return self._function(*operands)

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
            derivatives = self._derivative([*values, *seeds])
            derivative_of = dict(zip(self._results, derivatives, strict=True))
            tangents_out: Values = []
            for i, result in enumerate(results):
                tangent = derivative_of.get(i)
                if result is None:
                    tangent = None
                elif i not in derivative_of:  # a whole number
                    tangent = np.zeros(result.shape, jax.dtypes.float0)
                tangents_out.append(tangent)
            return results, tangents_out

        return function

    @functools.cached_property
    def _derivative(self) -> Callable[[Values], Values]:
        return _derivative(self._small, self._position, self._replayed)


def _differentiable(variables: Sequence[Any]) -> list[int]:
    """The numbers of the variables that have a derivative."""
    numbers = []
    for i, variable in enumerate(variables):
        if jnp.issubdtype(variable.aval.dtype, jnp.inexact):
            numbers.append(i)
    return numbers


def _derivative(
    small: EquationCut, position: TracePosition, replayed: Replayed
) -> Callable[[Values], Values]:
    """A function that runs the derivative of a call.

    It takes the operands, then tangents of operands or cotangents of results.
    """
    equation = small.equation
    ends = small.axes.operands, small.axes.results
    axes_of_seeds, axes_of_derivatives = _swapped_if_backwards(equation, ends)
    variables = equation.invars, equation.outvars
    seeded, derived = _swapped_if_backwards(equation, variables)
    seed_axes = pick(axes_of_seeds, _differentiable(seeded))
    derivative_axes = pick(axes_of_derivatives, _differentiable(derived))
    program = _trace_derivative(equation)

    copies = _Copies()
    axes_of_inputs = small.axes.operands + seed_axes
    inputs = list(map(copies.of, axes_of_inputs))
    inference = Inference(())
    needed = (True,) * len(derivative_axes)
    inside = position.inside(equation, 0, needed)._replace(path=())
    outputs = inference.visit_program(Program.of(program), inputs, inside)
    ties = Ties(functools.partial(position.pin, equation))
    ties.unify_values(outputs, map(copies.of, derivative_axes))
    cut = copies.cut(small.cut, f'{equation.primitive.name} at {position.line(equation)}')
    trace = _Trace(program, inference.equations, inference.constants, inference.trips)
    return replayed(trace, cut).run


def _swapped_if_backwards(equation: Any, ends: tuple[T, T]) -> tuple[T, T]:
    """Takes what belongs to operands and to results; returns what belongs to seeds and to derivatives."""
    of_operands, of_results = ends
    if equation.primitive.name in RULED_BACKWARDS:
        return of_results, of_operands
    return of_operands, of_results


def _trace_derivative(equation: Any) -> Any:
    """Traces the derivative of a call at the old shapes."""
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
        if equation.primitive.name in RULED_BACKWARDS:
            _, pull_back = jax.vjp(function, *inexact)
            return pull_back(seeds)
        _, tangents = jax.jvp(function, inexact, seeds)
        return tangents

    ends = equation.invars, equation.outvars
    seeded, _ = _swapped_if_backwards(equation, ends)
    inexact_seeds = pick(seeded, _differentiable(seeded))
    operand_shapes = _shapes(equation.invars)
    seed_shapes = _shapes(inexact_seeds)
    return jax.make_jaxpr(derivative)(operand_shapes, seed_shapes)


def _shapes(variables: Iterable[Any]) -> Values:
    avals = [variable.aval for variable in variables]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


class _Copies:
    """Copies of the axes of a model, made of new atoms, so that a rule can unify them without changing the model."""

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
        """The same cut, of the copies.

        Raises:
          ValueError: the rule has pinned a copy that is cut, or unified it with one that is cut differently.
        """
        lists: dict[Axis, Lists] = {}
        for original, copy in self._atoms.items():
            if original not in cut.lists:
                continue
            copy = copy.resolved()
            is_free = copy.form == 'atom' and copy.pin is None
            copied = self._copied_lists(cut.lists[original])
            earlier = lists.setdefault(copy, copied)
            if not is_free or not earlier.equal(copied):
                raise ValueError(_refusal(rule_of, original.size, copy))
        for original, copy in self._atoms.items():
            is_cut = not lists.keys().isdisjoint(atoms(copy))
            if is_cut and original not in cut.lists:
                raise ValueError(_refusal(rule_of, original.size, copy))
        return Cut(lists, cut.trips)

    def _copied_lists(self, lists: Lists) -> Lists:
        """The same lists, owned by copies."""
        owners = []
        for owner in lists.owners:
            copy = self._atoms.get(owner, owner)
            owners.append(copy.resolved())
        return Lists(tuple(owners), lists.table)


def _refusal(rule_of: str, size: int, copy: Axis) -> str:
    is_pinned = copy.form == 'atom' and copy.pin is not None
    reason = f': {copy.pin}' if is_pinned else ''
    return (
        f'the derivative rule of {rule_of} cannot be used after an axis of {size} was cut{reason}; keep all channels '
        'of its group, or take no derivative'
    )
