"""Cells that may be compared: one workload on one data set under one recipe, summarised over seeds."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxpruner.report.results import Cell

DENSE = 'no_prune'
# Columns and rows of the original's table; any other name comes after these.
ALGORITHM_ORDER = tuple(
    f'{DENSE} random magnitude saliency global_magnitude magnitude_ste static_sparse set rigl'.split()
)
WORKLOAD_ORDER = ('resnet', 'vit', 'federated', 't5', 'dqn')


class Summary(NamedTuple):
    """A metric over several seeds."""

    mean: float
    deviation: float | None  # standard deviation of a sample; None for one seed
    seeds: int


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All cells of one workload, data set and recipe; made by `group_cells`.

    >>> Experiment('resnet (digits)', 'resnet', 'digits', 'accuracy', 'high', '5d41402a', ()).axis
    'accuracy (%)'
    """

    label: str  # of a row or a panel; names the recipe, too, where there is more than one
    workload: str
    data: str
    metric: str
    better: Literal['high', 'low']
    recipe: str
    cells: tuple[Cell, ...]

    @property
    def factor(self) -> int:
        """What a value is multiplied by when it is shown: 100 for accuracies, which are shown in per cent."""
        return 100 if self.metric == 'accuracy' else 1

    @property
    def axis(self) -> str:
        """The metric with its unit."""
        return 'accuracy (%)' if self.metric == 'accuracy' else self.metric

    @property
    def algorithms(self) -> list[str]:
        """The algorithms in the order of columns."""
        return algorithms_of(self.cells)

    @property
    def sparsities(self) -> list[float]:
        """The sparsities asked for, ascending; the dense baseline adds none."""
        sparse_cells = [cell for cell in self.cells if cell.algorithm != DENSE]
        return sorted({cell.sparsity for cell in sparse_cells})

    def select(self, algorithm: str, sparsity: float) -> list[Cell]:
        """Selects the cells of an algorithm at a sparsity, by seed; dense ones belong to every sparsity."""
        cells = []
        for cell in self.cells:
            has_sparsity = algorithm == DENSE or cell.sparsity == sparsity
            if cell.algorithm == algorithm and has_sparsity:
                cells.append(cell)
        return cells

    def summarize(self, algorithm: str, sparsity: float) -> Summary | None:
        """Computes mean and deviation of the metric; `None` where there is no such cell."""
        values = [cell.value for cell in self.select(algorithm, sparsity)]
        return _summarize(values) if values else None


def group_cells(cells: Iterable[Cell]) -> list[Experiment]:
    """Sorts cells into groups that may be compared, in the order of the original's rows.

    A cell that occurs twice with the same value, as when a folder is named twice, counts once.

    Args:
      cells: of any workloads and folders.

    Returns:
      One experiment for each workload, data set, metric and recipe.

    Raises:
      ValueError: there is no cell, or one occurs twice with different values.

    >>> cell = Cell('resnet', 'digits', 'rigl', 0.8, 0, 'accuracy', 'high', 0.97, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    >>> [(experiment.label, len(experiment.cells)) for experiment in group_cells([cell, cell])]
    [('resnet (digits)', 1)]
    """
    groups: dict[tuple, dict[str, Cell]] = collections.defaultdict(dict)
    for cell in cells:
        group = groups[cell.workload, cell.data, cell.metric, cell.better, cell.recipe]
        earlier = group.setdefault(cell.name, cell)
        if not _is_same(earlier.value, cell.value):
            raise ValueError(
                f'{cell.workload} ({cell.data}) has {cell.name} twice under one recipe, with {cell.metric} '
                f'{earlier.value} and {cell.value}; show the folders one at a time'
            )
    if not groups:
        raise ValueError('no readable cell to show')
    recipes = collections.Counter((workload, data, metric) for workload, data, metric, *_ in groups)
    experiments = []
    for (workload, data, metric, better, recipe), group in groups.items():
        has_one_recipe = recipes[workload, data, metric] == 1
        details = data if has_one_recipe else f'{data}, recipe {recipe[:6]}'
        label = f'{workload} ({details})'
        members = tuple(sorted(group.values(), key=_cell_order))
        experiments.append(Experiment(label, workload, data, metric, better, recipe, members))
    return sorted(experiments, key=_experiment_order)


def algorithms_of(cells: Iterable[Cell]) -> list[str]:
    """Lists each algorithm once: those of the original's table in its order, then the others by name."""
    names = {cell.algorithm for cell in cells}
    original = [name for name in ALGORITHM_ORDER if name in names]
    return original + sorted(names.difference(original))


def _summarize(values: Sequence[float]) -> Summary:
    with np.errstate(invalid='ignore'):  # the deviation of infinite losses is NaN
        mean = float(np.mean(values))
        deviation = None
        if len(values) > 1:
            deviation = float(np.std(values, ddof=1))
    return Summary(mean, deviation, len(values))


def _is_same(first: float, second: float) -> bool:
    are_nan = math.isnan(first) and math.isnan(second)  # NaN is the same result as NaN
    return first == second or are_nan


def _cell_order(cell: Cell) -> tuple[str, float, int]:
    return cell.algorithm, cell.sparsity, cell.seed


def _experiment_order(experiment: Experiment) -> tuple[int, str]:
    position = len(WORKLOAD_ORDER)
    if experiment.workload in WORKLOAD_ORDER:
        position = WORKLOAD_ORDER.index(experiment.workload)
    return position, experiment.label
