"""Residual blocks of unrolled models, which can be left out as a whole.

A block computes a branch from a stream and adds it to the stream: `after = before + branch(before)`. Without the block,
the program reads `before` wherever it read `after`. Then the results do not depend on some parameters any more, which
are the leaves of the block. In

    hidden = relu(x @ up)
    x = x + hidden @ down
    y = x @ head

these are `up` and `down`. Leaving the block out is the same as zeroing its leaves if that makes the branch zero.

    find_branches  finds additions in which one operand is computed from the other, and the leaves of the branch
    find_blocks    names the branches of all programs, and says which become zero
    ShallowApply   runs a program without some blocks: reads the stream before an addition instead of the sum

Layers of a scan are the channels of a group instead, see `Group.is_depth`.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import sizes_of
from jaxpruner.structure.programs import ModelProgram, Trace, abstract
from jaxpruner.structure.zeros import ZERO, Fill, ZeroWalk
from jaxpruner.trace.program import Position, Run, live
from jaxpruner.tree import Path, PyTree

Paths = frozenset[Path]


class Block(NamedTuple):
    """A residual block that can be left out of a model.

    Attributes:
      name: the part of the tree with its leaves and no others. If there is none, its leaf that the first program uses
        first; leaves of blocks inside it come last.
      paths: of its leaves.
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
    parameters: int
    exact: bool
    reason: str


Blocks = Mapping[str, Block]  # by name


class Branch(NamedTuple):
    """An equation that adds a branch to a stream.

    Attributes:
      number: of the equation in its program.
      stream: the number of the operand that is the stream; the other one is the branch.
    """

    number: int
    stream: int


def find_branches(jaxpr: Any, paths: Sequence[Path]) -> dict[Paths, Branch]:
    """Finds the branches of a program by the leaves of their own; of several with the same leaves the outermost.

    Args:
      jaxpr: the program. Its first inputs are the leaves of the parameters.
      paths: of the parameters.
    """
    makers = {id(result): equation for equation in jaxpr.eqns for result in equation.outvars}
    used = _used(jaxpr, paths)
    branches: dict[Paths, Branch] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for i in (0, 1) if _adds_arrays(equation) else ():
            stream, branch = equation.invars[i], equation.invars[1 - i]
            computed = _sources(branch, makers) - _sources(branch, makers, of_sums=True)
            if not computed.isdisjoint(_sources(stream, makers, of_sums=True)):
                own = used - _used(_without(jaxpr, [Branch(number, i)]), paths)
                if own:  # they replace those of a branch inside
                    branches[own] = Branch(number, i)
    return branches


def _adds_arrays(equation: Any) -> bool:
    """Whether an equation adds two arrays of the same shape."""
    return equation.primitive.name == 'add' and not any(
        isinstance(operand, Literal) or operand.aval.shape != equation.outvars[0].aval.shape
        for operand in equation.invars
    )


def _sources(variable: Any, makers: Mapping[int, Any], of_sums: bool = False) -> set[int]:
    """A variable and what it is computed from, or is a sum of, by `id`."""
    found: set[int] = set()
    pending = [variable]
    for each in pending:  # while it grows
        if id(each) not in found and not isinstance(each, Literal):
            found.add(id(each))
            maker = makers.get(id(each))
            if maker is not None and (not of_sums or _adds_arrays(maker)):
                pending += maker.invars
    return found


def _used(jaxpr: Any, paths: Iterable[Path]) -> Paths:
    """The parameters that the results of a program depend on."""
    return frozenset(itertools.compress(paths, live(jaxpr).inputs))


