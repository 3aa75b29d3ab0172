"""Plain text tables that fit a width, for what is printed without rich."""

import collections
import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Literal

# What tables fit by default: the width that terminals, log files and documents share.
WIDTH = 80
# A column that gives way keeps at least this many characters.
_LEAST_WIDTH = 8
_GAP = '  '
_ELLIPSIS = '…'
_SEPARATORS = '/.×'


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a text table.

    >>> Column('kept', align='right').overflow
    'keep'
    """

    heading: str
    align: Literal['left', 'right'] = 'left'
    # What happens where the table is too wide: the column keeps its texts whole, takes the middle out of them (names of
    # leaves), folds them behind a `/`, `.` or `×`, or wraps them between words.
    overflow: Literal['keep', 'middle', 'fold', 'wrap'] = 'keep'


def to_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    width: int = WIDTH,
) -> str:
    """Lays out a table as plain text.

    Args:
      columns: the columns; those that do not `keep` their texts give way where the table is too wide.
      rows: texts, one for each column.
      total: a last row, below a line; `None` for none.
      width: characters that a line may have.

    Returns:
      The table's lines, without a line break at the end. A line is longer than `width` only where the columns that keep
      their texts leave less than 8 characters for each of the others.

    >>> columns = [Column('leaf', overflow='middle'), Column('kept', align='right')]
    >>> print(to_text(columns, [['encoder/attention/kernel', '12'], ['bias', '4']], ['total', '16'], width=20))
    leaf            kept
    --------------------
    encoder…kernel    12
    bias               4
    --------------------
    total             16
    """
    body = [list(row) for row in rows]
    if total is not None:
        body.append(list(total))
    headings = [column.heading for column in columns]
    widths = _fitting_widths(columns, [headings, *body], width)
    cells = []  # for each column: the lines of each of its texts
    for i, column in enumerate(columns):
        cells.append(_cells(column, [row[i] for row in body], widths[i]))
    widths = [_widest(column, texts) for column, texts in zip(columns, cells, strict=True)]
    rule = '-' * (sum(widths) + len(_GAP) * (len(widths) - 1))
    lines = [_line(columns, headings, widths), rule]
    for number in range(len(body)):
        if total is not None and number == len(rows):
            lines.append(rule)
        lines += _row_lines(columns, [texts[number] for texts in cells], widths)
    return '\n'.join(lines)


def shorten(text: str, width: int) -> str:
    """Takes the middle out of a text that is too long.

    Args:
      text: one line.
      width: characters that are left, one of them an ellipsis.

    >>> shorten('encoder/layer_0/attention/kernel', 20)
    'encoder/la…on/kernel'
    """
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    start = width - 1 - end
    return text[:start] + _ELLIPSIS + text[len(text) - end :]


def _fitting_widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> list[int]:
    """The width of each column, where the widest that gives way is narrowed until the table fits."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    flexible = [i for i, column in enumerate(columns) if column.overflow != 'keep']
    room = width - len(_GAP) * (len(columns) - 1)
    while sum(widths) > room:
        narrowable = [i for i in flexible if widths[i] > max(_LEAST_WIDTH, len(columns[i].heading))]
        if not narrowable:
            break
        widest = max(narrowable, key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


def _cells(column: Column, texts: Sequence[str], width: int) -> list[list[str]]:
    """The lines of each text of a column."""
    if column.overflow == 'keep':
        return [[text] for text in texts]
    if column.overflow == 'fold':
        return [_folded(text, width) for text in texts]
    if column.overflow == 'wrap':
        return [textwrap.wrap(text, width) or [''] for text in texts]
    # Two names that look alike without their middles stay whole, on several lines.
    meanings = collections.Counter(shorten(text, width) for text in set(texts))
    cells = []
    for text in texts:
        short = shorten(text, width)
        cells.append([short] if meanings[short] == 1 else _folded(text, width))
    return cells


def _folded(name: str, width: int) -> list[str]:
    """A name or a shape on several lines, broken behind a separator where there is one."""
    lines = []
    while len(name) > width:
        end = max(name.rfind(separator, 0, width) for separator in _SEPARATORS) + 1 or width
        lines.append(name[:end])
        name = name[end:]
    return [*lines, name]


def _widest(column: Column, cells: Sequence[Sequence[str]]) -> int:
    lines = [line for cell in cells for line in cell]
    return max(len(line) for line in [column.heading, *lines])


def _row_lines(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], widths: Sequence[int]
) -> list[str]:
    lines = []
    for number in range(max(len(cell) for cell in cells)):
        texts = [cell[number] if number < len(cell) else '' for cell in cells]
        lines.append(_line(columns, texts, widths))
    return lines


def _line(columns: Sequence[Column], texts: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, text, width in zip(columns, texts, widths, strict=True):
        padded.append(text.rjust(width) if column.align == 'right' else text.ljust(width))
    return _GAP.join(padded).rstrip()
