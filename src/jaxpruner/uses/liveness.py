"""Finds the live equations of a program: those that its results depend on. Others are no uses of a parameter."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.uses.bodies import Cond, Program, Scan, ShardMap, While
from jaxpruner.uses.visitors import Position, Visitor

# Callbacks that only show something change no result.
_SHOWS = frozenset({'debug_callback', 'debug_print'})

# For each of some values, whether it is needed.
Needed = tuple[bool, ...]
Flags = list[bool]


class Live(NamedTuple):
    """What a program needs for some of its results.

    Attributes:
      inputs: for each input, whether it is needed.
      results: for each equation, which of its results are needed; all False if it can be left out.
    """

    inputs: Needed
    results: tuple[Needed, ...]


@functools.lru_cache(4096)
def live(jaxpr: Any, needed: Needed) -> Live:
    """Finds what a program needs for the needed ones of its results."""
    live_ids = _ids(jaxpr.outvars, needed)
    results = []
    for equation in reversed(jaxpr.eqns):
        has_effect = bool(equation.effects) and equation.primitive.name not in _SHOWS
        flags = [has_effect or id(result) in live_ids for result in equation.outvars]
        results.append(tuple(flags))
        if has_effect or any(flags):
            operands = _BACKWARDS.visit_equation(equation, flags, Position())
            live_ids |= _ids(equation.invars, operands)
    inputs = [id(variable) in live_ids for variable in jaxpr.invars]
    return Live(tuple(inputs), tuple(reversed(results)))


def _ids(variables: Sequence[Any], flags: Sequence[bool]) -> set[int]:
    """The `id` of each flagged variable. Literals are not hashable in some versions of JAX."""
    ids = set()
    for variable, is_flagged in zip(variables, flags, strict=True):
        if is_flagged:
            ids.add(id(variable))
    return ids


class _Backwards(Visitor[bool, Position]):
    """Finds which operands of an equation are needed for its needed results.

    Other visitors go from operands to results. This one goes backwards: each method gets flags of the results, and
    returns flags of the operands. So the parameter `results` has another name than in the base class, which passes it
    by position.
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
        if not scan.length:  # only carried values are passed through
            constants, _, sliced = scan.split([False] * len(scan.equation.invars))
            return constants + carried + sliced
        needed = needed_of_scan_body(scan, tuple(results))
        body = live(scan.body.jaxpr, needed)
        constants, carried_in, sliced = scan.split(body.inputs)
        # A carried value may be returned without having gone through the body.
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
    """Finds the results of a scan's body that some results of the scan need."""
    while True:
        body = live(scan.body.jaxpr, needed)
        _, carried_in, _ = scan.split(body.inputs)
        carried, stacked = scan.split_results(needed)
        after = (*_either(carried, carried_in), *stacked)
        if after == needed:
            return needed
        needed = after


def needed_of_while_body(loop: While, needed: Needed) -> Needed:
    """Finds the results of a while loop's body that some results of the loop need."""
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
