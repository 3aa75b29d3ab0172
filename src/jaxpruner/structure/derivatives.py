"""Custom derivative rules at smaller shapes.

A call with a derivative rule of its own (`jax.custom_jvp`, `jax.custom_vjp`) has a program and a rule, both made for
the old shapes. The program runs with smaller shapes, as the rest of the model does. The rule is a Python function and
cannot run like that. Instead, the derivative by the rule is traced as a second program, at the old shapes. The axes of
the second program are inferred, and it, too, runs with smaller shapes.

A rule may pin an axis that gets smaller. Then the rule for the small shape is unknown. The call itself still runs, but
taking its derivative is an error.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes, Axis, Ties, atoms, pick, product, total
from jaxpruner.structure.cut import Cut, EquationCut, Lists
from jaxpruner.structure.programs import Inference
from jaxpruner.structure.traces import Trace, pin_at
from jaxpruner.trace.interpreter import Position
from jaxpruner.trace.program import RULED_BACKWARDS, Program, bind

Values = list[Any]


def run_ruled(
    run: Callable[..., Values],
    small: EquationCut,
    position: Position,
    replay: Callable[[Trace, Cut], Any],
    values: Values,
) -> Values:
    """Runs a call with a derivative rule of its own with smaller shapes.

    Args:
      run: runs the program of the call.
      small: the call.
      position: of the call.
      replay: makes a `replay.Replay`, a run of a program with smaller shapes.
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

    @functools.cache
    def derivative() -> Callable[[Values], Values]:
        return _small_derivative(small, position, replay)

    def pull_back(values: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        gradients: Values = [None] * len(values)
        derivatives = derivative()([*values, *pick(cotangents, outputs)])
        for i, gradient in zip(inputs, derivatives, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    def push_forward(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        results = function(*values)
        derivatives = derivative()([*values, *pick(tangents, inputs)])
        tangents_out: Values = [
            None if result is None else np.zeros(result.shape, jax.dtypes.float0)
            for result in results
        ]
        for i, tangent in zip(outputs, derivatives, strict=True):
            tangents_out[i] = None if results[i] is None else tangent
        return results, tangents_out

    function: Any
    if equation.primitive.name in RULED_BACKWARDS:
        function = jax.custom_vjp(lambda *values: run(*values))
        function.defvjp(lambda *values: (run(*values), values), pull_back)
    else:
        function = jax.custom_jvp(lambda *values: run(*values))
        function.defjvp(push_forward)
    return function(*operands)


def _small_derivative(
    small: EquationCut, position: Position, replay: Callable[[Trace, Cut], Any]
) -> Callable[[Values], Values]:
    """Makes the derivative of a call of its operands, and of tangents of operands or cotangents of results."""
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

    def shapes(variables: Sequence[Any]) -> Values:
        avals = [variable.aval for variable in variables]
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    # At the old shapes.
    ends = (equation.invars, axes.operands, inputs), (equation.outvars, axes.results, outputs)
    (seeded, seed_axes, seeds), (_, result_axes, results) = ends[::-1] if is_backwards else ends
    program = jax.make_jaxpr(derivative)(shapes(equation.invars), shapes(pick(seeded, seeds)))
    copies = _Copies()
    inference = Inference(())
    inside = position.inside(equation, 0, (True,) * len(results))._replace(path=())
    arguments = list(map(copies.of, axes.operands + pick(seed_axes, seeds)))
    found = inference.visit_program(Program.of(program), arguments, inside)
    ties = Ties(functools.partial(pin_at, position, equation))
    ties.unify_values(found, map(copies.of, pick(result_axes, results)))
    name = f'{equation.primitive.name} at {position.line(equation)}'
    trace = Trace(program, inference.equations, inference.constants, inference.trips)
    return replay(trace, copies.cut(cut, name)).run


def _differentiable(variables: Sequence[Any]) -> list[int]:
    """The numbers of the variables that have a derivative."""
    return [
        i
        for i, variable in enumerate(variables)
        if jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    ]


class _Copies:
    """Copies of the axes of a model, made of new atoms, so that a rule can unify them without changing the model."""

    def __init__(self) -> None:
        self._atoms: dict[Axis, Axis] = {}

    def of(self, axes: Axes) -> Axes:
        """The copies of a value's axes."""

        def copy(axis: Axis) -> Axis:
            axis = axis.resolved()
            if axis.form == 'atom':
                return self._atoms.setdefault(axis, Axis(axis.size))
            parts = map(copy, axis.parts)
            return product(parts) if axis.form == 'product' else total(parts)

        return tuple(map(copy, axes))

    def cut(self, cut: Cut, rule_of: str) -> Cut:
        """The same cut, of the copies.

        Raises:
          ValueError: the rule has pinned a copy that is cut, or unified it with one that is cut differently.
        """
        lists: dict[Axis, Lists] = {}
        for original, copy in self._atoms.items():
            copy = copy.resolved()
            if original in cut.lists:
                owners, table = cut.lists[original]
                owners = tuple([self._atoms.get(owner, owner).resolved() for owner in owners])
                earlier = lists.setdefault(copy, Lists(owners, table))
                is_same = earlier.owners == owners and np.array_equal(earlier.table, table)
                if copy.form != 'atom' or copy.pin is not None or not is_same:
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
