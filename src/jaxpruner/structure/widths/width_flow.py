"""Finds where numbers meet the widths of groups: beside a cut axis, or after a sum over one.

A mean over channels is `sum / width`, and attention takes `query / sqrt(width)`. Python computes such a number before
tracing, so the program does not say where it comes from. But the program says which cut axes the other operand has, or
was last summed over. A number may come from such a width if it equals the width, its root, or the inverse of either.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner.structure.analysis import fills
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, drop, pick
from jaxpruner.structure.analysis.live_evaluator import LiveEvaluator
from jaxpruner.structure.analysis.records import EquationAxes, Trace, TracePosition
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.rules import elementwise, primitives
from jaxpruner.structure.widths.old_numbers import OldNumber, OldValues, number_at
from jaxpruner.structure.widths.width_sources import Width, Widths, sources_of
from jaxpruner.trace.program import Cond, Program, ProgramPath, Scan, While, bind


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
      number: that all its elements equal; `None` if there is none.
      summed: the widths that it was last summed over.
      made_at: paths of the equations that computed the number.
    """

    number: Any = None
    summed: Widths = frozenset()
    made_at: frozenset[ProgramPath] = frozenset()


Values = list[Facts]


_MEETS = frozenset(('div', 'mul', 'pow'))
_KEEPS_NUMBERS = frozenset(('broadcast_in_dim', 'reshape', 'squeeze', 'copy'))


class WidthFlow(LiveEvaluator[Facts]):
    """Goes through a traced model.

    Args:
      trace: of the model.
      cut: the channels that stay.
      names: atom of a group -> its name.

    Attributes:
      widths: path of an equation -> the widths that meet there.
      numbers: those that may come from an old width.
    """

    def __init__(self, trace: Trace, cut: Cut, names: Mapping[Axis, str]):
        self.trace = trace
        self.cut = cut
        self.widths: dict[ProgramPath, Widths] = {}
        self.numbers: list[OldNumber] = []
        self._names = names
        self._tables: dict[int, Axes] = {}  # by `id` of their variables, until they are used

    def run(self) -> None:
        """Goes through the whole program."""
        program = self.trace.program
        inputs = [Facts()] * len(program.jaxpr.invars)
        self.visit_whole(program, inputs)

    def constant(self, value: Any, aval: Any) -> Facts:
        no_candidates = ((),) * len(aval.shape)
        fill = fills.of_constant(value, no_candidates)
        return Facts(fill.everywhere)

    def visit_program(
        self, program: Program, inputs: Sequence[Facts], position: TracePosition
    ) -> Values:
        self._note_tables(program, position)
        return super().visit_program(program, inputs, position)

    def _note_tables(self, program: Program, position: TracePosition) -> None:
        """Notes the constants that are cut and are not one number."""
        variables = program.jaxpr.constvars
        axes_of_constants = self.trace.constants[position.path]
        entries = zip(variables, program.constants, axes_of_constants, strict=True)
        for variable, value, axes in entries:
            is_table = self.constant(value, variable.aval).number is None
            if is_table and self.cut.shrinks(axes):
                self._tables[id(variable)] = axes

    def unneeded(self, equation: Any, operands: Any) -> Values:
        return _nothing_of(equation)

    def visit_equation(self, equation: Any, operands: Values, position: TracePosition) -> Values:
        axes = self.trace.equations[position.path]
        widths = self._widths_of(axes.values) | _last_sums(operands)
        self.widths[position.path] = widths
        for path in _made_at(operands):
            self.widths[path] |= widths
        self._list_tables(equation, position)
        return super().visit_equation(equation, operands, position)

    def _list_tables(self, equation: Any, position: TracePosition) -> None:
        """Lists the tables among the operands, each at its first use."""
        for number, variable in enumerate(equation.invars):
            axes = self._tables.pop(id(variable), None)
            if axes is not None:
                values = OldValues(None, None, number)
                widths = self._widths_of([axes])
                self._add(equation, position, values, widths)

    def visit_plain(self, equation: Any, operands: Values, position: TracePosition) -> Values:
        axes = self.trace.equations[position.path]
        name = equation.primitive.name
        if primitives.makes_from_nothing(name):
            self._check_table(equation, axes.results[0], position)
        summed = self._summed_by(equation, axes, operands)
        if _makes_number(name, operands):
            number = _number_made(equation, operands)
            made_at = _made_at(operands) | {position.path}
            return [Facts(number, summed, made_at)]
        if name in _MEETS:
            self._check_operands(equation, operands, position)
        return [Facts(summed=summed)] * len(equation.outvars)

    def _summed_by(self, equation: Any, axes: EquationAxes, operands: Values) -> Widths:
        """The widths that the results were last summed over, in this equation or before it."""
        name = equation.primitive.name
        before = _last_sums(operands)
        if name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            return self._sum_over(pick(axes.operands[0], contracted))
        if name.startswith('reduce_') and 'axes' in equation.params:
            reduced = pick(axes.operands[0], equation.params['axes'])
            return self._sum_over(reduced) or before
        return before

    def _check_operands(self, equation: Any, operands: Values, position: TracePosition) -> None:
        """Lists an operand that equals a width of the other operand, or one that it was last summed over."""
        axes = self.trace.equations[position.path]
        summed = _last_sums(operands)
        for i, facts in enumerate(operands):
            if facts.number is None or not np.isfinite(facts.number):
                continue
            others = drop(axes.operands, [i])
            widths = self._widths_of(others) | summed
            dtype = equation.invars[i].aval.dtype
            sources = sources_of(facts.number, widths, dtype)
            if sources:
                width, new = sources[0]
                values = OldValues(facts.number, new, i)
                self._add(equation, position, values, frozenset([width]))

    def _check_table(self, equation: Any, axes: Axes, position: TracePosition) -> None:
        """Lists a table that is made for the old width, unless its kept part equals one for the new width."""
        name = equation.primitive.name
        if name == 'empty' or not self.cut.shrinks(axes):
            return
        kept = None
        if name == 'iota':
            numbered = axes[equation.params['dimension']]
            if not self.cut.shortens(numbered):
                return
            if not self.cut.has_lists_along(axes):
                kept = self._kept_of_table(equation, axes)
                if _counts_up(kept):
                    return
        widths = self._widths_of([axes])
        self._add(equation, position, OldValues(kept, None), widths)

    def _kept_of_table(self, equation: Any, axes: Axes) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            (table,) = bind(equation, ())
            return np.asarray(self.cut.take(table, axes))

    def groups_at(self, path: ProgramPath, values: OldValues) -> tuple[str, ...]:
        """Names of the groups from whose widths a number comes. Unless its values decide, all that meet there."""
        widths = self.widths.get(path, frozenset())
        sizes = np.size(values.old), np.size(values.new)
        if values.new is not None and sizes == (1, 1):
            old = np.asarray(values.old).item()
            new = np.asarray(values.new).item()
            for source in sources_of(old, widths, np.float32):
                if math.isclose(source.new, new, rel_tol=1e-6):
                    return self._names_of([source.width])
        return self._names_of(widths)

    def _add(
        self, equation: Any, position: TracePosition, values: OldValues, widths: Widths
    ) -> None:
        names = self._names_of(widths)
        number = number_at(equation, position, values, names)
        self.numbers.append(number)

    def visit_scan(self, scan: Scan, operands: Values, position: TracePosition) -> Values:
        _, carried, slices = scan.split(operands)
        return self.visit_scan_body(scan, operands, _sums_alone(carried), slices, position)

    def visit_while(self, loop: While, operands: Values, position: TracePosition) -> Values:
        _, _, carried = loop.split(operands)
        carried = _sums_alone(carried)
        self.visit_condition(loop, operands, carried, position)
        return self.visit_loop_body(loop, operands, carried, position)

    def visit_cond(self, cond: Cond, operands: Values, position: TracePosition) -> Values:
        results = _nothing_of(cond.equation)
        for results_of_branch in self.visit_branches(cond, operands, position):
            for i, facts in enumerate(results_of_branch):
                summed = results[i].summed | facts.summed
                results[i] = Facts(summed=summed)
        return results

    def _widths_of(self, values: Iterable[Axes]) -> Widths:
        """The widths of the cut axes of some values, and of the cut atoms along them."""
        widths: set[Width] = set()
        for axes in values:
            for axis in filter(self.cut.shortens, axes):
                widths.add(self._width([axis]))
                for atom in filter(self.cut.shortens, atoms(axis)):
                    widths.add(self._width([atom]))
        return frozenset(widths)

    def _sum_over(self, axes: Axes) -> Widths:
        """The widths of a sum over some axes: of all together, and of each."""
        widths = self._widths_of([axes])
        if widths:
            widths |= {self._width(axes)}
        return widths

    def _width(self, axes: Iterable[Axis]) -> Width:
        old, new = 1, 1
        atoms_of_groups: set[Axis] = set()
        for axis in axes:
            old *= axis.size
            new *= self.cut.size(axis)
            atoms_of_groups.update(atoms(axis))
        atoms_of_groups.intersection_update(self._names)
        return Width(old, new, frozenset(atoms_of_groups))

    def _names_of(self, widths: Iterable[Width]) -> tuple[str, ...]:
        """The names of the groups along some widths, in the order of the groups."""
        along: set[Axis] = set()
        for width in widths:
            along |= width.atoms
        names = []
        for atom, name in self._names.items():
            if atom in along:
                names.append(name)
        return tuple(names)


