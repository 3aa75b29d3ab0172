"""By how much one way to prune is better than another in the one-shot example, with two intervals.

Models of other seeds differ, and so do places of the text: one interval is that of the mean over seeds (Student's), the
other that of the mean over validation sequences (from the bootstrap, the losses of all seeds taken together).
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpruner.baselines.recipe import Recipe
from jaxpruner.report.differences import student_quantile
from oneshot_shakespeare_pruning import ALGORITHMS, Variant, read_cells, read_losses, variants

# What the papers found: the first of two is at least as good.
EXPECTED = (('sparsegpt', 'wanda'), ('wanda', 'magnitude'))
RESAMPLES = 10_000


class Pair(NamedTuple):
    """Two ways to prune, of which the first is expected to be better."""

    words: str
    first: tuple[Variant, str]
    second: tuple[Variant, str]
    sparsity: float


def differences(recipe: Recipe, out: Path) -> str:
    """All pairs as a table in Markdown; those that have no seed in common are left out."""
    losses = {variant.folder: _losses(out / variant.folder) for variant in variants(recipe)}
    lines = [
        '| | loss is lower by | 95 % over seeds | 95 % over sequences | seeds |',
        '|:--|--:|--:|--:|--:|',
    ]
    for words, *ways, sparsity in pairs(recipe):
        better, worse = (
            losses[variant.folder].get((algorithm, sparsity), {}) for variant, algorithm in ways
        )
        if seeds := sorted(better.keys() & worse.keys()):
            lower = np.stack([worse[seed].astype(np.float64) - better[seed] for seed in seeds])
            spans = [
                f'{low:.4f} to {high:.4f}'
                for low, high in (over_seeds(lower), over_sequences(lower))
            ]
            lines.append(f'| {words} | {lower.mean():.4f} | {" | ".join(spans)} | {len(seeds)} |')
    return '\n'.join(lines) + '\n'


def _losses(folder: Path) -> dict[tuple[str, float], dict[int, np.ndarray]]:
    """Of each algorithm and sparsity, by seed."""
    found: dict[tuple[str, float], dict[int, np.ndarray]] = {}
    for cell in read_cells(folder):
        found.setdefault((cell.algorithm, cell.sparsity), {})[cell.seed] = read_losses(folder, cell)
    return found


def pairs(recipe: Recipe) -> Iterator[Pair]:
    """The expected order in each way to prune, then what OWL does to each algorithm, per block and per leaf."""
    ways = variants(recipe)
    for variant in ways:
        for sparsity in variant.sparsities:
            share = '' if variant.is_n_by_m else f'{100 * sparsity:.4g} % '
            for first, second in EXPECTED:
                if second not in variant.algorithms:
                    continue
                words = f'{first} than {second}, {share}{variant.title}'
                yield Pair(words, (variant, first), (variant, second), sparsity)
    unstructured, owl, owl_leaf = ways[:3]
    for better, worse, words in (
        (owl, unstructured, 'with OWL than without'),
        (owl_leaf, unstructured, 'with OWL per leaf than without'),
        (owl, owl_leaf, 'with OWL per block than per leaf'),
    ):
        for sparsity, algorithm in itertools.product(better.sparsities, ALGORITHMS):
            yield Pair(
                f'{algorithm} {words}, {100 * sparsity:.4g} %',
                (better, algorithm),
                (worse, algorithm),
                sparsity,
            )


def over_seeds(values: np.ndarray) -> tuple[float, float]:
    """Where the mean lies if seeds are drawn anew; `values` are float[seeds, sequences]."""
    means = values.mean(1)
    if len(means) == 1:
        return -math.inf, math.inf
    half = student_quantile(len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means))
    return means.mean() - half, means.mean() + half


def over_sequences(values: np.ndarray) -> tuple[float, float]:
    """Where the mean lies if sequences are drawn anew, of the same models; `values` are float[seeds, sequences]."""
    means = values.mean(0)
    drawn = np.random.default_rng(0).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.quantile(means[drawn].mean(1), (0.025, 0.975))
    return low, high
