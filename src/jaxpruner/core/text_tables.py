"""Plain text tables that fit a width, for what is printed without rich."""

import collections
import dataclasses
import itertools
import textwrap
from collections.abc import Sequence
from typing import Literal

# What tables fit by default: the width that terminals, log files and documents share.
WIDTH = 80
# A column that gives way keeps at least this many characters.
_LEAST_WIDTH = 8
# A column that wraps between words gives way before others, down to this many characters.
_WRAPPED_WIDTH = 16
_GAP = '  '
_ELLIPSIS = '…'
_SEPARATORS = '/.×'


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a text table."""

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
    """Lays out a table as lines of at most `width` characters, with the total as a last row below a rule.

    A line is longer only where the columns that keep their texts leave less than 8 characters for each of the others.

    >>> columns = [Column('leaf', overflow='middle'), Column('kept', align='right')]
    >>> print(to_text(columns, [['encoder/attention/kernel', '12'], ['bias', '4']], ['total', '16'], width=20))
    leaf            kept
    --------------------
    encoder…kernel    12
    bias               4
    --------------------
    total             16
    """
    body = [*rows] if total is None else [*rows, total]
    headings = [column.heading for column in columns]
    widths = _fitting_widths(columns, [headings, *body], width)
    texts_of_columns = list(zip(*body, strict=True)) or [()] * len(columns)
    cells = []  # for each column the lines of each of its texts
    for i, column in enumerate(columns):
        column_cells = _cells(column, texts_of_columns[i], widths[i])
        cells.append(column_cells)
        widths[i] = max(map(len, itertools.chain([column.heading], *column_cells)))
    rule = '-' * (sum(widths) + len(_GAP) * (len(widths) - 1))
    lines = [_line(columns, headings, widths), rule]
    for number, row_cells in enumerate(zip(*cells, strict=True)):
        if number == len(rows):
            lines.append(rule)
        for texts in itertools.zip_longest(*row_cells, fillvalue=''):
            lines.append(_line(columns, texts, widths))
    return '\n'.join(lines)


def shorten(text: str, width: int) -> str:
    """Takes the middle out of a text that is longer than `width` characters, one of them an ellipsis.

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
    """Fits the width of each column: those that wrap are narrowed first, then the widest, until the table fits."""

    def order(i: int) -> tuple[bool, int]:
        return columns[i].overflow == 'wrap' and widths[i] > _WRAPPED_WIDTH, widths[i]

    widths = []
    least_widths = []
    for i, column in enumerate(columns):
        widest = max(len(row[i]) for row in rows)
        widths.append(widest)
        is_fixed = column.overflow == 'keep'
        least_widths.append(widest if is_fixed else max(_LEAST_WIDTH, len(column.heading)))
    room = width - len(_GAP) * (len(columns) - 1)
    while sum(widths) > room:
        narrowable = [i for i, least in enumerate(least_widths) if widths[i] > least]
        if not narrowable:
            break
        widths[max(narrowable, key=order)] -= 1
    return widths


def _cells(column: Column, texts: Sequence[str], width: int) -> list[list[str]]:
    """Breaks each text of a column into lines."""
    counts = collections.Counter(shorten(text, width) for text in set(texts))
    cells = []
    for text in texts:
        short = shorten(text, width)
        match column.overflow:
            case 'keep':
                lines = [text]
            case 'wrap':
                lines = _wrapped(text, width)
            case 'middle' if counts[short] == 1:
                lines = [short]
            case _:  # also of two names that look alike without their middles
                lines = _folded(text, width)
        cells.append(lines)
    return cells


def _wrapped(text: str, width: int) -> list[str]:
    """Breaks a text between words; a word that is too long is folded, as a name is."""
    lines = []
    for line in textwrap.wrap(text, width, break_long_words=False):
        lines += _folded(line, width)
    return lines or ['']


def _folded(name: str, width: int) -> list[str]:
    """Breaks a name or a shape into lines, behind a separator where there is one."""
    lines = []
    while len(name) > width:
        end = max(name.rfind(separator, 0, width) for separator in _SEPARATORS) + 1 or width
        lines.append(name[:end])
        name = name[end:]
    return [*lines, name]


def _line(columns: Sequence[Column], texts: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for i, column in enumerate(columns):
        pad = str.rjust if column.align == 'right' else str.ljust
        padded.append(pad(texts[i], widths[i]))
    return _GAP.join(padded).rstrip()
