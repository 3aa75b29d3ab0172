"""Results as a table: a row for each workload at each sparsity, a column for each algorithm.

`make_table` decides what stands where; `to_text`, `to_markdown` and `to_csv` write it down.
"""

import contextlib
import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence

from jaxpruner import text_tables
from jaxpruner.report.experiments import (
    DENSE,
    Experiment,
    algorithms_of,
    group_cells,
    paired_difference,
)
from jaxpruner.report.results import Cell
from jaxpruner.text_tables import Column

MISSING = '-'
MARKS_EXPLAINED = (
    'mean ± standard deviation over seeds. * is the best sparse value of its column. ~ may be as good: the 95 % '
    'interval of its difference to the best, seed by seed, includes zero, so that noise may explain it. More seeds '
    'would tell more apart.'
)
_ARROWS = {'high': '↑', 'low': '↓'}
_CSV_HEADINGS = 'workload data recipe algorithm sparsity metric better mean std n'.split()


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one algorithm reached in a row."""

    text: str  # mean ± standard deviation over seeds, accuracies in per cent
    mark: str  # '*' for the best sparse value of its row, '~' if the paired difference to it may be chance, else ''
    sparsity: float  # asked for, in [0, 1]; 0 for the dense baseline
    mean: float  # in the metric's own unit, accuracies in [0, 1]
    deviation: float | None  # of a sample, in the same unit; None for one seed
    seeds: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One workload at one sparsity."""

    label: str  # workload, data, metric with its unit, and an arrow that says which values are good
    experiment: Experiment
    sparsity: float  # in [0, 1]
    # One for each column of the table; None where nothing was run.
    entries: tuple[Entry | None, ...]

    @property
    def seeds(self) -> str:
        """The number of seeds, a range where algorithms differ."""
        numbers = {entry.seeds for entry in self.entries if entry}
        return '–'.join(dict.fromkeys([str(min(numbers)), str(max(numbers))]))


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
    columns = tuple(algorithms_of(cells))
    rows = []
    for experiment in group_cells(cells):
        for sparsity in experiment.sparsities or [0.0]:
            entries = _entries(experiment, sparsity, columns)
            label = f'{experiment.label}: {experiment.axis} {_ARROWS[experiment.better]}'
            rows.append(Row(label, experiment, sparsity, entries))
    rows.sort(key=lambda row: row.sparsity)  # stable: workloads keep their order
    return ResultTable(columns, tuple(rows))


def _entries(
    experiment: Experiment, sparsity: float, columns: Sequence[str]
) -> tuple[Entry | None, ...]:
    summaries = {name: experiment.summarize(name, sparsity) for name in columns}
    means = {name: experiment.factor * one.mean for name, one in summaries.items() if one}
    largest = max((abs(mean) for mean in means.values() if math.isfinite(mean)), default=0)
    decimals = min(max(3 - math.floor(math.log10(largest or 1)), 0), 8)  # four digits
    shown = f'{{:.{decimals}f}}'.format
    sign = 1 if experiment.better == 'high' else -1
    sparse = [name for name in means if name != DENSE and not math.isnan(means[name])]
    best = max(sparse, key=lambda name: sign * means[name], default='')
    entries = []
    for name, summary in summaries.items():
        if summary is None:
            entries.append(None)
            continue
        text, mark = shown(means[name]), ''
        if name in sparse:
            mark = '*' if text == shown(means[best]) else '~'
        with contextlib.suppress(ValueError):  # without a seed in common, nothing is certain
            if mark == '~' and paired_difference(experiment, best, name, sparsity).is_certain:
                mark = ''
        if summary.deviation is not None:
            text += f' ± {shown(experiment.factor * summary.deviation)}'
        entries.append(Entry(text, mark, 0.0 if name == DENSE else sparsity, *summary))
    return tuple(entries)


