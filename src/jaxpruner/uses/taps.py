"""Runs a traced model and hands out what goes into chosen operations: here statistics of activations are taken.

The program is evaluated as it was traced. Only equations on the way to a chosen operation are taken apart; what is
found in the trips of a loop is added up, or stacked where each trip uses another element of the parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxpruner import tree as tree_lib
from jaxpruner.uses import bodies
from jaxpruner.uses.graph import UnsupportedPrimitive, Use, UseGraph

Path = tuple[int, ...]
Found = dict[int, Any]
Statistic = Callable[[Use, list[jax.Array]], Any]


def run_with_taps(
    graph: UseGraph, uses: Sequence[Use], statistic: Statistic, params: tree_lib.PyTree, *inputs: Any
) -> tuple[list[jax.Array], list[Any]]:
    """Runs the model and takes a statistic of the operands of some of its operations.

    A function of arrays: call it inside `jax.jit`. `use.site.equation` is the operation, and the operand number
    `use.site.operand` is read from the parameter.

    Args:
      graph: of the model, traced with inputs of these shapes.
      uses: of the graph.
      statistic: `(use, operands) -> pytree of arrays`.
      params: the parameters.
      *inputs: the inputs.

    Returns:
      The leaves of the model's results, and a statistic for each use: summed over the trips of loops, stacked in front
      along the loops from which each trip gets its own element of the parameter.

    Raises:
      UnsupportedPrimitive: an operation lies in a program that cannot be taken apart.

    >>> from jaxpruner.uses import param_uses
    >>> params, x = {'w': jnp.ones((3, 4))}, jnp.arange(6.0).reshape(2, 3)
    >>> graph = param_uses(lambda params, x: x @ params['w'], params, x)
    >>> _, (squares,) = run_with_taps(graph, graph['w'], lambda use, xs: (xs[0] ** 2).sum(0), params, x)
    >>> squares
    Array([ 9., 17., 29.], dtype=float32)
    """
    taps: dict[Path, list[int]] = {}
    for number, use in enumerate(uses):
        taps.setdefault(use.site.path, []).append(number)
    program = bodies.Program(graph.program.jaxpr, tuple(graph.program.consts))
    results, found = _Run(uses, statistic, taps).program(program, jax.tree.leaves((params, inputs)), ())
    return results, [found[number] for number in range(len(uses))]


class _Run:
    """One evaluation of a program; each rule returns an equation's results and what was found inside."""

    def __init__(self, uses: Sequence[Use], statistic: Statistic, taps: dict[Path, list[int]]):
        self.uses, self.statistic, self.taps = uses, statistic, taps
        # Equations that have to be taken apart.
        self.open = {path[:length] for path in taps for length in range(1, len(path), 2)}

    def program(self, program: bodies.Program, values: Sequence[Any], path: Path) -> tuple[list[Any], Found]:
        jaxpr = program.jaxpr
        known = dict(zip(map(id, (*jaxpr.constvars, *jaxpr.invars)), (*program.constants, *values), strict=True))
        found: Found = {}

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else known[id(variable)]

        for number, equation in enumerate(jaxpr.eqns):
            here, operands = (*path, number), [read(variable) for variable in equation.invars]
            for tap in self.taps.get(here, ()):
                found[tap] = self.statistic(self.uses[tap], operands)
            if here in self.open:
                results, inside = self._open(equation, operands, here)
                found.update(inside)
            else:
                results = _bind(equation, operands)
            known.update(zip(map(id, equation.outvars), results, strict=True))
        return [read(variable) for variable in jaxpr.outvars], found

    def _open(self, equation: Any, operands: list[Any], path: Path) -> tuple[list[Any], Found]:
        name = equation.primitive.name
        if name in bodies.CALLS - {'shard_map'}:
            return self.program(bodies.called(equation), operands, (*path, 0))
        inside = [at for at in self.taps if at[: len(path)] == path]
        if name not in ('scan', 'while', 'cond') or (name == 'while' and any(at[len(path)] == 0 for at in inside)):
            where = self.uses[self.taps[inside[0]][0]].where
            raise UnsupportedPrimitive(f'nothing can be observed inside {name} or the condition of a loop ({where})')
        return getattr(self, f'_{name}')(equation, operands, path)

    def _scan(self, equation: Any, operands: list[Any], path: Path) -> tuple[list[Any], Found]:
        scan = bodies.Scan.of(equation)
        constants, carried, sliced = scan.split(operands)

        def trip(carried: list[Any], taken: list[Any]) -> tuple[list[Any], Found]:
            return self.program(scan.body, [*constants, *carried, *taken], (*path, 0))

        def body(state: Any, taken: list[Any]) -> Any:
            carried, sums = state
            results, found = trip(carried, taken)
            stacked = {tap: value for tap, value in found.items() if self._is_stacked(tap, path)}
            sums = {tap: jax.tree.map(jnp.add, total, found[tap]) for tap, total in sums.items()}
            return (results[: scan.carried], sums), (results[scan.carried :], stacked)

        first = [jax.eval_shape(lambda array: array[0], array) for array in sliced]
        shapes = jax.eval_shape(lambda *both: trip(*both)[1], carried, first)
        sums = {tap: _zeros(shape) for tap, shape in shapes.items() if not self._is_stacked(tap, path)}
        options = {name: equation.params[name] for name in ('length', 'reverse', 'unroll')}
        (carried, sums), (outputs, stacked) = lax.scan(body, (carried, sums), sliced, **options)
        return [*carried, *outputs], {**sums, **stacked}

    def _is_stacked(self, tap: int, path: Path) -> bool:
        return any(entry.loop == path for entry in self.uses[tap].site.view.stack)

    def _while(self, equation: Any, operands: list[Any], path: Path) -> tuple[list[Any], Found]:
        loop = bodies.While.of(equation)
        condition_constants, body_constants, carried = loop.split(operands)

        def trip(carried: list[Any]) -> tuple[list[Any], Found]:
            return self.program(loop.body, [*body_constants, *carried], (*path, 1))

        def condition(state: Any) -> Any:
            return self.program(loop.condition, [*condition_constants, *state[0]], (*path, 0))[0][0]

        def body(state: Any) -> Any:
            results, found = trip(state[0])
            return results, jax.tree.map(jnp.add, state[1], found)

        sums = _zeros(jax.eval_shape(lambda carried: trip(carried)[1], carried))
        return lax.while_loop(condition, body, (carried, sums))

    def _cond(self, equation: Any, operands: list[Any], path: Path) -> tuple[list[Any], Found]:
        index, *values = operands
        branches = [
            lambda *values, number=number, program=program: self.program(program, values, (*path, number))
            for number, program in enumerate(bodies.branches(equation))
        ]
        shapes: Found = {}
        for branch in branches:
            shapes |= jax.eval_shape(lambda *values, branch=branch: branch(*values)[1], *values)

        def complete(branch: Callable[..., tuple[list[Any], Found]]) -> Callable[..., tuple[list[Any], Found]]:
            def run(*values: Any) -> tuple[list[Any], Found]:
                results, found = branch(*values)
                return results, {tap: found[tap] if tap in found else _zeros(shapes[tap]) for tap in shapes}

            return run

        return lax.switch(index, [complete(branch) for branch in branches], *values)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _bind(equation: Any, operands: list[Any]) -> list[Any]:
    """Runs an equation as it is. Older JAX keeps the functions of a call apart from its other parameters."""
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]
