"""Compares a traced model with one that was built from source with smaller widths.

Both programs come from the same lines, so that they have the same operations in the same order. What differs is what
Python computed from a width before anything was traced: the numbers that the smaller program keeps. The two programs
are gone through side by side. An operand is either a number that is known, or a value that has the same origin in both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes
from jaxpruner.structure.analysis.records import EquationAxes, Place, Trace
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.structure.rules import primitives, resizing
from jaxpruner.structure.widths.old_numbers import OldNumber, OldValues, number_at
from jaxpruner.uses import liveness
from jaxpruner.uses.bodies import (
    Call,
    Cond,
    Program,
    ProgramPath,
    Scan,
    ShardMap,
    While,
    bind,
    inside,
)

GroupsAt = Callable[[ProgramPath, OldValues], tuple[str, ...]]
Needed = tuple[bool, ...]


class OtherDifferenceError(Exception):
    """The programs differ in more than numbers; the text says where."""


class _Fixed(NamedTuple):
    """An operand that is known while tracing."""

    value: Any


class _Side(NamedTuple):
    """One of two programs, or of two equations."""

    program: Program
    needed: Needed


class Comparison:
    """Goes through two programs side by side.

    Args:
      trace: of the whole model.
      cut: what stays of it.
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
        """Compares the whole program with that of the model built from source; raises OtherDifferenceError."""
        old = Program.of(self.trace.program)
        needed = (True,) * len(old.jaxpr.outvars)
        self._compare_programs(old, _Side(Program.of(source), needed), Place(needed=needed))

    def _compare_programs(self, old: Program, new: _Side, place: Place) -> None:
        new_program = new.program
        if len(old.jaxpr.invars) != len(new_program.jaxpr.invars):
            raise OtherDifferenceError(_where('another number of operands', place))
        old_values = self._origins(old, place)
        new_values = _origins_of(new_program.jaxpr.constvars, new_program.constants)
        for number, pair in enumerate(zip(old.jaxpr.invars, new_program.jaxpr.invars, strict=True)):
            old_values[id(pair[0])] = new_values[id(pair[1])] = number
        old_equations = list(_live_equations(old, place.needed))
        new_equations = list(_live_equations(new_program, new.needed))
        for (number, equation, needed), (_, other, other_needed) in zip(
            old_equations, new_equations, strict=False
        ):
            at = place.at(number)._replace(needed=needed)
            if equation.primitive.name != other.primitive.name:
                names = f'{equation.primitive.name} in place of {other.primitive.name}'
                raise OtherDifferenceError(_where(names, at, equation))
            old_operands = [_read(old_values, variable) for variable in equation.invars]
            new_operands = [_read(new_values, variable) for variable in other.invars]
            self._compare_operands(equation, (old_operands, new_operands), at)
            self._compare_equations(equation, other, at, other_needed)
            if len(equation.outvars) != len(other.outvars):
                raise OtherDifferenceError(_where('another number of results', at, equation))
            for result, pair in enumerate(zip(equation.outvars, other.outvars, strict=True)):
                origin = (number, result)
                old_values[id(pair[0])] = new_values[id(pair[1])] = origin
        if len(old_equations) != len(new_equations):
            counts = f'{len(old_equations)} operations in place of {len(new_equations)}'
            raise OtherDifferenceError(_where(counts, place))
        self._compare_results(old, new, place, (old_values, new_values))

    def _origins(self, old: Program, place: Place) -> dict[int, Any]:
        """Where the constants of the whole model come from, cut along."""
        constants = []
        axes_of_constants = self.trace.constants[place.path]
        for value, axes in zip(old.constants, axes_of_constants, strict=True):
            constants.append(self._kept(value, axes))
        return _origins_of(old.jaxpr.constvars, constants)

    def _kept(self, value: Any, axes: Axes) -> Any:
        """The part of a constant that stays; `None` where it differs from trip to trip."""
        return None if self.cut.has_lists_along(axes) else self.cut.take(value, axes)

    def _compare_operands(
        self, equation: Any, operands: tuple[Sequence[Any], Sequence[Any]], place: Place
    ) -> None:
        if len(operands[0]) != len(operands[1]):
            raise OtherDifferenceError(_where('another number of operands', place, equation))
        for number, (old, new) in enumerate(zip(*operands, strict=True)):
            if isinstance(old, _Fixed) and isinstance(new, _Fixed):
                if not _is_same(old.value, new.value):
                    self._add(equation, place, OldValues(old.value, new.value, number))
            elif old != new:
                raise OtherDifferenceError(_where(f'another operand {number}', place, equation))

    def _add(self, equation: Any, place: Place, values: OldValues) -> None:
        groups = self._groups_at(place.path, values)
        self.numbers.append(number_at(equation, place, values, groups))

    def _compare_equations(self, old: Any, new: Any, place: Place, new_needed: Needed) -> None:
        axes = self.trace.equations[place.path]
        shapes = zip(new.outvars, axes.results, place.needed, strict=False)
        for variable, result_axes, needed in shapes:
            expected = self.cut.shape(result_axes)
            if needed and tuple(variable.aval.shape) != expected:
                shape = tuple(variable.aval.shape)
                text = f'a result of shape {expected} in place of {shape}'
                raise OtherDifferenceError(_where(text, place, old))
        old_inside, new_inside = inside(old), inside(new)
        if isinstance(old_inside, ShardMap):
            return
        if old_inside is None or new_inside is None:
            self._compare_plain(old, new, place, axes)
            return
        if isinstance(old_inside, Scan) and isinstance(new_inside, Scan):
            trips = self.cut.size(self.trace.trips[place.path])
            if (trips, old_inside.reverse) != (new_inside.length, new_inside.reverse):
                raise OtherDifferenceError(_where('other trips', place, old))
        sides = zip(
            _programs_inside(old_inside, place.needed),
            _programs_inside(new_inside, new_needed),
            strict=True,
        )
        for number, (old_side, new_side) in enumerate(sides):
            within = place.inside(old, number, old_side.needed)
            self._compare_programs(old_side.program, new_side, within)

    def _compare_plain(self, old: Any, new: Any, place: Place, axes: EquationAxes) -> None:
        """Parameters of two equations with no program inside, and what they make from nothing."""
        is_cut = self.cut.touches((*axes.operands, *axes.results))
        row = primitives.ROWS.get(old.primitive.name)
        is_new = row is not None and row.resized is resizing.from_nothing
        if is_cut and is_new:
            self._compare_new_values(old, new, place, axes)
            return
        expected = dict(old.params)
        if is_cut and row is not None and row.resized is not None:
            operands = []
            for variable, each in zip(old.invars, axes.operands, strict=True):
                shape = self.cut.shape(each)
                operands.append(jax.ShapeDtypeStruct(shape, variable.aval.dtype))
            expected.update(row.resized(_Parameters(old, axes, self.cut), operands))
        for name, value in expected.items():
            other = new.params.get(name)
            # As text, since a NaN differs from itself.
            is_same = value == other or repr(value) == repr(other)
            if _is_plain(value) and _is_plain(other) and not is_same:
                raise OtherDifferenceError(
                    _where(f'{name}={value} in place of {other}', place, old)
                )

    def _compare_new_values(self, old: Any, new: Any, place: Place, axes: EquationAxes) -> None:
        """Values made from nothing, such as `iota`: the smaller program makes the whole and takes what stays."""
        if old.primitive.name == 'empty':
            return
        values = OldValues(None, None)
        if not old.invars:
            with jax.ensure_compile_time_eval():
                kept = self._kept(bind(old, ())[0], axes.results[0])
                values = OldValues(kept, np.asarray(bind(new, ())[0]))
        if values.old is None or not _is_same(values.old, values.new):
            self._add(old, place, values)

    def _compare_results(
        self,
        old: Program,
        new: _Side,
        place: Place,
        values: tuple[Mapping[int, Any], Mapping[int, Any]],
    ) -> None:
        pairs = zip(old.jaxpr.outvars, new.program.jaxpr.outvars, place.needed, strict=True)
        for number, (variable, other, needed) in enumerate(pairs):
            first, second = _read(values[0], variable), _read(values[1], other)
            is_fixed = isinstance(first, _Fixed) and isinstance(second, _Fixed)
            same = _is_same(first.value, second.value) if is_fixed else first == second
            if needed and not same:
                raise OtherDifferenceError(_where(f'another result {number}', place))


