"""The mask of one leaf, part by part, for leaves of any size: that of `mask_calculator.get_topk_fn`.

Each of the library's sparsity types has its own way through the parts. N:M ranks inside small groups, so that a part
stands alone. The others make passes over all parts for the threshold, and another for the masks. A type of one's own
may compare any weights with any others, so its leaf is a single part, whose mask the library makes.
"""

import contextlib
import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import mask_calculator, n_by_m, selection, sparsity_types
from jaxpruner.checkpoints.base import Checkpoint
from jaxpruner.checkpoints.parts import PART_SIZE, Part, parts_of
from jaxpruner.checkpoints.ranking_in_parts import Verdicts, threshold

# The number of a part and its weights -> a non-negative float for each weight.
Score = Callable[[int, np.ndarray], np.ndarray]


def magnitude(number: int, weights: np.ndarray) -> np.ndarray:
    """Scores weights by their absolute value, in their own dtype."""
    del number
    return np.abs(weights)


def random_scores(name: str, seed: int) -> Score:
    """Makes uniform float32 scores in [0, 1) that depend on the leaf's name, the seed and the part's number alone."""
    if seed < 0:
        raise ValueError(f'seed must not be negative, got {seed}')

    def score(number: int, weights: np.ndarray) -> np.ndarray:
        # Drawn anew in each pass: several times faster than JAX's counters are on a CPU.
        generator = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
        return generator.random(weights.shape, np.float32)

    return score


class PrunedPart(NamedTuple):
    """A part of a leaf after pruning."""

    weights: np.ndarray  # zero where removed
    mask: np.ndarray  # uint8 of their shape, 1 = kept
    nans: int  # weights that were NaN


def prune_leaf(
    checkpoint: Checkpoint,
    name: str,
    sparsity_type: sparsity_types.SparsityType,
    sparsity: float,
    score: Score = magnitude,
    part_size: int = PART_SIZE,
) -> Iterator[PrunedPart]:
    """Prunes a leaf, holding a part of `part_size` weights at a time; yields the parts in flat order.

    Sums over channels are those of the parts, added up in float64, which may round otherwise than one sum does.

    Raises:
      ValueError: the type does not fit the shape.
    """
    leaf = checkpoint.leaves[name]
    sparsity_type.check_shape(leaf.shape, name)
    scored_leaf = _ScoredLeaf(checkpoint, name, score, _cuts(sparsity_type, leaf.shape, part_size))
    mask_of = _mask_function(sparsity_type, sparsity, scored_leaf)
    for scored in scored_leaf.scored_parts():
        mask = mask_of(scored.part, scored.scores)
        weights = scored.weights
        nans = int(np.count_nonzero(np.isnan(weights)))
        np.copyto(weights, np.zeros((), weights.dtype), where=mask == 0)
        yield PrunedPart(weights, mask, nans)


class _ScoredPart(NamedTuple):
    part: Part
    weights: np.ndarray
    scores: np.ndarray


