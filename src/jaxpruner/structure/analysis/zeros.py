"""Finds the exact groups: zeros are followed through the program, from the parameters to every sum over channels.

A group is rejected, and so is not exact, unless zeros are known wherever its channels are summed over. The body of a
loop is visited until the fills of its carried values stay the same. So are programs that pass a state on. Each visit
knows at most what the visit before knew. So an atom that one visit rejects is rejected by all later ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpruner.structure.analysis.axes import Axes, Axis, Pin, atoms, atoms_of_values
from jaxpruner.structure.analysis.fills import (
    EquationFills,
    Fill,
    Scalar,
    is_finite,
    join_fills,
    nothing_of,
    of_constant,
)
from jaxpruner.structure.analysis.live_evaluator import KnownConstant, LiveEvaluator, with_constants
from jaxpruner.structure.analysis.records import Trace, TracePosition, has_type_of
from jaxpruner.structure.analysis.signs import signs_of, signs_of_results
from jaxpruner.structure.rules import primitives
from jaxpruner.trace.program import Cond, Program, Scan, While
from jaxpruner.tree import Path


def inexact_atoms(traces: Sequence[Trace], leaves: Sequence[Fill] | None = None) -> dict[Axis, str]:
    """Finds the atoms that are not exact, with the reason: removing their channels differs from zeroing them.

    The parameters are zeroed, and so is the state of the first call. The state that a call returns goes into the next
    call of any program, until the fills of the state stay the same.

    Args:
      traces: of the programs of a model.
      leaves: the fills of the parameters, if they are not zeroed. Nothing is known of the state then.
    """
    walks = list(map(ZeroWalk, traces))
    is_zeroed = leaves is None
    if leaves is None:
        leaves = list(map(walks[0].zeroed, traces[0].leaves))
    states: dict[Path, Fill] = {}
    for walk in walks:
        for path, axes in walk.trace.named_states:
            fill = walk.zeroed(axes) if is_zeroed else nothing_of(len(axes))
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
            inexact.setdefault(atom, reason)  # the reason in the first program
    return inexact


Fills = list[Fill]


class ZeroWalk(LiveEvaluator[Fill]):
    """Follows the fills of values through a program.

    Attributes:
      inexact: the atoms that are not exact, with the reason.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.inexact: dict[Axis, str] = {}
        self._causes: dict[Axis, Pin] = {}  # what last made zeroed channels infinite or NaN
        self._in_leaves = set(atoms_of_values(trace.leaves))
        self._candidates: dict[int, tuple[Axis, ...]] = {}

    def run(self, leaves: Sequence[Fill], states: Mapping[Path, Fill]) -> Fills:
        """Goes through the whole program with these parameters and states; returns the fills of its results."""
        trace = self.trace
        state_fills = [states[path] for path in trace.state_paths]
        fills = [*leaves, *state_fills]
        inputs = trace.program.jaxpr.invars[len(fills) :]
        fills += map(unknown, inputs)
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
        """The fill of a leaf of the parameters or of the state that is zero along all of its groups."""
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

    def unneeded(self, equation: Any, operands: Any) -> Fills:
        return list(map(unknown, equation.outvars))

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
        def reject(atom: Axis, reason: str, scalar: Scalar) -> None:
            pin = position.pin(equation, reason)
            if not is_finite(scalar):
                pin = self._causes.get(atom, pin)
            self._reject(atom, pin)

        def note_cause(atom: Axis, reason: str) -> None:
            self._causes[atom] = position.pin(equation, reason)

        axes = self.trace.equations[position.path]
        fills = EquationFills(equation, axes, operands, self.candidates, reject, note_cause)
        fill_results = primitives.fills_rule(equation.primitive.name)
        signs = signs_of_results(equation, [fill.signs for fill in operands])
        results = []
        for fill in fill_results(fills):
            is_operand = any(fill is operand for operand in operands)
            if not is_operand:  # else it stays the same object, by which `_TripProbe` knows it
                is_known = fill.everywhere is not None
                own_signs = signs_of(np.asarray(fill.everywhere)) if is_known else signs
                fill = fill._replace(signs=own_signs)
            results.append(fill)
        return results

    def _reject(self, atom: Axis, pin: Pin) -> None:
        """Notes why an atom is not exact. Its first reason stays."""
        if atom not in self.inexact:
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
        """Rejects the trips of a scan unless a trip with zeroed parameters carries on the values that it got.

        Returns:
          For each stacked result, atom of the trips -> the scalar that such a trip puts there, if it is known.
        """
        _, results = scan.split_results(scan.equation.outvars)
        channels: list[dict[Axis, Scalar]] = [{} for _ in results]
        trips = self.trace.trips[position.path]
        for atom in self.candidates(trips):
            scalars = [fill.at(0, atom) for fill in sliced]
            stacked = _run_zeroed_trip(self.trace, scan, scalars, position)
            if stacked is None:
                reason = 'a trip without its parameters changes what is carried'
                self._reject(atom, position.pin(scan.equation, reason))
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
    """The fills of carried values before every visit of a loop's body, and after the last one."""
    while True:
        after = run(carried)
        joined = list(map(join_fills, carried, after))
        if joined == carried:
            return carried, after
        carried = joined


class _TripProbe(ZeroWalk):
    """Goes through the body of a scan with zeroed parameters.

    Adding zeros returns the fill of the other operand itself. So a carried value that stays the same is known by the
    identity of its fill.
    """

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        return ()

    def visit_plain(self, equation: Any, operands: Fills, position: TracePosition) -> Fills:
        if equation.primitive.name in ('add', 'add_any'):
            (result,) = equation.outvars
            for number, other in ((0, 1), (1, 0)):
                adds_zeros = operands[other].everywhere == 0
                if adds_zeros and has_type_of(equation.invars[number].aval, result.aval):
                    return [operands[number]]
        return super().visit_plain(equation, operands, position)


def _run_zeroed_trip(
    trace: Trace, scan: Scan, scalars: Sequence[Scalar], position: TracePosition
) -> list[Scalar] | None:
    """The scalars that a trip with these slices stacks; `None` if the trip changes a carried value."""
    inside = position.in_scan(scan)
    unknown_inputs = list(map(unknown, scan.body.jaxpr.invars))
    constants, carried, sliced = scan.split(unknown_inputs)
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


def unknown(variable: Any) -> Fill:
    """The fill of a variable of which nothing is known."""
    return nothing_of(len(variable.aval.shape))
