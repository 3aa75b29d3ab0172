"""Kept weights are replaced by as many others: those with the smallest scores are dropped, and others are grown."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.core import control
from jaxpruner.mask_calculator import selection
from jaxpruner.sparsity_types import Groups

# Scores of a smaller leaf are materialised: programs that read arrays compile faster, which counts where leaves are
# many, and memory counts where they are large.
_MIN_LAZY_SIZE = 2**17

# The role of a group, from phase to phase:
#   before: _KEPT, which may be dropped, or _PRUNED.
#   after the first phase, which drops: _STAYS, or _MAY_GROW, which are all the others. A group just dropped may grow,
#     too.
#   after the second phase, which grows: _STAYS is the new mask.
_KEPT, _PRUNED, _MAY_GROW, _STAYS = np.arange(4, dtype=np.uint8)


class MaskedLeaf(NamedTuple):
    """A leaf in which weights are replaced."""

    mask: jax.Array  # uint8
    drop_scores: Any  # of its shape, or `Scores`; of the kept weights those with the smallest scores are dropped
    grow_scores: Any  # of its shape, or `Scores`; of all that are not kept then, those with the largest are grown
    groups: Groups  # unstructured, block or channel


def drop_and_grow(leaves: Sequence[MaskedLeaf], fraction: jax.Array | float) -> list[jax.Array]:
    """Replaces a share of the kept weights (or blocks, channels) of each leaf, and returns the new masks.

    `round(kept * fraction)` groups of each leaf, or of each layer, are dropped, and as many are grown.

    Raises:
      ValueError: scores have another shape than their mask.

    >>> mask, scores = jnp.array([1, 1, 0, 0], jnp.uint8), jnp.array([3.0, 1.0, 0.0, 0.0])
    >>> from jaxpruner import sparsity_types
    >>> groups = Groups(sparsity_types.Unstructured())
    >>> leaf = MaskedLeaf(mask, scores, jnp.array([0.0, 0.0, 1.0, 2.0]), groups)
    >>> drop_and_grow([leaf], fraction=0.5)
    [Array([1, 0, 0, 1], dtype=uint8)]
    """
    candidates = [_candidates(leaf) for leaf in leaves]
    fraction = jnp.asarray(fraction, jnp.float32)
    if tree_lib.has_traced((candidates, fraction)):
        is_kept = _drop_and_grow(candidates, fraction)
    else:  # a program of all leaves would be compiled anew for each model; leaves of one shape share one
        is_kept = [_drop_and_grow([candidate], fraction)[0] for candidate in candidates]
    masks = []
    for leaf, flags in zip(leaves, is_kept, strict=True):
        verdicts = flags.astype(jnp.uint8)
        masks.append(leaf.groups.spread(verdicts, leaf.mask.shape))
    return masks


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['is_kept_before', 'scores'],
    meta_fields=['is_stacked', 'count_per_device', 'is_materialised'],
)
@dataclasses.dataclass(frozen=True)
class _Candidates:
    """The groups of a leaf, of which some are dropped and others are grown."""

    is_kept_before: jax.Array
    scores: selection.Scores  # of groups whose role is still to be added
    is_stacked: bool
    count_per_device: bool
    is_materialised: bool  # whether scores become an array before they are ranked

    def count(self, flags: jax.Array) -> jax.Array:
        """Counts the true flags: a scalar, or one count a layer."""
        axes = tuple(range(int(self.is_stacked), flags.ndim))
        return selection.count_true(flags, axes, selection.counter_for(flags.size))

    def request(
        self,
        scores: selection.Scores,
        role: jax.Array,
        count: jax.Array,
    ) -> selection.Request:
        """Asks for the `count` best groups among those whose role lets them be chosen."""
        ranked = selection.Scores((*scores.weights, role), scores.of)
        return selection.Request(
            selection.read(ranked) if self.is_materialised else ranked,
            count,
            is_stacked=self.is_stacked,
            count_per_device=self.count_per_device,
        )


class _Progress(NamedTuple):
    role: jax.Array  # what becomes of each group
    kept_before: (
        jax.Array
    )  # how many groups were kept before; one count a layer, where layers are stacked


@jax.jit
def _drop_and_grow(leaves: list[_Candidates], fraction: jax.Array) -> list[jax.Array]:
    """Flags the groups that are kept then, by one selection that is compiled once and runs twice."""

    def run_phase(phase: jax.Array | int, carry: list[_Progress]) -> list[_Progress]:
        all_scores = [leaf.scores for leaf in leaves]
        progress, scores = control.keep_in_loop((carry, all_scores))
        is_growing = phase == 1
        requests, counts_before = [], []
        for i, leaf in enumerate(leaves):
            role = progress[i].role
            kept = leaf.count((role == _KEPT) | (role == _STAYS))
            kept_before = jnp.where(is_growing, progress[i].kept_before, kept)
            undropped = kept - selection.share_of(kept, fraction, most=role.size)
            count = jnp.where(is_growing, kept_before - kept, undropped)
            requests.append(leaf.request(scores[i], role, count))
            counts_before.append(kept_before)
        after = []
        for i, selected in enumerate(selection.keep_largest_each(requests)):
            role = _next_role(is_growing, progress[i].role, selected.mask != 0)
            after.append(_Progress(role, counts_before[i]))
        return after

    start = []
    for leaf in leaves:
        is_kept_before = leaf.is_kept_before
        layers = is_kept_before.shape[: int(leaf.is_stacked)]
        kept_before = jnp.zeros(layers, selection.counter_for(is_kept_before.size))
        role = jnp.where(is_kept_before, _KEPT, _PRUNED)
        start.append(_Progress(role, kept_before))
    after_both = jax.lax.fori_loop(0, 2, run_phase, start)
    return [progress.role == _STAYS for progress in after_both]


def _next_role(
    is_growing: jax.Array | bool,
    role: jax.Array,
    is_chosen: jax.Array,
) -> jax.Array:
    """Tells what stays after a phase, and what is missing then.

    Kept weights whose scores are NaN or -inf tie with pruned ones, which may then be chosen in the first phase. So what
    is chosen there counts only where it was kept.
    """
    after_growing = (role == _STAYS) | is_chosen
    after_dropping = (role == _KEPT) & is_chosen
    stays = jnp.where(is_growing, after_growing, after_dropping)
    return jnp.where(stays, _STAYS, _MAY_GROW)


def _candidates(leaf: MaskedLeaf) -> _Candidates:
    groups = leaf.groups
    if groups.is_unstructured and leaf.mask.size:
        is_kept_before, drop, grow = leaf.mask != 0, leaf.drop_scores, leaf.grow_scores
    else:
        is_kept_before = groups.pool(leaf.mask.astype(jnp.float32)) > 0
        drop = groups.pool(selection.read(leaf.drop_scores))
        grow = groups.pool(selection.read(leaf.grow_scores))
    return _Candidates(
        is_kept_before,
        _scores_of_roles(is_kept_before, drop, grow),
        is_stacked=groups.is_stacked,
        count_per_device=groups.is_unstructured,
        is_materialised=is_kept_before.size < _MIN_LAZY_SIZE,
    )


def _scores_of_roles(
    is_kept_before: jax.Array,
    drop: jax.Array | selection.Scores,
    grow: jax.Array | selection.Scores,
) -> selection.Scores:
    """Joins both scores in one: its weights are those to drop by and those to grow by, of the common dtype first."""
    drop, grow = _as_floats(drop, is_kept_before.shape), _as_floats(grow, is_kept_before.shape)
    common = _common_dtype(drop.dtype, grow.dtype)
    if common not in (drop.dtype, grow.dtype):
        drop_array = selection.read(drop)
        grow_array = _at_least_lowest(selection.read(grow))
        drop = selection.Scores(drop_array.astype(common), jnp.positive)
        grow = selection.Scores(grow_array.astype(common), jnp.positive)
    # The first array of `Scores.weights` gives the dtype of the scores.
    is_grow_first = drop.dtype != common
    weights = (grow.weights, drop.weights) if is_grow_first else (drop.weights, grow.weights)
    return selection.Scores(weights, _ScoreByRole(drop.of, grow.of, common, is_grow_first))


def _as_floats(scores: jax.Array | selection.Scores, shape: tuple[int, ...]) -> selection.Scores:
    if scores.shape != shape:
        raise ValueError(
            f'scores of shape {scores.shape} do not fit a mask of shape {shape}; give one score for each weight'
        )
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        scores = selection.read(scores).astype(jnp.float32)
    if isinstance(scores, selection.Scores):
        return scores
    return selection.Scores(jnp.asarray(scores), jnp.positive)


def _common_dtype(first: jnp.dtype, second: jnp.dtype) -> jnp.dtype:
    """Finds a dtype that holds all floats of both; JAX promotes none of 8 bits, and none at all where it is strict."""
    if first == second:
        return first
    return jnp.dtype('float64' if 'float64' in (first, second) else 'float32')


def _at_least_lowest(scores: jax.Array) -> jax.Array:
    """Raises NaN and -inf to the lowest number.

    Otherwise they would not rank above what is kept: after an overflow too few weights would be grown.
    """
    lowest = jnp.finfo(scores.dtype).min
    return jnp.where(scores >= lowest, scores, lowest)


@dataclasses.dataclass(frozen=True)
class _ScoreByRole:
    """Scores what may be dropped, or may grow; everything else ranks last."""

    drop: Callable[[Any], jax.Array]
    grow: Callable[[Any], jax.Array]
    dtype: jnp.dtype
    is_grow_first: bool  # whether the weights to grow by come first

    def __call__(self, weights_and_role: tuple[Any, Any, jax.Array]) -> jax.Array:
        first, second, role = weights_and_role
        dropped, grown = (second, first) if self.is_grow_first else (first, second)
        drop = self.drop(dropped).astype(self.dtype)
        grow = _at_least_lowest(self.grow(grown)).astype(self.dtype)
        may_be_dropped = role == _KEPT
        may_grow = role == _MAY_GROW
        return jnp.where(may_be_dropped, drop, jnp.where(may_grow, grow, -jnp.inf))
