"""Which groups are exact: zeros are followed through the program, from the parameters to every sum over channels.

A group is rejected unless zeros are known wherever its channels are summed over. The body of a loop is passed through
until what is known of its carried values stays the same. So are programs that hand a state on. Each pass knows at most
what the pass before knew. So an atom that one pass rejects is rejected by all later ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner.core.tree import Path
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, atoms_of_values
from jaxpruner.structure.analysis.fills import (
    EquationFills,
    Fill,
    Scalar,
    join_fills,
    nothing_of,
    of_constant,
)
from jaxpruner.structure.analysis.live_evaluator import KnownConstant, LiveEvaluator, with_constants
from jaxpruner.structure.analysis.records import Trace, TracePosition, has_type_of
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
    walks = list(map(ZeroWalk, traces))
    states: dict[Path, Fill] = {}
    for walk in walks:
        trace = walk.trace
        for path, axes in trace.named_states:
            fill = nothing_of(len(axes))
            if leaves is None:
                fill = walk.zeroed(axes)
            states.setdefault(path, fill)
    before = None
    while states != before:
        before = dict(states)
        for walk in walks:
            results = walk.run(leaves, states)
            for number, leaf in walk.trace.returned.items():
                path = walk.trace.state_paths[leaf]
                states[path] = join_fills(states[path], results[number])
    inexact: dict[Axis, str] = {}
    for walk in walks:
        for atom, reason in walk.inexact.items():
            inexact.setdefault(atom, reason)  # that of the first program
    return inexact


Fills = list[Fill]


class ZeroWalk(LiveEvaluator[Fill]):
    """Follows what stands at removed channels.

    Attributes:
      inexact: the atoms of which removing channels is not the same as zeroing them, with the reason.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.inexact: dict[Axis, str] = {}
        self._in_leaves = set(atoms_of_values(trace.leaves))
        self._candidates: dict[int, tuple[Axis, ...]] = {}

    def run(
        self,
        leaves: Sequence[Fill] | None = None,
        states: Mapping[Path, Fill] | None = None,
    ) -> Fills:
        """Goes through the whole program; returns what is known of its results.

        Args:
          leaves: what is known of the parameters; without it they are zero along all of their groups.
          states: what is known of the state; likewise.
        """
        trace = self.trace
        if leaves is None:
            leaves = list(map(self.zeroed, trace.leaves))
        fills = list(leaves)
        for path, axes in trace.named_states:
            fill = self.zeroed(axes) if states is None else states[path]
            fills.append(fill)
        inputs = trace.program.jaxpr.invars[len(fills) :]
        fills += map(_unknown, inputs)
        return self.visit_whole(trace.program, fills)

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        """The atoms of an axis that could be removed."""
        axis = axis.resolved()
        if id(axis) not in self._candidates:
            distinct = dict.fromkeys(atoms(axis))
            removable = filter(self._is_removable, distinct)
            self._candidates[id(axis)] = tuple(removable)
        return self._candidates[id(axis)]

    def _is_removable(self, atom: Axis) -> bool:
        is_free = atom.pin is None and atom.size > 1
        return is_free and atom in self._in_leaves

    def zeroed(self, axes: Axes) -> Fill:
        """A parameter or a leaf of the state, zero along all of its groups."""
        channels = []
        for axis in axes:
            zeros = dict.fromkeys(self.candidates(axis), 0)
            channels.append(zeros)
        return Fill(None, tuple(channels))

    def constant(self, value: Any, aval: Any) -> Fill:
        if isinstance(value, KnownConstant):
            return value.value
        no_candidates = ((),) * len(aval.shape)
        return of_constant(value, no_candidates)

    def unneeded(self, equation: Any) -> Fills:
        return list(map(_unknown, equation.outvars))

    def visit_program(
        self, program: Program, inputs: Sequence[Fill], position: TracePosition
    ) -> Fills:
        fills = []
        axes_of_constants = self.trace.constants[position.path]
        for value, axes in zip(program.constants, axes_of_constants, strict=True):
            candidates = list(map(self.candidates, axes))
            fill = of_constant(value, candidates)
            fills.append(fill)
        program = with_constants(program, fills)
        return super().visit_program(program, inputs, position)

    def visit_plain(self, equation: Any, operands: Fills, position: TracePosition) -> Fills:
        def reject(atom: Axis, reason: str) -> None:
            self._reject(atom, equation, reason, position)

        axes = self.trace.equations[position.path]
        fills = EquationFills(equation, axes, operands, self.candidates, reject)
        fill_results = primitives.fills_rule(equation.primitive.name)
        return fill_results(fills)

    def _reject(self, atom: Axis, equation: Any, reason: str, position: TracePosition) -> None:
        """Notes why an atom is not exact; its first reason stays."""
        if atom not in self.inexact:
            pin = position.pin(equation, reason)
            self.inexact[atom] = str(pin)

    def visit_scan(self, scan: Scan, operands: Fills, position: TracePosition) -> Fills:
        _, carried, sliced = scan.split(operands)
        slices = []
        for fill in sliced:
            _, *channels = fill.channels
            slices.append(fill._replace(channels=tuple(channels)))
        stacked: Fills = []

        def run(carried: Fills) -> Fills:
            nonlocal stacked
            results = self.visit_scan_body(scan, operands, carried, slices, position)
            carried, stacked = scan.split_results(results)
            return carried

        before, after = _settle(run, carried)
        in_trips = self._zeroed_trips(scan, sliced, position)
        results = after if scan.length else before
        for fill, channels_of_trips in zip(stacked, in_trips, strict=True):
            channels = (channels_of_trips, *fill.channels)
            results.append(fill._replace(channels=channels))
        return results

    def _zeroed_trips(
        self, scan: Scan, sliced: Fills, position: TracePosition
    ) -> list[dict[Axis, Scalar]]:
        """Rejects the trips of a scan unless one with zeroed parameters hands on what it got.

        Returns:
          For each stacked result what such trips put there.
        """
        _, results = scan.split_results(scan.equation.outvars)
        channels: list[dict[Axis, Scalar]] = [{} for _ in results]
        trips = self.trace.trips[position.path]
        for atom in self.candidates(trips):
            scalars = [fill.at(0, atom) for fill in sliced]
            stacked = _run_zeroed_trip(self.trace, scan, scalars, position)
            if stacked is None:
                reason = 'a trip without its parameters changes what is carried'
                self._reject(atom, scan.equation, reason, position)
                continue
            for channels_of_result, scalar in zip(channels, stacked, strict=True):
                if scalar is not None:
                    channels_of_result[atom] = scalar
        return channels

    def visit_while(self, loop: While, operands: Fills, position: TracePosition) -> Fills:
        _, _, carried = loop.split(operands)

        def run(carried: Fills) -> Fills:
            return self.visit_loop_body(loop, operands, carried, position)

        carried, _ = _settle(run, carried)
        self.visit_condition(loop, operands, carried, position)
        return carried

    def visit_cond(self, cond: Cond, operands: Fills, position: TracePosition) -> Fills:
        first, *others = self.visit_branches(cond, operands, position)
        joined = first
        for results in others:
            joined = list(map(join_fills, joined, results))
        return joined


