"""A model without some residual blocks: its programs, and trees with `None` for the leaves of the blocks."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.structure.cutting import additions as additions_lib
from jaxpruner.structure.cutting.blocks import Block, find_additions
from jaxpruner.structure.cutting.verifying import Verification, coarsest_precision, compare
from jaxpruner.structure.programs import Model, ModelProgram, shape_of_leaf, signature
from jaxpruner.tree import Path, PyTree


def chosen_blocks(
    blocks: Mapping[str, Block], names: Iterable[str], allow_inexact: bool
) -> list[Block]:
    """Finds the blocks with these names.

    Raises:
      TypeError: one name is given instead of several.
      KeyError: there is no such block.
      ValueError: a block is not exact.
    """
    if isinstance(names, str):
        raise TypeError(f'give a list of names, [{names!r}]')
    chosen = []
    for name in names:
        if name not in blocks:
            nearest = tree_lib.nearest(name, blocks)
            raise KeyError(f'there is no residual block {name!r}; {nearest}')
        block = blocks[name]
        if not (block.exact or allow_inexact):
            raise ValueError(
                f'leaving out {name!r} is not the same as zeroing it: {block.reason}; leave it in, or pass '
                'allow_inexact=True and train the smaller model'
            )
        chosen.append(block)
    return chosen


def drop(tree: PyTree, blocks: Iterable[Block]) -> PyTree:
    """Replaces the entries of a tree that belong to leaves of some blocks by `None`."""
    dropped = set[Path]()
    for block in blocks:
        dropped |= block.paths | block.state_paths
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    kept = []
    for path, leaf in zip(paths, leaves, strict=True):
        ends = [path[start:] for start in range(len(path))]
        is_dropped = not dropped.isdisjoint(ends)
        kept.append(None if is_dropped else leaf)
    return jax.tree.unflatten(treedef, kept)


def without_blocks(model: Model, blocks: Sequence[Block]) -> Any:
    """The graph of a model without some of its blocks."""
    programs = []
    for program in model.programs:
        examples = program.examples
        if examples is not None:
            examples = _drop_from_state(program, examples, blocks)
        shallow = program._replace(
            apply_fn=ShallowApply(program, model.params, blocks),
            arguments=_drop_from_state(program, program.arguments, blocks),
            examples=examples,
        )
        programs.append(shallow)
    params = drop(model.params, blocks)
    return model.analyse(params, programs)


def _drop_from_state(
    program: ModelProgram, arguments: tuple[Any, ...], blocks: Sequence[Block]
) -> tuple[Any, ...]:
    if not program.has_state:
        return arguments
    state, *inputs = arguments
    return drop(state, blocks), *inputs


def verify_without_blocks(
    model: Model, params: PyTree, blocks: Sequence[Block]
) -> list[Verification]:
    """Compares each program that was given arrays as arguments with itself without some blocks."""
    dropped = drop(params, blocks)
    leaves, treedef = jax.tree.flatten(params)
    for i, kept in enumerate(tree_lib.leaves_like(treedef, dropped)):
        if kept is None:
            leaves[i] = jnp.zeros_like(leaves[i])
    zeroed = jax.tree.unflatten(treedef, leaves)
    verifications = []
    for program in model.programs:
        examples = program.examples
        if examples is None:
            continue
        small_examples = _drop_from_state(program, examples, blocks)
        run_whole = jax.jit(program.apply_fn)
        run_small = jax.jit(ShallowApply(program, model.params, blocks))
        with jax.default_matmul_precision('highest'):
            traced = jax.make_jaxpr(run_whole)(params, *examples)
            whole_results = jax.tree.leaves(run_whole(params, *examples))
            zeroed_results = jax.tree.leaves(run_whole(zeroed, *examples))
            small_results = jax.tree.leaves(run_small(dropped, *small_examples))
        precision = coarsest_precision(traced.jaxpr)
        verification = compare(whole_results, zeroed_results, small_results, precision)
        verifications.append(verification)
    return verifications


class ShallowApply:
    """The apply function of a program without some residual blocks."""

    def __init__(
        self,
        program: ModelProgram,
        params: PyTree,
        blocks: Sequence[Block],
    ):
        self.__name__ = program.name
        self.whole = program.apply_fn
        self._program = program
        self._params = params  # shapes, with the blocks
        self._blocks = blocks
        self._programs: dict[Hashable, _ShallowProgram] = {}

    def __call__(self, params: PyTree, *arguments: Any) -> Any:
        """Runs the program with parameters and a state that have `None` for the leaves of the blocks."""
        state, inputs = self._program.split(arguments)
        filled_params = _Filled(self._params, params)
        filled_state = _Filled(self._program.state, state)
        shapes_of_inputs = jax.tree.map(shape_of_leaf, inputs)
        shallow = self._traced(filled_params.shapes, filled_state.shapes, shapes_of_inputs)
        leaves = filled_params.values + filled_state.values
        leaves += jax.tree.leaves(inputs)
        results = additions_lib.run(shallow.program, leaves)
        return jax.tree.unflatten(shallow.results, results)

    def _traced(self, params: Any, state: Any, inputs: Any) -> '_ShallowProgram':
        """The program without the blocks at these shapes."""
        key = signature((params, state, inputs))
        if key in self._programs:
            return self._programs[key]
        arguments = (state, *inputs) if self._program.has_state else inputs
        trace = jax.make_jaxpr(self.whole, return_shape=True)
        program, results = trace(params, *arguments)
        paths = _Paths(_paths_of(params), _paths_of(state))
        additions = find_additions(program.jaxpr, paths, self._blocks)
        shallow_program = additions_lib.without(program, additions)
        shallow = _ShallowProgram(shallow_program, jax.tree.structure(results))
        if not tree_lib.has_traced(program.consts):  # tracers may be gone later
            self._programs[key] = shallow
        return shallow


class _ShallowProgram(NamedTuple):
    """A traced program without some blocks, and the structure of its results."""

    program: Any
    results: Any


class _Paths(NamedTuple):
    """An `additions.LeafPaths`."""

    paths: Sequence[Path]
    state_paths: Sequence[Path]


def _paths_of(tree: PyTree) -> list[Path]:
    paths, _, _ = tree_lib.flatten_with_paths(tree)
    return paths


class _Filled:
    """A tree with `None` for some leaves, filled up to the whole tree.

    Attributes:
      values: of all leaves of the whole tree, `None` for missing ones.
      shapes: of the whole tree. A missing leaf gets the dtype that the others of its old dtype have now.
    """

    def __init__(self, whole: PyTree, tree: PyTree):
        own, treedef = jax.tree.flatten(whole)
        self.values = tree_lib.leaves_like(treedef, tree)
        new_dtypes: dict[Any, Any] = {}
        for leaf, value in zip(own, self.values, strict=True):
            if value is not None:
                new_dtypes.setdefault(leaf.dtype, jnp.result_type(value))
        shapes = []
        for leaf, value in zip(own, self.values, strict=True):
            if value is None:
                dtype = new_dtypes.get(leaf.dtype, leaf.dtype)
                shapes.append(jax.ShapeDtypeStruct(leaf.shape, dtype))
            else:
                shapes.append(shape_of_leaf(value))
        self.shapes = jax.tree.unflatten(treedef, shapes)
