"""Residual blocks of unrolled models, which can be left out as a whole.

A block computes a branch from a stream and adds it to the stream: `after = before + branch(before)`. Without the block,
the program reads `before` wherever it read `after`. Then the results do not depend on some parameters any more, which
are the leaves of the block. In

    hidden = relu(x @ up)
    x = x + hidden @ down
    y = x @ head

these are `up` and `down`. Leaving the block out is the same as zeroing its leaves if that makes the branch zero.
`additions` finds the branches of a program, and `_BranchProbe` which of them become zero.

Layers of a scan are the channels of a group instead, see `Group.is_depth`.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.structure import small_model
from jaxpruner.structure.additions import Addition, Branch, Paths, find_branches, without
from jaxpruner.structure.axes import Axis, sizes_of
from jaxpruner.structure.programs import Model, ModelProgram, shape_of_leaf
from jaxpruner.structure.small_model import Verification
from jaxpruner.structure.traces import Trace, live_in_whole, pin_at
from jaxpruner.structure.zeros import Fill, ZeroWalk, unknown
from jaxpruner.trace.interpreter import Position, Run
from jaxpruner.trace.program import Program
from jaxpruner.tree import Path, PyTree


@dataclasses.dataclass(frozen=True)
class Block:
    """A residual block that can be left out of a model.

    Attributes:
      name: the part of the tree with its leaves and no others. If there is none, its leaf that is used first; leaves of
        blocks inside it come last.
      paths: of its leaves.
      state_paths: of its leaves in the state.
      parameters: how many it has.
      exact: whether leaving it out is the same as setting its leaves to zero.
      reason: why it is not exact; empty if it is.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> params = {'block': {'up': jnp.ones((2, 4)), 'down': jnp.ones((4, 2))}, 'head': jnp.ones((2, 1))}
    >>> def apply(p, x):
    ...     return (x + jnp.tanh(x @ p['block']['up']) @ p['block']['down']) @ p['head']
    >>> graph = channel_groups(apply, params, jnp.ones((5, 2)))
    >>> block = graph.blocks['block']
    >>> block.parameters, block.exact
    (16, True)
    """

    name: str
    paths: Paths
    state_paths: Paths
    parameters: int
    exact: bool
    reason: str


def find_blocks(traces: Sequence[Trace]) -> dict[str, Block]:
    """Finds the residual blocks of a model by name, in the order of the first program.

    Every program that uses a leaf of a block has to have the whole block.
    """
    branches_of: dict[Paths, list[tuple[Branch, str]]] = defaultdict(list)
    for trace in traces:
        branches = find_branches(trace.program.jaxpr, trace.paths, trace.state_paths)
        zero_additions = _BranchProbe(trace, branches).find_zeros()
        for branch in branches:
            reason = ''
            if branch.addition not in zero_additions:
                number = branch.addition.number
                equation = trace.program.jaxpr.eqns[number]
                words = 'the branch is not zero once its parameters are'
                reason = str(pin_at(Position().at(number), equation, words))
            branches_of[branch.paths].append((branch, reason))
    sizes = {path: math.prod(sizes_of(axes)) for path, axes in traces[0].named_leaves}
    blocks = {}
    for paths, branches in branches_of.items():
        users = sum(_uses_some(trace.program.jaxpr, trace.paths, paths) for trace in traces)
        if len(branches) != users:
            continue
        inner_paths = frozenset().union(*[other for other in branches_of if other < paths])
        name = _name_block(traces, paths, inner_paths)
        reason = next((reason for _, reason in branches if reason), '')
        state_paths = frozenset().union(*[branch.state_paths for branch, _ in branches])
        parameters = sum(sizes[path] for path in paths)
        blocks[name] = Block(name, paths, state_paths, parameters, not reason, reason)
    return blocks


def _uses_some(jaxpr: Any, paths: Sequence[Path], some: Paths) -> bool:
    """Whether the results of a program depend on one of some leaves."""
    return not some.isdisjoint(itertools.compress(paths, live_in_whole(jaxpr).inputs))


def _name_block(traces: Sequence[Trace], paths: Paths, inner_paths: Paths) -> str:
    """The name of a block, see `Block.name`."""
    all_paths = traces[0].paths
    first_uses = {}
    for number, path in enumerate(all_paths):
        if path in paths:
            # Blocks inside have names of their own, so their leaves come last.
            uses = [trace.first_uses[number] for trace in traces]
            first_uses[path] = path in inner_paths, *uses
    first = min(first_uses, key=lambda path: first_uses[path])
    for length in range(1, len(first) + 1):
        prefix = first[:length]
        if {path for path in all_paths if path[:length] == prefix} == paths:
            return tree_lib.path_string(prefix)
    name = tree_lib.path_string(first)
    return f'{name} and {len(paths) - 1} more' if first in inner_paths else name


class _BranchProbe(ZeroWalk):
    """Goes through a program in which the leaves of all blocks are zero.

    A stream is unknown after each addition, so that no block is zero only because another one is.
    """

    def __init__(self, trace: Trace, branches: Iterable[Branch]):
        super().__init__(trace)
        self._zero_additions: set[Addition] = set()
        self._zeroed_paths: set[Path] = set()
        self._additions: dict[int, list[Addition]] = defaultdict(list)
        for branch in branches:
            self._zeroed_paths |= branch.paths
            self._additions[branch.addition.number].append(branch.addition)

    def find_zeros(self) -> set[Addition]:
        """Finds the additions whose branch is zero."""
        inputs = list(map(unknown, self.trace.program.jaxpr.invars))
        for i, path in enumerate(self.trace.paths):
            if path in self._zeroed_paths:
                inputs[i] = inputs[i]._replace(everywhere=0)
        program = self.trace.program
        self.visit_program(Program.of(program), inputs, Position.of_whole(program))
        return self._zero_additions

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()

    def visit_equation(self, equation: Any, operands: list[Fill], position: Position) -> list[Fill]:
        results = super().visit_equation(equation, operands, position)
        number, *inside = position.path
        if inside or number not in self._additions:
            return results
        for addition in self._additions[number]:
            if operands[addition.branch].everywhere == 0:
                self._zero_additions.add(addition)
        return [result._replace(everywhere=None) for result in results]


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
        if not (blocks[name].exact or allow_inexact):
            raise ValueError(
                f'leaving out {name!r} is not the same as zeroing it: {blocks[name].reason}; leave it in, or pass '
                'allow_inexact=True and train the smaller model'
            )
        chosen.append(blocks[name])
    return chosen


def drop(tree: PyTree, blocks: Iterable[Block]) -> PyTree:
    """Replaces the entries of a tree that belong to leaves of some blocks by `None`."""
    dropped = frozenset().union(*[block.paths | block.state_paths for block in blocks])
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    for number, path in enumerate(paths):
        if not dropped.isdisjoint([path[start:] for start in range(len(path))]):
            leaves[number] = None
    return jax.tree.unflatten(treedef, leaves)


def programs_without(model: Model, blocks: Sequence[Block]) -> list[ModelProgram]:
    """The programs of a model without some of its blocks."""
    programs = []
    for program in model.programs:
        examples = program.examples
        small = program._replace(
            apply_fn=ShallowApply(program, model.params, blocks),
            arguments=_drop_from_state(program, program.arguments, blocks),
            examples=examples and _drop_from_state(program, examples, blocks),
        )
        programs.append(small)
    return programs


def _drop_from_state(
    program: ModelProgram, arguments: tuple[Any, ...], blocks: Sequence[Block]
) -> tuple[Any, ...]:
    if not program.has_state:
        return arguments
    return drop(arguments[0], blocks), *arguments[1:]


def verify_without_blocks(
    model: Model, params: PyTree, blocks: Sequence[Block]
) -> list[Verification]:
    """Compares each program that was given arrays as arguments with itself without some blocks."""
    dropped = drop(params, blocks)
    leaves, treedef = jax.tree.flatten(params)
    kept = tree_lib.leaves_like(treedef, dropped)
    zeroed = treedef.unflatten(
        [
            jnp.zeros_like(leaf) if new is None else leaf
            for leaf, new in zip(leaves, kept, strict=True)
        ]
    )
    verifications = []
    with jax.default_matmul_precision('highest'):
        for program, small in zip(model.programs, programs_without(model, blocks), strict=True):
            if program.examples is None:
                continue
            arguments = [(tree, *program.examples) for tree in (params, zeroed)]
            arguments.append((dropped, *(small.examples or ())))
            verifications.append(small_model.verify(program.apply_fn, small.apply_fn, arguments))
    return verifications


class ShallowApply:
    """The apply function of a program without some residual blocks."""

    def __init__(self, program: ModelProgram, params: PyTree, blocks: Sequence[Block]):
        self.__name__ = program.name
        self.whole = program.apply_fn
        self._program = program
        self._params = params  # shapes, with the blocks
        self._blocks = blocks

    def __call__(self, params: PyTree, *arguments: Any) -> Any:
        """Runs the program with parameters and a state that have `None` for the leaves of the blocks."""
        state, inputs = self._program.split(arguments)
        param_leaves, param_shapes = _filled(self._params, params)
        state_leaves, state_shapes = _filled(self._program.state, state)
        shapes = (state_shapes, *inputs) if self._program.has_state else inputs
        program, results = jax.make_jaxpr(self.whole, return_shape=True)(param_shapes, *shapes)
        paths, _, _ = tree_lib.flatten_with_paths(param_shapes)
        state_paths, _, _ = tree_lib.flatten_with_paths(state_shapes)
        branches = find_branches(program.jaxpr, paths, state_paths)
        addition_of = {branch.paths: branch.addition for branch in branches}
        additions = []
        for block in self._blocks:
            if block.paths in addition_of:
                additions.append(addition_of[block.paths])
            elif _uses_some(program.jaxpr, paths, block.paths):
                raise ValueError(f'for inputs of these shapes {block.name} is no residual block')
        program = program.replace(jaxpr=without(program.jaxpr, additions))
        leaves = param_leaves + state_leaves + jax.tree.leaves(inputs)
        values = Run().visit_program(Program.of(program), leaves, Position.of_whole(program))
        return jax.tree.unflatten(jax.tree.structure(results), values)


def _filled(whole: PyTree, tree: PyTree) -> tuple[list[Any], Any]:
    """The leaves of a tree, with `None` for those that the whole tree has, and the shapes of the whole tree.

    A missing leaf gets the dtype that the others of its old dtype have now.
    """
    own, treedef = jax.tree.flatten(whole)
    values = list(tree_lib.leaves_like(treedef, tree))
    pairs = list(zip(own, values, strict=True))
    dtypes = {leaf.dtype: jnp.result_type(value) for leaf, value in pairs if value is not None}
    shapes = []
    for leaf, value in pairs:
        missing = jax.ShapeDtypeStruct(leaf.shape, dtypes.get(leaf.dtype, leaf.dtype))
        shapes.append(missing if value is None else shape_of_leaf(value))
    return values, treedef.unflatten(shapes)
