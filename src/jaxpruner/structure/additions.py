"""Finds additions of a branch to a stream in a program, and takes them out.

In `after = before + branch(before)` the branch is computed from the stream that it is added to. Without the branch, the
program reads `before` wherever it read `after`.

    find_branches   finds additions in which one operand is computed from the other, and the leaves of the branch
    without         makes the program that reads the stream before an addition instead of the sum
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jaxpruner.structure.traces import has_type_of, live_in_whole
from jaxpruner.tree import Path

Paths = frozenset[Path]


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
    """

    addition: Addition
    paths: Paths
    state_paths: Paths


def find_branches(jaxpr: Any, paths: Sequence[Path], state_paths: Sequence[Path]) -> list[Branch]:
    """Finds the branches of a program that have leaves of their own; of several with the same leaves the outermost.

    Args:
      jaxpr: the program. Its first inputs are the leaves of the parameters, then those of the state.
      paths: of the parameters.
      state_paths: of the state.
    """
    makers = {id(result): equation for equation in jaxpr.eqns for result in equation.outvars}
    numbers = [number for number, each in enumerate(jaxpr.eqns) if _adds_arrays(each)]
    additions = [Addition(number, stream) for number in numbers for stream in (0, 1)]
    ways = _ways_to_results(jaxpr, additions)
    branches: dict[Paths, Branch] = {}
    for i, addition in enumerate(additions):
        own: set[Path] = set()
        for variable, path in zip(jaxpr.invars, (*paths, *state_paths), strict=False):
            if ways.get(id(variable), 0) >> i & 1:
                own.add(path)
        key = frozenset(own.intersection(paths))
        if not key:
            continue
        operands = jaxpr.eqns[addition.number].invars
        summands = _sources(operands[addition.branch], makers, of_sums=True)
        computed = _sources(operands[addition.branch], makers) - summands
        if computed & _sources(operands[addition.stream], makers, of_sums=True):
            branches[key] = Branch(addition, key, frozenset(own - key))
    return list(branches.values())


def _ways_to_results(jaxpr: Any, additions: Sequence[Addition]) -> Mapping[int, int]:
    """For each variable by `id`, the branches that lie on all of its ways to the results.

    They are an integer whose bit i stands for addition i. A variable without a way to the results has no entry.
    """
    bits = {(each.number, each.branch): 1 << i for i, each in enumerate(additions)}
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
            other_ways = ways.get(id(variable), all_additions)
            ways[id(variable)] = other_ways & (common | bits.get((number, i), 0))
    return ways


def _sources(variable: Any, makers: Mapping[int, Any], of_sums: bool = False) -> set[int]:
    """A variable and what it is computed from, or is a sum of, by `id`."""
    found: set[int] = set()
    pending = [variable]
    while pending:
        variable = pending.pop()
        if id(variable) in found or isinstance(variable, Literal):
            continue
        found.add(id(variable))
        maker = makers.get(id(variable))
        if maker is not None and (not of_sums or _adds_arrays(maker)):
            pending += maker.invars
    return found


def _adds_arrays(equation: Any) -> bool:
    """Whether an equation adds two arrays of the same shape and dtype."""
    if equation.primitive.name not in ('add', 'add_any'):
        return False
    result = equation.outvars[0].aval
    return not any(
        isinstance(variable, Literal) or not has_type_of(variable.aval, result)
        for variable in equation.invars
    )


def without(jaxpr: Any, additions: Iterable[Addition]) -> Any:
    """The program that reads the streams before these additions instead of the sums."""
    streams: dict[int, Any] = {}
    for addition in sorted(additions):  # the first one first: later streams may be its sum
        equation = jaxpr.eqns[addition.number]
        (result,) = equation.outvars
        stream = equation.invars[addition.stream]
        streams[id(result)] = streams.get(id(stream), stream)

    def replaced(variables: Iterable[Any]) -> list[Any]:
        return [streams.get(id(variable), variable) for variable in variables]

    equations = [equation.replace(invars=replaced(equation.invars)) for equation in jaxpr.eqns]
    return jaxpr.replace(eqns=equations, outvars=replaced(jaxpr.outvars))
