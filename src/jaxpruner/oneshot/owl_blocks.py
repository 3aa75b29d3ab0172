"""OWL on a model: which weight matrices share a sparsity, and which each block of them gets."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.oneshot import matrix_scores, owl
from jaxpruner.oneshot.blocks import Names, block_of
from jaxpruner.oneshot.calibration import CalibratedMatrices
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.leaf_targets import LeafTargets
from jaxpruner.oneshot.weight_matrices import WeightMatrices


class OwlSettings(NamedTuple):
    """How OWL is done.

    Attributes:
      per: what has one share of outliers, and one sparsity: a `'block'` or a `'leaf'` (each matrix of a stack).
      names: globs or paths of the leaves of each block.
      multiple: the paper's M.
      deviation: the paper's lambda.
    """

    per: str = 'block'
    names: Sequence[Names] = ()
    multiple: float = 5.0
    deviation: float = 0.08


def matrix_sparsities(
    entries: Sequence[CalibratedMatrices],
    targets: LeafTargets,
    read: Callable[[WeightMatrices], jax.Array],
    settings: OwlSettings,
) -> list[jax.Array]:
    """Computes the sparsity of each weight matrix of a model: for each entry a float32 array, one for each matrix.

    The mean over all weights is that of the leaves' own targets. A block counts the outliers among the scores of all of
    its matrices, whose inputs are taken by the mean of their squares. `read` gives the weights of matrices.
    """
    matrices = [entry.matrices for entry in entries]
    numbers = number_blocks(matrices, settings.per, settings.names)
    score_sums = []
    sizes = []
    own_targets = []
    for part, statistics in entries:
        sums = _sums_of_scores(read(part), statistics)
        score_sums.append(sums)
        *_, inputs, outputs = part.shape
        sizes.append(np.full(sums.shape, inputs * outputs))
        target = float(targets[part.path].sparsity)
        own_targets.append(np.full(sums.shape, target))
    block_sizes = _sum_by_block(numbers, sizes)
    at_least_one = np.maximum(block_sizes, 1)
    mean_scores = _sum_by_block(numbers, score_sums) / at_least_one
    thresholds = settings.multiple * mean_scores
    outliers = []
    for (part, statistics), own in zip(entries, numbers, strict=True):
        own_thresholds = jnp.asarray(thresholds[own], jnp.float32)
        weights = read(part)
        outliers.append(_numbers_above(weights, statistics, own_thresholds))
        del weights  # before the next are read
    shares = _sum_by_block(numbers, outliers) / at_least_one
    mean_target = np.average(_flat(own_targets), weights=_flat(sizes))
    of_blocks = owl.owl_sparsities(
        shares.tolist(), block_sizes.tolist(), float(mean_target), settings.deviation
    )
    by_block = np.asarray(of_blocks)
    return [jnp.asarray(by_block[own], jnp.float32) for own in numbers]


def number_blocks(
    matrices: Sequence[WeightMatrices], per: str, names: Sequence[Names] = ()
) -> list[np.ndarray]:
    """Numbers the block of each matrix: for each leaf an array in the shape of the matrices' leading axes.

    Of `names` the first that matches a leaf makes its block; of other leaves those make one that stand in the same trip
    of a scan, or whose paths begin alike up to the first part that is numbered: `h/0`, `layers_3`, `block_0`. A leaf
    that has no such part is a block of its own. `per='leaf'` numbers all matrices apart.
    """
    prefixes = numbered_prefixes([part.path for part in matrices])
    numbers: dict[Any, int] = {}
    of_leaves = []
    for leaf, (part, prefix) in enumerate(zip(matrices, prefixes, strict=True)):
        own = np.empty(part.shape[:-2], np.int64)
        for index in np.ndindex(*own.shape):
            key: Any = (leaf, index)
            if per != 'leaf':
                key = _block_name(part, prefix, names), _trip(part, index)
            own[index] = numbers.setdefault(key, len(numbers))
        of_leaves.append(own)
    return of_leaves


def numbered_prefixes(paths: Sequence[tree_lib.Path]) -> list[tree_lib.Path]:
    """Takes of each path its beginning up to the first part in which others differ by a number alone, else the path.

    >>> numbered_prefixes([('model_1', 'block_0', 'w'), ('model_1', 'block_1', 'w')])
    [('model_1', 'block_0'), ('model_1', 'block_1')]
    """
    siblings: dict[tree_lib.Path, set[str]] = {}
    for path in paths:
        for end, part in enumerate(path):
            key = (*path[:end], _without_numbers(part))
            siblings.setdefault(key, set()).add(part)

    def numbered_prefix(path: tree_lib.Path) -> tree_lib.Path:
        for end, part in enumerate(path):
            key = (*path[:end], _without_numbers(part))
            if len(siblings[key]) > 1:
                return path[: end + 1]
        return path

    return list(map(numbered_prefix, paths))


def _without_numbers(part: str) -> str:
    return re.sub(r'\d+', '#', part)


def _block_name(matrices: WeightMatrices, prefix: tree_lib.Path, names: Sequence[Names]) -> Any:
    number = block_of(matrices.path, names)
    if number is not None:
        return number
    if not matrices.stack:
        return prefix
    outermost = matrices.stack[0]
    return outermost.loop, outermost.length


def _trip(matrices: WeightMatrices, index: tuple[int, ...]) -> int:
    """Finds in which trip of the outermost loop that takes the leaf apart a matrix is used; -1 where none does."""
    if not matrices.stack:
        return -1
    first_trip, _ = matrices.stack[0].range
    return first_trip + index[0]


@jax.jit
def _sums_of_scores(weights: jax.Array, statistics: InputStatistics) -> jax.Array:
    return jnp.sum(_scores(weights, statistics), (-2, -1))


@jax.jit
def _numbers_above(
    weights: jax.Array, statistics: InputStatistics, thresholds: jax.Array
) -> jax.Array:
    is_above = _scores(weights, statistics) > thresholds[..., None, None]
    return jnp.sum(is_above, (-2, -1))


def _scores(weights: jax.Array, statistics: InputStatistics) -> jax.Array:
    """Computes Wanda's scores by mean squares of inputs: leaves of a block may have seen other numbers of samples."""
    count = jnp.asarray(statistics.count, jnp.float32)
    second_moment = statistics.second_moment
    missing_axes = second_moment.ndim - count.ndim
    count = count.reshape(count.shape + (1,) * missing_axes)
    mean_square = second_moment / jnp.maximum(count, 1)
    return matrix_scores.wanda_scores(weights, mean_square)


def _sum_by_block(numbers: Sequence[np.ndarray], values: Sequence[Any]) -> np.ndarray:
    """Sums over the matrices of each block."""
    return np.bincount(_flat(numbers), weights=_flat(values))


def _flat(arrays: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in arrays])
