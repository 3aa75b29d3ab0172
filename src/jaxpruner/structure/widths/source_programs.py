"""Compares a traced model with a module that was built from source with smaller widths.

Both programs come from the same lines, so they have the same operations in the same order. They differ in the numbers
that Python computed from a width before tracing. The smaller program keeps the old ones. The comparison goes through
both programs side by side. Each operand is either a known number, or a value that has the same origin in both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpruner.structure.analysis.axes import Axes
from jaxpruner.structure.analysis.records import EquationAxes, Trace, TracePosition
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.rules import primitives, resizing
from jaxpruner.structure.widths.old_numbers import OldNumber, OldValues, number_at
from jaxpruner.structure.widths.program_sides import (
    Fixed,
    LiveEquation,
    Origins,
    Side,
    is_plain,
    is_same,
    live_equations,
    programs_inside,
)
from jaxpruner.trace.program import Program, ProgramPath, Scan, ShardMap, bind, inside

GroupsAt = Callable[[ProgramPath, OldValues], tuple[str, ...]]


class OtherDifferenceError(Exception):
    """The programs differ in more than numbers. The message says where."""

    def __init__(self, text: str, position: TracePosition, equation: Any = None):
        super().__init__(_locate(text, position, equation))


class Comparison:
    """Goes through two programs side by side.

    Args:
      trace: of the whole model.
      cut: the channels that stay.
      groups_at: path of an equation, and a number there -> names of the groups from whose widths it comes.

    Attributes:
      numbers: those that differ.
    """

    def __init__(self, trace: Trace, cut: Cut, groups_at: GroupsAt):
        self.trace = trace
        self.cut = cut
        self.numbers: list[OldNumber] = []
        self._groups_at = groups_at

    def run(self, source: Any) -> None:
        """Compares the whole program with that of the module. Raises OtherDifferenceError."""
        old = Program.of(self.trace.program)
        position = TracePosition.of_whole(self.trace.program)
        new = Side(Program.of(source), position.needed)
        self._compare_programs(old, new, position)

    def _compare_programs(self, old: Program, new: Side, position: TracePosition) -> None:
        old_jaxpr, new_jaxpr = old.jaxpr, new.program.jaxpr
        count = len(old_jaxpr.invars)
        if count != len(new_jaxpr.invars):
            raise OtherDifferenceError('another number of operands', position)
        kept_constants = self._kept_constants(old, position)
        old_origins = Origins(kept_constants, old_jaxpr.constvars)
        new_origins = Origins(new.program.constants, new_jaxpr.constvars)
        old_origins.note(old_jaxpr.invars, range(count))
        new_origins.note(new_jaxpr.invars, range(count))
        old_equations = live_equations(Side(old, position.needed))
        new_equations = live_equations(new)
        for old_live, new_live in zip(old_equations, new_equations, strict=False):
            at = position.at(old_live.number)._replace(needed=old_live.needed)
            self._compare_names(old_live, new_live, at)
            self._compare_operands(old_live, new_live, (old_origins, new_origins), at)
            self._compare_equations(old_live, new_live, at)
            results = _result_origins(old_live, new_live, at)
            old_origins.note(old_live.equation.outvars, results)
            new_origins.note(new_live.equation.outvars, results)
        if len(old_equations) != len(new_equations):
            counts = f'{len(old_equations)} operations in place of {len(new_equations)}'
            raise OtherDifferenceError(counts, position)
        old_results = list(map(old_origins.read, old_jaxpr.outvars))
        new_results = list(map(new_origins.read, new_jaxpr.outvars))
        _compare_results(old_results, new_results, position)

    def _kept_constants(self, old: Program, position: TracePosition) -> list[Any]:
        """The constants of the whole model, after the cut."""
        axes_of_constants = self.trace.constants[position.path]
        return list(map(self._kept, old.constants, axes_of_constants))

    def _kept(self, value: Any, axes: Axes) -> Any:
        """The part of a constant that stays; `None` if it differs between trips."""
        if self.cut.has_lists_along(axes):
            return None
        return self.cut.take(value, axes)

    def _compare_names(self, old: LiveEquation, new: LiveEquation, position: TracePosition) -> None:
        name = old.equation.primitive.name
        other = new.equation.primitive.name
        if name != other:
            raise OtherDifferenceError(f'{name} in place of {other}', position, old.equation)

    def _compare_operands(
        self,
        old: LiveEquation,
        new: LiveEquation,
        origins: tuple[Origins, Origins],
        position: TracePosition,
    ) -> None:
        old_variables, new_variables = old.equation.invars, new.equation.invars
        if len(old_variables) != len(new_variables):
            raise OtherDifferenceError('another number of operands', position, old.equation)
        old_origins, new_origins = origins
        pairs = zip(old_variables, new_variables, strict=True)
        for number, (old_variable, new_variable) in enumerate(pairs):
            before = old_origins.read(old_variable)
            after = new_origins.read(new_variable)
            if isinstance(before, Fixed) and isinstance(after, Fixed):
                if not is_same(before.value, after.value):
                    values = OldValues(before.value, after.value, number)
                    self._add(old.equation, position, values)
            elif before != after:
                raise OtherDifferenceError(f'another operand {number}', position, old.equation)

    def _add(self, equation: Any, position: TracePosition, values: OldValues) -> None:
        groups = self._groups_at(position.path, values)
        number = number_at(equation, position, values, groups)
        self.numbers.append(number)

    def _compare_equations(
        self, old: LiveEquation, new: LiveEquation, position: TracePosition
    ) -> None:
        """Compares the shapes of results, and the parameters or the programs inside."""
        self._compare_shapes(old, new, position)
        old_inside = inside(old.equation)
        new_inside = inside(new.equation)
        if isinstance(old_inside, ShardMap):
            return
        if old_inside is None or new_inside is None:
            self._compare_plain(old.equation, new.equation, position)
            return
        if isinstance(old_inside, Scan) and isinstance(new_inside, Scan):
            trips = self.trace.trips[position.path]
            is_same_length = self.cut.size(trips) == new_inside.length
            if not is_same_length or old_inside.reverse != new_inside.reverse:
                raise OtherDifferenceError('other trips', position, old.equation)
        old_sides = programs_inside(old_inside, old.needed)
        new_sides = programs_inside(new_inside, new.needed)
        sides = zip(old_sides, new_sides, strict=True)
        for number, (old_side, new_side) in enumerate(sides):
            within = position.inside(old.equation, number, old_side.needed)
            self._compare_programs(old_side.program, new_side, within)

    def _compare_shapes(
        self, old: LiveEquation, new: LiveEquation, position: TracePosition
    ) -> None:
        axes = self.trace.equations[position.path]
        results = zip(new.equation.outvars, axes.results, old.needed, strict=False)
        for variable, result_axes, needed in results:
            expected = self.cut.shape(result_axes)
            shape = tuple(variable.aval.shape)
            if needed and shape != expected:
                text = f'a result of shape {expected} in place of {shape}'
                raise OtherDifferenceError(text, position, old.equation)

    def _compare_plain(self, old: Any, new: Any, position: TracePosition) -> None:
        """Compares the parameters of two equations with no program inside, or the new values that they make."""
        axes = self.trace.equations[position.path]
        is_cut = self.cut.touches(axes.values)
        if is_cut and primitives.makes_from_nothing(old.primitive.name):
            self._compare_new_values(old, new, position, axes)
            return
        expected = dict(old.params)
        if is_cut:
            expected.update(self._resized_params(old, axes))
        for name, value in expected.items():
            other = new.params.get(name)
            # As text, since a NaN differs from itself.
            is_equal = value == other or repr(value) == repr(other)
            if is_plain(value) and is_plain(other) and not is_equal:
                raise OtherDifferenceError(f'{name}={value} in place of {other}', position, old)

    def _resized_params(self, equation: Any, axes: EquationAxes) -> dict[str, Any]:
        """The parameters that change with the sizes of the operands."""
        row = primitives.ROWS.get(equation.primitive.name)
        if row is None or row.resized is None:
            return {}
        operands = []
        for variable, axes_of_operand in zip(equation.invars, axes.operands, strict=True):
            shape = self.cut.shape(axes_of_operand)
            operands.append(jax.ShapeDtypeStruct(shape, variable.aval.dtype))
        parameters: Any = row.resized(_Parameters(equation, axes, self.cut), operands)
        return parameters

    def _compare_new_values(
        self, old: Any, new: Any, position: TracePosition, axes: EquationAxes
    ) -> None:
        """Compares new values such as `iota`, which the smaller program makes in the old size and then cuts."""
        if old.primitive.name == 'empty':
            return
        values = OldValues(None, None)
        if not old.invars:
            with jax.ensure_compile_time_eval():
                (whole,) = bind(old, ())
                (made,) = bind(new, ())
                kept = self._kept(whole, axes.results[0])
                values = OldValues(kept, np.asarray(made))
        if values.old is None or not is_same(values.old, values.new):
            self._add(old, position, values)


class _Parameters(resizing.EquationCut):
    """Returns the parameters that a primitive runs with on smaller operands, instead of running it."""

    __slots__ = ()

    def run(self, operands: Sequence[Any], **changed: Any) -> Any:
        return changed


def _locate(text: str, position: TracePosition, equation: Any) -> str:
    """Adds the line of the source to a difference."""
    if equation is None:
        if not position.callers:
            return text
        *callers, equation = position.callers
        position = position._replace(callers=tuple(callers))
    line = position.line(equation)
    return f'{text} at {equation.primitive.name} ({line})'


def _result_origins(
    old: LiveEquation, new: LiveEquation, position: TracePosition
) -> list[tuple[int, int]]:
    """The origins of the results of two equations, the same in both programs."""
    count = len(old.equation.outvars)
    if count != len(new.equation.outvars):
        raise OtherDifferenceError('another number of results', position, old.equation)
    return [(old.number, result) for result in range(count)]


def _compare_results(old: Sequence[Any], new: Sequence[Any], position: TracePosition) -> None:
    """Compares the origins of the results of two programs."""
    origins = zip(old, new, position.needed, strict=True)
    for number, (before, after, needed) in enumerate(origins):
        are_fixed = isinstance(before, Fixed) and isinstance(after, Fixed)
        is_equal = is_same(before.value, after.value) if are_fixed else before == after
        if needed and not is_equal:
            raise OtherDifferenceError(f'another result {number}', position)
