"""Which groups are exact: zeros are followed through the program, from the parameters to every sum over channels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms
from jaxpruner.structure.analysis.fills import (
    Fill,
    Flow,
    Number,
    join_fills,
    nothing_of,
    of_constant,
)
from jaxpruner.structure.analysis.live_evaluator import KnownConstant, LiveEvaluator
from jaxpruner.structure.analysis.records import Place, Trace
from jaxpruner.structure.rules import primitives
from jaxpruner.uses.bodies import Cond, Program, Scan, While


def inexact_atoms(traces: Sequence[Trace], leaves: Sequence[Fill] | None = None) -> dict[Axis, str]:
    """The atoms of which removing channels is not the same as zeroing them, with the reason.

    The parameters are zeroed, and so is the state of the first call. What a call returns is the state of the next one,
    of any of the programs, until nothing new becomes known.

    Args:
      traces: of the programs of a model.
      leaves: what is known of the parameters, where they are not zeroed; nothing is known of the state then.
    """
    flows = list(map(ZeroFlow, traces))
    states: dict[tree_lib.Path, Fill] = {}
    for flow in flows:
        for path, axes in zip(flow.trace.state_paths, flow.trace.states, strict=True):
            known = flow.zeroed(axes) if leaves is None else nothing_of(len(axes))
            states.setdefault(path, known)
    before = None
    while states != before:
        before = dict(states)
        for flow in flows:
            results = flow.run(leaves, states)
            for number, leaf in flow.trace.returned.items():
                path = flow.trace.state_paths[leaf]
                states[path] = join_fills(states[path], results[number])
    inexact = {}
    for flow in flows:
        inexact = flow.inexact | inexact  # the first program's reasons go first
    return inexact


class ZeroFlow(LiveEvaluator[Fill]):
    """Follows what stands at removed channels.

    Attributes:
      inexact: the atoms of which removing channels is not the same as zeroing them, with the reason.

    Loops are gone through until what is carried stays the same. Each turn knows less than the one before, so that what
    is rejected in an earlier turn is rejected in the last one, too.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.inexact: dict[Axis, str] = {}
        self._in_leaves: set[Axis] = set()
        for axes in trace.leaves:
            for axis in axes:
                self._in_leaves.update(atoms(axis))
        self._candidates: dict[int, tuple[Axis, ...]] = {}

    def run(
        self,
        leaves: Sequence[Fill] | None = None,
        states: Mapping[tree_lib.Path, Fill] | None = None,
    ) -> list[Fill]:
        """Goes through the whole program; returns what is known of its results.

        Args:
          leaves: what is known of the parameters; without it they are zero along all of their groups.
          states: what is known of the state; likewise.
        """
        jaxpr = self.trace.program.jaxpr
        if leaves is None:
            leaves = list(map(self.zeroed, self.trace.leaves))
        inputs = list(leaves)
        for path, axes in zip(self.trace.state_paths, self.trace.states, strict=True):
            inputs.append(self.zeroed(axes) if states is None else states[path])
        for variable in jaxpr.invars[len(inputs) :]:
            inputs.append(_unknown(variable))
        place = Place(needed=(True,) * len(jaxpr.outvars))
        return self.visit_program(Program.of(self.trace.program), inputs, place)

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        """The atoms of an axis that could be removed."""
        axis = axis.resolved()
        if id(axis) not in self._candidates:
            candidates = filter(self._is_removable, dict.fromkeys(atoms(axis)))
            self._candidates[id(axis)] = tuple(candidates)
        return self._candidates[id(axis)]

    def _is_removable(self, atom: Axis) -> bool:
        return atom.pin is None and atom.size > 1 and atom in self._in_leaves

    def zeroed(self, axes: Axes) -> Fill:
        """A parameter or a leaf of the state, zero along all of its groups."""
        channels = [dict.fromkeys(self.candidates(axis), 0) for axis in axes]
        return Fill(None, tuple(channels))

    def constant(self, value: Any, aval: Any) -> Fill:
        if isinstance(value, KnownConstant):
            return value.value
        return of_constant(value, ((),) * len(aval.shape))

    def unneeded(self, equation: Any) -> list[Fill]:
        return list(map(_unknown, equation.outvars))

    def visit_program(
        self, program: Program, inputs: Sequence[Fill], position: Place
    ) -> list[Fill]:
        constants = []
        axes_of_constants = self.trace.constants[position.path]
        for value, axes in zip(program.constants, axes_of_constants, strict=True):
            candidates = list(map(self.candidates, axes))
            fill = of_constant(value, candidates)
            constants.append(KnownConstant(fill))
        program = Program(program.jaxpr, tuple(constants))
        return super().visit_program(program, inputs, position)

    def visit_plain(self, equation: Any, operands: list[Fill], position: Place) -> list[Fill]:
        def reject(atom: Axis, reason: str) -> None:
            self._reject(atom, equation, reason, position)

        axes = self.trace.equations[position.path]
        flow = Flow(equation, axes, operands, self.candidates, reject)
        rule = primitives.fills_rule(equation.primitive.name)
        return rule(flow)

    def _reject(self, atom: Axis, equation: Any, reason: str, place: Place) -> None:
        """Notes why an atom is not exact; its first reason stays."""
        if atom not in self.inexact:
            self.inexact[atom] = str(place.pin(equation, reason))

    def visit_scan(self, scan: Scan, operands: list[Fill], position: Place) -> list[Fill]:
        constants, carried, sliced = scan.split(operands)
        inside = position.in_scan(scan)
        taken = []
        for fill in sliced:
            taken.append(fill._replace(channels=fill.channels[1:]))
        stacked: list[Fill] = []

        def run(carried: list[Fill]) -> list[Fill]:
            nonlocal stacked
            results = self.visit_program(scan.body, [*constants, *carried, *taken], inside)
            carried, stacked = scan.split_results(results)
            return carried

        before, after = _settled(run, carried)
        in_trips = self._zeroed_trips(scan, sliced, position)
        results = after if scan.length else before
        for fill, known in zip(stacked, in_trips, strict=True):
            channels = (known, *fill.channels)
            results.append(fill._replace(channels=channels))
        return results

    def _zeroed_trips(
        self, scan: Scan, sliced: list[Fill], position: Place
    ) -> list[dict[Axis, Number]]:
        """Rejects the trips of a scan unless one with zeroed parameters hands on what it got.

        Returns:
          For each stacked result what such trips put there.
        """
        _, results = scan.split_results(scan.equation.outvars)
        known: list[dict[Axis, Number]] = [{} for _ in results]
        for atom in self.candidates(self.trace.trips[position.path]):
            numbers = [fill.at(0, atom) for fill in sliced]
            stacked = _zeroed_trip(self.trace, scan, numbers, position)
            if stacked is None:
                reason = 'a trip without its parameters changes what is carried'
                self._reject(atom, scan.equation, reason, position)
                continue
            for of_result, number in zip(known, stacked, strict=True):
                if number is not None:
                    of_result[atom] = number
        return known

    def visit_while(self, loop: While, operands: list[Fill], position: Place) -> list[Fill]:
        condition_constants, body_constants, carried = loop.split(operands)
        in_condition, in_body = position.in_condition(loop), position.in_body(loop)

        def run(carried: list[Fill]) -> list[Fill]:
            return self.visit_program(loop.body, body_constants + carried, in_body)

        carried, _ = _settled(run, carried)
        self.visit_program(loop.condition, condition_constants + carried, in_condition)
        return carried

    def visit_cond(self, cond: Cond, operands: list[Fill], position: Place) -> list[Fill]:
        first, *others = self.visit_branches(cond, operands, position)
        joined = first
        for results in others:
            joined = list(map(join_fills, joined, results))
        return joined


