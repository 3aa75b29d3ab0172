"""Finds where numbers meet the widths of groups: next to a cut axis, or after a sum over one.

A mean over channels is `sum / width`, a softmax of attention takes `query / sqrt(width)`. Python computes such a number
before anything is traced, so that the program does not tell where it comes from. What it tells is which cut axes the
other operand has, or was summed over last. A number with the value of such a width, of its root, or of the inverse of
either may come from it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.analysis import fills
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms
from jaxpruner.structure.analysis.live_evaluator import LiveEvaluator
from jaxpruner.structure.analysis.records import Place, Trace
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.rules import elementwise, primitives, resizing
from jaxpruner.structure.widths.old_numbers import OldNumber, OldValues, number_at
from jaxpruner.uses.bodies import Cond, Program, ProgramPath, Scan, While, bind


class Width(NamedTuple):
    """A width that a cut changes.

    Attributes:
      old: before the cut.
      new: after it.
      atoms: the cut atoms that lie along it.
    """

    old: int
    new: int
    atoms: frozenset[Axis]


Widths = frozenset[Width]


class Known(NamedTuple):
    """What is known of a value.

    Attributes:
      number: that all its elements are; `None` if there is none.
      summed: the widths over which it was summed last.
      made_at: paths of the equations that computed the number.
    """

    number: Any = None
    summed: Widths = frozenset()
    made_at: frozenset[ProgramPath] = frozenset()


def _root(width: float) -> float:
    return math.sqrt(width)


def _fourth_root(width: float) -> float:
    return width**0.25


def _one_less(width: float) -> float:
    return width - 1.0


_FORMS: tuple[Callable[[float], float], ...] = (float, _root, _fourth_root, _one_less)
_MEETS = frozenset(('div', 'mul', 'pow'))
_NUMBERS = elementwise.COMPUTING | {'broadcast_in_dim', 'reshape', 'squeeze', 'copy'}


class WidthFlow(LiveEvaluator[Known]):
    """Goes through a traced model.

    Args:
      trace: of the model.
      cut: what stays of it.
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
        jaxpr = self.trace.program.jaxpr
        place = Place(needed=(True,) * len(jaxpr.outvars))
        inputs = [Known()] * len(jaxpr.invars)
        self.visit_program(Program.of(self.trace.program), inputs, place)

    def constant(self, value: Any, aval: Any) -> Known:
        fill = fills.of_constant(value, ((),) * len(aval.shape))
        return Known(fill.everywhere)

    def visit_program(
        self, program: Program, inputs: Sequence[Known], position: Place
    ) -> list[Known]:
        jaxpr = program.jaxpr
        axes_of_constants = self.trace.constants[position.path]
        for variable, value, axes in zip(
            jaxpr.constvars, program.constants, axes_of_constants, strict=True
        ):
            is_table = self.constant(value, variable.aval).number is None
            if is_table and self.cut.touches([axes]):
                self._tables[id(variable)] = axes
        return super().visit_program(program, inputs, position)

    def unneeded(self, equation: Any) -> list[Known]:
        return [Known()] * len(equation.outvars)

    def visit_needed(self, equation: Any, operands: list[Known], position: Place) -> list[Known]:
        axes = self.trace.equations[position.path]
        widths = self._widths_of((*axes.operands, *axes.results))
        widths = widths.union(*[known.summed for known in operands])
        self.widths[position.path] = widths
        for known in operands:
            for path in known.made_at:
                self.widths[path] |= widths
        for number, variable in enumerate(equation.invars):
            axes_of_table = self._tables.pop(id(variable), None)
            if axes_of_table is not None:
                values = OldValues(None, None, number)
                self._add(equation, position, values, self._widths_of([axes_of_table]))
        return super().visit_needed(equation, operands, position)

    def visit_plain(self, equation: Any, operands: list[Known], position: Place) -> list[Known]:
        axes = self.trace.equations[position.path]
        name = equation.primitive.name
        row = primitives.ROWS.get(name)
        if row is not None and row.resized is resizing.from_nothing:
            self._check_table(equation, axes.results[0], position)
        summed = frozenset[Width]().union(*[known.summed for known in operands])
        if name.startswith('reduce_') and 'axes' in equation.params:
            reduced = [axes.operands[0][i] for i in equation.params['axes']]
            summed = self._sum_over(reduced) or summed
        elif name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            summed = self._sum_over([axes.operands[0][i] for i in contracted])
        if name in _NUMBERS and all(known.number is not None for known in operands):
            made_at = frozenset((position.path,)).union(*[known.made_at for known in operands])
            return [Known(self._computed(equation, operands), summed, made_at)]
        if name in _MEETS:
            self._check_operands(equation, operands, position)
        return [Known(summed=summed)] * len(equation.outvars)

    def _computed(self, equation: Any, operands: Sequence[Known]) -> Any:
        if equation.primitive.name not in elementwise.COMPUTING:
            return operands[0].number
        numbers = [known.number for known in operands]
        return fills.computed(equation, numbers, [True] * len(operands))

    def _check_operands(self, equation: Any, operands: Sequence[Known], place: Place) -> None:
        """Whether a known operand has the value of a width that the other one has, or was summed over."""
        axes = self.trace.equations[place.path]
        for i, known in enumerate(operands):
            if known.number is None or not np.isfinite(known.number):
                continue
            others = axes.operands[:i] + axes.operands[i + 1 :]
            widths = self._widths_of(others).union(*[each.summed for each in operands])
            dtype = equation.invars[i].aval.dtype
            sources = _sources_of(known.number, widths, dtype)
            if sources:
                width, new = sources[0]
                values = OldValues(known.number, new, i)
                self._add(equation, place, values, frozenset([width]))

    def _check_table(self, equation: Any, axes: Axes, place: Place) -> None:
        """What is made for the old width, and cut along: differs from what is made for the new width."""
        if equation.primitive.name == 'empty' or not self.cut.touches([axes]):
            return
        table = None
        if equation.primitive.name == 'iota':
            numbered = axes[equation.params['dimension']]
            if not self.cut.touches([(numbered,)]):
                return
            if not self.cut.has_lists_along(axes):
                with jax.ensure_compile_time_eval():
                    table = np.asarray(self.cut.take(bind(equation, ())[0], axes))
                kept = np.unique(table)
                if np.array_equal(kept, np.arange(len(kept))):
                    return
        self._add(equation, place, OldValues(table, None), self._widths_of([axes]))

    def groups_at(self, path: ProgramPath, values: OldValues) -> tuple[str, ...]:
        """Names of the groups from whose widths a number comes: of all that meet there, unless its values tell."""
        widths = self.widths.get(path, frozenset())
        if values.new is not None and np.size(values.old) == np.size(values.new) == 1:
            dtype = np.float32
            for width, new in _sources_of(np.asarray(values.old).item(), widths, dtype):
                if math.isclose(new, np.asarray(values.new).item(), rel_tol=1e-6):
                    return self._names_of(frozenset([width]))
        return self._names_of(widths)

    def _add(self, equation: Any, place: Place, values: OldValues, widths: Widths) -> None:
        self.numbers.append(number_at(equation, place, values, self._names_of(widths)))

    def visit_scan(self, scan: Scan, operands: list[Known], position: Place) -> list[Known]:
        inside = position.in_scan(scan)
        constants, carried, sliced = scan.split(operands)
        carried = [Known(summed=known.summed) for known in carried]
        return self.visit_program(scan.body, [*constants, *carried, *sliced], inside)

    def visit_while(self, loop: While, operands: list[Known], position: Place) -> list[Known]:
        condition_constants, body_constants, carried = loop.split(operands)
        carried = [Known(summed=known.summed) for known in carried]
        in_condition, in_body = position.in_condition(loop), position.in_body(loop)
        self.visit_program(loop.condition, condition_constants + carried, in_condition)
        return self.visit_program(loop.body, body_constants + carried, in_body)

    def visit_cond(self, cond: Cond, operands: list[Known], position: Place) -> list[Known]:
        results = [Known()] * len(cond.equation.outvars)
        for results_of_branch in self.visit_branches(cond, operands, position):
            for i, known in enumerate(results_of_branch):
                results[i] = Known(None, results[i].summed | known.summed)
        return results

    def _widths_of(self, values: Iterable[Axes]) -> Widths:
        """The cut axes of some values, and the cut atoms along them."""
        found: set[Width] = set()
        for axes in values:
            for axis in axes:
                if self.cut.size(axis) == axis.size:
                    continue
                found.add(self._width([axis]))
                for each in atoms(axis):
                    if self.cut.size(each) != each.size:
                        found.add(self._width([each]))
        return frozenset(found)

    def _sum_over(self, axes: Sequence[Axis]) -> Widths:
        """The widths of a sum over some axes: of all of them together, and of each."""
        found = self._widths_of([tuple(axes)])
        return found | {self._width(axes)} if found else found

    def _width(self, axes: Iterable[Axis]) -> Width:
        old, new = 1, 1
        found: set[Axis] = set()
        for axis in axes:
            old *= axis.size
            new *= self.cut.size(axis)
            found.update(each for each in atoms(axis) if each in self._names)
        return Width(old, new, frozenset(found))

    def _names_of(self, widths: Widths) -> tuple[str, ...]:
        found = frozenset[Axis]().union(*[width.atoms for width in widths])
        return tuple([name for each, name in self._names.items() if each in found])


def _sources_of(number: Any, widths: Widths, dtype: Any) -> list[tuple[Width, float]]:
    """The widths that a number may come from, the largest first, and the number for each new width."""
    # A number was rounded to the dtype of the operation before it got here.
    tolerance = 4 * float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
    sources = []
    for width in sorted(widths, key=lambda width: -width.old):
        for form in _FORMS:
            before, after = form(width.old), form(width.new)
            if min(before, after) <= 0:
                continue
            if math.isclose(number, before, rel_tol=tolerance):
                sources.append((width, after))
            if math.isclose(number, 1 / before, rel_tol=tolerance):
                sources.append((width, 1 / after))
    return sources
