"""Plain text tables that fit a width, for what is printed without rich."""

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

# What tables fit by default: the width that terminals, log files and documents share.
WIDTH = 80
# A column that gives way keeps at least this many characters.
_LEAST_WIDTH = 8
# A column that wraps between words gives way before others, down to this many characters.
_WRAPPED_WIDTH = 16
_GAP = '  '
_ELLIPSIS = '…'
_SEPARATORS = '/.×'
_LEAST_LAYERS = 3  # that are put into one row
_MOST_RANGES = 8  # that a table names


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a text table."""

    heading: str
    align: Literal['left', 'right'] = 'left'
    # What happens where the table is too wide: the column keeps its texts whole, folds them behind a `/`, `.` or `×`
    # (names and shapes of leaves), or wraps them between words.
    overflow: Literal['keep', 'fold', 'wrap'] = 'keep'


def to_text(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
    width: int = WIDTH,
) -> str:
    """Lays out a table as lines of at most `width` characters, with the total as a last row below a rule.

    A line is longer only where the columns that keep their texts leave less than 8 characters for each of the others.

    >>> columns = [Column('leaf', overflow='fold'), Column('kept', align='right')]
    >>> print(to_text(columns, [['encoder/attention/kernel', '12'], ['bias', '4']], ['total', '16'], width=20))
    leaf        kept
    ----------------
    encoder/      12
    attention/
    kernel
    bias           4
    ----------------
    total         16
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


def group_layers(names: Sequence[str], alike: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """Puts rows of equal layers together, so that a table of a deep model has a row for each kind of leaf.

    Args:
      names: of all rows.
      alike: what else must be equal in rows that are put together, such as shape and dtype.

    Returns:
      For each row of the table its name and the indices of what it stands for. Three or more rows that are alike, and
      whose names differ in one number, are one: `'h.{0-2}.up'`. It stands where the first of them stood.

    >>> group_layers(['h.0.up', 'h.1.up', 'h.2.up', 'head'], ['8×8', '8×8', '8×8', '8×9'])
    [('h.{0-2}.up', [0, 1, 2]), ('head', [3])]
    """
    numbered: dict[Any, list[tuple[int, int]]] = {}
    for i, name in enumerate(names):
        for number in re.finditer('[0-9]+', name):
            key = name[: number.start()], name[number.end() :], alike[i]
            numbered.setdefault(key, []).append((int(number[0]), i))
    groups: dict[int, tuple[str, list[int]]] = {}  # by the index of the first row
    left = set(range(len(names)))
    # A name with two numbers may be of two groups: the larger one, or the one of the first number.
    for (before, after, _), members in sorted(numbered.items(), key=lambda item: -len(item[1])):
        members = sorted(member for member in members if member[1] in left)
        if len(members) >= _LEAST_LAYERS:
            numbers, indices = zip(*members, strict=True)
            layers = ranges(numbers).replace(' ', '')
            groups[min(indices)] = (f'{before}{{{layers}}}{after}', list(indices))
            left.difference_update(indices)
    for i in left:
        groups[i] = (names[i], [i])
    return [groups[i] for i in sorted(groups)]


def ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers, neighbours as ranges; of many ranges the first.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    bounds: list[list[int]] = []
    for number in numbers:
        if bounds and number == bounds[-1][1] + 1:
            bounds[-1][1] = number
        else:
            bounds.append([number, number])
    texts = [str(low) if low == high else f'{low}-{high}' for low, high in bounds[:_MOST_RANGES]]
    return ', '.join(texts) + (', …' if len(bounds) > _MOST_RANGES else '')


def span(numbers: Sequence[float], write: Callable[[float], str]) -> str:
    """Writes the least and the largest of some numbers, or one of them if they look alike.

    >>> span([0.5, 0.75, 0.6], '{:.0%}'.format), span([0.5, 0.5], '{:.0%}'.format)
    ('50%-75%', '50%')
    """
    return '-'.join(dict.fromkeys([write(min(numbers)), write(max(numbers))]))


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
    if column.overflow == 'keep':
        return [[text] for text in texts]
    broken = _wrapped if column.overflow == 'wrap' else _folded
    return [broken(text, width) for text in texts]


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
