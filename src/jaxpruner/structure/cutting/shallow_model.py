"""A model without some of its residual blocks: its programs, and trees in which the blocks' leaves are `None`."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.cutting import blocks as blocks_lib
from jaxpruner.structure.cutting.blocks import Block
from jaxpruner.structure.cutting.verifying import Verification, coarsest_precision, compare
from jaxpruner.structure.programs import Model, ModelProgram, shape_of_leaf


def chosen_blocks(
    blocks: Mapping[str, Block], names: Iterable[str], allow_inexact: bool
) -> list[Block]:
    """The blocks with these names.

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
            raise KeyError(f'there is no residual block {name!r}; {tree_lib.nearest(name, blocks)}')
        block = blocks[name]
        if not (block.exact or allow_inexact):
            raise ValueError(
                f'leaving out {name!r} is not the same as zeroing it: {block.reason}; leave it in, or pass '
                'allow_inexact=True and train the smaller model'
            )
        chosen.append(block)
    return chosen


def drop(tree: tree_lib.PyTree, blocks: Iterable[Block]) -> tree_lib.PyTree:
    """A tree with `None` for what belongs to leaves of some blocks."""
    dropped = set[tree_lib.Path]()
    for block in blocks:
        dropped |= block.paths | block.state_paths
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    kept = []
    for path, leaf in zip(paths, leaves, strict=True):
        is_dropped = any(path[start:] in dropped for start in range(len(path)))
        kept.append(None if is_dropped else leaf)
    return jax.tree.unflatten(treedef, kept)


def without_blocks(model: Model, blocks: Sequence[Block]) -> Any:
    """The graph of a model without some of its blocks."""
    programs = []
    for program in model.programs:
        examples = program.examples
        shallow = program._replace(
            apply_fn=ShallowApply(program, model.params, blocks),
            arguments=_drop_from_state(program, program.arguments, blocks),
            examples=examples and _drop_from_state(program, examples, blocks),
        )
        programs.append(shallow)
    return model.analyse(drop(model.params, blocks), programs)


def _drop_from_state(
    program: ModelProgram, arguments: tuple[Any, ...], blocks: Sequence[Block]
) -> tuple[Any, ...]:
    if not program.has_state:
        return arguments
    return drop(arguments[0], blocks), *arguments[1:]


def verify_without_blocks(
    model: Model, params: tree_lib.PyTree, blocks: Sequence[Block]
) -> list[Verification]:
    """Compares each program that has arrays for arguments with itself without some blocks."""
    dropped = drop(params, blocks)
    kept = tree_lib.leaves_like(jax.tree.structure(params), dropped)
    leaves = []
    for leaf, rest in zip(jax.tree.leaves(params), kept, strict=True):
        leaves.append(jnp.zeros_like(leaf) if rest is None else leaf)
    zeroed = jax.tree.unflatten(jax.tree.structure(params), leaves)
    verifications = []
    for program in model.programs:
        if program.examples is None:
            continue
        small = ShallowApply(program, model.params, blocks)
        with jax.default_matmul_precision('highest'):
            whole = jax.jit(program.apply_fn)
            precision = coarsest_precision(jax.make_jaxpr(whole)(params, *program.examples).jaxpr)
            arguments = _drop_from_state(program, program.examples, blocks)
            before = jax.tree.leaves(whole(params, *program.examples))
            without = jax.tree.leaves(whole(zeroed, *program.examples))
            after = jax.tree.leaves(jax.jit(small)(dropped, *arguments))
        verifications.append(compare(before, without, after, precision))
    return verifications


class ShallowApply:
    """The apply function of a program without some residual blocks."""

    def __init__(
        self,
        program: ModelProgram,
        params: tree_lib.PyTree,
        blocks: Sequence[Block],
    ):
        self.__name__ = program.name
        self.whole = program.apply_fn
        self._program = program
        self._params = params  # shapes, with the blocks
        self._blocks = blocks
        self._programs: dict[Hashable, tuple[Any, Any]] = {}

    def __call__(self, params: tree_lib.PyTree, *arguments: Any) -> Any:
        """Runs the program with parameters, and a state, in which the leaves of the blocks are `None`."""
        whole = _Filled(self._params, params)
        has_state = self._program.has_state
        state = _Filled(self._program.state, arguments[0] if has_state else ())
        rest = arguments[has_state:]
        shapes = (whole.shapes, state.shapes, jax.tree.map(shape_of_leaf, rest))
        program, results = self._traced(shapes)
        inputs = [*whole.values, *state.values, *jax.tree.leaves(rest)]
        return jax.tree.unflatten(results, blocks_lib.run(program, inputs))

    def _traced(self, shapes: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        """The program without the blocks at these shapes, and the structure of its results."""
        leaves, treedef = jax.tree.flatten(shapes)
        key = treedef, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        if key in self._programs:
            return self._programs[key]
        params, state, inputs = shapes
        arguments = (state, *inputs) if self._program.has_state else inputs
        trace = jax.make_jaxpr(self.whole, return_shape=True)
        program, results = trace(params, *arguments)
        paths = _Paths(_paths_of(params), _paths_of(state))
        additions = blocks_lib.find_additions(program.jaxpr, paths, self._blocks)
        traced = blocks_lib.without(program, additions), jax.tree.structure(results)
        if not tree_lib.has_traced(program.consts):  # what the model closes over may be gone later
            self._programs[key] = traced
        return traced


class _Paths(NamedTuple):
    """A `blocks.LeafPaths`."""

    paths: Sequence[tree_lib.Path]
    state_paths: Sequence[tree_lib.Path]


def _paths_of(tree: tree_lib.PyTree) -> list[tree_lib.Path]:
    return tree_lib.flatten_with_paths(tree)[0]


class _Filled:
    """A tree in which leaves of the whole one are `None`.

    Attributes:
      values: of all leaves of the whole tree, `None` where one is missing.
      shapes: the whole tree; a missing leaf has the dtype that others of its dtype were given.
    """

    def __init__(self, whole: tree_lib.PyTree, tree: tree_lib.PyTree):
        own, treedef = jax.tree.flatten(whole)
        self.values = tree_lib.leaves_like(treedef, tree)
        dtypes: dict[Any, Any] = {}
        for leaf, value in zip(own, self.values, strict=True):
            if value is not None:
                dtypes.setdefault(leaf.dtype, jnp.result_type(value))
        shapes = []
        for leaf, value in zip(own, self.values, strict=True):
            missing = jax.ShapeDtypeStruct(leaf.shape, dtypes.get(leaf.dtype, leaf.dtype))
            shapes.append(missing if value is None else shape_of_leaf(value))
        self.shapes = jax.tree.unflatten(treedef, shapes)
