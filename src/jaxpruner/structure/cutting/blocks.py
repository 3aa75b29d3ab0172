"""Residual blocks of unrolled models, which can be left out as a whole.

A block adds to a stream what it computes from it, the branch: `after = before + branch(before)`. To leave it out is to
read `before` wherever the program reads `after`. Then some parameters have no part in the results any more: the leaves
of the block. In

    hidden = relu(x @ up)
    x = x + hidden @ down
    y = x @ head

these are `up` and `down`. Leaving the block out is the same as setting its leaves to zero if the branch is zero then.

Each step is one pass through the equations of a program:

    _additions      the additions of which one operand is computed from the other
    _ways           for each value the additions through which all of its ways to the results lead
    _with_reasons   which branches are zero
    without         the program that reads the stream before an addition instead of the sum

Layers of a scan are the channels of a group instead, see `Group.is_depth`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax.extend.core
from jax.extend.core import Literal

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis
from jaxpruner.structure.analysis.fills import Fill
from jaxpruner.structure.analysis.records import Place, Trace
from jaxpruner.structure.analysis.zeros import ZeroFlow
from jaxpruner.uses import liveness
from jaxpruner.uses.bodies import Program, bind


@dataclasses.dataclass(frozen=True)
class Block:
    """A residual block that can be left out of a model.

    Attributes:
      name: the part of the tree that holds its leaves and no others; otherwise its leaf that is used first, of those
        that are in no block inside.
      paths: of its leaves.
      state_paths: of the leaves of the state that belong to it.
      parameters: how many it has.
      exact: whether leaving it out is the same as setting its leaves to zero.
      reason: why it is not; empty where it is.

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
    paths: frozenset[tree_lib.Path]
    state_paths: frozenset[tree_lib.Path]
    parameters: int
    exact: bool
    reason: str


_REASON = 'the branch is not zero once its parameters are'


class LeafPaths(Protocol):
    """The paths of the first inputs of a program, such as a `Trace` has."""

    @property
    def paths(self) -> Sequence[tree_lib.Path]: ...
    @property
    def state_paths(self) -> Sequence[tree_lib.Path]: ...


class Addition(NamedTuple):
    """An equation that adds a branch to a stream.

    Attributes:
      number: of the equation in its program.
      stream: the number of the operand that is the stream; the other one is the branch.
    """

    number: int
    stream: int


class _Branch(NamedTuple):
    """An addition, and the leaves that have no part in the results without it.

    Attributes:
      addition: the addition.
      paths: of leaves of the parameters.
      state_paths: of leaves of the state.
      reason: why the branch is not zero once its parameters are; empty where it is.
    """

    addition: Addition
    paths: frozenset[tree_lib.Path]
    state_paths: frozenset[tree_lib.Path]
    reason: str = ''


def find_blocks(traces: Sequence[Trace]) -> dict[str, Block]:
    """The residual blocks of a model by name, in the order of the program.

    A program that uses a leaf of a block has to have the whole block.
    """
    found: dict[frozenset[tree_lib.Path], list[_Branch]] = {}
    for trace in traces:
        for branch in _with_reasons(trace, _branches(trace.program.jaxpr, trace)):
            found.setdefault(branch.paths, []).append(branch)
    blocks = {}
    for paths, parts in found.items():
        users = [trace for trace in traces if _uses_some(trace.program.jaxpr, trace.paths, paths)]
        if len(parts) == len(users):
            inside = frozenset().union(*[other for other in found if other < paths])
            block = _block(traces, parts, inside)
            blocks[block.name] = block
    return blocks


def find_additions(jaxpr: Any, leaves: LeafPaths, blocks: Iterable[Block]) -> list[Addition]:
    """The additions of some blocks in a program.

    Raises:
      ValueError: the program uses a block and does not add it to a stream.
    """
    by_paths = {branch.paths: branch.addition for branch in _branches(jaxpr, leaves)}
    additions = []
    for block in blocks:
        if block.paths in by_paths:
            additions.append(by_paths[block.paths])
        elif _uses_some(jaxpr, leaves.paths, block.paths):
            raise ValueError(f'for inputs of these shapes {block.name} is no residual block')
    return additions


def _uses_some(jaxpr: Any, paths: Sequence[tree_lib.Path], some: frozenset[tree_lib.Path]) -> bool:
    """Whether one of these leaves has a part in the results of a program."""
    live = liveness.live(jaxpr, (True,) * len(jaxpr.outvars))
    return any(used and path in some for path, used in zip(paths, live.inputs, strict=False))


