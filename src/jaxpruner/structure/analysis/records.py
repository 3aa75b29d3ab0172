"""What the analysis of a program passes on: where an equation stands, its axes, and the row of a primitive."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jax.extend import source_info_util

from jaxpruner.core.tree import Path
from jaxpruner.structure.analysis.axes import Axes, Axis, Pin, new_axes
from jaxpruner.structure.analysis.ties import Ties
from jaxpruner.uses import liveness
from jaxpruner.uses.bodies import ProgramPath, Scan, While
from jaxpruner.uses.moving_rules import shape_of


class TracePosition(NamedTuple):
    """Where a visitor of a traced program is: a `uses.bodies.Position` that also knows what is needed there.

    Attributes:
      path: of the equation, or of a program inside one; see `uses.graph.Site`.
      needed: which results have a part in the results of the model.
      callers: the equations that led here, the innermost last.
    """

    path: ProgramPath = ()
    needed: tuple[bool, ...] = ()
    callers: tuple[Any, ...] = ()

    @classmethod
    def of_whole(cls, program: Any) -> 'TracePosition':
        """A whole traced program, of which all results are needed."""
        count = len(program.jaxpr.outvars)
        return cls(needed=(True,) * count)

    def at(self, number: int) -> 'TracePosition':
        """An equation in this program, or a program in this equation."""
        return self._replace(path=(*self.path, number))

    def inside(self, equation: Any, number: int, needed: Sequence[bool]) -> 'TracePosition':
        """A program in this equation, of which these results are needed."""
        path = (*self.path, number)
        callers = (*self.callers, equation)
        return TracePosition(path, tuple(needed), callers)

    def in_scan(self, scan: Scan) -> 'TracePosition':
        """The body of this scan."""
        needed = liveness.needed_of_scan_body(scan, self.needed)
        return self.inside(scan.equation, 0, needed)

    def in_condition(self, loop: While) -> 'TracePosition':
        """The condition of this loop."""
        return self.inside(loop.equation, 0, needed=(True,))

    def in_body(self, loop: While) -> 'TracePosition':
        """The body of this loop."""
        needed = liveness.needed_of_while_body(loop, self.needed)
        return self.inside(loop.equation, 1, needed)

    def line(self, equation: Any) -> str:
        """The line of the source that an equation comes from; within JAX, that of the call which led there."""
        callers = reversed(self.callers)
        for candidate in (equation, *callers):
            line = source_info_util.summarize(candidate.source_info)
            if line:
                return line
        return ''

    def pin(self, equation: Any, reason: str, mixes: bool = True) -> Pin:
        """Says that an equation here pins an axis."""
        find_line = functools.partial(self.line, equation)
        return Pin(reason, equation.primitive.name, find_line, mixes)


class EquationAxes(NamedTuple):
    """The axes of an equation's operands and of its results."""

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]

    @property
    def values(self) -> tuple[Axes, ...]:
        """The operands, and then the results."""
        return self.operands + self.results


class Contraction(NamedTuple):
    """The axes of an operation that multiplies and sums.

    Attributes:
      shared: that both operands have, summed or not.
      summed: those of them that the result lacks.
      free: that one operand has.
    """

    shared: Axes
    summed: Axes
    free: Axes


class Trace(NamedTuple):
    """A traced program of a model, and the axes of each of its values.

    Equations that have no part in the results are in none of the mappings: nothing is known of their axes, and the
    model is the same without them.

    Attributes:
      program: the traced program, a `jax.extend.core.ClosedJaxpr` of the leaves of the parameters, of the state and of
        the inputs.
      paths: of the parameters' leaves.
      leaves: the axes of each leaf.
      state_paths: of the leaves of the state.
      states: the axes of each of them.
      returned: number of a result -> number of the leaf of the state that comes back in it.
      equations: path of an equation -> the axes of its operands and results. An equation with a program inside is
        there, too. Within a scan the axes of sliced operands and stacked results lack the first.
      constants: path of a program -> the axes of each of its constants; the whole program's path is `()`.
      trips: path of a scan -> the axis that has an index for each of its trips.
      contractions: the axes of each operation that multiplies and sums.
      used: for each leaf, whether it has a part in the results.
      first_uses: for each leaf, its place in the order in which the model first uses them.
    """

    program: Any
    paths: Sequence[Path]
    leaves: Sequence[Axes]
    state_paths: Sequence[Path]
    states: Sequence[Axes]
    returned: Mapping[int, int]
    equations: Mapping[ProgramPath, EquationAxes]
    constants: Mapping[ProgramPath, tuple[Axes, ...]]
    trips: Mapping[ProgramPath, Axis]
    contractions: Sequence[Contraction]
    used: Sequence[bool]
    first_uses: Sequence[int]

    @property
    def named_leaves(self) -> Iterator[tuple[Path, Axes]]:
        """The path and the axes of each leaf of the parameters."""
        return zip(self.paths, self.leaves, strict=True)

    @property
    def named_states(self) -> Iterator[tuple[Path, Axes]]:
        """The path and the axes of each leaf of the state."""
        return zip(self.state_paths, self.states, strict=True)

    @property
    def leaf_numbers(self) -> dict[Path, int]:
        """The number of each leaf of the parameters by its path."""
        return {path: number for number, path in enumerate(self.paths)}


class TraceLike(Protocol):
    """What a run of a traced program needs of a `Trace`; see there."""

    @property
    def program(self) -> Any: ...
    @property
    def equations(self) -> Mapping[ProgramPath, EquationAxes]: ...
    @property
    def constants(self) -> Mapping[ProgramPath, tuple[Axes, ...]]: ...
    @property
    def trips(self) -> Mapping[ProgramPath, Axis]: ...


class EquationTies(Ties):
    """An equation, and what it states of axes.

    Attributes:
      equation: the equation.
      operands: the axes of its operands.
    """

    def __init__(self, equation: Any, operands: Sequence[Axes], position: TracePosition):
        super().__init__(functools.partial(position.pin, equation))
        self.equation = equation
        self.operands = operands

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the equation."""
        return self.equation.params

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return shape_of(self.equation.outvars[0])

    def new_results(self) -> list[Axes]:
        """New axes for each result."""
        return new_results(self.equation)

    def pin_everything(self, reason: str) -> list[Axes]:
        """Pins the axes of all operands and results; returns those of the results."""
        results = self.new_results()
        for axes in (*self.operands, *results):
            self.pin_all(axes, reason)
        return results


def has_type_of(aval: Any, other: Any) -> bool:
    """Whether two values have the same shape and dtype."""
    return aval.shape == other.shape and aval.dtype == other.dtype


def new_results(equation: Any) -> list[Axes]:
    """New axes for each result of an equation."""
    results = []
    for variable in equation.outvars:
        results.append(new_axes(shape_of(variable)))
    return results


class Row(NamedTuple):
    """What is known of a primitive.

    Attributes:
      axes: what it says of axes; returns those of each result.
      fills: what it makes of removed channels: a rule of a `fills.EquationFills`.
      resized: how it runs on smaller operands: a rule of a `resizing.EquationCut` and these; `None` if it reads all
        sizes off its operands.
    """

    axes: Callable[[EquationTies], list[Axes]]
    fills: Callable[[Any], list[Any]]
    resized: Callable[[Any, list[Any]], list[Any]] | None = None
