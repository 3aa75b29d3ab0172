"""The programs of a model, and the state that they take and return.

A program may take a state after the parameters, such as the statistics of batch normalization or the keys and values of
earlier tokens. It returns the state with other numbers. The state is found among the results by its names and shapes:

>>> import jax.numpy as jnp
>>> state = {'norm': {'mean': jnp.zeros(8), 'count': jnp.zeros(())}}
>>> returned_leaves(state, {'loss': jnp.ones(()), 'batch_stats': state})
{0: 0, 1: 1}
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.tree import Path, PyTree

Shape = tuple[int, ...]
Shapes = Mapping[Path, Shape]


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
        shapes = jax.tree.map(shape_of_leaf, arguments)
        leaves = jax.tree.leaves(arguments)
        are_arrays = all(map(is_array, leaves))
        examples = arguments if are_arrays else None
        return cls(apply_fn, has_state, shapes, examples)

    @property
    def state(self) -> PyTree:
        """The shapes of the state; an empty tree if there is none."""
        return self.arguments[0] if self.has_state else ()

    def split(self, arguments: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Splits arguments into the state, an empty tree if there is none, and the inputs."""
        if not self.has_state:
            return (), arguments
        state, *inputs = arguments
        return state, inputs

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.apply_fn, '__name__', repr(self.apply_fn))


class Model(NamedTuple):
    """The model that a graph was made of.

    Attributes:
      params: of the model, `jax.ShapeDtypeStruct` for arrays.
      programs: one or more programs that use these parameters.
      analyse: `(params, programs) -> ChannelGraph`, makes the graph of other parameters and programs.
    """

    params: PyTree
    programs: tuple[ModelProgram, ...]
    analyse: Callable[..., Any]

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
            whole = getattr(program.apply_fn, 'whole', None)
            if apply_fn in (program.apply_fn, whole):
                return number
        names = ', '.join([program.name for program in self.programs])
        raise ValueError(
            f'the graph was made of {names}, not of {apply_fn!r}; add it with graph.also before channels are chosen'
        )

    def with_program(self, number: int, params: PyTree, program: ModelProgram) -> Any:
        """The graph of the model with other parameters, and with one program replaced."""
        programs = list(self.programs)
        programs[number] = program
        return self.analyse(params, programs)

    def are_params(self, tree: PyTree) -> bool:
        """Whether a tree can be the parameters: arrays of their structure and dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        own_leaves, own_structure = jax.tree.flatten(self.params)
        if structure != own_structure:
            return False
        for leaf, own in zip(leaves, own_leaves, strict=True):
            if not is_array(leaf) or jnp.result_type(leaf) != own.dtype:
                return False
        return True


def is_array(leaf: Any) -> bool:
    """Whether a leaf has values, and is neither a shape nor traced."""
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    return not is_shape and not tree_lib.is_traced(leaf)


def shape_of_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and the dtype of an array or a number."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def signature(shapes: PyTree) -> Hashable:
    """The structure, shapes and dtypes of a tree, as a key for what was traced with them."""
    leaves, treedef = jax.tree.flatten(shapes)
    shapes_and_dtypes = []
    for leaf in leaves:
        shape_and_dtype = jnp.shape(leaf), jnp.result_type(leaf)
        shapes_and_dtypes.append(shape_and_dtype)
    return treedef, tuple(shapes_and_dtypes)


def returned_leaves(state: PyTree, results: PyTree) -> dict[int, int]:
    """Finds the results that are the returned state.

    A part of the results with the names and shapes of the whole state is the state. If there is no such part, each
    named entry of the state is looked for by itself, since a program may return only some of them.

    Returns:
      Number of a result -> number of the leaf of the state.

    Raises:
      ValueError: several parts of the results could be the state.
    """
    state_shapes = _shapes_by_path(state)
    result_shapes = _shapes_by_path(results)
    if not state_shapes:
        return {}
    matches = _match(state_shapes, result_shapes)
    if not matches:
        first_parts = [path[0] for path in state_shapes if path]
        for name in dict.fromkeys(first_parts):
            if not name.isdigit():  # the position in a tuple is no name
                entry = _take_part(state_shapes, (name,), ())
                matches |= _match(entry, result_shapes, name)
    number_of = {path: number for number, path in enumerate(state_shapes)}
    returned = {}
    for number, path in enumerate(result_shapes):
        if path in matches:
            returned[number] = number_of[matches[path]]
    return returned


def _shapes_by_path(tree: PyTree) -> Shapes:
    is_bare_leaf = jax.tree.structure(tree) == jax.tree.structure(0)
    if is_bare_leaf:
        return {(): jnp.shape(tree)}
    paths, leaves, _ = tree_lib.flatten_with_paths(tree)
    shapes = map(jnp.shape, leaves)
    return dict(zip(paths, shapes, strict=True))


def _match(state: Shapes, results: Shapes, *name: str) -> dict[Path, Path]:
    """Path of a result -> path in the state, for the part of the results that is the state or this entry of it."""
    first = next(iter(state))
    prefixes = []
    for path in results:
        prefix = path[: len(path) - len(first)]
        is_first = (*prefix, *first) == path
        if is_first and _take_part(results, (*prefix, *name), prefix) == state:
            prefixes.append(prefix)
    if len(prefixes) > 1:
        names = [tree_lib.path_string(prefix) or 'the whole' for prefix in prefixes]
        parts = ' and '.join(names)
        raise ValueError(
            f'{parts} of the results could each be the state that comes back; give the state a name, '
            'state={"cache": state}, and return it under this name'
        )
    matches = {}
    for prefix in prefixes:
        for path in state:
            matches[*prefix, *path] = path
    return matches


def _take_part(shapes: Shapes, beginning: Path, prefix: Path) -> Shapes:
    """The entries whose paths begin so, by their paths without the prefix."""
    part = {}
    for path, shape in shapes.items():
        if path[: len(beginning)] == beginning:
            below = path[len(prefix) :]
            part[below] = shape
    return part
