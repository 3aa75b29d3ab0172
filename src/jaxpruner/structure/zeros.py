"""Finds the exact groups: zeros are followed through the program, from the parameters to every sum over channels.

A group is rejected, and so is not exact, unless zeros are known wherever its channels are summed over. The body of a
loop is visited until the fills of its carried values stay the same. So are programs that pass a state on. Each visit
knows at most what the visit before knew. So an atom that one visit rejects is rejected by all later ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpruner.structure import rules
from jaxpruner.structure.axes import Axes, Axis, Pin, atoms
from jaxpruner.structure.fills import (
    EquationFills,
    Fill,
    Scalar,
    is_finite,
    join_fills,
    nothing_of,
    of_constant,
)
from jaxpruner.structure.traces import Trace, has_type_of, pin_at
from jaxpruner.trace.interpreter import Interpreter, Position
from jaxpruner.trace.program import Cond, Program, Scan, While
from jaxpruner.tree import Path

Fills = list[Fill]


def inexact_atoms(traces: Sequence[Trace], leaves: Sequence[Fill] | None = None) -> dict[Axis, str]:
    """Finds the atoms that are not exact, with the reason: removing their channels differs from zeroing them.

    The parameters are zeroed, and so is the state of the first call. The state that a call returns goes into the next
    call of any program, until the fills of the state stay the same.

    Args:
      traces: of the programs of a model.
      leaves: the fills of the parameters, if they are not zeroed. Nothing is known of the state then.
    """
    walks = list(map(ZeroWalk, traces))
    fills = list(map(walks[0].zeroed, traces[0].leaves)) if leaves is None else leaves
    states: dict[Path, Fill] = {}
    for walk in walks:
        for path, axes in walk.trace.named_states:
            states.setdefault(path, walk.zeroed(axes) if leaves is None else nothing_of(len(axes)))
    before = None
    while states != before:
        before = dict(states)
        for walk in walks:
            results = walk.run(fills, states)
            for number, leaf in walk.trace.returned.items():
                path = walk.trace.state_paths[leaf]
                states[path] = join_fills(states[path], results[number])
    inexact: dict[Axis, str] = {}
    for walk in reversed(walks):  # the reason in the first program counts
        inexact |= walk.inexact
    return inexact


class ZeroWalk(Interpreter[Fill]):
    """Follows the fills of values through a program.

    Attributes:
      inexact: the atoms that are not exact, with the reason.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.inexact: dict[Axis, str] = {}
        self._causes: dict[Axis, Pin] = {}  # what last made zeroed channels infinite or NaN
        self._in_leaves = {atom for axes in trace.leaves for atom in atoms(*axes)}
        self._candidates: dict[int, tuple[Axis, ...]] = {}

    def run(self, leaves: Sequence[Fill], states: Mapping[Path, Fill]) -> Fills:
        """Goes through the whole program with these parameters and states; returns the fills of its results."""
        trace = self.trace
        fills = [*leaves, *[states[path] for path in trace.state_paths]]
        inputs = trace.program.jaxpr.invars[len(fills) :]
        fills += map(unknown, inputs)
        position = Position.of_whole(trace.program)
        return self.visit_program(Program.of(trace.program), fills, position)

    def candidates(self, axis: Axis) -> tuple[Axis, ...]:
        """The atoms of an axis that could be removed."""
        axis = axis.resolved()
        if id(axis) not in self._candidates:
            self._candidates[id(axis)] = tuple(
                [
                    atom
                    for atom in dict.fromkeys(atoms(axis))
                    if atom.pin is None and atom.size > 1 and atom in self._in_leaves
                ]
            )
        return self._candidates[id(axis)]

    def zeroed(self, axes: Axes) -> Fill:
        """The fill of a leaf of the parameters or of the state that is zero along all of its groups."""
        return Fill(None, tuple([dict.fromkeys(self.candidates(axis), 0) for axis in axes]))

    def constant(self, value: Any, aval: Any) -> Fill:
        return value if isinstance(value, Fill) else of_constant(value, ((),) * len(aval.shape))

    def unneeded(self, equation: Any, operands: Any) -> Fills:
        return list(map(unknown, equation.outvars))

    def visit_program(self, program: Program, inputs: Sequence[Fill], position: Position) -> Fills:
        constants = []
        axes_of_constants = self.trace.constants[position.path]
        for value, axes in zip(program.constants, axes_of_constants, strict=True):
            constants.append(of_constant(value, list(map(self.candidates, axes))))
        return super().visit_program(Program(program.jaxpr, tuple(constants)), inputs, position)

    def visit_plain(self, equation: Any, operands: Fills, position: Position) -> Fills:
        def reject(atom: Axis, reason: str, scalar: Scalar) -> None:
            pin = pin_at(position, equation, reason)
            self._reject(atom, pin if is_finite(scalar) else self._causes.get(atom, pin))

        def note_cause(atom: Axis, reason: str) -> None:
            self._causes[atom] = pin_at(position, equation, reason)

        axes = self.trace.equations[position.path]
        fills = EquationFills(equation, *axes, operands, self.candidates, reject, note_cause)
        return rules.fills_rule(equation.primitive.name)(fills)

    def _reject(self, atom: Axis, pin: Pin) -> None:
        """Notes why an atom is not exact. Its first reason stays."""
        if atom not in self.inexact:
            self.inexact[atom] = str(pin)

    def visit_scan(self, scan: Scan, operands: Fills, position: Position) -> Fills:
        _, carried, sliced = scan.split(operands)
        slices = [fill._replace(channels=fill.channels[1:]) for fill in sliced]
        stacked: Fills = []

        def run(carried: Fills) -> Fills:
            nonlocal stacked
            results = self.visit_scan_body(scan, operands, carried, slices, position)
            carried, stacked = scan.split_results(results)
            return carried

        before, after = _settle(run, carried)
        results = after if scan.length else before
        # The scalars that trips with zeroed parameters stack.
        in_trips: list[dict[Axis, Scalar]] = [{} for _ in stacked]
        for atom in self.candidates(self.trace.trips[position.path]):
            scalars = _run_zeroed_trip(
                self.trace, scan, [fill.at(0, atom) for fill in sliced], position
            )
            if scalars is None:
                reason = 'a trip without its parameters changes what is carried'
                self._reject(atom, pin_at(position, scan.equation, reason))
                continue
            for own, scalar in zip(in_trips, scalars, strict=True):
                if scalar is not None:
                    own[atom] = scalar
        for fill, own in zip(stacked, in_trips, strict=True):
            results.append(fill._replace(channels=(own, *fill.channels)))
        return results

    def visit_while(self, loop: While, operands: Fills, position: Position) -> Fills:
        _, _, carried = loop.split(operands)

        def run(carried: Fills) -> Fills:
            return self.visit_loop_body(loop, operands, carried, position)

        carried, _ = _settle(run, carried)
        self.visit_condition(loop, operands, carried, position)
        return carried

    def visit_cond(self, cond: Cond, operands: Fills, position: Position) -> Fills:
        joined, *others = self.visit_branches(cond, operands, position)
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

    def visit_plain(self, equation: Any, operands: Fills, position: Position) -> Fills:
        if equation.primitive.name in ('add', 'add_any'):
            for number, other in ((0, 1), (1, 0)):
                is_same = has_type_of(equation.invars[number].aval, equation.outvars[0].aval)
                if operands[other].everywhere == 0 and is_same:
                    return [operands[number]]
        return super().visit_plain(equation, operands, position)


def _run_zeroed_trip(
    trace: Trace, scan: Scan, scalars: Sequence[Scalar], position: Position
) -> list[Scalar] | None:
    """The scalars that a trip with these slices stacks; `None` if the trip changes a carried value."""
    inside = position.in_scan(scan)
    constants, carried, sliced = scan.split(list(map(unknown, scan.body.jaxpr.invars)))
    for i, scalar in enumerate(scalars):
        sliced[i] = sliced[i]._replace(everywhere=scalar)
    results = _TripProbe(trace).visit_program(scan.body, [*constants, *carried, *sliced], inside)
    carried_out, stacked = scan.split_results(results)
    for before, after, is_needed in zip(carried, carried_out, inside.needed, strict=False):
        if is_needed and after is not before:
            return None
    return [fill.everywhere for fill in stacked]


def unknown(variable: Any) -> Fill:
    """The fill of a variable of which nothing is known."""
    return nothing_of(len(variable.aval.shape))
