"""Which groups are exact: zeros are followed through the program, from the parameters to every sum over channels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms
from jaxpruner.structure.analysis.fills import Fill, Flow, Number, join_fills, of_constant
from jaxpruner.structure.analysis.records import EquationAxes, Place, Trace
from jaxpruner.structure.rules import primitives
from jaxpruner.uses import liveness
from jaxpruner.uses.bodies import Call, Cond, Evaluator, Program, Scan, While


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
            unknown = Fill(None, ({},) * len(axes))
            states.setdefault(path, flow.zeroed(axes) if leaves is None else unknown)
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


class _Constant:
    """What is known of a constant, in its place among a program's constants."""

    def __init__(self, fill: Fill):
        self.fill = fill


class ZeroFlow(Evaluator[Fill, Place]):
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
        inputs = list(map(self.zeroed, self.trace.leaves) if leaves is None else leaves)
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
            removable = []
            for atom in dict.fromkeys(atoms(axis)):
                if atom.pin is None and atom.size > 1 and atom in self._in_leaves:
                    removable.append(atom)
            self._candidates[id(axis)] = tuple(removable)
        return self._candidates[id(axis)]

    def zeroed(self, axes: Axes) -> Fill:
        """A parameter or a leaf of the state, zero along all of its groups."""
        return Fill(None, tuple([dict.fromkeys(self.candidates(axis), 0) for axis in axes]))

    def constant(self, value: Any, aval: Any) -> Fill:
        if isinstance(value, _Constant):
            return value.fill
        return of_constant(value, ((),) * len(aval.shape))

    def positions_in(self, program: Program, position: Place) -> Iterable[Place]:
        live = liveness.live(program.jaxpr, position.needed)
        for number, needed in enumerate(live.results):
            yield position.at(number)._replace(needed=needed)

    def visit_program(
        self, program: Program, inputs: Sequence[Fill], position: Place
    ) -> list[Fill]:
        constants = []
        axes_of_constants = self.trace.constants[position.path]
        for value, axes in zip(program.constants, axes_of_constants, strict=True):
            fill = of_constant(value, list(map(self.candidates, axes)))
            constants.append(_Constant(fill))
        return super().visit_program(Program(program.jaxpr, tuple(constants)), inputs, position)

    def visit_equation(self, equation: Any, operands: list[Fill], position: Place) -> list[Fill]:
        if not any(position.needed):
            return list(map(_unknown, equation.outvars))
        return super().visit_equation(equation, operands, position)

    def visit_plain(self, equation: Any, operands: list[Fill], position: Place) -> list[Fill]:
        def reject(equation: Any, atom: Axis, reason: str) -> None:
            if atom not in self.inexact:
                self.inexact[atom] = str(position.pin(equation, reason))

        axes: EquationAxes = self.trace.equations[position.path]
        flow = Flow(equation, axes, self.candidates, reject)
        return primitives.fills_rule(equation.primitive.name)(flow, operands)

    def visit_call(self, call: Call, operands: list[Fill], position: Place) -> list[Fill]:
        inside = position.inside(call.equation, 0, position.needed)
        return self.visit_program(call.program, operands, inside)

    def visit_scan(self, scan: Scan, operands: list[Fill], position: Place) -> list[Fill]:
        constants, carried, sliced = scan.split(operands)
        needed = liveness.needed_of_scan_body(scan, position.needed)
        inside = position.inside(scan.equation, 0, needed)
        taken = [Fill(fill.everywhere, fill.channels[1:]) for fill in sliced]
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
            results.append(Fill(fill.everywhere, (known, *fill.channels)))
        return results

    def _zeroed_trips(
        self, scan: Scan, sliced: list[Fill], position: Place
    ) -> list[dict[Axis, Number]]:
        """Rejects the trips of a scan unless one with zeroed parameters hands on what it got.

        Returns:
          For each stacked result what such trips put there.
        """
        count = len(scan.equation.outvars) - scan.carried
        known: list[dict[Axis, Number]] = [{} for _ in range(count)]
        for atom in self.candidates(self.trace.trips[position.path]):
            numbers = [fill.at(0, atom) for fill in sliced]
            stacked = _zeroed_trip(self.trace, scan, numbers, position)
            if stacked is None:
                reason = 'a trip without its parameters changes what is carried'
                self.inexact.setdefault(atom, str(position.pin(scan.equation, reason)))
                continue
            for of_result, number in zip(known, stacked, strict=True):
                if number is not None:
                    of_result[atom] = number
        return known

    def visit_while(self, loop: While, operands: list[Fill], position: Place) -> list[Fill]:
        condition_constants, body_constants, carried = loop.split(operands)
        needed = liveness.needed_of_while_body(loop, position.needed)
        in_condition = position.inside(loop.equation, 0, (True,))
        in_body = position.inside(loop.equation, 1, needed)

        def run(carried: list[Fill]) -> list[Fill]:
            return self.visit_program(loop.body, body_constants + carried, in_body)

        carried, _ = _settled(run, carried)
        self.visit_program(loop.condition, condition_constants + carried, in_condition)
        return carried

    def visit_cond(self, cond: Cond, operands: list[Fill], position: Place) -> list[Fill]:
        _, *operands = operands
        joined: list[Fill] = []
        for number, branch in enumerate(cond.branches):
            inside = position.inside(cond.equation, number, position.needed)
            results = self.visit_program(branch, operands, inside)
            joined = list(map(join_fills, joined, results)) if number else results
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
            result = equation.outvars[0].aval
            for number, other in enumerate(reversed(operands)):
                aval = equation.invars[number].aval
                is_like_result = (aval.shape, aval.dtype) == (result.shape, result.dtype)
                if other.everywhere == 0 and is_like_result:
                    return [operands[number]]
        return super().visit_plain(equation, operands, position)


def _zeroed_trip(
    trace: Trace, scan: Scan, numbers: Sequence[Number], place: Place
) -> list[Number] | None:
    """What a trip stacks of which the sliced operands are these numbers; `None` if it changes what is carried."""
    needed = liveness.needed_of_scan_body(scan, place.needed)
    constants, carried, sliced = scan.split([_unknown(v) for v in scan.body.jaxpr.invars])
    for i, number in enumerate(numbers):
        sliced[i] = sliced[i]._replace(everywhere=number)
    inside = place.inside(scan.equation, 0, needed)
    results = _TripProbe(trace).visit_program(scan.body, [*constants, *carried, *sliced], inside)
    carried_out, stacked = scan.split_results(results)
    for before, after, is_needed in zip(carried, carried_out, needed, strict=False):
        if is_needed and after is not before:
            return None
    return [fill.everywhere for fill in stacked]


def _unknown(variable: Any) -> Fill:
    """A value of which nothing is known."""
    return Fill(None, ({},) * len(variable.aval.shape))
