"""By how much one variant of pruning is better than another in the one-shot example, with two intervals.

Models differ from seed to seed, and the loss differs from sequence to sequence. One interval is that of the mean over
seeds (Student's). The other is that of the mean over validation sequences (bootstrap, over the mean of all seeds).
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.special

from jaxpruner.baselines.recipe import Recipe
from oneshot_shakespeare_pruning import ALGORITHMS, Variant, read_cells, read_losses, variants

# What the papers found: the first of two is at least as good.
EXPECTED = (('sparsegpt', 'wanda'), ('wanda', 'magnitude'))
RESAMPLES = 10_000


class Pair(NamedTuple):
    """Two prunings at one sparsity, of which the first is expected to be better."""

    words: str
    first: tuple[Variant, str]  # a variant and an algorithm
    second: tuple[Variant, str]
    sparsity: float


def differences(recipe: Recipe, out: Path) -> str:
    """All pairs as a table in Markdown; those that have no seed in common are left out."""
    losses: _Losses = {}
    for variant in variants(recipe):
        losses |= _read_losses_of(variant, out)
    lines = [
        '| | loss is lower by | 95 % over seeds | 95 % over sequences | seeds |',
        '|:--|--:|--:|--:|--:|',
    ]
    for pair in pairs(recipe):
        first = losses.get(_key(*pair.first, pair.sparsity), {})
        second = losses.get(_key(*pair.second, pair.sparsity), {})
        seeds = sorted(first.keys() & second.keys())
        if not seeds:
            continue
        lower = np.stack([second[seed].astype(np.float64) - first[seed] for seed in seeds])
        intervals = f'{_interval(*over_seeds(lower))} | {_interval(*over_sequences(lower))}'
        lines.append(f'| {pair.words} | {lower.mean():.4f} | {intervals} | {len(seeds)} |')
    return '\n'.join(lines) + '\n'


# By variant, algorithm and sparsity: the losses of validation sequences by seed.
_Losses = dict[tuple[str, str, float], dict[int, np.ndarray]]


def _read_losses_of(variant: Variant, out: Path) -> _Losses:
    losses: _Losses = {}
    folder = out / variant.folder
    for cell in read_cells(folder):
        of_seeds = losses.setdefault(_key(variant, cell.algorithm, cell.sparsity), {})
        of_seeds[cell.seed] = read_losses(folder, cell)
    return losses


def _key(variant: Variant, algorithm: str, sparsity: float) -> tuple[str, str, float]:
    return variant.folder, algorithm, sparsity


def _interval(low: float, high: float) -> str:
    return f'{low:.4f} to {high:.4f}'


def pairs(recipe: Recipe) -> Iterator[Pair]:
    """The expected order in each variant, then what OWL does to each algorithm, per block and per leaf."""
    all_variants = variants(recipe)
    for variant in all_variants:
        for sparsity in variant.sparsities:
            share = '' if variant.is_n_by_m else f'{100 * sparsity:.4g} % '
            for first, second in EXPECTED:
                if second not in variant.algorithms:
                    continue
                words = f'{first} than {second}, {share}{variant.title}'
                yield Pair(words, (variant, first), (variant, second), sparsity)
    unstructured, owl, owl_leaf = all_variants[:3]
    for better, worse, words in (
        (owl, unstructured, 'with OWL than without'),
        (owl_leaf, unstructured, 'with OWL per leaf than without'),
        (owl, owl_leaf, 'with OWL per block than per leaf'),
    ):
        for sparsity, algorithm in itertools.product(better.sparsities, ALGORITHMS):
            title = f'{algorithm} {words}, {100 * sparsity:.4g} %'
            yield Pair(title, (better, algorithm), (worse, algorithm), sparsity)


def over_seeds(values: np.ndarray) -> tuple[float, float]:
    """The interval of the mean over models of other seeds; `values` are float[seeds, sequences]."""
    means = values.mean(1)
    if len(means) == 1:
        return -math.inf, math.inf
    quantile = scipy.special.stdtrit(len(means) - 1, 0.975)  # of Student's t
    half = quantile * means.std(ddof=1) / math.sqrt(len(means))
    return means.mean() - half, means.mean() + half


def over_sequences(values: np.ndarray) -> tuple[float, float]:
    """The interval of the mean of the same models over other sequences; `values` are float[seeds, sequences]."""
    means = values.mean(0)
    drawn = np.random.default_rng(0).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.quantile(means[drawn].mean(1), (0.025, 0.975))
    return low, high
