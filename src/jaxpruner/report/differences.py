"""Which of two algorithms is better, over the seeds that both have; and whether the original's order is met."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np

from jaxpruner.report import experiments as experiments_lib
from jaxpruner.report.original import ORIGINAL, SPARSITY
from jaxpruner.report.results import Cell


@dataclasses.dataclass(frozen=True)
class Difference:
    """By how much one algorithm is better than another, in the metric's unit; negative: it is worse.

    The interval is Student's, of 95 %, for the mean of the paired differences; infinite for one seed.

    >>> Difference(mean=0.02, low=-0.01, high=0.05, seeds=5).holds
    True
    """

    mean: float
    low: float
    high: float
    seeds: int  # that both have

    @property
    def holds(self) -> bool:
        """Whether the interval does not contradict that the first is better; that of a run that diverged never does."""
        return not self.high < 0

    @property
    def is_certain(self) -> bool:
        """Whether the interval leaves no doubt that the first is better."""
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
        """'agrees'; 'differs', which the interval allows to be chance; or 'contradicts'."""
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
    experiment: experiments_lib.Experiment, first: str, second: str, sparsity: float
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

    >>> cells = [
    ...     Cell('vit', 'digits', name, 0.8, seed, 'loss', 'low', value, {}, 0.8, {}, 1000, 12.3, '5d41402a')
    ...     for name, values in {'rigl': [1.0, 1.25], 'set': [2.0, 2.0]}.items()
    ...     for seed, value in enumerate(values)
    ... ]
    >>> (experiment,) = experiments_lib.group_cells(cells)
    >>> paired_difference(experiment, 'rigl', 'set', 0.8).mean
    0.875
    """
    ours, theirs = (
        {c.seed: c.value for c in experiment.select(name, sparsity)} for name in (first, second)
    )
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise ValueError(
            f'{experiment.label} has no seed with both {first} and {second} at sparsity {sparsity}: '
            f'{first} has {sorted(ours) or "none"}, {second} {sorted(theirs) or "none"}'
        )
    sign = 1 if experiment.better == 'high' else -1
    differences = sign * np.array([ours[seed] - theirs[seed] for seed in seeds])
    mean = float(differences.mean())
    if len(seeds) == 1:
        return Difference(mean, -math.inf, math.inf, 1)
    with np.errstate(invalid='ignore'):  # an infinite loss has a NaN for deviation
        half = (
            student_quantile(len(seeds) - 1)
            * float(differences.std(ddof=1))
            / math.sqrt(len(seeds))
        )
    return Difference(mean, mean - half, mean + half, len(seeds))


def check_original_order(cells: Iterable[Cell], sparsity: float = SPARSITY) -> list[OrderCheck]:
    """Compares the order of algorithms with that in the original's table, pair by pair.

    With 36 pairs in a row, about one that is equal in truth is contradicted by chance.

    Args:
      cells: of any workloads; those that the original does not have are passed over.
      sparsity: of ours, in [0, 1]; the original's is 0.8.

    Returns:
      For each row of the original, each pair of algorithms that has a seed in common here; the one that is better in
      the original comes first.

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
    for experiment in experiments_lib.group_cells(cells):
        seeds = {
            name: {c.seed for c in experiment.select(name, sparsity)}
            for name in experiment.algorithms
        }
        for row_name, row in ORIGINAL.items():
            if row.workload != experiment.workload:
                continue
            ranked = sorted(
                row.values.items(), key=lambda item: item[1], reverse=row.better == 'high'
            )
            for (first, its), (second, other) in itertools.combinations(ranked, 2):
                if seeds.get(first, set()) & seeds.get(second, set()):
                    ours = paired_difference(experiment, first, second, sparsity)
                    checks.append(
                        OrderCheck(
                            experiment.label, row_name, first, second, abs(its - other), ours
                        )
                    )
    if not checks:
        workloads = ', '.join(dict.fromkeys(row.workload for row in ORIGINAL.values()))
        raise ValueError(
            f'no two algorithms of the original table share a seed at sparsity {sparsity}; '
            f'the workloads there are {workloads}'
        )
    return checks


# The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom.
_QUANTILES = (
    12.70620,
    4.30265,
    3.18245,
    2.77645,
    2.57058,
    2.44691,
    2.36462,
    2.30600,
    2.26216,
    2.22814,
)


def student_quantile(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t, to four digits.

    Beyond the table it is the expansion around the normal's quantile (Abramowitz and Stegun, 26.7.5).

    >>> student_quantile(4), round(student_quantile(30), 3)
    (2.77645, 2.042)
    """
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    z, n = 1.959964, degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