def find_blocks(traces: Sequence[Trace]) -> dict[str, Block]:
    """Finds the residual blocks that all programs of a model have, by name, in the order of the first program."""
    reasons_of: dict[Paths, list[str]] = defaultdict(list)  # why it is not exact, in each program
    for trace in traces:
        jaxpr = trace.program.jaxpr
        branches = find_branches(jaxpr, list(trace.leaves))
        zeroed = frozenset().union(*branches)
        walk = ZeroWalk(trace)
        walk.run([Fill(ZERO) if path in zeroed else Fill() for path in trace.leaves])
        for paths, (number, stream) in branches.items():
            position = Position().at(number)
            is_zero = walk.operands[position.path][1 - stream].everywhere == ZERO
            words = 'the branch is not zero once its parameters are'
            reason = '' if is_zero else position.reason(jaxpr.eqns[number], words)
            reasons_of[paths].append(reason)
    sizes = {path: math.prod(sizes_of(axes)) for path, axes in traces[0].leaves.items()}
    blocks = {}
    for paths, reasons in reasons_of.items():
        if len(reasons) < len(traces):
            continue
        inner = frozenset().union(*[other for other in reasons_of if other < paths])
        first = min(paths, key=lambda path: (path in inner, traces[0].first_uses[path]))
        parents = [first[:length] for length in range(1, len(first))]
        whole = [each for each in parents if {p for p in sizes if p[: len(each)] == each} == paths]
        name = tree_lib.path_string((*whole, first)[0])
        parameters = sum(sizes[path] for path in paths)
        reason = next(filter(None, reasons), '')
        blocks[name] = Block(name, paths, parameters, not reason, reason)
    return blocks


def chosen_blocks(blocks: Blocks, names: Iterable[str], allow_inexact: bool) -> list[Block]:
    """Finds the blocks with these names.

    Raises:
      KeyError: there is no such block.
      ValueError: a block is not exact.
    """
    chosen = []
    for name in names:
        if name not in blocks:
            raise KeyError(f'there is no residual block {name!r}; {tree_lib.nearest(name, blocks)}')
        if not (blocks[name].exact or allow_inexact):
            raise ValueError(
                f'leaving out {name!r} is not the same as zeroing it: {blocks[name].reason}; leave it in, or pass '
                'allow_inexact=True and train the smaller model'
            )
        chosen.append(blocks[name])
    return chosen


def drop(tree: PyTree, blocks: Iterable[Block]) -> PyTree:
    """Replaces the entries of a tree that belong to leaves of some blocks by `None`."""
    dropped = frozenset().union(*[block.paths for block in blocks])
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    for number, path in enumerate(paths):
        if not dropped.isdisjoint([path[start:] for start in range(len(path))]):
            leaves[number] = None
    return jax.tree.unflatten(treedef, leaves)


class ShallowApply:
    """The apply function of a program without some residual blocks."""

    def __init__(self, program: ModelProgram, params: PyTree, blocks: Sequence[Block]):
        self.__name__ = program.name
        self.whole = program.apply_fn
        self._params = params  # shapes, with the blocks
        self._blocks = blocks

    def __call__(self, params: PyTree, *arguments: Any) -> Any:
        """Runs the program with parameters that have `None` for the leaves of the blocks."""
        paths, own, treedef = tree_lib.flatten_with_paths(self._params)
        leaves = tree_lib.leaves_like(treedef, params)
        pairs = zip(own, leaves, strict=True)
        shapes = [whole if leaf is None else abstract(leaf) for whole, leaf in pairs]
        make_jaxpr = jax.make_jaxpr(self.whole, return_shape=True)
        program, results = make_jaxpr(treedef.unflatten(shapes), *arguments)
        found = find_branches(program.jaxpr, paths)
        for block in self._blocks:
            if block.paths not in found:
                raise ValueError(
                    f'for inputs of these shapes, or parameters of other dtypes, {block.name} is no residual block'
                )
        branches = [found[block.paths] for block in self._blocks]
        program = program.replace(jaxpr=_without(program.jaxpr, branches))
        values = [*leaves, *jax.tree.leaves(arguments)]
        values = _Sums().visit_all(program, values)
        return jax.tree.unflatten(jax.tree.structure(results), values)


def _without(jaxpr: Any, branches: Iterable[Branch]) -> Any:
    """The program in which these additions have only the stream as an operand; `_Sums` runs it."""
    equations = list(jaxpr.eqns)
    for number, stream in branches:
        equation = equations[number]
        equations[number] = equation.replace(invars=[equation.invars[stream]])
    return jaxpr.replace(eqns=equations)


class _Sums(Run):
    """Runs a program in which additions may have one operand."""

    def visit_equation(self, equation: Any, operands: list[Any], position: Position) -> list[Any]:
        is_one = equation.primitive.name == 'add' and len(operands) == 1
        return operands if is_one else super().visit_equation(equation, operands, position)
