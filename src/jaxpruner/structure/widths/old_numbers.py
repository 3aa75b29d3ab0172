"""Old numbers: those in a smaller program that were computed from an old width, such as `1 / width`."""

import collections
import dataclasses
import os
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import text_tables
from jaxpruner.structure.analysis import fills
from jaxpruner.structure.analysis.records import TracePosition
from jaxpruner.trace.program import ProgramPath


@dataclasses.dataclass(frozen=True, eq=False)
class OldNumber:
    """A number in the program that was, or may have been, computed from the old width of a group.

    Attributes:
      primitive: the operation that it is an operand of, or that makes it if it is a table.
      line: of the source.
      old: the number or table that `ChannelGraph.small_apply` keeps; `None` for a table that is not computed here.
      new: the number in a module built with the new widths; `None` if it is not known.
      groups: names of the groups whose widths meet in the operation.
      path: of the equation in the traced program.
      operand: its number among the operands; `None` for a result.

    >>> OldNumber('div', 'model.py:3', old=8.0, new=4.0, groups=('up[1]',)).is_table
    False
    """

    primitive: str
    line: str
    old: Any
    new: Any
    groups: tuple[str, ...]
    path: ProgramPath = dataclasses.field(default=(), repr=False)
    operand: int | None = dataclasses.field(default=None, repr=False)

    @property
    def is_table(self) -> bool:
        """Whether it is an array of more than one element."""
        return self.old is None or np.size(self.old) > 1


class OldValues(NamedTuple):
    """The first entries of an `OldNumber`, and which operand of its equation it is."""

    old: Any
    new: Any
    operand: int | None = None


def number_at(
    equation: Any, position: TracePosition, values: OldValues, groups: tuple[str, ...]
) -> OldNumber:
    """Makes the record of a number in an equation."""
    return OldNumber(
        primitive=equation.primitive.name,
        line=position.line(equation),
        old=values.old,
        new=values.new,
        groups=groups,
        path=position.path,
        operand=values.operand,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class OldNumbers:
    """The numbers of old widths in a smaller program. Made by `ChannelGraph.old_numbers`.

    Attributes:
      numbers: in the order of the program.
      is_compared: whether the program was compared with that of a module with the new widths. Otherwise numbers are
        listed that have the value of an old width, of its root, or of the inverse of either.
      other_difference: where the two programs differ in more than numbers; empty if they do not.

    >>> print(OldNumbers((OldNumber('div', 'model.py:3', 8.0, 4.0, ('up[1]',)),), is_compared=True))
    number  with new widths  times  operation  groups  line
    -------------------------------------------------------------
         8                4      1  div        up[1]   model.py:3
    """

    numbers: tuple[OldNumber, ...]
    is_compared: bool
    other_difference: str = ''

    def __str__(self) -> str:
        lines = []
        if self.numbers:
            lines.append(to_table(self.numbers))
        elif self.is_compared:
            lines.append('no number differs')
        else:
            lines.append('no number has the value of an old width')
        if self.numbers and not self.is_compared:
            lines.append(
                'these numbers have the value of an old width, and may come from it; with a module of the new widths, '
                'small_fn=…, the programs are compared'
            )
        if self.other_difference:
            lines.append(f'the programs differ in more than numbers: {self.other_difference}')
        return '\n'.join(lines)


_COLUMNS = (
    text_tables.Column('number', align='right'),
    text_tables.Column('with new widths', align='right'),
    text_tables.Column('times', align='right'),
    text_tables.Column('operation'),
    text_tables.Column('groups', overflow='wrap'),
    text_tables.Column('line', overflow='fold'),
)


def to_table(numbers: tuple[OldNumber, ...]) -> str:
    """The numbers as a table."""
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for number in numbers:
        old, new = _shorten(number.old), _shorten(number.new)
        groups = ', '.join(number.groups)
        line = _shorten_line(number.line)
        counts[old, new, number.primitive, groups, line] += 1
    rows = []
    for (old, new, *others), count in counts.items():
        rows.append((old, new, str(count), *others))
    return text_tables.to_text(_COLUMNS, rows)


def _shorten_line(line: str) -> str:
    """The file relative to `site-packages` or the working directory, and the line."""
    file_and_line, _, _ = line.partition(' ')
    _, _, in_packages = file_and_line.rpartition('site-packages/')
    return in_packages.removeprefix(f'{os.getcwd()}/')


def _shorten(value: Any) -> str:
    """A number, or the shape of a table."""
    if value is None:
        return 'table'
    if fills.is_key(value):
        return 'key'
    array = np.asarray(value)
    if array.size == 1:
        number = array.item()
        is_real = array.dtype.kind in 'fiu'
        return f'{number:.6g}' if is_real else str(number)
    return f'table {array.shape}'
