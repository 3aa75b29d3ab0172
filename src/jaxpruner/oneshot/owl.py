"""OWL: blocks with many outliers among their scores stay denser."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot.calibrate import CalibratedMatrices, InputStatistics
from jaxpruner.oneshot.matrices import WeightMatrices, wanda_scores
from jaxpruner.sparsity_distributions import check_sparsity

# A glob or a path, or several.
Names = str | Sequence[str | tree_lib.Path]


def outlier_shares(scores: jax.Array, multiple: float = 5.0) -> jax.Array:
    """Computes which share of a layer's scores exceeds a multiple of their mean.

    Args:
      scores: Wanda's, `[..., inputs, outputs]`.
      multiple: the paper's M.

    Returns:
      A share for each matrix, `[...]`.

    >>> outlier_shares(jnp.array([[9.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    Array(0.16666667, dtype=float32)
    """
    mean = jnp.mean(scores, (-2, -1), keepdims=True)
    return jnp.mean(scores > multiple * mean, (-2, -1), dtype=scores.dtype)


def owl_sparsities(
    shares: Sequence[float], sizes: Sequence[int], sparsity: float, max_deviation: float = 0.08
) -> list[float]:
    r"""Computes outlier weighed layer-wise sparsity, from Yin et al., 2023.

    With $D_l$ the share of outliers of layer $l$, its density is $2 \lambda (D_l - \min D) / (\max D - \min D)$,
    shifted so that all layers together reach the target. Where a layer would leave [0, 1], all come as much closer to
    the target as it takes.

    Args:
      shares: of outliers, one for each layer; see `outlier_shares`.
      sizes: number of weights of each layer, with which its sparsity counts in the mean.
      sparsity: what the mean is to be, in [0, 1].
      max_deviation: the paper's lambda.

    Returns:
      The sparsity of each layer.

    Raises:
      ValueError: a sparsity outside [0, 1], a negative deviation, shares that are not finite, or other numbers of
        shares and sizes.

    >>> np.round(owl_sparsities([0.01, 0.03, 0.02], [100, 100, 100], 0.7), 3).tolist()
    [0.78, 0.62, 0.7]
    """
    check_sparsity(sparsity, 'sparsity')
    if not max_deviation >= 0:
        raise ValueError(f'max_deviation must not be negative, got {max_deviation!r}')
    if len(shares) != len(sizes):
        raise ValueError(
            f'each layer needs a share and a size, got {len(shares)} shares and {len(sizes)} sizes'
        )
    outliers = np.asarray(shares, np.float64)
    if not np.isfinite(outliers).all():
        raise ValueError(
            f'shares of outliers must be finite, got {list(shares)}; look for NaN in the scores'
        )
    spread = np.ptp(outliers) if len(outliers) else 0.0
    if spread == 0:
        return [float(sparsity)] * len(sizes)
    above = 2 * max_deviation * (outliers - outliers.min()) / spread
    above -= np.average(above, weights=np.asarray(sizes, np.float64))
    room_below = sparsity / max(above.max(), 1e-30)
    room_above = (1 - sparsity) / max(-above.min(), 1e-30)
    return np.clip(sparsity - min(room_below, room_above, 1.0) * above, 0, 1).tolist()


def matrix_sparsities(
    entries: Sequence[CalibratedMatrices],
    targets: Mapping[tree_lib.Path, Any],
    read: Callable[[WeightMatrices], jax.Array],
    settings: Any,
) -> list[jax.Array]:
    """Computes the sparsity of each weight matrix of a model: for each entry a float32 array, one for each matrix.

    The mean over all weights is that of the leaves' own targets. A block counts the outliers among the scores of all of
    its matrices, whose inputs are taken by the mean of their squares. `read` gives the weights of matrices, and
    `settings` is a `CalibratedPruning`.
    """
    numbers = _number_blocks([part for part, _ in entries], settings.owl_per, settings.blocks or ())
    flat_numbers = np.concatenate([own.ravel() for own in numbers])

    def by_block(values: Sequence[Any]) -> np.ndarray:
        return np.bincount(flat_numbers, np.concatenate([np.ravel(value) for value in values]))

    sizes, sums, outliers = [], [], []
    removed = 0.0
    for (part, statistics), own in zip(entries, numbers, strict=True):
        sizes.append(np.full(own.shape, part.shape[-2] * part.shape[-1]))
        removed += float(targets[part.path].sparsity) * math.prod(part.shape)
        sums.append(jnp.sum(_scores(read(part), statistics), (-2, -1)))
    block_sizes = by_block(sizes)
    thresholds = settings.owl_multiple * by_block(sums) / np.maximum(block_sizes, 1)
    for (part, statistics), own in zip(entries, numbers, strict=True):
        threshold = jnp.asarray(thresholds[own], jnp.float32)[..., None, None]
        outliers.append(jnp.sum(_scores(read(part), statistics) > threshold, (-2, -1)))
    shares = by_block(outliers) / np.maximum(block_sizes, 1)
    mean_target = removed / max(block_sizes.sum(), 1)
    chosen = owl_sparsities(
        shares.tolist(), block_sizes.tolist(), mean_target, settings.owl_deviation
    )
    return [jnp.asarray(np.asarray(chosen)[own], jnp.float32) for own in numbers]


@jax.jit
def _scores(weights: jax.Array, statistics: InputStatistics) -> jax.Array:
    """Computes Wanda's scores by mean squares of inputs: leaves of a block may have seen other numbers of samples."""
    count = jnp.asarray(statistics.count, jnp.float32)
    second_moment = statistics.second_moment
    count = count.reshape(count.shape + (1,) * (second_moment.ndim - count.ndim))
    return wanda_scores(weights, second_moment / jnp.maximum(count, 1))


def _number_blocks(
    matrices: Sequence[WeightMatrices], per: str, blocks: Sequence[Names]
) -> list[np.ndarray]:
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


def block_of(path: tree_lib.Path, blocks: Sequence[Names]) -> int | None:
    """Finds the number of the first block that names a leaf, `None` if none does.

    >>> block_of(('layer_1', 'w'), ['layer_0/*', ('layer_1/*', 'head')])
    1
    """
    matching = (n for n, names in enumerate(blocks) if tree_lib.matches_any(names, path))
    return next(matching, None)


def numbered_prefixes(paths: Sequence[tree_lib.Path]) -> list[tree_lib.Path]:
    """Takes of each path its beginning up to the first part in which others differ by a number alone, else the path.

    >>> numbered_prefixes([('model_1', 'block_0', 'w'), ('model_1', 'block_1', 'w')])
    [('model_1', 'block_0'), ('model_1', 'block_1')]
    """

    def pattern(path: tree_lib.Path, end: int) -> tree_lib.Path:
        return (*path[:end], re.sub(r'\d+', '#', path[end]))

    siblings: dict[tree_lib.Path, set[str]] = {}
    for path in paths:
        for end, part in enumerate(path):
            siblings.setdefault(pattern(path, end), set()).add(part)
    prefixes = []
    for path in paths:
        ends = [end for end in range(len(path)) if len(siblings[pattern(path, end)]) > 1]
        prefixes.append(path[: ends[0] + 1] if ends else path)
    return prefixes
