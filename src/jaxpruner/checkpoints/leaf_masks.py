"""The mask of one leaf, part by part: scores, a sparsity and a sparsity type as elsewhere, for leaves of any size."""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import sparsity_types
from jaxpruner.checkpoints.base import Checkpoint, Leaf
from jaxpruner.checkpoints.parts import PART_SIZE, Part, parts_of
from jaxpruner.checkpoints.ranking_in_parts import Verdicts, threshold
from jaxpruner.mask_calculator import n_by_m, selection

# The number of a part and its weights -> a non-negative float for each weight.
Score = Callable[[int, np.ndarray], np.ndarray]


def magnitude(number: int, weights: np.ndarray) -> np.ndarray:
    """The absolute value of each weight, in its own dtype.

    Args:
      number: of the part; does not count.
      weights: float array.

    >>> magnitude(0, np.array([-2.0, 1.0])).tolist()
    [2.0, 1.0]
    """
    del number
    return np.abs(weights)


def random_scores(name: str, seed: int) -> Score:
    """Uniform float32 scores in [0, 1), which depend on the leaf's name, the seed and the part's number alone.

    Args:
      name: the leaf's.
      seed: whole number, not negative.

    Raises:
      ValueError: the seed is negative.

    >>> random_scores('w', 8)(0, np.ones(3)).shape
    (3,)
    """
    if seed < 0:
        raise ValueError(f'seed must not be negative, got {seed}')

    def score(number: int, weights: np.ndarray) -> np.ndarray:
        # Drawn anew in each pass: several times faster than JAX's counters are on a CPU.
        generator = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
        return generator.random(weights.shape, np.float32)

    return score


class Pruned(NamedTuple):
    """A part of a leaf after pruning.

    >>> Pruned(np.array([0.0, 2.0]), np.array([0, 1], np.uint8)).mask.tolist()
    [0, 1]
    """

    weights: np.ndarray  # zero where removed
    mask: np.ndarray  # uint8 of their shape, 1 = kept
    nans: int = 0  # weights that were NaN


def prune_leaf(
    checkpoint: Checkpoint,
    name: str,
    kind: sparsity_types.SparsityType,
    sparsity: float,
    score: Score = magnitude,
    part_size: int = PART_SIZE,
) -> Iterator[Pruned]:
    """Prunes a leaf as `mask_calculator.get_topk_fn(kind)(scores, sparsity)` does, holding a part of it at a time.

    Sums over channels are those of the parts, added up in float64, which may round otherwise than one sum does.

    Args:
      checkpoint: where the leaf is.
      name: the leaf's.
      kind: `Unstructured`, `NByM`, `Block` or `Channel`.
      sparsity: share to remove, in [0, 1].
      score: what weights are ranked by.
      part_size: weights held at a time.

    Returns:
      The leaf's parts in flat order.

    Raises:
      ValueError: the type does not fit the shape.

    >>> import tempfile, pathlib
    >>> from jaxpruner.checkpoints import open_checkpoint, write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(pathlib.Path(folder) / 'a.safetensors', {'w': np.array([-3.0, 1.0, 2.0])})
    ...     dense = open_checkpoint(folder)
    ...     [part.mask.tolist() for part in prune_leaf(dense, 'w', sparsity_types.Unstructured(), 0.3)]
    [[1, 0, 1]]
    """
    leaf = checkpoint.leaves[name]
    kind.check_shape(leaf.shape, name)
    deepest, multiple = _cuts(kind, leaf.ndim)

    def weights() -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
        for number, part in enumerate(parts_of(leaf.shape, deepest, multiple, part_size)):
            array = checkpoint.read(name, part)
            yield part, array, score(number, array)

    mask_of = _mask_function(kind, sparsity, leaf, weights)
    for part, array, scores in weights():
        mask = mask_of(part, scores)
        nans = int(np.count_nonzero(np.isnan(array)))
        np.copyto(array, np.zeros((), array.dtype), where=mask == 0)
        yield Pruned(array, mask, nans)


def _cuts(kind: sparsity_types.SparsityType, rank: int) -> tuple[int | None, int]:
    """The last axis that parts may be cut along without cutting a group, and where."""
    if isinstance(kind, sparsity_types.NByM):
        return kind.axis % rank, kind.m
    if isinstance(kind, sparsity_types.Block) and rank:
        return max(rank - 2, 0), kind.block_shape[-min(rank, 2)]
    return None, 1


