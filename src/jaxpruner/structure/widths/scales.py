"""Follows factors through a program: what becomes of each value if parameters and numbers are scaled.

A product has the product of its operands' factors, a root the root, a sum needs the same factor in all of its operands,
and `exp` takes none. So the logarithm of each value's factor is a sum of unknowns, one for each parameter, and the
program states linear equations between them:

    norm = x * rsqrt(mean(x * x) / D + eps) * scale

If `D` becomes half of what it was, the mean is twice as large. The sum asks for twice the `eps`, the product is smaller
by `sqrt(2)`, and is as it was once `scale` is larger by `sqrt(2)`. `Equations.solve` finds that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxpruner.structure.analysis import fills
from jaxpruner.structure.analysis.live_evaluator import LiveEvaluator
from jaxpruner.structure.analysis.records import Place, Trace
from jaxpruner.structure.widths.old_numbers import OldNumber
from jaxpruner.uses.bodies import Cond, Program, Scan, While


class Unknown(NamedTuple):
    """An unknown factor.

    Attributes:
      kind: `'leaf'` of a parameter, `'number'` of one that differs, `'constant'` of one that is added, `'carried'` of
        what a loop carries.
      key: which one.
    """

    kind: str
    key: Any


class Scale(NamedTuple):
    """The logarithm of a value's factor: a sum of unknowns, each times a coefficient.

    Attributes:
      terms: the coefficients.
      takes_any: of zeros and of infinities, which stay as they are with any factor.
    """

    terms: Mapping[Unknown, float]
    takes_any: bool = False


ONE = Scale({})
ANY = Scale({}, takes_any=True)


def _sum(scales: Iterable[tuple[Scale, float]]) -> Scale:
    """The sum of some scales, each times a coefficient."""
    terms: dict[Unknown, float] = {}
    for scale, coefficient in scales:
        if scale.takes_any:
            return ANY
        for unknown, value in scale.terms.items():
            terms[unknown] = terms.get(unknown, 0.0) + coefficient * value
    return Scale({unknown: value for unknown, value in terms.items() if value})


_SAME = frozenset(
    """
    abs broadcast_in_dim conj convert_element_type copy copy_p cumsum cummax cummin dynamic_slice gather imag
    mesh_cast name neg pbroadcast pvary real reduce_max reduce_min reduce_precision reduce_sum reduce_window_max
    reduce_window_min reduce_window_sum reshape reshard rev sharding_constraint slice split squeeze stop_gradient tile
    transpose
    """.split()
)
_EQUAL = frozenset(
    """
    add add_any clamp concatenate dynamic_update_slice max min pad scatter-add scatter_add select_n stack sub
    """.split()
)
_COMPARING = frozenset('eq ge gt le lt ne'.split())
_NONE = frozenset('argmax argmin iota is_finite sign'.split())
_POWERS = {'sqrt': 0.5, 'rsqrt': -0.5, 'cbrt': 1 / 3, 'square': 2.0}
_ADDING = frozenset(('add', 'sub'))


class ScaleFlow(LiveEvaluator[Scale]):
    """Goes through a program and states equations between factors.

    Args:
      trace: of the model.
      numbers: those that differ in a program of the new widths.

    Attributes:
      rows: scales that are to be one.
      constants: for each unknown of a constant where it stands.
    """

    def __init__(self, trace: Trace, numbers: Sequence[OldNumber]):
        self.trace = trace
        self.rows: list[Scale] = []
        self.constants: dict[Unknown, tuple[Any, Place, int]] = {}
        self._numbers: dict[Any, Unknown] = {}
        for number, each in enumerate(numbers):
            self._numbers[each.path, each.operand] = Unknown('number', number)

    def run(self) -> None:
        """Goes through the whole program; its results keep their factor of one."""
        jaxpr = self.trace.program.jaxpr
        inputs = [ONE] * len(jaxpr.invars)
        for number in range(len(self.trace.leaves)):
            if _is_inexact(jaxpr.invars[number]):
                inputs[number] = Scale({Unknown('leaf', number): 1.0})
        place = Place(needed=(True,) * len(jaxpr.outvars))
        self._fix(self.visit_program(Program.of(self.trace.program), inputs, place))

    def constant(self, value: Any, aval: Any) -> Scale:
        number = fills.of_constant(value, ((),) * len(aval.shape)).everywhere
        if number is None:
            return ONE
        return ANY if number == 0 or not np.isfinite(number) else ONE

    def unneeded(self, equation: Any) -> list[Scale]:
        return [ANY] * len(equation.outvars)

    def visit_needed(self, equation: Any, operands: list[Scale], position: Place) -> list[Scale]:
        for i, variable in enumerate(equation.invars):
            known = self._numbers.get((position.path, i))
            if known is not None:
                operands[i] = Scale({known: 1.0})
            elif equation.primitive.name in _ADDING and isinstance(variable, Literal):
                operands[i] = self._constant_added(equation, operands[i], position, i)
        return super().visit_needed(equation, operands, position)

    def visit_plain(self, equation: Any, operands: list[Scale], position: Place) -> list[Scale]:
        name = equation.primitive.name
        result = ONE
        if name in _SAME and _is_inexact(equation.outvars[0]):
            result = operands[0]
        elif name in _EQUAL:
            result = self._equate(operands[1:] if name == 'select_n' else _values(name, operands))
        elif name in _COMPARING:
            self._equate(operands)
        elif name in ('mul', 'dot_general', 'conv_general_dilated'):
            result = _sum([(operands[0], 1.0), (operands[1], 1.0)])
        elif name == 'div':
            result = _sum([(operands[0], 1.0), (operands[1], -1.0)])
        elif name in _POWERS:
            result = _sum([(operands[0], _POWERS[name])])
        elif name == 'integer_pow':
            result = _sum([(operands[0], float(equation.params['y']))])
        elif name == 'pow' and isinstance(equation.invars[1], Literal) and operands[1] is ONE:
            result = _sum([(operands[0], float(equation.invars[1].val))])
        elif name == 'optimization_barrier':
            return operands
        elif name not in _NONE:
            self._fix(operands)
        return [result] * len(equation.outvars)

    def visit_scan(self, scan: Scan, operands: list[Scale], position: Place) -> list[Scale]:
        inside = position.in_scan(scan)
        constants, carried, sliced = scan.split(operands)
        before = self._carried(carried, scan.first_carried, scan.equation, position)
        results = self.visit_program(scan.body, [*constants, *before, *sliced], inside)
        after, stacked = scan.split_results(results)
        self._equate_each(before, after)
        return before + stacked

    def visit_while(self, loop: While, operands: list[Scale], position: Place) -> list[Scale]:
        condition_constants, body_constants, carried = loop.split(operands)
        in_condition, in_body = position.in_condition(loop), position.in_body(loop)
        before = self._carried(carried, loop.first_carried, loop.equation, position)
        self._fix(self.visit_program(loop.condition, condition_constants + before, in_condition))
        after = self.visit_program(loop.body, body_constants + before, in_body)
        self._equate_each(before, after)
        return before

    def visit_cond(self, cond: Cond, operands: list[Scale], position: Place) -> list[Scale]:
        branches = self.visit_branches(cond, operands, position)
        return [self._equate(scales) for scales in zip(*branches, strict=True)]

    def _constant_added(self, equation: Any, scale: Scale, place: Place, operand: int) -> Scale:
        """A constant that is added, such as an epsilon: the module may be built with another one."""
        if scale.takes_any:
            return scale
        unknown = Unknown('constant', (place.path, operand))
        self.constants[unknown] = equation, place, operand
        return Scale({unknown: 1.0})

    def _carried(
        self, carried: Sequence[Scale], first: int, equation: Any, place: Place
    ) -> list[Scale]:
        """What a loop carries has one factor in all of its turns."""
        before = []
        for i, scale in enumerate(carried):
            variable = equation.invars[first + i]
            unknown = Unknown('carried', (place.path, i))
            before.append(Scale({unknown: 1.0}) if _is_inexact(variable) else ONE)
            self._equate([before[i], scale])
        return before

    def _equate_each(self, first: Sequence[Scale], second: Sequence[Scale]) -> None:
        for one, other in zip(first, second, strict=True):
            self._equate([one, other])

    def _equate(self, scales: Sequence[Scale]) -> Scale:
        """All values have one factor, which is returned."""
        fixed = [scale for scale in scales if not scale.takes_any]
        for other in fixed[1:]:
            self.rows.append(_sum([(fixed[0], 1.0), (other, -1.0)]))
        return fixed[0] if fixed else ANY

    def _fix(self, scales: Sequence[Scale]) -> None:
        """These values have a factor of one."""
        for scale in scales:
            if scale.terms:
                self.rows.append(scale)


def _is_inexact(variable: Any) -> bool:
    """Whether a value can be scaled; whole numbers are rounded."""
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _values(name: str, operands: Sequence[Scale]) -> Sequence[Scale]:
    """The operands of an operation that are values, and no indices."""
    if name == 'dynamic_update_slice':
        return operands[:2]
    return (operands[0], operands[2]) if name.startswith('scatter') else operands
