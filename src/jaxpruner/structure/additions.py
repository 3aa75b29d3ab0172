"""Finds additions of a branch to a stream in a program, and takes them out.

In `after = before + branch(before)` the branch is computed from the stream that it is added to. Without the branch, the
program reads `before` wherever it read `after`.

    find_branches   finds additions in which one operand is computed from the other, and the leaves of the branch
    without         makes the program that reads the stream before an addition instead of the sum
    run             runs the equations of such a program that its results still depend on
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jax.extend.core import Literal

from jaxpruner.structure.traces import has_type_of, live_in_whole
from jaxpruner.trace.interpreter import Position, Run
from jaxpruner.trace.program import Program
from jaxpruner.tree import Path

Paths = frozenset[Path]


class LeafPaths(Protocol):
    """The paths of a program's first inputs, as a `Trace` has them."""

    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def state_paths(self) -> Sequence[Path]: ...


class Addition(NamedTuple):
    """An equation that adds a branch to a stream.

    Attributes:
      number: of the equation in its program.
      stream: the number of the operand that is the stream; the other one is the branch.
    """

    number: int
    stream: int

    @property
    def branch(self) -> int:
        """The number of the operand that is the branch."""
        return 1 - self.stream


class Branch(NamedTuple):
    """An addition, and the leaves that the results do not depend on without it.

    Attributes:
      addition: the addition.
      paths: of leaves of the parameters.
      state_paths: of leaves of the state.
      reason: why the branch is not zero if its parameters are zero; empty if it is zero.
    """

    addition: Addition
    paths: Paths
    state_paths: Paths
    reason: str = ''


def find_branches(jaxpr: Any, leaves: LeafPaths) -> list[Branch]:
    """Finds the branches of a program that have leaves of their own; of several with the same leaves the outermost."""
    additions = _find_additions(jaxpr)
    ways = _ways_to_results(jaxpr, additions)
    all_paths = (*leaves.paths, *leaves.state_paths)
    branches: dict[Paths, Branch] = {}
    for number, addition in enumerate(additions):
        own_paths: set[Path] = set()
        for variable, path in zip(jaxpr.invars, all_paths, strict=False):
            additions_on_all_ways = ways.get(id(variable), 0)
            if additions_on_all_ways >> number & 1:
                own_paths.add(path)
        paths = own_paths.intersection(leaves.paths)
        state_paths = own_paths - paths
        if paths:
            key = frozenset(paths)
            branches[key] = Branch(addition, key, frozenset(state_paths))
    return list(branches.values())


def _find_additions(jaxpr: Any) -> list[Addition]:
    """Finds the additions whose branch is computed from the stream, or from summands of the stream."""
    sources = _VariableSets()  # the variables that a variable is computed from, and itself
    summands = _VariableSets()  # the variables that a variable is a sum of, and itself
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        sources.add(variable)
        summands.add(variable)
    additions = []
    for number, equation in enumerate(jaxpr.eqns):
        operands = [v for v in equation.invars if not isinstance(v, Literal)]
        terms: list[Any] = []
        if _adds_arrays(equation):
            terms = operands
            for addition in (Addition(number, 0), Addition(number, 1)):
                stream, branch = operands[addition.stream], operands[addition.branch]
                computed = sources.of(branch) & ~summands.of(branch)
                if summands.of(stream) & computed:
                    additions.append(addition)
        for variable in equation.outvars:
            sources.add(variable, operands)
            summands.add(variable, terms)
    return additions


class _VariableSets:
    """A set of variables for each variable of a program.

    A set is an integer. Its bit i stands for the variable that was added as number i. A set may hold nearly all
    variables of a program, and Python's own sets would join them element by element.
    """

    def __init__(self):
        self._sets: dict[int, int] = {}  # by `id` of the variable

    def add(self, variable: Any, others: Iterable[Any] = ()) -> None:
        """Gives a variable the set of itself and of the sets of others, which were added before."""
        variables = 1 << len(self._sets)  # itself
        for other in others:
            variables |= self.of(other)
        self._sets[id(variable)] = variables

    def of(self, variable: Any) -> int:
        """The set of a variable. `&` and `~` are intersection and complement."""
        return self._sets[id(variable)]


def _adds_arrays(equation: Any) -> bool:
    """Whether an equation adds two arrays of the same shape and dtype."""
    if equation.primitive.name not in ('add', 'add_any'):
        return False
    result = equation.outvars[0].aval
    for variable in equation.invars:
        is_literal = isinstance(variable, Literal)
        if is_literal or not has_type_of(variable.aval, result):
            return False
    return True


def _ways_to_results(jaxpr: Any, additions: Sequence[Addition]) -> Mapping[int, int]:
    """For each variable by `id`, the branches that lie on all of its ways to the results.

    They are an integer whose bit i stands for addition i. A variable without a way to the results has no entry.
    """
    bits: dict[tuple[int, int], int] = {}
    for i, addition in enumerate(additions):
        bits[addition.number, addition.branch] = 1 << i
    all_additions = ~0
    ways: dict[int, int] = dict.fromkeys(map(id, jaxpr.outvars), 0)
    live = live_in_whole(jaxpr)
    for number in reversed(range(len(jaxpr.eqns))):
        if not any(live.results[number]):
            continue
        equation = jaxpr.eqns[number]
        common = 0 if equation.effects else all_additions
        for variable in equation.outvars:
            common &= ways.get(id(variable), all_additions)
        for i, variable in enumerate(equation.invars):
            own_addition = bits.get((number, i), 0)
            other_ways = ways.get(id(variable), all_additions)
            ways[id(variable)] = other_ways & (common | own_addition)
    return ways


def without(program: Any, additions: Iterable[Addition]) -> Any:
    """The program, a `ClosedJaxpr`, that reads the streams before these additions instead of the sums."""
    jaxpr = program.jaxpr
    streams: dict[int, Any] = {}
    for addition in sorted(additions):  # the first one first: later streams may be its sum
        equation = jaxpr.eqns[addition.number]
        (result,) = equation.outvars
        stream = equation.invars[addition.stream]
        streams[id(result)] = streams.get(id(stream), stream)

    def replaced(variables: Iterable[Any]) -> list[Any]:
        return [streams.get(id(variable), variable) for variable in variables]

    equations = []
    for equation in jaxpr.eqns:
        operands = replaced(equation.invars)
        equations.append(equation.replace(invars=operands))
    results = replaced(jaxpr.outvars)
    jaxpr = jaxpr.replace(eqns=equations, outvars=results)
    return program.replace(jaxpr=jaxpr)


def run(program: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs the equations of a program that its results depend on. Other inputs may be `None`."""
    return Run().visit_program(Program.of(program), inputs, Position.of_whole(program))
