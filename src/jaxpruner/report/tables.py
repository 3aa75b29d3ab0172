"""Results as a table: a row for each workload, a column for each algorithm, a block of rows for each sparsity.

`make_table` decides what stands where; `to_markdown`, `to_csv` and `to_rich` write it down.
"""

import csv
import dataclasses
import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxpruner.report import experiments as experiments_lib
from jaxpruner.report.results import Cell

if TYPE_CHECKING:
    import rich.console
    import rich.table

_Grid = list[Sequence[tuple[str, bool]]]  # texts, and whether they are bold
MISSING = '-'
_DIGITS = 4  # that the largest value of a row shows
_MOST_DECIMALS = 8
_ARROWS = {'high': '↑', 'low': '↓'}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one algorithm reached in a row.

    >>> Entry('97.00 ± 1.00', best=False, sparsity=0.8, mean=0.97, deviation=0.01, seeds=3).text
    '97.00 ± 1.00'
    """

    text: str  # mean ± standard deviation over seeds, accuracies in per cent
    best: bool  # shown bold: the best sparse value of its row
    sparsity: float  # asked for, in [0, 1]; 0 for the dense baseline
    mean: float  # in the metric's own unit, accuracies in [0, 1]
    deviation: float | None  # of a sample, in the same unit; None for one seed
    seeds: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One workload at one sparsity.

    >>> Row('vit (digits): accuracy (%) ↑', 'vit', 'digits', '5d41402a', 'accuracy', 'high', 0.8, (None,)).seeds
    '-'
    """

    label: str  # workload, data, metric with its unit, and an arrow that says which values are good
    workload: str
    data: str
    recipe: str  # SHA-256
    metric: str
    better: str  # 'high' or 'low'
    sparsity: float  # in [0, 1]
    entries: tuple[
        Entry | None, ...
    ]  # one for each column of the table; None where nothing was run

    @property
    def seeds(self) -> str:
        """The number of seeds, a range where algorithms differ."""
        numbers = sorted({entry.seeds for entry in self.entries if entry})
        return '–'.join(map(str, dict.fromkeys(numbers[:1] + numbers[-1:]))) or MISSING


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
      cells: of any workloads, algorithms, sparsities and seeds. What was trained with different recipes stands in rows
        of its own.

    Returns:
      The table, with texts as they are shown.

    Raises:
      ValueError: there is no cell, or one occurs twice with different values.

    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> make_table([cell]).rows[0].entries[0].text
    '97.00'
    """
    experiments = experiments_lib.group_cells(cells)
    columns = experiments_lib.in_order(
        name for experiment in experiments for name in experiment.algorithms
    )
    places = [
        (sparsity, experiment)
        for experiment in experiments
        for sparsity in experiment.sparsities or [0.0]
    ]
    places.sort(key=lambda place: place[0])  # stable: workloads keep their order
    return ResultTable(
        tuple(columns), tuple(_make_row(experiment, s, columns) for s, experiment in places)
    )


def to_markdown(table: ResultTable) -> str:
    """Writes a table in the layout of the original's: a first column of workloads, then one for each algorithm.

    >>> cell = Cell('t5', 'text', 'rigl', 0.8, 0, 'loss', 'low', 2.5, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_markdown(make_table([cell])))
    |                   | sparsity |      rigl | seeds |
    |:------------------|---------:|----------:|------:|
    | t5 (text): loss ↓ |      80% | **2.500** |     1 |
    """
    grid = [[f'**{text}**' if bold else text for text, bold in row] for row in _grid(table)]
    grid = [[text.replace('|', r'\|') for text in row] for row in grid]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        [
            text.rjust(width) if number else text.ljust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in grid
    ]
    rule = [
        ('' if number else ':') + '-' * (width + 1) + (':' if number else '')
        for number, width in enumerate(widths)
    ]
    heading, *rows = [f'| {" | ".join(line)} |' for line in lines]
    return '\n'.join([heading, f'|{"|".join(rule)}|', *rows]) + '\n'


def to_csv(table: ResultTable) -> str:
    """Writes one line for each workload, algorithm and sparsity, with values in the metric's own unit.

    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_csv(make_table([cell])))
    workload,data,recipe,algorithm,sparsity,metric,better,mean,std,n
    resnet,digits,5d41402a,rigl,0.8,accuracy,high,0.97,,1
    """
    lines = []
    for row in table.rows:
        for name, entry in zip(table.columns, row.entries, strict=True):
            if entry:
                what = (
                    row.workload,
                    row.data,
                    row.recipe,
                    name,
                    entry.sparsity,
                    row.metric,
                    row.better,
                )
                lines.append(
                    (
                        *what,
                        entry.mean,
                        '' if entry.deviation is None else entry.deviation,
                        entry.seeds,
                    )
                )
    file = io.StringIO()
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow('workload data recipe algorithm sparsity metric better mean std n'.split())
    writer.writerows(dict.fromkeys(lines))  # once each: dense stands in several rows
    return file.getvalue()


def to_rich(table: ResultTable, width: int) -> 'rich.console.Group':
    """Makes the table for a terminal; where it would be too wide, it is turned on its side and cut into parts that fit.

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

    grid = _grid(table)
    rows = table.rows
    blocks = {
        number
        for number in range(1, len(rows))
        if rows[number - 1].sparsity != rows[number].sparsity
    }
    if sum(max(len(text) for text, _ in column) + 3 for column in zip(*grid, strict=True)) < width:
        return rich.console.Group(_rich_table(grid, blocks))
    blocks = {
        1,
        len(table.columns) + 1,
    }  # lines below the sparsities and above the numbers of seeds
    return rich.console.Group(*(_rich_table(part, blocks) for part in _turn(grid, width)))