def _nothing_of(equation: Any) -> Values:
    return [Facts()] * len(equation.outvars)


def _last_sums(values: Iterable[Facts]) -> Widths:
    """The widths that some values were last summed over."""
    widths: set[Width] = set()
    for facts in values:
        widths |= facts.summed
    return frozenset(widths)


def _made_at(values: Iterable[Facts]) -> frozenset[ProgramPath]:
    """The paths of the equations that computed some numbers."""
    paths: set[ProgramPath] = set()
    for facts in values:
        paths |= facts.made_at
    return frozenset(paths)


def _sums_alone(carried: Iterable[Facts]) -> Values:
    """The facts about carried values in every trip of a loop: their sums, but no numbers."""
    return [Facts(summed=facts.summed) for facts in carried]


def _makes_number(name: str, operands: Iterable[Facts]) -> bool:
    """Whether an equation computes a number from numbers."""
    is_followed = name in elementwise.COMPUTING or name in _KEEPS_NUMBERS
    return is_followed and all(facts.number is not None for facts in operands)


def _number_made(equation: Any, operands: Sequence[Facts]) -> Any:
    if equation.primitive.name in _KEEPS_NUMBERS:
        return operands[0].number
    numbers = [facts.number for facts in operands]
    are_literals = [True] * len(operands)
    return fills.computed(equation, numbers, are_literals)


def _counts_up(table: np.ndarray) -> bool:
    """Whether a table has the numbers 0, 1, 2 and so on, without a gap."""
    numbers = np.unique(table)
    return np.array_equal(numbers, np.arange(len(numbers)))
