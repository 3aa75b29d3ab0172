"""Follows factors through a program: how each value is scaled if parameters and numbers are scaled.

The factor of a product is the product of its operands' factors, and that of a root is the root. A sum needs the same
factor in all operands, and `exp` needs a factor of one. So the logarithm of each factor is a sum of unknowns, such as
one for each parameter, and the program states linear equations between the unknowns:

    norm = x * rsqrt(mean(x * x) / D + eps) * scale

If `D` is halved, the mean is doubled. Then the sum needs `eps` to be doubled, and the product shrinks by `sqrt(2)`. It
is the same as before if `scale` grows by `sqrt(2)`. `folding` finds that.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxpruner.structure.analysis import fills
from jaxpruner.structure.analysis.live_evaluator import LiveEvaluator
from jaxpruner.structure.analysis.records import Trace, TracePosition
from jaxpruner.structure.widths.old_numbers import OldNumber
from jaxpruner.trace.program import Cond, ProgramPath, Scan, While


class Unknown(NamedTuple):
    """An unknown factor.

    Attributes:
      role: whether it is the factor of a parameter's leaf, of a number that differs, of a constant that is added, or of
        a value that a loop carries.
      key: which of these it is.
    """

    role: Literal['leaf', 'number', 'constant', 'carried']
    key: Any


class Scale(NamedTuple):
    """The logarithm of a value's factor: a sum of unknowns, each times a coefficient.

    Attributes:
      terms: the coefficients.
      takes_any: whether the value may have any factor, since zeros and infinities stay the same with each.
    """

    terms: Mapping[Unknown, float]
    takes_any: bool = False

    @classmethod
    def of(cls, unknown: Unknown) -> 'Scale':
        """An unknown factor by itself."""
        return cls({unknown: 1.0})

    def to_the(self, power: float) -> 'Scale':
        """The factor of a power of the value."""
        return _combined(self, power, ONE, 0.0)

    def times(self, other: 'Scale') -> 'Scale':
        """The factor of a product of two values."""
        return _combined(self, 1.0, other, 1.0)

    def over(self, other: 'Scale') -> 'Scale':
        """The factor of a quotient of two values."""
        return _combined(self, 1.0, other, -1.0)


ONE = Scale({})
ANY = Scale({}, takes_any=True)


def _combined(first: Scale, coefficient: float, second: Scale, other: float) -> Scale:
    """The sum of two scales, each times a coefficient."""
    if first.takes_any or second.takes_any:
        return ANY
    terms: dict[Unknown, float] = {}
    for scale, weight in ((first, coefficient), (second, other)):
        for unknown, value in scale.terms.items():
            before = terms.get(unknown, 0.0)
            terms[unknown] = before + weight * value
    nonzero = {}
    for unknown, value in terms.items():
        if value:
            nonzero[unknown] = value
    return Scale(nonzero)


class Constant(NamedTuple):
    """A constant that a module may be built with another value of.

    Attributes:
      equation: that adds it.
      position: of the equation.
      operand: its number among the operands.
    """

    equation: Any
    position: TracePosition
    operand: int


_SAME = frozenset(
    """
    abs broadcast_in_dim conj convert_element_type copy cumsum cummax cummin dynamic_slice gather imag
    mesh_cast name neg pbroadcast pvary real reduce_max reduce_min reduce_precision reduce_sum reduce_window_max
    reduce_window_min reduce_window_sum reshape reshard rev sharding_constraint slice split squeeze stop_gradient tile
    transpose unstack
    """.split()
)
_EQUAL = frozenset(
    """
    add add_any clamp concatenate dynamic_update_slice max min pad scatter-add select_n stack sub
    """.split()
)
_COMPARING = frozenset('eq ge gt le lt ne'.split())
_NONE = frozenset('argmax argmin iota is_finite sign'.split())
_PRODUCTS = frozenset('conv_general_dilated dot_general mul'.split())
_POWERS = {'sqrt': 0.5, 'rsqrt': -0.5, 'cbrt': 1 / 3, 'square': 2.0}
_ADDING = frozenset(('add', 'sub'))

Scales = list[Scale]


class ScaleFlow(LiveEvaluator[Scale]):
    """Goes through a program and states equations between factors.

    Args:
      trace: of the model.
      numbers: those that differ in a program of the new widths.

    Attributes:
      rows: scales that have to be one.
      constants: unknown of a constant -> the constant.
    """

    def __init__(self, trace: Trace, numbers: Sequence[OldNumber]):
        self.trace = trace
        self.rows: Scales = []
        self.constants: dict[Unknown, Constant] = {}
        self._numbers: dict[tuple[ProgramPath, int | None], Unknown] = {}
        for i, number in enumerate(numbers):
            self._numbers[number.path, number.operand] = Unknown('number', i)

    def run(self) -> None:
        """Goes through the whole program; its results keep their factor of one."""
        variables = self.trace.program.jaxpr.invars
        inputs = [ONE] * len(variables)
        for number in range(len(self.trace.leaves)):
            if _is_inexact(variables[number]):
                inputs[number] = Scale.of(Unknown('leaf', number))
        results = self.visit_whole(self.trace.program, inputs)
        self._fix(results)

    def constant(self, value: Any, aval: Any) -> Scale:
        no_candidates = ((),) * len(aval.shape)
        number = fills.of_constant(value, no_candidates).everywhere
        if number is None:
            return ONE
        stays_itself = number == 0 or not np.isfinite(number)
        return ANY if stays_itself else ONE

    def unneeded(self, equation: Any, operands: Any) -> Scales:
        return [ANY] * len(equation.outvars)

    def visit_equation(self, equation: Any, operands: Scales, position: TracePosition) -> Scales:
        adds = equation.primitive.name in _ADDING
        for i, variable in enumerate(equation.invars):
            number = self._numbers.get((position.path, i))
            if number is not None:
                operands[i] = Scale.of(number)
            elif adds and isinstance(variable, core.Literal) and not operands[i].takes_any:
                # The module may be built with another constant, such as an epsilon.
                unknown = Unknown('constant', (position.path, i))
                self.constants[unknown] = Constant(equation, position, i)
                operands[i] = Scale.of(unknown)
        return super().visit_equation(equation, operands, position)

    def visit_plain(self, equation: Any, operands: Scales, position: TracePosition) -> Scales:
        if equation.primitive.name == 'optimization_barrier':
            return operands
        result = self._scale_result(equation, operands)
        return [result] * len(equation.outvars)

    def _scale_result(self, equation: Any, operands: Scales) -> Scale:
        """The factor of the results. States the equations that the operation needs between its operands."""
        name = equation.primitive.name
        first = operands[0] if operands else ONE
        if name in _SAME and _is_inexact(equation.outvars[0]):
            return first
        if name in _EQUAL:
            return self._equate(_values_among(name, operands))
        if name in _PRODUCTS:
            return first.times(operands[1])
        if name == 'div':
            return first.over(operands[1])
        power = _power_of(equation, operands)
        if power is not None:
            return first.to_the(power)
        if name in _COMPARING:
            self._equate(operands)
        elif name not in _NONE:
            self._fix(operands)
        return ONE

    def visit_scan(self, scan: Scan, operands: Scales, position: TracePosition) -> Scales:
        _, carried, slices = scan.split(operands)
        variables = scan.equation.invars[scan.first_carried :]
        before = self._carried(carried, variables, position)
        results = self.visit_scan_body(scan, operands, before, slices, position)
        after, stacked = scan.split_results(results)
        self._equate_each(before, after)
        return before + stacked

    def visit_while(self, loop: While, operands: Scales, position: TracePosition) -> Scales:
        _, _, carried = loop.split(operands)
        variables = loop.equation.invars[loop.first_carried :]
        before = self._carried(carried, variables, position)
        again = self.visit_condition(loop, operands, before, position)
        self._fix(again)
        after = self.visit_loop_body(loop, operands, before, position)
        self._equate_each(before, after)
        return before

    def visit_cond(self, cond: Cond, operands: Scales, position: TracePosition) -> Scales:
        branches = self.visit_branches(cond, operands, position)
        results = zip(*branches, strict=True)
        return list(map(self._equate, results))

    def _carried(
        self, carried: Scales, variables: Sequence[Any], position: TracePosition
    ) -> Scales:
        """Gives each carried value one factor for all trips of a loop."""
        before = []
        for i, scale in enumerate(carried):
            scale_inside = ONE
            if _is_inexact(variables[i]):
                unknown = Unknown('carried', (position.path, i))
                scale_inside = Scale.of(unknown)
            self._equate([scale_inside, scale])
            before.append(scale_inside)
        return before

    def _equate_each(self, first: Scales, second: Scales) -> None:
        for pair in zip(first, second, strict=True):
            self._equate(pair)

    def _equate(self, scales: Sequence[Scale]) -> Scale:
        """States that values have one factor, and returns it."""
        scalable = [scale for scale in scales if not scale.takes_any]
        if not scalable:
            return ANY
        first, *others = scalable
        for other in others:
            self.rows.append(first.over(other))
        return first

    def _fix(self, scales: Iterable[Scale]) -> None:
        """States that values have a factor of one."""
        for scale in scales:
            if scale.terms:
                self.rows.append(scale)


def _is_inexact(variable: Any) -> bool:
    """Whether a value can be scaled, which whole numbers cannot."""
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _power_of(equation: Any, operands: Scales) -> float | None:
    """The power to which an operation raises its first operand; `None` for other operations."""
    name = equation.primitive.name
    if name == 'integer_pow':
        return float(equation.params['y'])
    if name == 'pow':
        exponent = equation.invars[1]
        is_own_constant = isinstance(exponent, core.Literal) and operands[1] is ONE
        return float(exponent.val) if is_own_constant else None
    return _POWERS.get(name)


def _values_among(name: str, operands: Scales) -> Scales:
    """The operands of an operation without indices and predicates."""
    if name == 'select_n':
        return operands[1:]
    if name == 'dynamic_update_slice':
        return operands[:2]
    if name.startswith('scatter'):
        return [operands[0], operands[2]]
    return operands
