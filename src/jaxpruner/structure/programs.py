"""The programs of a model, the state that they take and return, and the axes of their values.

A program may take a state after the parameters, such as the statistics of batch normalization or the keys and values of
earlier tokens. It returns the state with other numbers. The state is found among the results by its names and shapes:

>>> import jax.numpy as jnp
>>> state = {'norm': {'mean': jnp.zeros(8), 'count': jnp.zeros(())}}
>>> returned_leaves(state, {'loss': jnp.ones(()), 'batch_stats': state})
{0: ('norm', 'count'), 1: ('norm', 'mean')}
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.structure import rules
from jaxpruner.structure.axes import Axes, Axis, Pin, Ties, atoms, new_axes, set_pin, sizes_of
from jaxpruner.structure.traces import EquationAxes, EquationTies, Trace, live_in_whole, new_results
from jaxpruner.trace.interpreter import Interpreter, Position
from jaxpruner.trace.program import Cond, Program, ProgramPath, Scan, ShardMap, While, shape_of
from jaxpruner.trace.walk import leaf_shape
from jaxpruner.tree import Path, PyTree

# These may read only parts of their operands, so that their results count as read, see `trace_programs`.
_TAKES_PARTS = frozenset('dynamic_slice gather slice split unstack'.split())


class ModelProgram(NamedTuple):
    """A function `(params, *arguments) -> results`.

    Attributes:
      apply_fn: the function.
      has_state: whether the first of the arguments is a state.
      arguments: `jax.ShapeDtypeStruct` for arrays.
      examples: the arguments themselves; `None` if they were shapes, or traced.
      results: structure of the results; `None` before the program is traced.
    """

    apply_fn: Callable[..., Any]
    has_state: bool
    arguments: tuple[Any, ...]
    examples: tuple[Any, ...] | None
    results: Any = None

    @classmethod
    def of(cls, apply_fn: Callable[..., Any], state: Any, inputs: Sequence[Any]) -> 'ModelProgram':
        """A program with these inputs, and with a state unless it is `None`."""
        has_state = state is not None
        arguments = (state, *inputs) if has_state else tuple(inputs)
        are_arrays = all(map(is_array, jax.tree.leaves(arguments)))
        shapes = jax.tree.map(shape_of_leaf, arguments)
        return cls(apply_fn, has_state, shapes, arguments if are_arrays else None)

    @property
    def state(self) -> PyTree:
        """The shapes of the state; an empty tree if there is none."""
        return self.arguments[0] if self.has_state else ()

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.apply_fn, '__name__', repr(self.apply_fn))


class Model(NamedTuple):
    """The model that a graph was made of.

    Attributes:
      params: of the model, `jax.ShapeDtypeStruct` for arrays.
      programs: one or more programs that use these parameters.
    """

    params: PyTree
    programs: tuple[ModelProgram, ...]

    @property
    def apply_fn(self) -> Callable[..., Any]:
        """The function of the first program."""
        return self.programs[0].apply_fn

    @property
    def examples(self) -> tuple[Any, ...] | None:
        """The arguments of the first program after the parameters; `None` if they were shapes, or traced."""
        return self.programs[0].examples

    def number_of(self, apply_fn: Callable[..., Any] | None) -> int:
        """The number of the program with this function; 0 if there is no function.

        Raises:
          ValueError: there is no such program.
        """
        if apply_fn is None:
            return 0
        for number, program in enumerate(self.programs):
            # A program without some blocks is also found by the function of the whole program.
            if apply_fn in (program.apply_fn, getattr(program.apply_fn, 'whole', None)):
                return number
        names = ', '.join([program.name for program in self.programs])
        raise ValueError(
            f'the graph was made of {names}, not of {apply_fn!r}; add it with graph.also before channels are chosen'
        )

    def are_params(self, tree: PyTree) -> bool:
        """Whether a tree can be the parameters: arrays of their structure, shapes and dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        own_leaves, own_structure = jax.tree.flatten(self.params)
        return structure == own_structure and all(
            is_array(leaf) and shape_of_leaf(leaf) == own
            for leaf, own in zip(leaves, own_leaves, strict=True)
        )


def is_array(leaf: Any) -> bool:
    """Whether a leaf has values, and is neither a shape nor traced."""
    return not isinstance(leaf, jax.ShapeDtypeStruct) and not tree_lib.is_traced(leaf)