class _Parameters(resizing.SmallEquation):
    """Tells with which parameters a primitive runs on smaller operands, in place of running it."""

    __slots__ = ()

    def run(self, operands: Sequence[Any], **changed: Any) -> Any:
        return changed


def _where(text: str, place: Place, equation: Any = None) -> str:
    """A difference and its line of the source."""
    if equation is None:
        if not place.callers:
            return text
        *callers, equation = place.callers
        place = place._replace(callers=tuple(callers))
    return f'{text} at {equation.primitive.name} ({place.line(equation)})'


def _origins_of(variables: Sequence[Any], constants: Sequence[Any]) -> dict[int, Any]:
    origins: dict[int, Any] = {}
    for variable, value in zip(variables, constants, strict=True):
        origins[id(variable)] = _Fixed(value)
    return origins


def _read(values: Mapping[int, Any], variable: Any) -> Any:
    if isinstance(variable, Literal):
        return _Fixed(variable.val)
    return values.get(id(variable))


def _live_equations(program: Program, needed: Needed) -> Iterator[tuple[int, Any, Needed]]:
    """The equations that have a part in the needed results: their number, and which results are needed."""
    live = liveness.live(program.jaxpr, needed)
    pairs = zip(program.jaxpr.eqns, live.results, strict=True)
    for number, (equation, results) in enumerate(pairs):
        if any(results):
            yield number, equation, results


def _programs_inside(equation: Any, needed: Needed) -> list[_Side]:
    """The programs inside an equation, with the results of each that are needed."""
    match equation:
        case Call():
            return [_Side(equation.program, needed)]
        case Scan():
            return [_Side(equation.body, liveness.needed_of_scan_body(equation, needed))]
        case While():
            body = _Side(equation.body, liveness.needed_of_while_body(equation, needed))
            return [_Side(equation.condition, (True,)), body]
        case Cond():
            return [_Side(branch, needed) for branch in equation.branches]
    raise AssertionError(f'{equation} has programs that are not known')


_PLAIN = (bool, int, float, str, np.dtype)


def _is_plain(value: Any) -> bool:
    """Whether a parameter of a primitive is numbers and words alone, which can be compared."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_same(first: Any, second: Any) -> bool:
    """Whether two constants are equal; what is traced, or no array of numbers, cannot be told apart."""
    if first is None or second is None:
        return first is second
    if tree_lib.is_traced(first) or tree_lib.is_traced(second):
        return first is second
    if jnp.issubdtype(jnp.result_type(first), jax.dtypes.extended):
        return first is second or bool(
            jnp.array_equal(jax.random.key_data(first), jax.random.key_data(second))
        )
    one, other = np.asarray(first), np.asarray(second)
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=True))