Weights = Callable[[], Iterator[tuple[Part, np.ndarray, np.ndarray]]]


def _mask_function(
    kind: sparsity_types.SparsityType, sparsity: float, leaf: Leaf, weights: Weights
) -> Callable[[Part, np.ndarray], np.ndarray]:
    """The function from a part and its scores to its mask, to be called in order."""
    if sparsity == 0:
        return lambda part, scores: np.ones(part.shape, np.uint8)
    if isinstance(kind, sparsity_types.NByM):
        return lambda part, scores: _keep_n_of_m(scores, kind.n, kind.m, kind.axis)
    assert isinstance(kind, sparsity_types.GroupedType)
    if isinstance(kind, sparsity_types.Channel):
        return _channel_masks(kind, sparsity, leaf, weights)

    def groups() -> Iterator[np.ndarray]:
        return (_group_scores(kind, scores) for _, _, scores in weights())

    total = _groups_in(kind, leaf.shape)
    verdicts = Verdicts(threshold(groups, _count(total, sparsity), total))
    return lambda part, scores: _spread(kind, verdicts.of(_group_scores(kind, scores)), part.shape)


def _channel_masks(
    kind: sparsity_types.Channel, sparsity: float, leaf: Leaf, weights: Weights
) -> Callable[[Part, np.ndarray], np.ndarray]:
    axis = kind.axis % leaf.ndim
    sums = np.zeros(leaf.shape[axis], np.float64)
    if leaf.size:
        for part, _, scores in weights():
            sums[part.offset[axis] : part.offset[axis] + part.shape[axis]] += _group_scores(
                kind, scores
            )
    totals = (
        sums if leaf.dtype == np.float64 else sums.astype(np.float32)
    )  # ties as the library sees them
    verdicts = Verdicts(threshold(lambda: [totals], _count(len(totals), sparsity), len(totals))).of(
        totals
    )

    def mask_of(part: Part, scores: np.ndarray) -> np.ndarray:
        del scores
        first = part.offset[axis]
        return _spread(kind, verdicts[first : first + part.shape[axis]], part.shape)

    return mask_of


def _count(total: int, sparsity: float) -> int:
    with _wide_if(total >= 2**32):
        return int(selection.number_to_keep(total, sparsity))


def _groups_in(kind: sparsity_types.GroupedType, shape: tuple[int, ...]) -> int:
    if not isinstance(kind, sparsity_types.Block) or 0 in shape:
        return int(np.prod(shape, dtype=np.int64))
    return jax.eval_shape(kind.group_scores, jax.ShapeDtypeStruct(shape, np.float32)).size


def _group_scores(kind: sparsity_types.GroupedType, scores: np.ndarray) -> np.ndarray:
    if isinstance(kind, sparsity_types.Unstructured) or not scores.size:
        return scores
    with _wide_if(scores.dtype == np.float64):
        return np.asarray(_jitted_group_scores(scores, kind))


def _spread(
    kind: sparsity_types.GroupedType, verdicts: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    if isinstance(kind, sparsity_types.Unstructured) or not verdicts.size:
        return verdicts.reshape(shape)
    return np.asarray(_jitted_spread(verdicts, kind, shape))


@functools.partial(jax.jit, static_argnums=1)
def _jitted_group_scores(scores: jax.Array, kind: sparsity_types.GroupedType) -> jax.Array:
    return kind.group_scores(scores)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _jitted_spread(
    verdicts: jax.Array, kind: sparsity_types.GroupedType, shape: tuple[int, ...]
) -> jax.Array:
    return kind.spread_groups(verdicts, shape)


_jitted_n_of_m = jax.jit(n_by_m.keep_n_of_m, static_argnums=(1, 2, 3))


def _keep_n_of_m(scores: np.ndarray, n: int, m: int, axis: int) -> np.ndarray:
    if not scores.size:
        return np.ones(scores.shape, np.uint8)
    with _wide_if(scores.dtype == np.float64):
        return np.asarray(_jitted_n_of_m(scores, n, m, axis))


def _wide_if(wide: bool) -> Any:
    """Lets JAX compute in 64 bits where a leaf has them."""
    if not wide:
        return contextlib.nullcontext()
    return jax.enable_x64(True) if hasattr(jax, 'enable_x64') else jax.experimental.enable_x64()  # pyright: ignore