def shape_of_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and the dtype of an array or a number."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def returned_leaves(state: PyTree, results: PyTree) -> dict[int, Path]:
    """Finds the results that are the returned state.

    A part of the results with the names and shapes of the whole state is the state. If there is no such part, each
    named entry of the state is looked for by itself, since a program may return only some of them.

    Returns:
      Number of a result -> path of the leaf of the state.

    Raises:
      ValueError: several parts of the results could be the state.
    """
    of_state, of_results = _shapes_by_path(state), _shapes_by_path(results)
    matches: dict[Path, Path] = {}  # path of a result -> path in the state
    named = [path[:1] for path in of_state if path and not path[0].isdigit()]
    for name in [(), *dict.fromkeys(named)]:
        entry = {path: shape for path, shape in of_state.items() if path[: len(name)] == name}
        parts: dict[Path, dict[Path, Any]] = defaultdict(dict)  # prefix -> what has the name there
        for path, shape in of_results.items():
            for start in range(len(path) + 1):
                if path[start : start + len(name)] == name:
                    parts[path[:start]][path[start:]] = shape
        prefixes = [prefix for prefix, part in parts.items() if part == entry]
        if len(prefixes) > 1:
            places = ' and '.join([tree_lib.path_string(each) or 'the whole' for each in prefixes])
            raise ValueError(
                f'{places} of the results could each be the state that comes back; give the state a name, '
                'state={"cache": state}, and return it under this name'
            )
        matches |= {(*prefix, *path): path for prefix in prefixes for path in entry}
        if matches and not name:  # the whole state
            break
    numbers = enumerate(of_results)
    bare = tree_lib.SINGLE_ARRAY_PATH
    return {number: matches[path] or bare for number, path in numbers if path in matches}


def _shapes_by_path(tree: PyTree) -> dict[Path, tuple[int, ...]]:
    if jax.tree.structure(tree) == jax.tree.structure(0):  # a bare leaf
        return {(): jnp.shape(tree)}
    paths, leaves, _ = tree_lib.flatten_with_paths(tree)
    return dict(zip(paths, map(jnp.shape, leaves), strict=True))


class Inference(Interpreter[Axes]):
    """Unifies the axes of a program's values, and keeps those of each equation that is needed."""

    def __init__(self, leaves: Mapping[Path, Axes]):
        self.first_uses: dict[Path, int] = {}
        self._leaves = {axes: path for path, axes in leaves.items()}
        self.equations: dict[ProgramPath, EquationAxes] = {}
        self.constants: dict[ProgramPath, tuple[Axes, ...]] = {}
        self.trips: dict[ProgramPath, Axis] = {}
        self.read: list[Axes] = []  # axes of values, or of their parts, that equations read

    def constant(self, value: Any, aval: Any) -> Axes:
        return new_axes(aval.shape)

    def unneeded(self, equation: Any, operands: Any) -> list[Axes]:
        return new_results(equation)

    def visit_constants(self, program: Program, position: Position) -> list[Axes]:
        axes = super().visit_constants(program, position)
        self.constants[position.path] = tuple(axes)
        return axes

    def visit_equation(self, equation: Any, operands: list[Axes], position: Position) -> list[Axes]:
        results = super().visit_equation(equation, operands, position)
        axes = EquationAxes(tuple(operands), tuple(results), rules.row_of(equation), equation)
        self.equations[position.path] = axes
        return results

    def visit_plain(self, equation: Any, operands: list[Axes], position: Position) -> list[Axes]:
        for axes in operands:
            if axes and axes in self._leaves:
                self.first_uses.setdefault(self._leaves[axes], len(self.equations))
        results = rules.row_of(equation).axes(EquationTies(equation, operands, position))
        if equation.primitive.name not in _TAKES_PARTS:
            self.read += operands
        self.read += results
        return results

    def visit_shard_map(
        self, shard_map: ShardMap, operands: list[Axes], position: Position
    ) -> list[Axes]:
        """Pins everything outside. The program of each device is visited for its costs."""
        self.trips[position.path] = Axis(shard_map.devices)
        inputs = [new_axes(shape_of(variable)) for variable in shard_map.program.jaxpr.invars]
        self.visit_call(shard_map, inputs, position)
        return self.visit_plain(shard_map.equation, operands, position)

    def visit_scan(self, scan: Scan, operands: list[Axes], position: Position) -> list[Axes]:
        """Carried values keep their axes. The sliced and stacked axes have an index for each trip."""
        _, carried, sliced = scan.split(operands)
        trips = Axis(scan.length)
        self.trips[position.path] = trips
        self.read.append((trips,))
        ties = EquationTies(scan.equation, operands, position)
        slices = []
        for axes in sliced:
            ties.unify(axes[0], trips)
            slices.append(axes[1:])
            if axes in self._leaves:  # a slice of a leaf counts as that leaf
                self._leaves.setdefault(slices[-1], self._leaves[axes])
        results = self.visit_body(scan, operands, carried, slices, position)
        carried_out, stacked = scan.split_results(results)
        ties.unify_values(carried, carried_out)
        return carried + [(trips, *axes) for axes in stacked]

    def visit_while(self, loop: While, operands: list[Axes], position: Position) -> list[Axes]:
        _, carried, _ = loop.split(operands)
        self.visit_condition(loop, operands, carried, position)
        results = self.visit_body(loop, operands, carried, [], position)
        EquationTies(loop.equation, operands, position).unify_values(carried, results)
        return carried

    def visit_cond(self, cond: Cond, operands: list[Axes], position: Position) -> list[Axes]:
        ties = EquationTies(cond.equation, operands, position)
        first, *others = self.visit_branches(cond, operands, position)
        for results in others:
            ties.unify_values(first, results)
        return first