def _block(
    traces: Sequence[Trace], parts: Sequence[_Branch], inside: frozenset[tree_lib.Path]
) -> Block:
    """A block of some programs, with the leaves of blocks inside it."""
    trace = traces[0]
    paths = parts[0].paths
    parameters = 0
    for path, variable in zip(trace.paths, trace.program.jaxpr.invars, strict=False):
        if path in paths:
            parameters += variable.aval.size
    reasons = [part.reason for part in parts if part.reason]
    state_paths = frozenset().union(*[part.state_paths for part in parts])
    name = _name(traces, paths, inside)
    return Block(name, paths, state_paths, parameters, not reasons, ''.join(reasons[:1]))


def _name(
    traces: Sequence[Trace], paths: frozenset[tree_lib.Path], inside: frozenset[tree_lib.Path]
) -> str:
    """The part of the tree that holds the leaves of a block; otherwise its own leaf that is used first."""
    all_paths = traces[0].paths
    first_uses = {}
    for number, path in enumerate(all_paths):
        if path in paths:
            # Its own leaves go before those of blocks inside, which have names of their own.
            uses = [trace.first_uses[number] for trace in traces]
            first_uses[path] = path in inside, *uses
    first = min(first_uses, key=lambda path: first_uses[path])
    for length in range(1, len(first) + 1):
        under = {path for path in all_paths if path[:length] == first[:length]}
        if under == paths:
            return tree_lib.path_string(first[:length])
    name = tree_lib.path_string(first)
    return name if first not in inside else f'{name} and {len(paths) - 1} more'


def _branches(jaxpr: Any, leaves: LeafPaths) -> list[_Branch]:
    """The branches of a program that have leaves of their own, the outermost of several with the same leaves."""
    additions = _additions(jaxpr)
    ways = _ways(jaxpr, additions)
    branches: dict[frozenset[tree_lib.Path], _Branch] = {}
    for number, addition in enumerate(additions):
        own = []
        for variable, path in zip(jaxpr.invars, (*leaves.paths, *leaves.state_paths), strict=False):
            if ways.get(id(variable), 0) >> number & 1:
                own.append(path)
        paths = frozenset(own).intersection(leaves.paths)
        if paths:
            branches[paths] = _Branch(addition, paths, frozenset(own) - paths)
    return list(branches.values())


def _with_reasons(trace: Trace, branches: Sequence[_Branch]) -> list[_Branch]:
    """The branches with the reasons why some are not zero once their leaves are."""
    jaxpr = trace.program.jaxpr
    zeroed: set[tree_lib.Path] = set()
    for branch in branches:
        zeroed |= branch.paths
    inputs = []
    paths = dict(enumerate(trace.paths))
    for i, variable in enumerate(jaxpr.invars):
        everywhere = 0 if paths.get(i) in zeroed else None
        inputs.append(Fill(everywhere, ({},) * len(variable.aval.shape)))
    probe = _BranchProbe(trace, [branch.addition for branch in branches])
    place = Place(needed=(True,) * len(jaxpr.outvars))
    probe.visit_program(Program.of(trace.program), inputs, place)
    explained = []
    for branch in branches:
        number = branch.addition.number
        pin = place.at(number).pin(jaxpr.eqns[number], _REASON)
        is_zero = branch.addition in probe.zero
        explained.append(branch if is_zero else branch._replace(reason=str(pin)))
    return explained


def _additions(jaxpr: Any) -> list[Addition]:
    """The additions of which the branch is computed from the stream, or from what was added up to the stream."""
    # Sets of variables are whole numbers, of which each bit is a variable.
    sources: dict[int, int] = {}  # what a variable is computed from, and itself
    summands: dict[int, int] = {}  # the variable and what it is a sum of
    count = 0
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        sources[id(variable)] = summands[id(variable)] = 1 << count
        count += 1
    additions = []
    for number, equation in enumerate(jaxpr.eqns):
        operands = [v for v in equation.invars if not isinstance(v, Literal)]
        of_operands = 0
        for variable in operands:
            of_operands |= sources[id(variable)]
        of_sum = 0
        if _adds_arrays(equation):
            for variable in operands:
                of_sum |= summands[id(variable)]
            for stream, branch in ((0, 1), (1, 0)):
                before, added = id(operands[stream]), id(operands[branch])
                if summands[before] & sources[added] & ~summands[added]:
                    additions.append(Addition(number, stream))
        for variable in equation.outvars:
            sources[id(variable)] = of_operands | 1 << count
            summands[id(variable)] = of_sum | 1 << count
            count += 1
    return additions