@dataclasses.dataclass(frozen=True)
class _ScoredLeaf:
    """A leaf whose parts are read and scored again in each pass over it."""

    checkpoint: Checkpoint
    name: str
    score: Score
    parts: Callable[[], Iterator[Part]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.leaves[self.name].shape

    def scored_parts(self) -> Iterator[_ScoredPart]:
        """Makes a pass over the leaf, in flat order."""
        for number, part in enumerate(self.parts()):
            weights = self.checkpoint.read(self.name, part)
            yield _ScoredPart(part, weights, self.score(number, weights))


def _cuts(
    sparsity_type: sparsity_types.SparsityType, shape: tuple[int, ...], part_size: int
) -> Callable[[], Iterator[Part]]:
    """Returns what cuts a leaf into parts, none of which cuts a group of weights that are ranked together."""
    rank = len(shape)
    deepest, multiple = None, 1
    if not _is_ranked_in_parts(sparsity_type):
        part_size = max(math.prod(shape), 1)
    elif isinstance(sparsity_type, sparsity_types.NByM):
        deepest, multiple = sparsity_type.axis % rank, sparsity_type.m
    elif isinstance(sparsity_type, sparsity_types.Block) and rank:
        deepest, multiple = max(rank - 2, 0), sparsity_type.block_shape[-min(rank, 2)]
    return functools.partial(parts_of, shape, deepest, multiple, part_size)


_MaskFunction = Callable[[Part, np.ndarray], np.ndarray]


def _mask_function(
    sparsity_type: sparsity_types.SparsityType, sparsity: float, leaf: _ScoredLeaf
) -> _MaskFunction:
    """Returns the function from a part and its scores to its mask, to be called in order."""
    if sparsity == 0:
        return lambda part, scores: np.ones(part.shape, np.uint8)
    if not _is_ranked_in_parts(sparsity_type):
        return functools.partial(_library_mask, sparsity_type, sparsity)
    match sparsity_type:
        case sparsity_types.NByM():
            return functools.partial(_n_by_m_mask, sparsity_type)
        case sparsity_types.Channel():
            return _channel_masks(sparsity_type, sparsity, leaf)
        case sparsity_types.Unstructured() | sparsity_types.Block():
            return _group_masks(sparsity_type, sparsity, leaf)
    raise AssertionError(sparsity_type)


def _is_ranked_in_parts(sparsity_type: sparsity_types.SparsityType) -> bool:
    """Whether it groups and scores as one of the library's own types; a subclass may do otherwise."""
    if isinstance(sparsity_type, sparsity_types.NByM) and isinstance(sparsity_type.axis, tuple):
        return False  # a part may hold a piece of a group
    grouped_types = (sparsity_types.NByM, sparsity_types.Block, sparsity_types.Channel)
    return sparsity_types.is_unstructured(sparsity_type) or type(sparsity_type) in grouped_types


def _library_mask(
    sparsity_type: sparsity_types.SparsityType, sparsity: float, part: Part, scores: np.ndarray
) -> np.ndarray:
    del part  # the whole leaf
    with _jax_precision_of(scores):
        return np.asarray(mask_calculator.get_topk_fn(sparsity_type)(jnp.asarray(scores), sparsity))


def _n_by_m_mask(sparsity_type: sparsity_types.NByM, part: Part, scores: np.ndarray) -> np.ndarray:
    if not scores.size:
        return np.ones(part.shape, np.uint8)
    with _jax_precision_of(scores):
        return np.asarray(
            _keep_n_of_m(scores, sparsity_type.n, sparsity_type.m, sparsity_type.axis)
        )


def _channel_masks(
    sparsity_type: sparsity_types.Channel, sparsity: float, leaf: _ScoredLeaf
) -> _MaskFunction:
    axis = sparsity_type.axis % len(leaf.shape)
    sums = np.zeros(leaf.shape[axis], np.float64)
    for part, weights, scores in leaf.scored_parts():
        if weights.size:
            channels = slice(part.offset[axis], part.offset[axis] + part.shape[axis])
            sums[channels] += _group_scores(sparsity_type, scores)
    if leaf.checkpoint.leaves[leaf.name].dtype != np.float64:
        sums = sums.astype(np.float32)  # so that ties are those of the library
    kept = _verdicts(lambda: [sums], len(sums), sparsity).of(sums)

    def mask_of(part: Part, scores: np.ndarray) -> np.ndarray:
        del scores
        channels = slice(part.offset[axis], part.offset[axis] + part.shape[axis])
        return _spread(sparsity_type, kept[channels], part.shape)

    return mask_of


def _group_masks(
    sparsity_type: sparsity_types.Unstructured | sparsity_types.Block,
    sparsity: float,
    leaf: _ScoredLeaf,
) -> _MaskFunction:
    def pooled() -> Iterator[np.ndarray]:
        for scored in leaf.scored_parts():
            yield _group_scores(sparsity_type, scored.scores)

    groups = math.prod(leaf.shape)
    if groups:
        scores = jax.ShapeDtypeStruct(leaf.shape, np.float32)
        groups = jax.eval_shape(sparsity_type.group_scores, scores).size
    verdicts = _verdicts(pooled, groups, sparsity)

    def mask_of(part: Part, scores: np.ndarray) -> np.ndarray:
        kept = verdicts.of(_group_scores(sparsity_type, scores))
        return _spread(sparsity_type, kept, part.shape)

    return mask_of


def _verdicts(scores: Callable[[], Iterable[np.ndarray]], total: int, sparsity: float) -> Verdicts:
    """Ranks `total` scores; each call of `scores` begins a pass over them."""
    with _jax_precision(is_wide=total >= 2**32):
        count = int(selection.number_to_keep(total, sparsity))
    return Verdicts(threshold(scores, count, total))


def _group_scores(sparsity_type: sparsity_types.GroupedType, scores: np.ndarray) -> np.ndarray:
    if not scores.size or sparsity_types.is_unstructured(sparsity_type):
        return scores
    with _jax_precision_of(scores):
        return np.asarray(_jitted_group_scores(sparsity_type, scores))


def _spread(
    sparsity_type: sparsity_types.GroupedType, kept: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    if not kept.size or sparsity_types.is_unstructured(sparsity_type):
        return kept.reshape(shape)
    return np.asarray(_jitted_spread(sparsity_type, kept, shape))


@functools.partial(jax.jit, static_argnums=0)
def _jitted_group_scores(sparsity_type: sparsity_types.GroupedType, scores: jax.Array) -> jax.Array:
    return sparsity_type.group_scores(scores)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _jitted_spread(
    sparsity_type: sparsity_types.GroupedType, kept: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    return sparsity_type.spread_groups(kept, shape)


_keep_n_of_m = jax.jit(n_by_m.keep_n_of_m, static_argnums=(1, 2, 3))


def _jax_precision_of(scores: np.ndarray) -> Any:
    return _jax_precision(is_wide=scores.dtype == np.float64)


def _jax_precision(is_wide: bool) -> Any:
    """Lets JAX compute in 64 bits where that is needed."""
    if not is_wide:
        return contextlib.nullcontext()
    return jax.enable_x64(True) if hasattr(jax, 'enable_x64') else jax.experimental.enable_x64()  # pyright: ignore