def _settled(
    run: Callable[[list[Fill]], list[Fill]], carried: list[Fill]
) -> tuple[list[Fill], list[Fill]]:
    """What is known of carried values before every turn of a loop, and after the last."""
    while True:
        after = run(carried)
        joined = list(map(join_fills, carried, after))
        if joined == carried:
            return carried, after
        carried = joined


class _TripProbe(ZeroFlow):
    """Runs the body of a scan with zeroed parameters.

    Adding zeros returns the other operand itself. So what a trip hands on is known by identity.
    """

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()

    def visit_plain(self, equation: Any, operands: list[Fill], position: Place) -> list[Fill]:
        if equation.primitive.name in ('add', 'add_any'):
            first, second = operands
            if second.everywhere == 0 and _is_like_result(equation, 0):
                return [first]
            if first.everywhere == 0 and _is_like_result(equation, 1):
                return [second]
        return super().visit_plain(equation, operands, position)


def _is_like_result(equation: Any, operand: int) -> bool:
    """Whether an operand has the shape and the dtype of the result."""
    aval = equation.invars[operand].aval
    result = equation.outvars[0].aval
    return (aval.shape, aval.dtype) == (result.shape, result.dtype)


def _zeroed_trip(
    trace: Trace, scan: Scan, numbers: Sequence[Number], place: Place
) -> list[Number] | None:
    """What a trip stacks of which the sliced operands are these numbers; `None` if it changes what is carried."""
    inside = place.in_scan(scan)
    inputs = list(map(_unknown, scan.body.jaxpr.invars))
    constants, carried, sliced = scan.split(inputs)
    for i, number in enumerate(numbers):
        sliced[i] = sliced[i]._replace(everywhere=number)
    results = _TripProbe(trace).visit_program(scan.body, [*constants, *carried, *sliced], inside)
    carried_out, stacked = scan.split_results(results)
    for before, after, is_needed in zip(carried, carried_out, inside.needed, strict=False):
        if is_needed and after is not before:
            return None
    return [fill.everywhere for fill in stacked]


def _unknown(variable: Any) -> Fill:
    """A value of which nothing is known."""
    return nothing_of(len(variable.aval.shape))
