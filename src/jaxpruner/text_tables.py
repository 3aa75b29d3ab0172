"""Plain text tables that fit a width, for plans and reports; they need nothing but Python."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

# What tables fit by default: the width that terminals, log files and documents share.
WIDTH = 80
_GAP = '  '
_LEAST_WIDTH = 8  # of a column that gives way
_LEAST_SENTENCE = 16  # down to which sentences give way before names do
# The number of a layer: a part of a name, or its end behind `_`.
_LAYER = re.compile(r'(?:(?<=[./_])|^)[0-9]+(?=[./]|$)')
_LEAST_LAYERS = 3  # that are put into one row
_MOST_RANGES = 8  # that a table names
# Lines break behind spaces, `/`, `×` and the `.` of names, but not that of numbers.
_BREAK = re.compile(r'(?<= )(?! )|(?<=[/×])|(?<=\D\.)')


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a text table."""

    heading: str
    align: Literal['left', 'right'] = 'left'
    # What happens where the table is too wide: the column keeps its texts whole, or breaks names and shapes of leaves
    # ('fold') or sentences ('wrap'), which give way first.
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
    texts = [[column.heading for column in columns], *rows, *([] if total is None else [total])]
    texts = [[printable(text) for text in row] for row in texts]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        narrowable = {}
        for i, column in enumerate(columns):
            if column.overflow != 'keep' and widths[i] > _LEAST_WIDTH:
                is_long_sentence = column.overflow == 'wrap' and widths[i] > _LEAST_SENTENCE
                narrowable[i] = (is_long_sentence, widths[i])
        if not narrowable:
            break
        widths[max(narrowable, key=narrowable.__getitem__)] -= 1

    def broken(i: int, text: str) -> list[str]:
        if len(text) <= widths[i]:
            return [text]
        lines, fits = [''], f'.{{1,{widths[i]}}}'
        for part in _BREAK.split(text):
            # A part that is too long by itself breaks behind `_`, or else anywhere.
            for piece in re.findall(f'{fits} *$|{fits}(?<=_)|{fits}', part):
                if len(lines[-1] + piece.rstrip()) > widths[i]:
                    lines.append('')
                lines[-1] += piece
        return [line.rstrip() for line in lines]

    cells = [[broken(i, text) for i, text in enumerate(row)] for row in texts]
    widths = [max(map(len, itertools.chain(*column))) for column in zip(*cells, strict=True)]
    rule = '-' * (sum(widths) + len(_GAP) * (len(widths) - 1))

    def line(texts: Sequence[str]) -> str:
        pads = [str.rjust if column.align == 'right' else str.ljust for column in columns]
        padded = [pad(text, size) for pad, text, size in zip(pads, texts, widths, strict=True)]
        return _GAP.join(padded).rstrip()

    lines = []
    for number, row in enumerate(cells):
        if number > len(rows):
            lines.append(rule)
        lines += map(line, itertools.zip_longest(*row, fillvalue=''))
        if not number:
            lines.append(rule)
    return '\n'.join(lines)


def printable(text: str) -> str:
    """Escapes letters that would move the cursor or change colours.

    >>> printable('kernel' + chr(27)) == 'kernel' + chr(92) + 'x1b'
    True
    """
    return ''.join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def with_prefix(number: float, unit: str = '') -> str:
    """Writes a number with three digits and a decimal prefix.

    >>> with_prefix(9437184, 'B'), with_prefix(999.9, 'B'), with_prefix(0)
    ('9.44 MB', '1 kB', '0')
    """
    prefixes = iter(('', 'k', 'M', 'G', 'T', 'P', 'E'))
    prefix = next(prefixes)
    while number >= 999.5:
        number /= 1000
        prefix = next(prefixes)
    return f'{number:.3g} {prefix}{unit}'.strip()


def group_layers(names: Sequence[str], alike: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """Puts rows of equal layers together, so that a table of a deep model has a row for each kind of leaf.

    Args:
      names: of all rows.
      alike: what else must be equal in rows that are put together, such as shape and dtype.

    Returns:
      For each row of the table its name and the indices of what it stands for. Three or more rows that are alike, and
      whose names differ in the first number that ends a part of them, are one: `'h.{0-2}.up'`. It stands where
      the first of them stood.

    >>> group_layers(['h.0.up', 'h.1.up', 'h.2.up', 'head'], ['8×8', '8×8', '8×8', '8×9'])
    [('h.{0-2}.up', [0, 1, 2]), ('head', [3])]
    """
    layers: dict[Any, list[tuple[int, int]]] = {}
    for i, name in enumerate(names):
        number = _LAYER.search(name)
        key = (name[: number.start()], name[number.end() :], alike[i]) if number else (name,)
        layers.setdefault(key, []).append((int(number[0]) if number else 0, i))
    groups: list[tuple[str, list[int]]] = []
    for key, members in layers.items():
        if len(members) >= _LEAST_LAYERS:
            numbers, indices = zip(*sorted(members), strict=True)
            of_all = ranges(numbers).replace(' ', '')
            groups.append((f'{key[0]}{{{of_all}}}{key[1]}', list(indices)))
        else:
            groups += [(names[i], [i]) for _, i in members]
    return sorted(groups, key=lambda group: min(group[1]))


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
