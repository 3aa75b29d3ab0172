"""Runs a traced model and adds up what goes into chosen operations: here statistics of activations are taken.

The program is evaluated as it was traced; only equations on the way to a chosen operation are taken apart. Totals go
along through loops and branches and are added to in place, so that they take memory once if they are donated.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxpruner.core import tree as tree_lib
from jaxpruner.uses import bodies
from jaxpruner.uses.graph import UnsupportedPrimitive, Use, UseGraph

Path = tuple[int, ...]
# By number of the place.
Totals = dict[int, Any]
# In which trip each loop is, by its path.
Trips = Mapping[Path, Any]
Statistic = Callable[[Use, list[jax.Array]], Any]


def run_with_taps(
    graph: UseGraph,
    uses: Sequence[Use],
    statistic: Statistic,
    params: tree_lib.PyTree,
    *inputs: Any,
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
    taps = Taps([[use] for use in uses], statistic)
    return taps.run(graph, taps.zeros(), params, *inputs)


class Taps:
    """Operations that are observed, and the places where their statistics are added up.

    Attributes:
      places: the uses of each place, all with statistics of the same shape.
      statistic: `(use, operands) -> pytree of arrays`.

    >>> from jaxpruner.uses import param_uses
    >>> params, x = {'w': jnp.ones((3, 3))}, jnp.ones((2, 3))
    >>> graph = param_uses(lambda params, x: x @ params['w'] @ params['w'], params, x)
    >>> taps = Taps([graph['w']], lambda use, xs: xs[0].sum(0))
    >>> taps.run(graph, taps.zeros(), params, x)[1][0].tolist()  # 2 from the first product, 6 from the second
    [8.0, 8.0, 8.0]
    """

    def __init__(self, places: Sequence[Sequence[Use]], statistic: Statistic):
        self.places, self.statistic = places, statistic
        self._taps: dict[Path, list[tuple[int, Use]]] = {}
        for place, uses in enumerate(places):
            for use in uses:
                _check_observable(use)
                self._taps.setdefault(use.site.path, []).append((place, use))
        # Equations that have to be taken apart.
        self.opened = frozenset(
            path[:length] for path in self._taps for length in range(1, len(path), 2)
        )

    def zeros(self, within: Path | None = None) -> list[Any]:
        """Totals to begin with, one for each place.

        Args:
          within: path of a loop of which a single trip is going to be run.
        """

        def of_place(use: Use) -> Any:
            operands = [
                jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in use.site.equation.invars
            ]
            found = jax.eval_shape(lambda *operands: self.statistic(use, list(operands)), *operands)
            lengths = tuple(
                entry.length for entry in use.site.view.stack if entry.loop not in ((), within)
            )
            return jax.tree.map(lambda leaf: jnp.zeros((*lengths, *leaf.shape), leaf.dtype), found)

        return [of_place(uses[0]) for uses in self.places]

    def run(
        self, graph: UseGraph, totals: Sequence[Any], params: tree_lib.PyTree, *inputs: Any
    ) -> tuple[list[jax.Array], list[Any]]:
        """Runs the model.

        Args:
          graph: of the model, traced with inputs of these shapes.
          totals: what has been found before.
          params: the parameters.
          *inputs: the inputs.

        Returns:
          The leaves of the model's results, and the totals with what was found.

        Raises:
          UnsupportedPrimitive: an operation lies in a program that cannot be taken apart.
        """
        program = bodies.Program(graph.program.jaxpr, tuple(graph.program.consts))
        values = jax.tree.leaves((params, inputs))
        results, found = self.program(program, values, (), dict(enumerate(totals)), {})
        return results, [found[place] for place in range(len(self.places))]

    def program(
        self,
        program: bodies.Program,
        values: Sequence[Any],
        path: Path,
        totals: Totals,
        trips: Trips,
    ) -> tuple[list[Any], Totals]:
        """Runs a program.

        Args:
          program: which.
          values: of its inputs.
          path: where it stands.
          totals: of the places that it may add to.
          trips: in which trip the loops around it are.

        Returns:
          Its results, and the totals with what was found.
        """
        jaxpr = program.jaxpr
        known = dict(
            zip(
                map(id, (*jaxpr.constvars, *jaxpr.invars)),
                (*program.constants, *values),
                strict=True,
            )
        )

        def read(variable: Any) -> Any:
            return variable.val if isinstance(variable, Literal) else known[id(variable)]

        for number, equation in enumerate(jaxpr.eqns):
            operands = [read(variable) for variable in equation.invars]
            results, totals = self.equation(equation, operands, (*path, number), totals, trips)
            known.update(zip(map(id, equation.outvars), results, strict=True))
        return [read(variable) for variable in jaxpr.outvars], totals

    def equation(
        self, equation: Any, operands: list[Any], path: Path, totals: Totals, trips: Trips
    ) -> tuple[list[Any], Totals]:
        """Runs an equation, as `program` does."""
        for place, use in self._taps.get(path, ()):
            found, entries = self.statistic(use, operands), use.site.view.stack
            index = tuple(trips[entry.loop] for entry in entries if entry.loop in trips)
            add = functools.partial(_add, index=index)
            totals = totals | {place: jax.tree.map(add, totals[place], found)}
        if path not in self.opened:
            return _bind(equation, operands), totals
        name = equation.primitive.name
        if name in bodies.CALLS - {'shard_map'}:
            return self.program(bodies.called(equation), operands, (*path, 0), totals, trips)
        inside = {at: taps for at, taps in self._taps.items() if at[: len(path)] == path}
        if name not in ('scan', 'while', 'cond') or (
            name == 'while' and any(at[len(path)] == 0 for at in inside)
        ):
            ((_, use), *_) = next(iter(inside.values()))
            raise UnsupportedPrimitive(
                f'nothing can be observed inside {name} or the condition of a loop ({use.where})'
            )
        part = {place: totals[place] for taps in inside.values() for place, _ in taps}
        results, part = getattr(self, f'_{name}')(equation, operands, path, part, trips)
        return results, totals | part

    def _scan(
        self, equation: Any, operands: list[Any], path: Path, totals: Totals, trips: Trips
    ) -> Any:
        scan = bodies.Scan.of(equation)
        constants, carried, sliced = scan.split(operands)
        reverse = equation.params['reverse']

        def body(state: Any, taken: list[Any]) -> Any:
            carried, totals, trip = state
            inner = {**trips, path: trip}
            results, totals = self.program(
                scan.body, [*constants, *carried, *taken], (*path, 0), totals, inner
            )
            return (results[: scan.carried], totals, trip + (-1 if reverse else 1)), results[
                scan.carried :
            ]

        first = jnp.int32(scan.length - 1 if reverse else 0)
        options = {name: equation.params[name] for name in ('length', 'reverse', 'unroll')}
        (carried, totals, _), outputs = lax.scan(body, (carried, totals, first), sliced, **options)
        return [*carried, *outputs], totals

    def _while(
        self, equation: Any, operands: list[Any], path: Path, totals: Totals, trips: Trips
    ) -> Any:
        loop = bodies.While.of(equation)
        condition_constants, body_constants, carried = loop.split(operands)

        def condition(state: Any) -> Any:
            return self.program(
                loop.condition, [*condition_constants, *state[0]], (*path, 0), {}, trips
            )[0][0]

        def body(state: Any) -> Any:
            return self.program(
                loop.body, [*body_constants, *state[0]], (*path, 1), state[1], trips
            )

        return lax.while_loop(condition, body, (carried, totals))

    def _cond(
        self, equation: Any, operands: list[Any], path: Path, totals: Totals, trips: Trips
    ) -> Any:
        index, *values = operands
        branches = [
            lambda totals, *values, at=(*path, number), program=program: self.program(
                program, values, at, totals, trips
            )
            for number, program in enumerate(bodies.branches(equation))
        ]
        return lax.switch(index, branches, totals, *values)


def _check_observable(use: Use) -> None:
    site = use.site
    if site.equation is None:
        raise UnsupportedPrimitive(
            'a parameter that the model returns is an operand of nothing, so there is no tap'
        )
    if min(site.path) < 0:
        name = site.equation.primitive.name
        raise UnsupportedPrimitive(
            f'a parameter leaves a program inside {name} as one of its results ({use.where}); it is an operand of '
            'nothing there, so there is no tap'
        )


def _add(total: jax.Array, found: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    """To the whole, or to the element of stacked totals that belongs to the trip."""
    if not index:
        return total + found
    found = jnp.expand_dims(found, tuple(range(len(index))))
    start = (
        *index,
        *[jnp.zeros_like(index[0])] * (found.ndim - len(index)),
    )  # of one dtype, whatever that is
    old = lax.dynamic_slice(total, start, found.shape)
    return lax.dynamic_update_slice(total, old + found, start)


def _bind(equation: Any, operands: list[Any]) -> list[Any]:
    """Runs an equation as it is. Older JAX keeps the functions of a call apart from its other parameters."""
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]
