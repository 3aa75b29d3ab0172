"""OWL: blocks with many outliers among their scores stay denser."""

import collections
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.calibrate import InputStatistics
from jaxpruner.oneshot.leaves import Names, block_of
from jaxpruner.oneshot.matrices import wanda_scores
from jaxpruner.sparsity_distributions import check_sparsity


def owl_sparsities(
    shares: Sequence[float], sizes: Sequence[int], sparsity: float, max_deviation: float = 0.08
) -> list[float]:
    r"""Computes outlier weighed layer-wise sparsity, from Yin et al., 2023.

    With $D_l$ the share of outliers of layer $l$, its density is $2 \lambda (D_l - \min D) / (\max D - \min D)$,
    shifted so that all layers together reach the target. Where a layer would leave [0, 1], all come as much closer to
    the target as it takes.

    Args:
      shares: of the scores of each layer that exceed a multiple of their mean.
      sizes: number of weights of each layer, with which its sparsity counts in the mean.
      sparsity: what the mean is to be, in [0, 1].
      max_deviation: the paper's lambda.

    Returns:
      The sparsity of each layer.

    Raises:
      ValueError: a sparsity outside [0, 1].

    >>> np.round(owl_sparsities([0.01, 0.03, 0.02], [100, 100, 100], 0.7), 3).tolist()
    [0.78, 0.62, 0.7]
    """
    check_sparsity(sparsity, 'sparsity')
    outliers = np.asarray(shares, np.float64)
    spread = np.ptp(outliers)
    if spread == 0:
        return [float(sparsity)] * len(sizes)
    above = 2 * max_deviation * (outliers - outliers.min()) / spread
    above -= np.average(above, weights=np.asarray(sizes, np.float64))
    room_below = sparsity / max(above.max(), 1e-30)
    room_above = (1 - sparsity) / max(-above.min(), 1e-30)
    return np.clip(sparsity - min(room_below, room_above, 1.0) * above, 0, 1).tolist()


def matrix_sparsities(entries, targets, read, settings) -> dict[Any, jax.Array]:
    """Computes the sparsity of each weight matrix of a model, by path and reading: float32, one for each matrix.

    The mean over all weights is that of the leaves' own targets. A block counts the outliers among the scores of all of
    its matrices, whose inputs are taken by the mean of their squares. `read` gives the weights of matrices, and
    `settings` is a `CalibratedPruning`.
    """
    parts = [part for part, _ in entries]
    numbers = _number_blocks(parts, settings.owl_per, settings.blocks or ())
    flat_numbers = np.concatenate([own.ravel() for own in numbers])

    def by_block(values: Sequence[Any]) -> np.ndarray:
        return np.bincount(flat_numbers, np.concatenate([np.ravel(value) for value in values]))

    pairs = list(zip(parts, numbers, strict=True))
    sizes = [np.full(own.shape, np.prod(part.shape[-2:])) for part, own in pairs]
    sums = [jnp.sum(_scores(read(part), own), (-2, -1)) for part, own in entries]
    block_sizes = by_block(sizes)
    thresholds = settings.owl_multiple * by_block(sums) / np.maximum(block_sizes, 1)
    outliers = []
    for (part, statistics), own in zip(entries, numbers, strict=True):
        threshold = jnp.asarray(thresholds[own], jnp.float32)[..., None, None]
        outliers.append(jnp.sum(_scores(read(part), statistics) > threshold, (-2, -1)))
    shares: Any = by_block(outliers) / np.maximum(block_sizes, 1)
    of_leaves = [float(targets[part.path].target) for part in parts]
    sparsity = np.average(of_leaves, weights=list(map(np.sum, sizes)))
    chosen = owl_sparsities(shares, list(block_sizes), sparsity, settings.owl_deviation)
    of_blocks = np.asarray(chosen, np.float32)
    return {(part.path, part.reading): jnp.asarray(of_blocks[own]) for part, own in pairs}


@jax.jit
def _scores(weights: jax.Array, statistics: InputStatistics) -> jax.Array:
    """Computes Wanda's scores by mean squares of inputs: leaves of a block may have seen other numbers of samples."""
    count = jnp.asarray(statistics.count, jnp.float32)
    second_moment = statistics.second_moment
    count = count.reshape(count.shape + (1,) * (second_moment.ndim - count.ndim))
    return wanda_scores(weights, second_moment / jnp.maximum(count, 1))


def _number_blocks(matrices, per: str, blocks: Sequence[Names]) -> list[np.ndarray]:
    """Numbers the block of each matrix: for each leaf an array in the shape of the matrices' leading axes.

    Of `blocks` the first with a name that matches a leaf is its block. Of other leaves those make one that stand in the
    same trip of a scan, or whose paths begin alike up to the first part that is numbered: `h/0`, `layers_3`, `block_0`.
    A leaf that has no such part is a block of its own. `per='leaf'` numbers all matrices apart.
    """
    prefixes = numbered_prefixes([part.path for part in matrices])
    numbers: dict[Any, int] = {}
    of_leaves = []
    for leaf, (part, name) in enumerate(zip(matrices, prefixes, strict=True)):
        if part.stack:
            name = part.stack[0].loop, part.stack[0].length
        named = block_of(part.path, blocks)
        own = np.empty(part.shape[:-2], np.int64)
        for index in np.ndindex(*own.shape):
            trip = part.stack[0].range[0] + index[0] if part.stack else -1
            key = (leaf, index) if per == 'leaf' else (name if named is None else named, trip)
            own[index] = numbers.setdefault(key, len(numbers))
        of_leaves.append(own)
    return of_leaves


def numbered_prefixes(paths: Sequence[tree_lib.Path]) -> list[tree_lib.Path]:
    """Takes of each path its beginning up to the first part in which others differ by a number alone, else the path.

    >>> numbered_prefixes([('model_1', 'block_0', 'w'), ('model_1', 'block_1', 'w')])
    [('model_1', 'block_0'), ('model_1', 'block_1')]
    """
    siblings = collections.defaultdict(set)
    beginnings = []
    for path in paths:
        patterns = [(path[:end], re.sub(r'\d+', '#', part)) for end, part in enumerate(path)]
        beginnings.append(patterns)
        for pattern, part in zip(patterns, path, strict=True):
            siblings[pattern].add(part)
    prefixes = []
    for path, patterns in zip(paths, beginnings, strict=True):
        is_numbered = [len(siblings[pattern]) > 1 for pattern in patterns]
        prefixes.append(path[: is_numbered.index(True) + 1] if any(is_numbered) else path)
    return prefixes
