"""Residual blocks of unrolled models, which can be left out as a whole.

A block computes a branch from a stream and adds it to the stream: `after = before + branch(before)`. Without the block,
the program reads `before` wherever it read `after`. Then the results do not depend on some parameters any more, which
are the leaves of the block. In

    hidden = relu(x @ up)
    x = x + hidden @ down
    y = x @ head

these are `up` and `down`. Leaving the block out is the same as zeroing its leaves if that makes the branch zero.
`additions` finds the branches of a program, and `_give_reasons` finds which of them become zero.

Layers of a scan are the channels of a group instead, see `Group.is_depth`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis, sizes_of
from jaxpruner.structure.analysis.fills import Fill
from jaxpruner.structure.analysis.live_evaluator import live_in_whole
from jaxpruner.structure.analysis.records import Trace, TracePosition
from jaxpruner.structure.analysis.zeros import ZeroWalk, unknown
from jaxpruner.structure.cutting.additions import (
    Addition,
    Branch,
    LeafPaths,
    Paths,
    find_branches,
)
from jaxpruner.tree import Path


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


_REASON = 'the branch is not zero once its parameters are'


def find_blocks(traces: Sequence[Trace]) -> dict[str, Block]:
    """Finds the residual blocks of a model by name, in the order of the first program.

    Every program that uses a leaf of a block has to have the whole block.
    """
    branches_of: dict[Paths, list[Branch]] = {}
    for trace in traces:
        branches = find_branches(trace.program.jaxpr, trace)
        for branch in _give_reasons(trace, branches):
            branches_of.setdefault(branch.paths, []).append(branch)
    blocks = {}
    for paths, branches in branches_of.items():
        users = 0
        for trace in traces:
            users += _uses_some(trace.program.jaxpr, trace.paths, paths)
        if len(branches) == users:
            inner_paths: set[Path] = set()
            for other in branches_of:
                if other < paths:
                    inner_paths |= other
            block = _make_block(traces, branches, inner_paths)
            blocks[block.name] = block
    return blocks


def find_additions(jaxpr: Any, leaves: LeafPaths, blocks: Iterable[Block]) -> list[Addition]:
    """Finds the additions of some blocks in a program.

    Raises:
      ValueError: the program uses a block, but does not add it to a stream.
    """
    additions_of = {}
    for branch in find_branches(jaxpr, leaves):
        additions_of[branch.paths] = branch.addition
    additions = []
    for block in blocks:
        if block.paths in additions_of:
            additions.append(additions_of[block.paths])
        elif _uses_some(jaxpr, leaves.paths, block.paths):
            raise ValueError(f'for inputs of these shapes {block.name} is no residual block')
    return additions


def _uses_some(jaxpr: Any, paths: Sequence[Path], some: Paths) -> bool:
    """Whether the results of a program depend on one of some leaves."""
    live = live_in_whole(jaxpr)
    leaves_used = live.inputs[: len(paths)]
    used_paths = itertools.compress(paths, leaves_used)
    return not some.isdisjoint(used_paths)


def _make_block(
    traces: Sequence[Trace], branches: Sequence[Branch], inner_paths: set[Path]
) -> Block:
    """Makes a block of its branches, one for each program that uses it."""
    first = traces[0]
    paths = branches[0].paths
    parameters = 0
    for path, axes in first.named_leaves:
        if path in paths:
            parameters += math.prod(sizes_of(axes))
    reason = ''
    state_paths: set[Path] = set()
    for branch in branches:
        reason = reason or branch.reason
        state_paths |= branch.state_paths
    name = _name_block(traces, paths, inner_paths)
    return Block(name, paths, frozenset(state_paths), parameters, not reason, reason)


def _name_block(traces: Sequence[Trace], paths: Paths, inner_paths: set[Path]) -> str:
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
        paths_below = {path for path in all_paths if path[:length] == prefix}
        if paths_below == paths:
            return tree_lib.path_string(prefix)
    name = tree_lib.path_string(first)
    if first in inner_paths:
        return f'{name} and {len(paths) - 1} more'
    return name


def _give_reasons(trace: Trace, branches: Sequence[Branch]) -> list[Branch]:
    """Adds to each branch the reason why it is not zero if its leaves are, if there is one."""
    equations = trace.program.jaxpr.eqns
    position = TracePosition.of_whole(trace.program)
    zero_additions = _BranchProbe(trace, branches).find_zeros()
    explained = []
    for branch in branches:
        if branch.addition not in zero_additions:
            number = branch.addition.number
            at = position.at(number)
            pin = at.pin(equations[number], _REASON)
            branch = branch._replace(reason=str(pin))
        explained.append(branch)
    return explained


class _BranchProbe(ZeroWalk):
    """Goes through a program in which the leaves of all blocks are zero.

    A stream is unknown after each addition, so that no block is zero only because another one is.
    """

    def __init__(self, trace: Trace, branches: Iterable[Branch]):
        super().__init__(trace)
        self._zero_additions: set[Addition] = set()
        self._zeroed_paths: set[Path] = set()
        self._additions: dict[int, list[Addition]] = {}
        for branch in branches:
            self._zeroed_paths |= branch.paths
            number = branch.addition.number
            self._additions.setdefault(number, []).append(branch.addition)

    def find_zeros(self) -> set[Addition]:
        """Finds the additions whose branch is zero."""
        program = self.trace.program
        inputs = list(map(unknown, program.jaxpr.invars))
        for i, path in enumerate(self.trace.paths):
            if path in self._zeroed_paths:
                inputs[i] = inputs[i]._replace(everywhere=0)
        self.visit_whole(program, inputs)
        return self._zero_additions

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()

    def visit_equation(
        self, equation: Any, operands: list[Fill], position: TracePosition
    ) -> list[Fill]:
        results = super().visit_equation(equation, operands, position)
        is_inside = len(position.path) > 1
        number = position.path[0]
        if is_inside or number not in self._additions:
            return results
        for addition in self._additions[number]:
            if operands[addition.branch].everywhere == 0:
                self._zero_additions.add(addition)
        return [result._replace(everywhere=None) for result in results]
