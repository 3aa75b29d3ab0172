"""Results as a table: a row for each workload, a column for each algorithm, a block of rows for each sparsity.

`make_table` decides what stands where; `to_markdown`, `to_csv` and `to_rich` write it down.
"""

import csv
import dataclasses
import io
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxpruner.report.experiments import DENSE, Experiment, Summary, algorithms_of, group_cells
from jaxpruner.report.results import Cell

if TYPE_CHECKING:
    import rich.console
    import rich.table

MISSING = '-'
_DIGITS = 4  # that the largest value of a row shows
_MOST_DECIMALS = 8
_ARROWS = {'high': '↑', 'low': '↓'}
_CSV_HEADINGS = 'workload data recipe algorithm sparsity metric better mean std n'.split()


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one algorithm reached in a row."""

    text: str  # mean ± standard deviation over seeds, accuracies in per cent
    best: bool  # shown bold: the best sparse value of its row
    sparsity: float  # asked for, in [0, 1]; 0 for the dense baseline
    mean: float  # in the metric's own unit, accuracies in [0, 1]
    deviation: float | None  # of a sample, in the same unit; None for one seed
    seeds: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One workload at one sparsity."""

    label: str  # workload, data, metric with its unit, and an arrow that says which values are good
    workload: str
    data: str
    recipe: str  # SHA-256
    metric: str
    better: str  # 'high' or 'low'
    sparsity: float  # in [0, 1]
    # One for each column of the table; None where nothing was run.
    entries: tuple[Entry | None, ...]

    @property
    def seeds(self) -> str:
        """The number of seeds, a range where algorithms differ."""
        numbers = {entry.seeds for entry in self.entries if entry}
        if not numbers:
            return MISSING
        least, most = min(numbers), max(numbers)
        return str(least) if least == most else f'{least}–{most}'


@dataclasses.dataclass(frozen=True)
class ResultTable:
    """A table of results, made by `make_table`.

    >>> ResultTable(('no_prune', 'rigl'), ()).columns
    ('no_prune', 'rigl')
    """

    columns: tuple[str, ...]  # algorithms
    rows: tuple[Row, ...]  # by sparsity, then in the original's order of workloads


def make_table(cells: Iterable[Cell]) -> ResultTable:
    """Arranges cells of one or several folders; dense ones stand in the row of every sparsity of their workload.

    Args:
      cells: of any workloads, algorithms, sparsities and seeds. Cells that were trained with different recipes stand in
        different rows.

    Returns:
      The table, with texts as they are shown.

    Raises:
      ValueError: there is no cell, or one occurs twice with different values.

    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> make_table([cell]).rows[0].entries[0].text
    '97.00'
    """
    cells = list(cells)
    columns = algorithms_of(cells)
    rows = []
    for experiment in group_cells(cells):
        for sparsity in experiment.sparsities or [0.0]:
            rows.append(_make_row(experiment, sparsity, columns))
    rows.sort(key=lambda row: row.sparsity)  # stable: workloads keep their order
    return ResultTable(tuple(columns), tuple(rows))


def to_markdown(table: ResultTable) -> str:
    """Writes a table in the layout of the original's: a first column of workloads, then one for each algorithm.

    >>> cell = Cell('t5', 'text', 'rigl', 0.8, 0, 'loss', 'low', 2.5, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_markdown(make_table([cell])))
    |                   | sparsity |      rigl | seeds |
    |:------------------|---------:|----------:|------:|
    | t5 (text): loss ↓ |      80% | **2.500** |     1 |
    """
    text_columns = zip(*_text_rows(table), strict=True)
    columns = []
    for number, column in enumerate(text_columns):
        columns.append(_markdown_column(column, is_number=number > 0))
    lines = []
    for line in zip(*columns, strict=True):
        lines.append(f'|{"|".join(line)}|\n')
    return ''.join(lines)


