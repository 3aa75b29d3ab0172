"""N:M sparsity: of each m consecutive weights along an axis the best n are kept."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from jaxpruner.core.named_fields import NamedFields
from jaxpruner.sparsity_types.base import axis_in, check_whole

# The axis along which a model sums, in whatever layout its framework has.
INPUT_AXIS = 'input'

# n:m in whole numbers; a wrong sign is refused by `NByM`
_PATTERN = re.compile(r'\s*([+-]?\d+)\s*:\s*([+-]?\d+)\s*')


class PartialGroupError(ValueError):
    """m does not divide what groups lie along; the message is the place and the reason, `'; '`, and a remedy."""


@dataclasses.dataclass(frozen=True)
class NByM(NamedFields):
    """Of each `m` consecutive weights along `axis`, the best `n` are kept. Config strings: `'nm_2,4'`, `'2:4'`.

    Attributes:
      n: weights kept in a group.
      m: weights in a group.
      axis: the axis along which groups lie; a tuple of axes, which are then one long axis, the last one innermost; or
        `'input'` for what the model sums over, which `uses.with_input_axes` replaces for each leaf.
      allow_partial: where m does not divide the axis, the last group is shorter and keeps min(n, its length); else
        such a shape is refused.

    Raises:
      ValueError: n > m, or one of them is not positive.
      TypeError: a value is no whole number.

    >>> NByM(2, 4)
    NByM(n=2, m=4, axis=-1, allow_partial=False)
    >>> n, m, axis = NByM(2, 4)._replace(axis=0)
    >>> n, m, axis
    (2, 4, 0)
    """

    _fields = ('n', 'm', 'axis')  # those of JaxPruner, which its users unpack

    n: int
    m: int
    axis: Any = -1
    allow_partial: bool = False

    def __post_init__(self):
        check_whole('n', self.n, 1)
        check_whole('m', self.m, 1)
        is_text = isinstance(self.axis, str) and self.axis != INPUT_AXIS
        if is_text or self.axis == () or isinstance(self.axis, list):
            raise TypeError(
                f"axis must be a whole number, a tuple of some, or 'input', got {self.axis!r}"
            )
        if self.axis != INPUT_AXIS:
            for axis in self.axes:
                check_whole('axis', axis)
        if self.n > self.m:
            raise ValueError(
                f'N:M sparsity keeps n of m weights, so n must not exceed m, got n={self.n}, m={self.m}'
            )

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axis, or the axes, as a tuple."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def line_length(self, shape: Sequence[int]) -> int:
        """Counts the weights of a line of a parameter of this shape; a line is cut into groups.

        Args:
          shape: the parameter's shape.

        >>> NByM(2, 4).line_length((4, 6, 8)), NByM(2, 4, axis=(0, 1)).line_length((4, 6, 8))
        (8, 24)
        """
        return math.prod(shape[axis] for axis in self.axes)

    def kept_in_line(self, length: int) -> int:
        """Counts the weights of a line that are kept.

        Args:
          length: of the line.

        >>> NByM(2, 4).kept_in_line(8), NByM(2, 4).kept_in_line(9)
        (4, 5)
        """
        return length // self.m * self.n + min(self.n, length % self.m)

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Refuses a shape whose axis does not divide into groups of m.

        Args:
          shape: the parameter's shape.
          where: the parameter's path, for the message.

        Raises:
          ValueError: there is no such axis, it is named twice, or m does not divide it.

        >>> NByM(2, 4).check_shape((3, 8), 'dense/kernel')
        """
        if self.partial_group(shape, where) and not self.allow_partial:
            raise PartialGroupError(
                f'{where}: shape {tuple(shape)} has length {self.line_length(shape)} along {self.axis_words}, which '
                f'm={self.m} '
                f"does not divide; choose another axis or m, or leave the leaf dense: sparsity_type={{'{where}': None, "
                "'*': …}"
            )

    @property
    def axis_words(self) -> str:
        """The axis in words, such as `axis -1`."""
        if self.axis == INPUT_AXIS:
            return 'the inputs'
        if isinstance(self.axis, tuple):
            return f'axes {", ".join(map(str, self.axis))} as one'
        return f'axis {self.axis}'

    def partial_group(self, shape: Sequence[int], where: str) -> int:
        """Computes the length of the last group where m does not divide the axis, else 0.

        Args:
          shape: the parameter's shape.
          where: the parameter's path, for the message.

        Raises:
          ValueError: there is no such axis, or it is not known yet.

        >>> NByM(2, 4).partial_group((3, 10), 'dense/kernel')
        2
        """
        if self.axis == INPUT_AXIS:
            raise ValueError(
                f'{where}: {self} names no axis yet; the trace of the model tells over which one it sums: '
                'sparsity_type=uses.with_input_axes(…, uses.param_uses(apply_fn, params, inputs))'
            )
        axes = {axis_in(axis, shape, where) % len(shape) for axis in self.axes}
        if len(axes) < len(self.axes):
            raise ValueError(f'{where}: {self} names an axis of shape {tuple(shape)} twice')
        return self.line_length(shape) % self.m


def parse_n_by_m(pattern: Any, axis: int | None = None) -> NByM:
    """Reads an N:M pattern as JAX-Pruning writes it; a partial last group is allowed.

    Args:
      pattern: `(n, m)`, `'n:m'`, or an `NByM`.
      axis: the axis along which groups lie; `None` for that of the `NByM`, or the last.

    Returns:
      The validated type.

    Raises:
      TypeError: the pattern is none of these.
      ValueError: n > m, one of them is not positive, or an `NByM` has another axis.

    >>> parse_n_by_m((2, 4)) == parse_n_by_m('2:4') == NByM(2, 4, allow_partial=True)
    True
    """
    if isinstance(pattern, NByM):
        if pattern.axis == INPUT_AXIS or isinstance(pattern.axis, tuple):
            raise ValueError(
                f'{pattern} is for the parameters of a model whose uses are known; give a number as its axis'
            )
        if axis not in (None, pattern.axis):
            raise ValueError(
                f'{pattern} lies along axis {pattern.axis}, but axis {axis} is asked for; give one of them'
            )
        return dataclasses.replace(pattern, allow_partial=True)
    if isinstance(pattern, str) and (match := _PATTERN.fullmatch(pattern)):
        pattern = tuple(map(int, match.groups()))
    if not isinstance(pattern, list | tuple) or len(pattern) != 2:
        raise TypeError(
            f"an N:M pattern is written (n, m) or 'n:m', such as (2, 4), got {pattern!r}"
        )
    return NByM(*pattern, axis=-1 if axis is None else axis, allow_partial=True)