def _adds_arrays(equation: Any) -> bool:
    """Whether an equation adds two arrays of the same shape and dtype, of which nothing is repeated."""
    if equation.primitive.name not in ('add', 'add_any'):
        return False
    result = equation.outvars[0].aval
    for variable in equation.invars:
        aval = variable.aval
        is_alike = (aval.shape, aval.dtype) == (result.shape, result.dtype)
        if isinstance(variable, Literal) or not is_alike:
            return False
    return True


def _ways(jaxpr: Any, additions: Sequence[Addition]) -> Mapping[int, int]:
    """For each variable by `id` the branches through which all of its ways to the results lead.

    These are whole numbers, of which bit i is that of addition i. A variable without a way is not there.
    """
    bits = {}
    for i, addition in enumerate(additions):
        bits[addition.number, 1 - addition.stream] = 1 << i
    ways: dict[int, int] = {id(variable): 0 for variable in jaxpr.outvars}
    live = liveness.live(jaxpr, (True,) * len(jaxpr.outvars))
    for number in reversed(range(len(jaxpr.eqns))):
        if not any(live.results[number]):
            continue
        equation = jaxpr.eqns[number]
        common = 0 if equation.effects else ~0
        for variable in equation.outvars:
            common &= ways.get(id(variable), ~0)
        for i, variable in enumerate(equation.invars):
            own = common | bits.get((number, i), 0)
            ways[id(variable)] = ways.get(id(variable), ~0) & own
    return ways


class _BranchProbe(ZeroFlow):
    """Runs a program in which the leaves of all blocks are zero.

    Nothing is known of a stream after an addition, so that no block is zero because another one is.
    """

    def __init__(self, trace: Trace, additions: Sequence[Addition]):
        super().__init__(trace)
        self.zero: set[Addition] = set()
        self._additions: dict[int, list[Addition]] = {}
        for addition in additions:
            self._additions.setdefault(addition.number, []).append(addition)

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()

    def visit_equation(self, equation: Any, operands: list[Fill], position: Place) -> list[Fill]:
        results = super().visit_equation(equation, operands, position)
        is_inside = len(position.path) > 1
        additions = [] if is_inside else self._additions.get(position.path[0], [])
        for addition in additions:
            if operands[1 - addition.stream].everywhere == 0:
                self.zero.add(addition)
        return [result._replace(everywhere=None) for result in results] if additions else results


def without(program: Any, additions: Iterable[Addition]) -> Any:
    """The program, a `ClosedJaxpr`, that reads the streams before some additions instead of the sums."""
    jaxpr = program.jaxpr
    streams: dict[int, Any] = {}
    for addition in sorted(additions):  # a stream that is a sum itself has been replaced before
        equation = jaxpr.eqns[addition.number]
        stream = equation.invars[addition.stream]
        streams[id(equation.outvars[0])] = streams.get(id(stream), stream)

    def replaced(variables: Iterable[Any]) -> list[Any]:
        return [streams.get(id(variable), variable) for variable in variables]

    equations = [equation.replace(invars=replaced(equation.invars)) for equation in jaxpr.eqns]
    jaxpr = jaxpr.replace(eqns=equations, outvars=replaced(jaxpr.outvars))
    return jax.extend.core.ClosedJaxpr(jaxpr, program.consts)


def run(program: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs the equations of a program that have a part in its results; inputs without one may be `None`."""
    jaxpr = program.jaxpr
    values: dict[int, Any] = {}
    variables = (*jaxpr.constvars, *jaxpr.invars)
    for variable, value in zip(variables, (*program.consts, *inputs), strict=True):
        values[id(variable)] = value

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[id(variable)]

    live = liveness.live(jaxpr, (True,) * len(jaxpr.outvars))
    for equation, needed in zip(jaxpr.eqns, live.results, strict=True):
        if any(needed):
            results = bind(equation, list(map(read, equation.invars)))
            for variable, value in zip(equation.outvars, results, strict=True):
                values[id(variable)] = value
    return list(map(read, jaxpr.outvars))