def to_csv(table: ResultTable) -> str:
    """Writes one line for each workload, algorithm and sparsity, with values in the metric's own unit.

    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_csv(make_table([cell])))
    workload,data,recipe,algorithm,sparsity,metric,better,mean,std,n
    resnet,digits,5d41402a,rigl,0.8,accuracy,high,0.97,,1
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(_CSV_HEADINGS)
    writer.writerows(dict.fromkeys(_csv_lines(table)))  # once each: dense stands in several rows
    return file.getvalue()


def to_rich(table: ResultTable, width: int) -> 'rich.console.Group':
    """Makes the table for a terminal; where it would be too wide, it is transposed and cut into parts that fit.

    Args:
      table: what `make_table` returns.
      width: of the terminal, in characters.

    Returns:
      One or more tables.

    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> len(to_rich(make_table([cell]), width=80).renderables)
    1
    """
    import rich.console

    text_rows = _text_rows(table)
    full_width = 0
    for column in zip(*text_rows, strict=True):
        full_width += _widest(column) + 3
    if full_width < width:
        last_rows: set[int] = set()  # of the blocks of one sparsity
        for number, (row, following) in enumerate(itertools.pairwise(table.rows), 1):
            if row.sparsity != following.sparsity:
                last_rows.add(number)
        return rich.console.Group(_rich_table(text_rows, last_rows))
    # Transposed, rules go below the sparsities and above the numbers of seeds.
    last_rows = {1, len(table.columns) + 1}
    parts = []
    for part in _transposed_parts(text_rows, width):
        parts.append(_rich_table(part, last_rows))
    return rich.console.Group(*parts)


def _make_row(experiment: Experiment, sparsity: float, columns: Sequence[str]) -> Row:
    summaries = {name: experiment.summarize(name, sparsity) for name in columns}
    decimals = _decimals(experiment, summaries.values())
    shown_means = {}  # of sparse algorithms; rounded, so that values that look equal are bold alike
    for name, summary in summaries.items():
        if summary and name != DENSE and not math.isnan(summary.mean):
            shown_means[name] = round(summary.mean * experiment.factor, decimals)
    choose_best = max if experiment.better == 'high' else min
    best = choose_best(shown_means.values(), default=None)
    entries = []
    for name, summary in summaries.items():
        if summary is None:
            entries.append(None)
            continue
        text = _shown(summary, experiment.factor, decimals)
        is_best = name in shown_means and shown_means[name] == best
        own_sparsity = 0.0 if name == DENSE else sparsity
        entries.append(Entry(text, is_best, own_sparsity, *summary))
    return Row(
        label=f'{experiment.label}: {experiment.axis} {_ARROWS[experiment.better]}',
        workload=experiment.workload,
        data=experiment.data,
        recipe=experiment.recipe,
        metric=experiment.metric,
        better=experiment.better,
        sparsity=sparsity,
        entries=tuple(entries),
    )


def _decimals(experiment: Experiment, summaries: Iterable[Summary | None]) -> int:
    """Counts the decimals that show four digits of the largest finite mean of a row."""
    largest = 0.0
    for summary in summaries:
        if summary and math.isfinite(summary.mean):
            largest = max(largest, abs(summary.mean) * experiment.factor)
    digits_before = 1 + math.floor(math.log10(largest or 1))
    decimals = _DIGITS - digits_before
    return min(max(decimals, 0), _MOST_DECIMALS)


def _shown(summary: Summary, factor: int, decimals: int) -> str:
    mean = f'{summary.mean * factor:.{decimals}f}'
    if summary.deviation is None:
        return mean
    deviation = f'{summary.deviation * factor:.{decimals}f}'
    return f'{mean} ± {deviation}'


def _csv_lines(table: ResultTable) -> Iterator[tuple]:
    for row in table.rows:
        for name, entry in zip(table.columns, row.entries, strict=True):
            if entry is None:
                continue
            origin = (row.workload, row.data, row.recipe, name, entry.sparsity)
            deviation = '' if entry.deviation is None else entry.deviation
            yield (*origin, row.metric, row.better, entry.mean, deviation, entry.seeds)


class _Text(NamedTuple):
    """What one place of a table shows."""

    text: str
    is_bold: bool = False


_TextRows = Sequence[Sequence[_Text]]


def _text_rows(table: ResultTable) -> _TextRows:
    """Writes the table as texts, headings first."""
    headings = ('', 'sparsity', *table.columns, 'seeds')
    text_rows = [[_Text(heading) for heading in headings]]
    for row in table.rows:
        texts = [_Text(row.label), _Text(f'{100 * row.sparsity:.4g}%')]
        for entry in row.entries:
            texts.append(_Text(entry.text, entry.best) if entry else _Text(MISSING))
        text_rows.append([*texts, _Text(row.seeds)])
    return text_rows


def _widest(texts: Iterable[_Text]) -> int:
    return max(len(text) for text, _ in texts)


def _markdown_column(column: Sequence[_Text], is_number: bool) -> list[str]:
    """Writes a column with the rule below its heading, all of one width; numbers stand on the right."""
    texts = []
    for text, is_bold in column:
        escaped = text.replace('|', r'\|')
        texts.append(f'**{escaped}**' if is_bold else escaped)
    width = max(map(len, texts))
    aligned = []
    for text in texts:
        padded = text.rjust(width) if is_number else text.ljust(width)
        aligned.append(f' {padded} ')
    dashes = '-' * (width + 1)
    rule = f'{dashes}:' if is_number else f':{dashes}'
    return [aligned[0], rule, *aligned[1:]]


def _transposed_parts(text_rows: _TextRows, width: int) -> list[_TextRows]:
    """Transposes the table, in parts that are no wider than the terminal, if at all possible."""
    headings, *rows = text_rows
    parts = []
    room = 0
    for label, *entries in rows:
        # A label may be folded between its words; every other text stays on one line.
        longest_word = max(map(len, label.text.split()))
        widest = max(longest_word, _widest(entries))
        if widest + 3 > room:
            parts.append([headings])
            room = width - _widest(headings) - 4
        folded = textwrap.fill(label.text, widest)
        parts[-1].append([_Text(folded), *entries])
        room -= widest + 3
    return [list(zip(*part, strict=True)) for part in parts]


def _rich_table(text_rows: _TextRows, last_rows: set[int]) -> 'rich.table.Table':
    """Makes a table of rich, with a rule below each of `last_rows`."""
    import rich.table
    import rich.text

    headings, *rows = text_rows
    result = rich.table.Table()
    for number, (heading, _) in enumerate(headings):
        justify = 'right' if number else 'left'
        result.add_column(rich.text.Text(heading), justify=justify, no_wrap=True)
    for number, row in enumerate(rows, 1):
        texts = []
        for text, is_bold in row:
            texts.append(rich.text.Text(text, style='bold' if is_bold else ''))
        result.add_row(*texts, end_section=number in last_rows)
    return result
