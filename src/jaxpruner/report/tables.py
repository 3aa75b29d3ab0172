"""Results as a table, from cells of one or several folders: as text for the terminal or Markdown.

Cells that were trained with different recipes are never mixed, and dense ones stand beside every sparsity of their
workload.
"""

import contextlib
import math
from collections.abc import Iterable

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


def to_text(cells: Iterable[Cell], width: int = text_tables.WIDTH) -> str:
    """Writes a table for each workload, with a row for each algorithm and a column for each sparsity.

    Values are mean ± standard deviation over seeds, accuracies in per cent. `*` marks the best sparse value of a
    column, and `~` values whose paired difference to it may be chance.

    Args:
      cells: of any workloads, algorithms, sparsities and seeds.
      width: of the terminal, in characters; more sparsities than fit stand in a table of their own.

    Raises:
      ValueError: there is no cell, or one occurs twice with different values.

    >>> cell = Cell('t5', 'text', 'rigl', 0.8, 0, 'loss', 'low', 2.5, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_text([cell]))
    t5 (text): loss ↓
    <BLANKLINE>
    algorithm  80% pruned
    ---------------------
    rigl          2.500 *
    ---------------------
    seeds             1
    """
    blocks = []
    for experiment in group_cells(cells):
        names = experiment.algorithms
        first = (Column('algorithm'), [*names, 'seeds'])
        others = []
        for sparsity in experiment.sparsities or [0.0]:
            texts = _texts_with_marks(experiment, sparsity)
            marked = [texts.get(name, (MISSING, ' ')) for name in names]
            heading = Column(_percent(sparsity) + ' pruned', align='right')
            column = [f'{text} {mark or " "}' for text, mark in marked]
            others.append((heading, [*column, f'{_seeds(experiment, sparsity)}  ']))
        step = max(1, (width - 20) // 18)  # about what a column takes
        for start in range(0, len(others), step):
            columns, texts = zip(first, *others[start : start + step], strict=True)
            *lines, last = zip(*texts, strict=True)
            table = text_tables.to_text(columns, lines, last, width)
            blocks.append(f'{_heading(experiment)}\n\n{table}')
    return '\n\n'.join(blocks)


def to_markdown(cells: Iterable[Cell]) -> str:
    """Writes a table in the layout of the original's: a first column of workloads, then one for each algorithm.

    Args:
      cells: of any workloads, algorithms, sparsities and seeds.

    Returns:
      A table with a row for each workload and sparsity; the best value of a row is bold.

    Raises:
      ValueError: there is no cell, or one occurs twice with different values.

    >>> cell = Cell('t5', 'text', 'rigl', 0.8, 0, 'loss', 'low', 2.5, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> print(to_markdown([cell]))
    |  | sparsity | rigl | seeds |
    |:---|---:|---:|---:|
    | t5 (text): loss ↓ | 80% | **2.500** | 1 |
    """
    cells = list(cells)
    names = algorithms_of(cells)
    rows = [
        (sparsity, experiment)
        for experiment in group_cells(cells)
        for sparsity in experiment.sparsities or [0.0]
    ]
    lines = [['', 'sparsity', *names, 'seeds']]
    for sparsity, experiment in sorted(rows, key=lambda row: row[0]):  # workloads keep their order
        marked = _texts_with_marks(experiment, sparsity)
        texts = [_heading(experiment).replace('|', r'\|'), _percent(sparsity)]
        for name in names:
            text, mark = marked.get(name, (MISSING, ''))
            texts.append(f'**{text}**' if mark == '*' else text)
        lines.append([*texts, _seeds(experiment, sparsity)])
    written = [f'| {" | ".join(texts)} |\n' for texts in lines]
    rule = f'|:---{"|---:" * (len(names) + 2)}|\n'
    return ''.join([written[0], rule, *written[1:]])


def _texts_with_marks(experiment: Experiment, sparsity: float) -> dict[str, tuple[str, str]]:
    """Writes what each algorithm reached at a sparsity, and its mark.

    The mark is `'*'` for the best sparse value, `'~'` if the paired difference to it may be chance, else empty.
    """
    found = {name: experiment.summarize(name, sparsity) for name in experiment.algorithms}
    summaries = {name: summary for name, summary in found.items() if summary is not None}
    means = {name: experiment.factor * one.mean for name, one in summaries.items()}
    largest = max((abs(mean) for mean in means.values() if math.isfinite(mean)), default=0)
    decimals = min(max(3 - math.floor(math.log10(largest or 1)), 0), 8)  # four digits
    shown = f'{{:.{decimals}f}}'.format
    sign = 1 if experiment.better == 'high' else -1
    sparse = [name for name in means if name != DENSE and not math.isnan(means[name])]
    best = max(sparse, key=lambda name: sign * means[name], default='')
    texts = {}
    for name, summary in summaries.items():
        text, mark = shown(means[name]), ''
        if name in sparse:
            mark = '*' if text == shown(means[best]) else '~'
        with contextlib.suppress(ValueError):  # without a seed in common, nothing is certain
            if mark == '~' and paired_difference(experiment, best, name, sparsity).is_certain:
                mark = ''
        if summary.deviation is not None:
            text += f' ± {shown(experiment.factor * summary.deviation)}'
        texts[name] = text, mark
    return texts


def _heading(experiment: Experiment) -> str:
    """Names workload, data and metric with its unit; an arrow says which values are good."""
    return f'{experiment.label}: {experiment.axis} {"↑" if experiment.better == "high" else "↓"}'


def _percent(sparsity: float) -> str:
    return f'{100 * sparsity:.4g}%'


def _seeds(experiment: Experiment, sparsity: float) -> str:
    """Counts the seeds, as a range where algorithms differ."""
    numbers = [len(experiment.select(name, sparsity)) for name in experiment.algorithms]
    numbers = [number for number in numbers if number]
    return '–'.join(dict.fromkeys([str(min(numbers)), str(max(numbers))]))
