"""Which equations of a program have a part in its results: what is traced and thrown away is no use of a parameter."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.uses.bodies import Cond, Position, Program, Scan, ShardMap, Visitor, While

# A callback that only shows something changes no result.
_SHOWS = frozenset({'debug_callback', 'debug_print'})

# For each of some values, whether it is needed.
Needed = tuple[bool, ...]
Flags = list[bool]


class Live(NamedTuple):
    """What a program needs for some of its results.

    Attributes:
      inputs: which of its inputs have a part in them.
      results: for each equation, which of its results do; all False where it can be left out.
    """

    inputs: Needed
    results: tuple[Needed, ...]


@functools.lru_cache(4096)
def live(jaxpr: Any, needed: Needed) -> Live:
    """What a program needs for the results that are needed."""
    needed_variables = _chosen(jaxpr.outvars, needed)
    results = []
    for equation in reversed(jaxpr.eqns):
        acts = bool(equation.effects) and equation.primitive.name not in _SHOWS
        needed_here = [acts or id(result) in needed_variables for result in equation.outvars]
        results.append(tuple(needed_here))
        if acts or any(needed_here):
            operands = _BACKWARDS.visit_equation(equation, needed_here, Position())
            needed_variables |= _chosen(equation.invars, operands)
    inputs = tuple(id(variable) in needed_variables for variable in jaxpr.invars)
    return Live(inputs, tuple(reversed(results)))


def _chosen(variables: Sequence[Any], needed: Sequence[bool]) -> set[int]:
    """The variables that are needed, by `id`: literals are not hashable in some versions."""
    chosen = set()
    for variable, is_needed in zip(variables, needed, strict=True):
        if is_needed:
            chosen.add(id(variable))
    return chosen


class _Backwards(Visitor[bool, Position]):
    """Tells which operands of an equation are needed for those of its results that are needed.

    Other visitors go from operands to results. This one goes backwards: each method gets flags of the results,
    `results`, and returns flags of the operands. Its parameters are named for that, unlike those of the base class,
    which passes them by position alone.
    """

    def visit_program(
        self, program: Program, results: Sequence[bool], position: Position
    ) -> list[bool]:
        return list(live(program.jaxpr, tuple(results)).inputs)

    def visit_plain(self, equation: Any, results: Flags, position: Position) -> Flags:
        return [True] * len(equation.invars)

    def visit_shard_map(self, shard_map: ShardMap, results: Flags, position: Position) -> Flags:
        return self.visit_program(shard_map.program, results, position)

    def visit_scan(self, scan: Scan, results: Flags, position: Position) -> Flags:
        carried, _ = scan.split_results(results)
        if not scan.length:  # what is carried goes through, and nothing else does
            needed = [False] * len(scan.equation.invars)
            needed[scan.constants : scan.constants + scan.carried] = carried
            return needed
        body = live(scan.body.jaxpr, needed_of_scan_body(scan, tuple(results)))
        constants, carried_in, sliced = scan.split(body.inputs)
        # What is carried out without having gone through the body is the operand itself.
        return constants + _either(carried, carried_in) + sliced

    def visit_while(self, loop: While, results: Flags, position: Position) -> Flags:
        carried = needed_of_while_body(loop, tuple(results))
        condition = live(loop.condition.jaxpr, (True,)).inputs
        body = live(loop.body.jaxpr, carried).inputs
        constants = condition[: loop.condition_constants] + body[: loop.body_constants]
        return list(constants + carried)

    def visit_cond(self, cond: Cond, results: Flags, position: Position) -> Flags:
        _, *variables = cond.equation.invars
        needed = [False] * len(variables)
        for branch in cond.branches:
            needed_of_branch = self.visit_program(branch, results, position)
            needed = _either(needed, needed_of_branch)
        return [True, *needed]


_BACKWARDS = _Backwards()


def needed_of_scan_body(scan: Scan, needed: Needed) -> Needed:
    """Which results of a scan's body are needed for some results of the scan."""
    while True:
        body = live(scan.body.jaxpr, needed)
        _, carried_in, _ = scan.split(body.inputs)
        carried, stacked = scan.split_results(needed)
        after = (*_either(carried, carried_in), *stacked)
        if after == needed:
            return needed
        needed = after


def needed_of_while_body(loop: While, needed: Needed) -> Needed:
    """Which results of a while loop's body are needed for some results of the loop."""
    condition = live(loop.condition.jaxpr, (True,))
    decide = condition.inputs[loop.condition_constants :]
    needed = tuple(_either(needed, decide))
    while True:
        body = live(loop.body.jaxpr, needed)
        carried_in = body.inputs[loop.body_constants :]
        after = tuple(_either(needed, carried_in))
        if after == needed:
            return needed
        needed = after


def _either(first: Sequence[bool], second: Sequence[bool]) -> Flags:
    return [a or b for a, b in zip(first, second, strict=True)]
