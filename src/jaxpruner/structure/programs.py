"""The programs of a model, the state that they take and return, and the axes of their values.

An NNX or Equinox module is a program of its arrays. Each library is loaded for its modules only.

A program may take a state after the parameters, such as the statistics of batch normalization or the keys and values of
earlier tokens. It returns the state with other numbers. The state is found among the results by its names and shapes:

>>> import jax.numpy as jnp
>>> state = {'norm': {'mean': jnp.zeros(8), 'count': jnp.zeros(())}}
>>> returned_leaves(state, {'loss': jnp.ones(()), 'batch_stats': state})
{0: ('norm', 'count'), 1: ('norm', 'mean')}
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis, EquationTies, Pin, Ties, atoms, new_axes, set_pin
from jaxpruner.structure.rules import EquationAxes, row_of
from jaxpruner.trace.program import (
    Cond,
    Interpreter,
    Position,
    Program,
    ProgramPath,
    Scan,
    ShardMap,
    While,
    live,
    shape_of,
)
from jaxpruner.tree import Path, PyTree, is_instance

# These may read only parts of their operands, so that their results count as read, see `trace_programs`.
_TAKES_PARTS = frozenset('dynamic_slice gather slice split unstack'.split())

AxesByPath = dict[Path, Axes]
Values = list[Axes]


class ModelArrays(NamedTuple):
    """The arrays of a module, and the module as a function of them.

    Attributes:
      trees: its parameters; and the arrays that belong to channels and are no parameters, if there are any.
      inputs: of the module, without its state.
      make: `(*trees) -> module`, a new one with these arrays.
      run: `(module, *state, *inputs) -> results`, in evaluation mode. It may change the module's mode.
    """

    trees: tuple[PyTree, ...]
    inputs: tuple[Any, ...]
    make: Callable[..., Any]
    run: Callable[..., Any]

    def apply(self, params: PyTree, *arguments: Any) -> Any:
        """The module as a function `(params, *inputs)`, or `(params, state, *inputs)` if there is a state."""
        state = arguments[: len(self.trees) - 1]
        return self.run(self.make(params, *state), *arguments)


def arrays_of(
    model: Any, inputs: tuple[Any, ...], call: Callable[..., Any] | None = None
) -> ModelArrays | None:
    """The arrays of an NNX or Equinox module; `None` for a function.

    Functions that Equinox wraps (`equinox.filter_jit`) are of its class, but hold no arrays, and count as functions.

    Args:
      model: any object.
      inputs: of the model.
      call: `(model, *inputs) -> results`. Without it the module itself is called.

    Raises:
      TypeError: it is neither.
    """
    call = call or (lambda module, *inputs: module(*inputs))
    if is_instance(model, 'flax.nnx', 'Module'):
        return _nnx_arrays(model, inputs, call)
    is_equinox = is_instance(model, 'equinox', 'Module')
    arrays = _equinox_arrays(model, inputs, call) if is_equinox else None
    if arrays is None and (is_instance(model, 'flax.linen', 'Module') or not callable(model)):
        raise TypeError(
            f'got a {type(model).__name__}; give an NNX or Equinox module, or a function apply_fn, to shrink the pair '
            '(apply_fn, params): with linen lambda variables, x: module.apply(variables, x), with Haiku model.apply'
        )
    return arrays


def _nnx_arrays(module: Any, inputs: tuple[Any, ...], call: Callable[..., Any]) -> ModelArrays:
    """The arrays of a module. The keys of its random numbers stay in it."""
    from flax import nnx

    graphdef, params, keys, state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    trees = (params, state) if jax.tree.leaves(state) else (params,)

    def make(*trees: PyTree) -> Any:
        # The module may take the variables as they are, so that others would see what it changes.
        return nnx.merge(graphdef, *jax.tree.map(lambda array: array, (*trees, keys)))

    def run(module: Any, *arguments: Any) -> Any:
        module.eval()
        return call(module, *arguments[len(trees) - 1 :])  # the module holds its state

    return ModelArrays(trees, inputs, make, run)


def _equinox_arrays(
    module: Any, inputs: tuple[Any, ...], call: Callable[..., Any]
) -> ModelArrays | None:
    """The arrays of a module, and the `equinox.nn.State` among its inputs; `None` if the module has no arrays."""
    import equinox as eqx

    params, rest = eqx.partition(module, eqx.is_array)
    if not jax.tree.leaves(params):
        return None
    positions = [i for i, value in enumerate(inputs) if isinstance(value, eqx.nn.State)][:1]
    others = tuple([value for i, value in enumerate(inputs) if i not in positions])

    def make(params: PyTree, *state: PyTree) -> Any:
        del state  # an input
        return eqx.combine(params, rest)

    def run(module: Any, *arguments: Any) -> Any:
        in_order = list(arguments)
        for i in positions:
            in_order.insert(i, in_order.pop(0))
        try:
            return call(eqx.nn.inference_mode(module), *in_order)
        except Exception as error:
            error.add_note(
                'A module of Equinox takes one example. jaxpruner.shrink maps it over a batch with '
                'call=lambda module, x: jax.vmap(module)(x).'
            )
            raise

    return ModelArrays((params, *[inputs[i] for i in positions]), others, make, run)


class ModelProgram(NamedTuple):
    """A function `(params, *arguments) -> results`.

    Attributes:
      apply_fn: the function.
      has_state: whether the first of the arguments is a state.
      arguments: `jax.ShapeDtypeStruct` for arrays.
      examples: the arguments themselves; `None` if they were shapes, or traced.
    """

    apply_fn: Callable[..., Any]
    has_state: bool
    arguments: tuple[Any, ...]
    examples: tuple[Any, ...] | None

    @classmethod
    def of(cls, apply_fn: Callable[..., Any], state: Any, inputs: Sequence[Any]) -> 'ModelProgram':
        """A program with these inputs, and with a state unless it is `None`."""
        has_state = state is not None
        arguments = (state, *inputs) if has_state else tuple(inputs)
        are_arrays = all(map(is_array, jax.tree.leaves(arguments)))
        shapes = jax.tree.map(abstract, arguments)
        return cls(apply_fn, has_state, shapes, arguments if are_arrays else None)

    @property
    def state(self) -> PyTree:
        """The shapes of the state; an empty tree if there is none."""
        return self.arguments[0] if self.has_state else ()

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.apply_fn, '__name__', repr(self.apply_fn))


def is_array(leaf: Any) -> bool:
    """Whether a leaf has values, and is neither a shape nor traced."""
    return not isinstance(leaf, jax.ShapeDtypeStruct) and not tree_lib.is_traced(leaf)


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
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


@dataclasses.dataclass(eq=False, repr=False)
class Trace(Interpreter[Axes]):
    """A traced program of a model, and the axes of each of its values, which it unifies.

    The mappings leave out equations that the results do not depend on. Their axes are unknown, and the model is the
    same without them.

    Attributes:
      program: the traced program, a `jax.extend.core.ClosedJaxpr`. Its inputs are the leaves of the parameters, then
        those of the state, then those of the inputs.
      source: what was traced, a `ModelProgram`.
      results: structure of the results.
      leaves: path -> the axes of a leaf of the parameters.
      states: path -> the axes of a leaf of the state.
      returned: number of a result -> path of the leaf of the state that it returns.
      equations: path of an equation -> the axes of its operands and results. An equation with a program inside has an
        entry, too. In the body of a scan, sliced operands and stacked results lack their first axis.
      constants: path of a program -> the axes of each of its constants. The path of the whole program is `()`.
      trips: path of a scan -> the axis with an index for each of its trips; of a `shard_map`, for each of its devices.
      first_uses: path of a leaf -> its place in the order of first uses; infinity if the results do not depend on it.
      read: axes of values, or of their parts, that equations read.
    """

    program: Any
    source: Any = None
    results: Any = None
    leaves: AxesByPath = dataclasses.field(default_factory=dict)
    states: AxesByPath = dataclasses.field(default_factory=dict)
    returned: Mapping[int, Path] = dataclasses.field(default_factory=dict)
    equations: dict[ProgramPath, EquationAxes] = dataclasses.field(default_factory=dict)
    constants: dict[ProgramPath, tuple[Axes, ...]] = dataclasses.field(default_factory=dict)
    trips: dict[ProgramPath, Axis] = dataclasses.field(default_factory=dict)
    first_uses: dict[Path, float] = dataclasses.field(default_factory=dict)
    read: list[Axes] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self._path_of = {axes: path for path, axes in self.leaves.items()}

    def trips_around(self, path: ProgramPath) -> list[Axis]:
        """The axes of the trips of all scans around an equation, and of devices."""
        outside = [path[:length] for length in range(1, len(path) - 1)]
        return [self.trips[each] for each in outside if each in self.trips]

    def constant(self, value: Any, aval: Any) -> Axes:
        return new_axes(aval.shape)

    def unneeded(self, equation: Any, operands: Any) -> list[Axes]:
        return [new_axes(shape_of(variable)) for variable in equation.outvars]

    def visit_constants(self, program: Program, position: Position) -> list[Axes]:
        axes = super().visit_constants(program, position)
        self.constants[position.path] = tuple(axes)
        return axes

    def visit_equation(self, equation: Any, operands: Values, position: Position) -> Values:
        results = super().visit_equation(equation, operands, position)
        axes = EquationAxes(tuple(operands), tuple(results), row_of(equation), equation)
        self.equations[position.path] = axes
        return results

    def visit_plain(self, equation: Any, operands: Values, position: Position) -> Values:
        for axes in operands:
            if axes and axes in self._path_of:
                self.first_uses.setdefault(self._path_of[axes], len(self.equations))
        results = row_of(equation).axes(EquationTies(equation, operands, position))
        if equation.primitive.name not in _TAKES_PARTS:
            self.read += operands
        self.read += results
        return results

    def visit_shard_map(self, shard_map: ShardMap, operands: Values, position: Position) -> Values:
        """Pins everything outside. The program of each device is visited for its costs."""
        self.trips[position.path] = Axis(shard_map.devices)
        inputs = [new_axes(shape_of(variable)) for variable in shard_map.program.jaxpr.invars]
        self.visit_call(shard_map, inputs, position)
        return self.visit_plain(shard_map.equation, operands, position)

    def visit_scan(self, scan: Scan, operands: Values, position: Position) -> Values:
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
            if axes in self._path_of:  # a slice of a leaf counts as that leaf
                self._path_of.setdefault(slices[-1], self._path_of[axes])
        results = self.visit_body(scan, operands, carried, slices, position)
        carried_out, stacked = scan.split_results(results)
        ties.unify_values(carried, carried_out)
        return carried + [(trips, *axes) for axes in stacked]

    def visit_while(self, loop: While, operands: Values, position: Position) -> Values:
        _, carried, _ = loop.split(operands)
        self.visit_condition(loop, operands, carried, position)
        results = self.visit_body(loop, operands, carried, [], position)
        EquationTies(loop.equation, operands, position).unify_values(carried, results)
        return carried

    def visit_cond(self, cond: Cond, operands: Values, position: Position) -> Values:
        ties = EquationTies(cond.equation, operands, position)
        first, *others = self.visit_branches(cond, operands, position)
        for results in others:
            ties.unify_values(first, results)
        return first


def trace_programs(params: PyTree, programs: Iterable[ModelProgram]) -> tuple[Trace, ...]:
    """Traces the programs of a model, and finds the axes of all their values."""
    paths, arrays, _ = tree_lib.flatten_with_paths(params)
    shapes = map(tree_lib.leaf_shape, arrays, paths)  # raises where a leaf is no array
    leaves = dict(zip(paths, map(new_axes, shapes), strict=True))
    states: AxesByPath = {}
    sources, traces = list(programs), []
    for source in sources:
        owner = 'the model' if len(sources) == 1 else source.name
        make_jaxpr = jax.make_jaxpr(source.apply_fn, return_shape=True)
        program, results = make_jaxpr(params, *source.arguments)
        own_states = _axes_of_state(source.state, states, leaves)
        returned = returned_leaves(source.state, results)
        trace = Trace(program, source, jax.tree.structure(results), leaves, own_states, returned)
        first = [*leaves.values(), *own_states.values()]
        inputs = [new_axes(shape_of(each)) for each in program.jaxpr.invars[len(first) :]]
        of_results = trace.visit_all(program, [*first, *inputs])
        fixed = [(f'input {n}', axes) for n, axes in enumerate(inputs)]
        fixed += [(f'result {n}', axes) for n, axes in enumerate(of_results) if n not in returned]
        for number, path in returned.items():
            where = f'result {number} of {owner}, a state'
            ties = Ties(lambda reason, where=where: Pin(f'{where}: {reason}'))
            ties.unify_each(of_results[number], own_states[path])
        for where, axes in fixed:
            for i, axis in enumerate(axes):
                set_pin(Pin(f'axis {i} of {where} of {owner}', mixes=False), axis)
        for path, is_used in zip(paths, live(program.jaxpr).inputs, strict=False):
            place = trace.first_uses.get(path, len(trace.equations))
            trace.first_uses[path] = place if is_used else math.inf
        trace.read += of_results
        traces.append(trace)
    # Parts of parameters that no program reads, such as positions beyond the length of the inputs.
    read_atoms = {atom for trace in traces for axes in trace.read for atom in atoms(*axes)}
    unread = [a for axes in leaves.values() for a in atoms(*axes) if a not in read_atoms]
    reason = 'the model does not read this part for inputs of these shapes'
    set_pin(Pin(reason, mixes=False), *unread)
    return tuple(traces)


def _axes_of_state(state: PyTree, earlier: AxesByPath, params: AxesByPath) -> AxesByPath:
    """The axes of the leaves of a state. Leaves with the same path in an earlier program are the same.

    Raises:
      ValueError: a leaf has the path of a parameter.
    """
    axes_of_leaves = {}
    for path, leaf in tree_lib.zip_with_paths(state):
        name = tree_lib.path_string(path)
        if path in params:
            raise ValueError(
                f'{name} is the path of a leaf of the state and of a parameter; give the '
                'state a name, state={"state": state}'
            )
        own = axes_of_leaves[path] = new_axes(leaf.shape)
        others = earlier.setdefault(path, own)
        # Axes of different sizes, such as the batches of a cache, are pinned.
        ties = Ties(lambda reason, name=name: Pin(f'the state {name}: {reason}', mixes=False))
        ties.unify_each(own, others)
    return axes_of_leaves