def to_text(
    table: ResultTable, width: int = text_tables.WIDTH, remarks: Mapping[str, str] | None = None
) -> str:
    """Writes a table for each workload, with a row for each algorithm and a column for each sparsity.

    `*` marks the best sparse value of a column, and `~` values whose paired difference to it may be chance.

    Args:
      table: what `make_table` returns.
      width: of the terminal, in characters; more sparsities than fit stand in a table of their own.
      remarks: words about algorithms, for a column of their own.

    >>> cell = Cell('t5', 'text', 'rigl', 0.8, 0, 'loss', 'low', 2.5, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_text(make_table([cell])))
    t5 (text): loss ↓
    <BLANKLINE>
    algorithm  80% pruned
    ---------------------
    rigl          2.500 *
    ---------------------
    seeds             1
    """
    blocks = []
    for label in dict.fromkeys(row.label for row in table.rows):
        rows = [row for row in table.rows if row.label == label]
        shown = [i for i in range(len(table.columns)) if any(row.entries[i] for row in rows)]
        names = [table.columns[i] for i in shown]
        first = [(Column('algorithm'), [*names, 'seeds'])]
        if remarks:
            words = [remarks.get(name, '') for name in names]
            first.append((Column('what it is', overflow='wrap'), [*words, '']))
        others = []
        for row in rows:
            entries = [row.entries[i] for i in shown]
            texts = [f'{one.text} {one.mark or " "}' if one else f'{MISSING}  ' for one in entries]
            heading = Column(f'{100 * row.sparsity:.4g}% pruned', align='right')
            others.append((heading, [*texts, f'{row.seeds}  ']))
        step = max(1, (width - (44 if remarks else 20)) // 18)  # about what a column takes
        for start in range(0, len(others), step):
            columns, texts = zip(*first, *others[start : start + step], strict=True)
            *lines, last = zip(*texts, strict=True)
            blocks.append(f'{label}\n\n{text_tables.to_text(columns, lines, last, width)}')
    return '\n\n'.join(blocks)


def to_markdown(table: ResultTable) -> str:
    """Writes a table in the layout of the original's: a first column of workloads, then one for each algorithm.

    >>> cell = Cell('t5', 'text', 'rigl', 0.8, 0, 'loss', 'low', 2.5, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_markdown(make_table([cell])))
    |                   | sparsity |      rigl | seeds |
    |:------------------|---------:|----------:|------:|
    | t5 (text): loss ↓ |      80% | **2.500** |     1 |
    """
    lines = [['', 'sparsity', *table.columns, 'seeds']]
    for row in table.rows:
        texts = [row.label.replace('|', r'\|'), f'{100 * row.sparsity:.4g}%']
        for entry in row.entries:
            bold = '**' if entry and entry.mark == '*' else ''
            texts.append(f'{bold}{entry.text}{bold}' if entry else MISSING)
        lines.append([*texts, row.seeds])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [f':{"-" * (widths[0] + 1)}', *(f'{"-" * (width + 1)}:' for width in widths[1:])]
    written = []
    for texts in lines:
        first, *others = zip(texts, widths, strict=True)
        cells = [str.ljust(*first), *(text.rjust(width) for text, width in others)]
        written.append(f'| {" | ".join(cells)} |\n')
    return ''.join([written[0], f'|{"|".join(rule)}|\n', *written[1:]])


def to_csv(table: ResultTable) -> str:
    """Writes one line for each workload, algorithm and sparsity, with values in the metric's own unit.

    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_csv(make_table([cell])))
    workload,data,recipe,algorithm,sparsity,metric,better,mean,std,n
    resnet,digits,5d41402a,rigl,0.8,accuracy,high,0.97,,1
    """
    lines: dict[tuple, None] = {}  # once each: dense stands in several rows
    for row in table.rows:
        one = row.experiment
        for name, entry in zip(table.columns, row.entries, strict=True):
            if entry is not None:
                origin = (one.workload, one.data, one.recipe, name, entry.sparsity)
                deviation = '' if entry.deviation is None else entry.deviation
                lines[*origin, one.metric, one.better, entry.mean, deviation, entry.seeds] = None
    file = io.StringIO()
    csv.writer(file, lineterminator='\n').writerows([_CSV_HEADINGS, *lines])
    return file.getvalue()