def trace_programs(
    params: PyTree, programs: Sequence[ModelProgram]
) -> tuple[Model, tuple[Trace, ...]]:
    """Traces the programs of a model, and finds the axes of all their values."""
    paths, arrays, _ = tree_lib.flatten_with_paths(params)
    shapes = map(leaf_shape, arrays, paths)  # raises where a leaf is no array
    leaves = dict(zip(paths, map(new_axes, shapes), strict=True))
    states: dict[Path, Axes] = {}
    traces, traced, read = [], [], []
    for program in programs:
        owner = 'the model' if len(programs) == 1 else program.name
        make_jaxpr = jax.make_jaxpr(program.apply_fn, return_shape=True)
        closed_jaxpr, results = make_jaxpr(params, *program.arguments)
        returned = returned_leaves(program.state, results)
        own_states = _axes_of_state(program.state, states, leaves)
        arguments = [*leaves.values(), *own_states.values()]
        for number, variable in enumerate(closed_jaxpr.jaxpr.invars[len(arguments) :]):
            arguments.append(new_axes(shape_of(variable)))
            _pin_each(arguments[-1], f'input {number} of {owner}')
        inference = Inference(leaves)
        position = Position.of_whole(closed_jaxpr)
        of_results = inference.visit_program(Program.of(closed_jaxpr), arguments, position)
        for number, axes in enumerate(of_results):
            where = f'result {number} of {owner}'
            if number in returned:
                ties = Ties(lambda reason, where=where: Pin(f'{where}, a state: {reason}'))
                ties.unify_each(axes, own_states[returned[number]])
            else:
                _pin_each(axes, where)
        first_uses: dict[Path, float] = {}
        for path, is_used in zip(paths, live_in_whole(closed_jaxpr.jaxpr).inputs, strict=False):
            place = inference.first_uses.get(path, len(inference.equations))
            first_uses[path] = place if is_used else math.inf
        found = inference.equations, inference.constants, inference.trips
        traces.append(Trace(closed_jaxpr, *found, leaves, own_states, returned, first_uses))
        traced.append(program._replace(results=jax.tree.structure(results)))
        read += [*inference.read, *of_results]
    # Parts of parameters that no program reads, such as positions beyond the length of the inputs.
    read_atoms = {atom for axes in read for atom in atoms(*axes)}
    unread = [a for axes in leaves.values() for a in atoms(*axes) if a not in read_atoms]
    reason = 'the model does not read this part for inputs of these shapes'
    set_pin(Pin(reason, mixes=False), *unread)
    return Model(jax.tree.map(shape_of_leaf, params), tuple(traced)), tuple(traces)


def _pin_each(axes: Axes, owner: str) -> None:
    for i, axis in enumerate(axes):
        set_pin(Pin(f'axis {i} of {owner}', mixes=False), axis)


def _axes_of_state(
    state: PyTree, earlier: dict[Path, Axes], params: Mapping[Path, Axes]
) -> dict[Path, Axes]:
    """The axes of the leaves of a state. Leaves with the same path in an earlier program are the same.

    Raises:
      ValueError: a leaf has the path of a parameter, or a different rank in another program.
    """
    paths, leaves, _ = tree_lib.flatten_with_paths(state)
    axes_of_leaves = {}
    for path, leaf in zip(paths, leaves, strict=True):
        name = tree_lib.path_string(path)
        if path in params:
            raise ValueError(
                f'{name} is the path of a leaf of the state and of a parameter; give the '
                'state a name, state={"state": state}'
            )
        own = new_axes(leaf.shape)
        others = earlier.setdefault(path, own)
        if len(others) != len(own):
            raise ValueError(
                f'the leaf {name} of the state has shape {sizes_of(others)} in one program and {leaf.shape} in '
                'another; give different states different names'
            )
        # Axes of different sizes, such as the batches of a cache, are pinned.
        Ties(lambda reason, name=name: Pin(f'the state {name}: {reason}', mixes=False)).unify_each(
            own, others
        )
        axes_of_leaves[path] = own
    return axes_of_leaves
