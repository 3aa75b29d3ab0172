"""Cells that may be compared: one workload on one data set under one recipe, summarised over seeds."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

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
        return sorted({cell.sparsity for cell in self.cells if cell.algorithm != DENSE})

    def select(self, algorithm: str, sparsity: float) -> list[Cell]:
        """Selects the cells of an algorithm at a sparsity, by seed; dense ones belong to every sparsity."""
        cells = [cell for cell in self.cells if cell.algorithm == algorithm]
        return [cell for cell in cells if algorithm == DENSE or cell.sparsity == sparsity]

    def summarize(self, algorithm: str, sparsity: float) -> Summary | None:
        """Computes mean and deviation of the metric; `None` where there is no such cell."""
        values = [cell.value for cell in self.select(algorithm, sparsity)]
        if not values:
            return None
        with np.errstate(invalid='ignore'):  # the deviation of infinite losses is NaN
            deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
            return Summary(float(np.mean(values)), deviation, len(values))


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
    groups: dict[Any, dict[str, Cell]] = collections.defaultdict(dict)
    for cell in cells:
        group = groups[cell.workload, cell.data, cell.metric, cell.better, cell.recipe]
        earlier = group.setdefault(cell.name, cell)
        if repr(float(earlier.value)) != repr(float(cell.value)):  # NaN is the same result as NaN
            raise ValueError(
                f'{cell.workload} ({cell.data}) has {cell.name} twice under one recipe, with {cell.metric} '
                f'{earlier.value} and {cell.value}; show the folders one at a time'
            )
    if not groups:
        raise ValueError('no readable cell to show')
    recipes = collections.Counter(key[:3] for key in groups)
    experiments = []
    for key, group in groups.items():
        workload, data, *_, recipe = key
        remark = f', recipe {recipe[:6]}' if recipes[key[:3]] > 1 else ''
        members = sorted(group.values(), key=lambda one: (one.algorithm, one.sparsity, one.seed))
        title = f'{workload} ({data}{remark})'
        experiments.append(Experiment(title, *key, tuple(members)))  # pyright: ignore[reportCallIssue]
    order = {name: number for number, name in enumerate(WORKLOAD_ORDER)}
    return sorted(experiments, key=lambda one: (order.get(one.workload, len(order)), one.label))


def algorithms_of(cells: Iterable[Cell]) -> list[str]:
    """Lists each algorithm once: those of the original's table in its order, then the others by name."""
    names = {cell.algorithm for cell in cells}
    original = [name for name in ALGORITHM_ORDER if name in names]
    return original + sorted(names.difference(original))


@dataclasses.dataclass(frozen=True)
class Difference:
    """By how much one algorithm is better than another, in the metric's unit; negative if it is worse.

    The interval is Student's, of 95 %, for the mean of the paired differences. It is infinite for one seed.

    >>> Difference(mean=0.02, low=0.01, high=0.03, seeds=5).is_certain
    True
    """

    mean: float
    low: float
    high: float
    seeds: int  # that both have

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval says that the first is better."""
        return self.low > 0


def paired_difference(
    experiment: Experiment, first: str, second: str, sparsity: float
) -> Difference:
    """Compares two algorithms over the seeds that both have.

    Args:
      experiment: the cells of one workload, from `group_cells`.
      first: an algorithm.
      second: another.
      sparsity: of both, in [0, 1]; dense cells belong to every sparsity.

    Returns:
      By how much the first is better.

    Raises:
      ValueError: no seed is shared.

    >>> cells = []
    >>> for name, losses in {'rigl': [1.0, 1.25], 'set': [2.0, 2.0]}.items():
    ...     for seed, loss in enumerate(losses):
    ...         cell = Cell('vit', 'digits', name, 0.8, seed, 'loss', 'low', loss, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    ...         cells.append(cell)
    >>> (experiment,) = group_cells(cells)
    >>> paired_difference(experiment, 'rigl', 'set', 0.8).mean
    0.875
    """
    ours = {cell.seed: cell.value for cell in experiment.select(first, sparsity)}
    theirs = {cell.seed: cell.value for cell in experiment.select(second, sparsity)}
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise ValueError(
            f'{experiment.label} has no seed with both {first} and {second} at sparsity {sparsity}: '
            f'{first} has {sorted(ours) or "none"}, {second} {sorted(theirs) or "none"}'
        )
    sign = 1 if experiment.better == 'high' else -1
    differences = sign * np.array([ours[seed] - theirs[seed] for seed in seeds])
    mean = float(differences.mean())
    half = math.inf
    if len(seeds) > 1:
        import scipy.special  # comes with JAX

        quantile = float(scipy.special.stdtrit(len(seeds) - 1, 0.975))  # of Student's t
        with np.errstate(invalid='ignore'):  # the deviation of an infinite loss is NaN
            half = quantile * float(differences.std(ddof=1)) / math.sqrt(len(seeds))
    return Difference(mean, mean - half, mean + half, len(seeds))
