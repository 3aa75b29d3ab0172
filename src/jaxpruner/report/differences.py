"""Which of two algorithms is better, over the seeds that both have; and whether the original's order is met."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np

from jaxpruner.report.experiments import Experiment, group_cells
from jaxpruner.report.original import ORIGINAL, SPARSITY, OriginalRow
from jaxpruner.report.results import Cell


@dataclasses.dataclass(frozen=True)
class Difference:
    """By how much one algorithm is better than another, in the metric's unit; negative if it is worse.

    The interval is Student's, of 95 %, for the mean of the paired differences. It is infinite for one seed.

    >>> Difference(mean=0.02, low=-0.01, high=0.05, seeds=5).holds
    True
    """

    mean: float
    low: float
    high: float
    seeds: int  # that both have

    @property
    def holds(self) -> bool:
        """Whether the interval leaves it possible that the first is better. A run that diverged always does."""
        return not self.high < 0

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval says that the first is better."""
        return self.low > 0


@dataclasses.dataclass(frozen=True)
class OrderCheck:
    """Two algorithms, the first of which is better in the original's table, and what our cells say.

    >>> print(OrderCheck('vit (digits)', 'ViT-B/16 (90ep)', 'rigl', 'set', 0.6, Difference(0.02, -0.01, 0.05, 5)))
    vit (digits): rigl is better than set by 0.02 [-0.01, 0.05], 5 seeds; ViT-B/16 (90ep): by 0.6: agrees
    """

    label: str  # our workload and data
    row: str  # of the original's table
    first: str
    second: str
    original: float  # by how much the first is better there, in that row's unit
    ours: Difference

    @property
    def verdict(self) -> str:
        """'agrees'; 'differs', which may be chance according to the interval; or 'contradicts'."""
        if not self.ours.holds:
            return 'contradicts'
        return 'agrees' if self.ours.mean > 0 else 'differs'

    def __str__(self) -> str:
        ours = self.ours
        interval = f'{ours.mean:.4g} [{ours.low:.4g}, {ours.high:.4g}], {ours.seeds} seeds'
        return (
            f'{self.label}: {self.first} is better than {self.second} by {interval}; '
            f'{self.row}: by {self.original:.4g}: {self.verdict}'
        )


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
    first_values = _values_by_seed(experiment, first, sparsity)
    second_values = _values_by_seed(experiment, second, sparsity)
    seeds = sorted(first_values.keys() & second_values.keys())
    if not seeds:
        raise ValueError(
            f'{experiment.label} has no seed with both {first} and {second} at sparsity {sparsity}: '
            f'{first} has {sorted(first_values) or "none"}, {second} {sorted(second_values) or "none"}'
        )
    differences = np.array([first_values[seed] - second_values[seed] for seed in seeds])
    if experiment.better == 'low':
        differences = -differences
    mean = float(differences.mean())
    if len(seeds) == 1:
        return Difference(mean, -math.inf, math.inf, 1)
    with np.errstate(invalid='ignore'):  # the deviation of an infinite loss is NaN
        standard_error = float(differences.std(ddof=1)) / math.sqrt(len(seeds))
    half = student_quantile(len(seeds) - 1) * standard_error
    return Difference(mean, mean - half, mean + half, len(seeds))


def check_original_order(cells: Iterable[Cell], sparsity: float = SPARSITY) -> list[OrderCheck]:
    """Compares the order of algorithms with that in the original's table, pair by pair.

    A row has 36 pairs. If all were equal in truth, chance would contradict about one of them.

    Args:
      cells: of any workloads; those that the original does not have are passed over.
      sparsity: of ours, in [0, 1]; the original's is 0.8.

    Returns:
      For each row of the original, each pair of algorithms that has a seed in common here; the algorithm that is
      better in the original comes first.

    Raises:
      ValueError: no two algorithms of the original's table can be compared.

    >>> cells = [
    ...     Cell('vit', 'digits', name, 0.8, 0, 'accuracy', 'high', value, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    ...     for name, value in {'rigl': 0.5, 'magnitude': 0.75}.items()
    ... ]
    >>> [(check.row, check.first, check.verdict) for check in check_original_order(cells)]
    [('ViT-B/16 (90ep)', 'magnitude', 'agrees'), ('ViT-B/16 (300ep)', 'magnitude', 'agrees')]
    """
    checks = []
    for experiment in group_cells(cells):
        for row_name, row in ORIGINAL.items():
            if row.workload == experiment.workload:
                checks += _check_row(experiment, row_name, row, sparsity)
    if not checks:
        workloads = dict.fromkeys(row.workload for row in ORIGINAL.values())
        raise ValueError(
            f'no two algorithms of the original table share a seed at sparsity {sparsity}; '
            f'the workloads there are {", ".join(workloads)}'
        )
    return checks


def student_quantile(degrees: int) -> float:
    """Computes the 97.5 % quantile of Student's t, to four digits.

    Beyond the table it is the expansion around the normal's quantile (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    z, n = 1.959964, degrees
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third


# The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom.
# fmt: off
_QUANTILES = (
    12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
)
# fmt: on


def _check_row(
    experiment: Experiment, row_name: str, row: OriginalRow, sparsity: float
) -> list[OrderCheck]:
    """Lists the pairs of one row of the original that our cells can be compared with."""
    best_first = sorted(row.values, key=row.values.__getitem__, reverse=row.better == 'high')
    checks = []
    for first, second in itertools.combinations(best_first, 2):
        first_seeds = _values_by_seed(experiment, first, sparsity).keys()
        if first_seeds.isdisjoint(_values_by_seed(experiment, second, sparsity)):
            continue
        original = abs(row.values[first] - row.values[second])
        ours = paired_difference(experiment, first, second, sparsity)
        checks.append(OrderCheck(experiment.label, row_name, first, second, original, ours))
    return checks


def _values_by_seed(experiment: Experiment, algorithm: str, sparsity: float) -> dict[int, float]:
    return {cell.seed: cell.value for cell in experiment.select(algorithm, sparsity)}
