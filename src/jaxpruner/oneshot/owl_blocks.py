"""OWL on a model: which weight matrices share a sparsity, and which each block of them gets."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.oneshot import matrix_scores, owl
from jaxpruner.oneshot.blocks import Names, block_of
from jaxpruner.oneshot.input_statistics import InputStatistics
from jaxpruner.oneshot.weight_matrices import WeightMatrices


class OwlLeaf(NamedTuple):
    """Weight matrices that OWL gives a sparsity.

    Attributes:
      path: of their leaf.
      matrices: how they are read from it.
      statistics: of their inputs.
      sparsity: what the distribution says.

    >>> OwlLeaf(('w',), None, InputStatistics(2, jnp.ones(3)), 0.5).sparsity
    0.5
    """

    path: tree_lib.Path
    matrices: WeightMatrices
    statistics: InputStatistics
    sparsity: float


class OwlSettings(NamedTuple):
    """How OWL is done.

    Attributes:
      per: what has one share of outliers, and one sparsity: a `'block'` or a `'leaf'` (each matrix of a stack).
      names: globs or paths of the leaves of each block.
      multiple: the paper's M.
      deviation: the paper's lambda.

    >>> OwlSettings().per
    'block'
    """

    per: str = 'block'
    names: Sequence[Names] = ()
    multiple: float = 5.0
    deviation: float = 0.08


def matrix_sparsities(
    leaves: Sequence[OwlLeaf],
    read: Callable[[tree_lib.Path, WeightMatrices], jax.Array],
    settings: OwlSettings,
) -> list[jax.Array]:
    """The sparsity of each weight matrix of a model.

    The mean over all weights is that of the leaves' own sparsities. A block counts the outliers among the scores of all
    of its matrices, whose inputs are taken by the mean of their squares.

    Args:
      leaves: what is pruned.
      read: from a leaf's path and a way to read it to the weight matrices.
      settings: how.

    Returns:
      For each leaf float32, one for each of its matrices.

    >>> from jaxpruner.oneshot.calibration import calibrate
    >>> params = {'layer_0': jnp.eye(6), 'layer_1': jnp.ones((6, 6))}
    >>> apply_fn = lambda params, x: x @ params['layer_0'] @ params['layer_1']
    >>> found = calibrate(apply_fn, params, [jnp.ones((6, 6))])
    >>> leaves = [OwlLeaf(path, *found[path][0], 0.5) for path in found]
    >>> sparsities = matrix_sparsities(leaves, lambda path, matrices: matrices.read(params[path[0]]), OwlSettings())
    >>> [round(float(sparsity), 2) for sparsity in sparsities]
    [0.42, 0.58]
    """
    numbers = number_blocks(
        [(leaf.path, leaf.matrices) for leaf in leaves], settings.per, settings.names
    )
    sums, sizes = [], []
    for leaf in leaves:
        weights = read(leaf.path, leaf.matrices)
        sums.append(_sums_of_scores(weights, leaf.statistics))
        sizes.append(np.full(sums[-1].shape, weights.shape[-2] * weights.shape[-1]))
    weights_of_blocks = _of_blocks(numbers, sizes)
    means = _of_blocks(numbers, sums) / np.maximum(weights_of_blocks, 1)
    outliers = []
    for leaf, own in zip(leaves, numbers, strict=True):
        thresholds = jnp.asarray(settings.multiple * means[own], jnp.float32)
        outliers.append(_numbers_above(read(leaf.path, leaf.matrices), leaf.statistics, thresholds))
    shares = _of_blocks(numbers, outliers) / np.maximum(weights_of_blocks, 1)
    targets = [
        np.full(own.shape, float(leaf.sparsity)) for leaf, own in zip(leaves, numbers, strict=True)
    ]
    mean = np.average(_flat(targets), weights=_flat(sizes))
    found = owl.owl_sparsities(
        shares.tolist(), weights_of_blocks.tolist(), float(mean), settings.deviation
    )
    return [jnp.asarray(np.asarray(found)[own], jnp.float32) for own in numbers]


def number_blocks(
    leaves: Sequence[tuple[tree_lib.Path, WeightMatrices]], per: str, names: Sequence[Names] = ()
) -> list[np.ndarray]:
    """The number of the block of each weight matrix.

    Of `names` the first that matches a leaf makes its block; of other leaves those make one that stand in the same trip
    of a scan, or whose paths begin alike up to the first part that is numbered: `h/0`, `layers_3`, `block_0`. A leaf
    that has no such part is a block of its own.

    Args:
      leaves: paths, and how the matrices are read.
      per: `'leaf'` numbers all matrices apart.
      names: globs or paths for each block.

    Returns:
      For each leaf an array in the shape of the leading axes of its matrices.

    >>> leaves = [(('h', '0', 'up'), None), (('h', '0', 'down'), None), (('h', '1', 'up'), None), (('head',), None)]
    >>> [prefix for prefix in numbered_prefixes([path for path, _ in leaves])]
    [('h', '0'), ('h', '0'), ('h', '1'), ('head',)]
    """
    prefixes = numbered_prefixes([path for path, _ in leaves])
    keys: dict[Any, int] = {}
    found = []
    for leaf, ((path, matrices), prefix) in enumerate(zip(leaves, prefixes, strict=True)):
        shape = matrices.layout.matrices_shape[:-2]
        own = np.empty(shape, np.int64)
        for index in np.ndindex(*shape):
            key = (
                (leaf, index)
                if per == 'leaf'
                else (_name(path, prefix, matrices, names), _trip(matrices, index))
            )
            own[index] = keys.setdefault(key, len(keys))
        found.append(own)
    return found


def numbered_prefixes(paths: Sequence[tree_lib.Path]) -> list[tree_lib.Path]:
    """For each path its beginning up to the first part in which others differ by a number alone, else the path.

    Args:
      paths: of all leaves that are pruned.

    >>> numbered_prefixes([('model_1', 'block_0', 'w'), ('model_1', 'block_1', 'w')])
    [('model_1', 'block_0'), ('model_1', 'block_1')]
    """
    siblings: dict[tree_lib.Path, set[str]] = {}
    for path in paths:
        for end in range(len(path)):
            siblings.setdefault((*path[:end], _without_numbers(path[end])), set()).add(path[end])

    def prefix(path: tree_lib.Path) -> tree_lib.Path:
        for end, part in enumerate(path):
            if len(siblings[*path[:end], _without_numbers(part)]) > 1:
                return path[: end + 1]
        return path

    return [prefix(path) for path in paths]


def _without_numbers(part: str) -> str:
    return re.sub(r'\d+', '#', part)


def _name(
    path: tree_lib.Path, prefix: tree_lib.Path, matrices: WeightMatrices, names: Sequence[Names]
) -> Any:
    named = block_of(path, names)
    if named is not None:
        return named
    stack = matrices.uses[0].site.view.stack
    return (stack[0].loop, stack[0].length) if stack else prefix


def _trip(matrices: WeightMatrices, index: tuple[int, ...]) -> int:
    """In which trip of the outermost loop that takes the leaf apart a matrix is used; -1 where none does."""
    stack = matrices.uses[0].site.view.stack
    return stack[0].range[0] + index[0] if stack else -1


@jax.jit
def _sums_of_scores(weights: jax.Array, statistics: InputStatistics) -> jax.Array:
    return jnp.sum(_scores(weights, statistics), (-2, -1))


@jax.jit
def _numbers_above(
    weights: jax.Array, statistics: InputStatistics, thresholds: jax.Array
) -> jax.Array:
    return jnp.sum(_scores(weights, statistics) > thresholds[..., None, None], (-2, -1))


def _scores(weights: jax.Array, statistics: InputStatistics) -> jax.Array:
    """Wanda's, of the mean square of each input: leaves of a block may have seen other numbers of samples."""
    count = jnp.asarray(statistics.count, jnp.float32)
    count = count.reshape(count.shape + (1,) * (statistics.second_moment.ndim - count.ndim))
    return matrix_scores.wanda_scores(weights, statistics.second_moment / jnp.maximum(count, 1))


def _of_blocks(numbers: Sequence[np.ndarray], values: Sequence[Any]) -> np.ndarray:
    """Sums of what the matrices of each block have."""
    return np.bincount(_flat(numbers), weights=_flat(values))


def _flat(arrays: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(array)) for array in arrays])