def _settle(run: Callable[[Fills], Fills], carried: Fills) -> tuple[Fills, Fills]:
    """What is known of carried values before every pass, and after the last; see the head of this file."""
    while True:
        after = run(carried)
        joined = list(map(join_fills, carried, after))
        if joined == carried:
            return carried, after
        carried = joined


class _TripProbe(ZeroWalk):
    """Runs the body of a scan with zeroed parameters.

    Adding zeros returns the other operand itself. So what a trip hands on is known by identity.
    """

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()

    def visit_plain(self, equation: Any, operands: Fills, position: TracePosition) -> Fills:
        if equation.primitive.name in ('add', 'add_any'):
            for number, other in ((0, 1), (1, 0)):
                adds_zeros = operands[other].everywhere == 0
                if adds_zeros and _is_like_result(equation, number):
                    return [operands[number]]
        return super().visit_plain(equation, operands, position)


def _is_like_result(equation: Any, operand: int) -> bool:
    """Whether an operand has the shape and the dtype of the result."""
    (result,) = equation.outvars
    return has_type_of(equation.invars[operand].aval, result.aval)


def _run_zeroed_trip(
    trace: Trace, scan: Scan, scalars: Sequence[Scalar], position: TracePosition
) -> list[Scalar] | None:
    """What a trip stacks of which the sliced operands are these scalars; `None` if it changes what is carried."""
    inside = position.in_scan(scan)
    unknown = list(map(_unknown, scan.body.jaxpr.invars))
    constants, carried, sliced = scan.split(unknown)
    for i, scalar in enumerate(scalars):
        sliced[i] = sliced[i]._replace(everywhere=scalar)
    inputs = [*constants, *carried, *sliced]
    results = _TripProbe(trace).visit_program(scan.body, inputs, inside)
    carried_out, stacked = scan.split_results(results)
    carried_values = zip(carried, carried_out, inside.needed, strict=False)
    for before, after, is_needed in carried_values:
        if is_needed and after is not before:
            return None
    return [fill.everywhere for fill in stacked]


def _unknown(variable: Any) -> Fill:
    """A value of which nothing is known."""
    return nothing_of(len(variable.aval.shape))