def _make_row(
    experiment: experiments_lib.Experiment, sparsity: float, columns: Sequence[str]
) -> Row:
    summaries = [experiment.summarize(name, sparsity) for name in columns]
    factor = experiment.factor
    largest = (
        max((abs(s.mean) * factor for s in summaries if s and math.isfinite(s.mean)), default=0)
        or 1
    )
    decimals = min(max(_DIGITS - 1 - math.floor(math.log10(largest)), 0), _MOST_DECIMALS)
    # Rounded as it is shown, so that what shows equal is bold alike; NaN is never the best.
    means = [
        round(s.mean * factor, decimals)
        if s and name != experiments_lib.DENSE and not math.isnan(s.mean)
        else None
        for name, s in zip(columns, summaries, strict=True)
    ]
    choose = max if experiment.better == 'high' else min
    best = choose((mean for mean in means if mean is not None), default=None)
    entries = []
    for name, summary, mean in zip(columns, summaries, means, strict=True):
        if summary is None:
            entries.append(None)
            continue
        parts = [summary.mean] if summary.deviation is None else [summary.mean, summary.deviation]
        text = ' ± '.join(f'{part * factor:.{decimals}f}' for part in parts)
        own = 0.0 if name == experiments_lib.DENSE else sparsity
        entries.append(Entry(text, mean is not None and mean == best, own, *summary))
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


def _turn(grid: _Grid, width: int) -> list[_Grid]:
    """The grid on its side, in parts that are no wider than the terminal, if at all possible."""
    names, *rows = grid
    parts, room = [], 0
    for (label, _), *entries in rows:
        widest = max(len(text) for text in [*label.split(), *(text for text, _ in entries)])
        if widest + 3 > room:
            parts.append([names])
            room = width - max(len(text) for text, _ in names) - 4
        parts[-1].append([(textwrap.fill(label, widest), False), *entries])
        room -= widest + 3
    return [list(zip(*part, strict=True)) for part in parts]


def _rich_table(grid: _Grid, blocks: set[int]) -> 'rich.table.Table':
    import rich.table
    import rich.text

    result = rich.table.Table()
    for number, (heading, _) in enumerate(grid[0]):
        result.add_column(
            rich.text.Text(heading), justify='right' if number else 'left', no_wrap=True
        )
    for number, row in enumerate(grid[1:], 1):
        texts = [rich.text.Text(text, style='bold' if bold else '') for text, bold in row]
        result.add_row(*texts, end_section=number in blocks)
    return result


def _grid(table: ResultTable) -> _Grid:
    """The table as texts, each with whether it is bold; headings first."""
    grid: _Grid = [[(text, False) for text in ('', 'sparsity', *table.columns, 'seeds')]]
    for row in table.rows:
        entries = [(entry.text, entry.best) if entry else (MISSING, False) for entry in row.entries]
        grid.append(
            [
                (row.label, False),
                (f'{100 * row.sparsity:.4g}%', False),
                *entries,
                (row.seeds, False),
            ]
        )
    return grid
