"""Kept weights are replaced by as many others: those with the smallest scores are dropped, and others regrow."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparsity_types
from jaxpruner.mask_calculator import groups, selection

# A leaf of fewer weights has its scores written down: programs that only read them compile faster, which counts where
# leaves are many, and memory counts where they are large.
_WORTH_SPARING = 2**17

# What becomes of a weight. The first and the third are ranked: what may be dropped, and what may come back.
_KEPT, _PRUNED, _MISSING, _STAYS = np.arange(4, dtype=np.uint8)


def drop_and_grow(
    masks: Sequence[jax.Array],
    drop_scores: Sequence[jax.Array | selection.Scores],
    grow_scores: Sequence[jax.Array | selection.Scores],
    types: Sequence[sparsity_types.GroupedType],
    stacked: Sequence[bool] | None = None,
    *,
    fraction: jax.Array | float,
) -> list[jax.Array]:
    """Replaces a share of the kept weights (or blocks, channels) of each leaf, whose number stays.

    Args:
      masks: uint8 masks.
      drop_scores: of their shapes, or `Scores`; of the kept ones those with the smallest scores are dropped,
        `round(kept * fraction)` of them.
      grow_scores: of their shapes, or `Scores`; of all that are not kept then, those with the largest scores come back.
      types: unstructured, block or channel.
      stacked: whether the first axis of a leaf counts layers, in each of which weights are replaced.
      fraction: scalar in [0, 1].

    Returns:
      The new masks.

    Raises:
      ValueError: scores have another shape than their mask.

    >>> mask, scores = jnp.array([1, 1, 0, 0], jnp.uint8), jnp.array([3.0, 1.0, 0.0, 0.0])
    >>> types = [sparsity_types.Unstructured()]
    >>> drop_and_grow([mask], [scores], [jnp.array([0.0, 0.0, 1.0, 2.0])], types, fraction=0.5)
    [Array([1, 0, 0, 1], dtype=uint8)]
    """
    stacked = list(stacked or [False] * len(masks))
    leaves = list(zip(masks, drop_scores, grow_scores, types, stacked, strict=True))
    pooled = [_pooled(*leaf) for leaf in leaves]
    flags = _drop_and_grow(
        [alive for alive, _, _ in pooled],
        [_both_scores(*leaf) for leaf in pooled],
        jnp.asarray(fraction, jnp.float32),
        in_rows=tuple(stacked),
        apart=tuple(map(sparsity_types.is_unstructured, types)),
        written=tuple(alive.size < _WORTH_SPARING for alive, _, _ in pooled),
    )
    return [
        groups.spread(kind, kept.astype(jnp.uint8), mask.shape, in_layers)
        for kept, (mask, _, _, kind, in_layers) in zip(flags, leaves, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=('in_rows', 'apart', 'written'))
def _drop_and_grow(
    alive: list[jax.Array],
    scores: list[selection.Scores],
    fraction: jax.Array,
    in_rows: tuple[bool, ...],
    apart: tuple[bool, ...],
    written: tuple[bool, ...],
) -> list[jax.Array]:
    """Flags of what is kept then, by one selection that is compiled once and runs twice: to drop, and to regrow."""

    def turn(number: jax.Array | int, carry: tuple[list, list]) -> tuple[list, list]:
        # Behind a barrier scores seem to change: what does not would be computed before the loop, and written down.
        (roles, before), known = jax.lax.optimization_barrier((carry, scores))
        growing = number == 1
        now = [
            _number((role == _KEPT) | (role == _STAYS), rows)
            for role, rows in zip(roles, in_rows, strict=True)
        ]
        before = [
            jnp.where(growing, earlier, kept) for earlier, kept in zip(before, now, strict=True)
        ]
        wanted = [
            jnp.where(
                growing, earlier - kept, kept - selection.share_of(kept, fraction, most=role.size)
            )
            for earlier, kept, role in zip(before, now, roles, strict=True)
        ]
        given = [
            selection.Scores((*both.weights, role), both.of)
            for both, role in zip(known, roles, strict=True)
        ]
        given = [
            selection.read(own) if write else own for own, write in zip(given, written, strict=True)
        ]
        columns = zip(given, wanted, [None] * len(given), in_rows, apart, strict=True)
        chosen = selection.keep_largest_each([selection.Request(*row) for row in columns])
        return [
            _next_role(growing, role, one.mask != 0)
            for role, one in zip(roles, chosen, strict=True)
        ], before

    roles = [jnp.where(flags, _KEPT, _PRUNED) for flags in alive]
    before = [
        jnp.zeros(flags.shape[: int(rows)], selection.counter_for(flags.size))
        for flags, rows in zip(alive, in_rows, strict=True)
    ]
    roles, _ = jax.lax.fori_loop(0, 2, turn, (roles, before))
    return [role == _STAYS for role in roles]


def _next_role(growing: jax.Array | bool, role: jax.Array, chosen: jax.Array) -> jax.Array:
    """What stays after a turn, and what is missing then.

    Scores to drop by that are NaN or -inf do not rank above what is pruned, so that this may be chosen, too.
    """
    stays = jnp.where(growing, (role == _STAYS) | chosen, (role == _KEPT) & chosen)
    return jnp.where(stays, _STAYS, _MISSING)


def _pooled(mask, drop, grow, kind, in_layers) -> tuple[jax.Array, Any, Any]:
    """Whether groups are alive, and their scores."""
    if sparsity_types.is_unstructured(kind) and mask.size:
        return mask != 0, drop, grow
    pool = functools.partial(groups.pool, kind, in_layers=in_layers)
    return (
        pool(mask.astype(jnp.float32)) > 0,
        pool(selection.read(drop)),
        pool(selection.read(grow)),
    )


def _both_scores(
    alive: jax.Array, drop: jax.Array | selection.Scores, grow: jax.Array | selection.Scores
) -> selection.Scores:
    """Scores for which the weights' roles are still to be added."""
    drop, grow = _as_floats(drop, alive.shape), _as_floats(grow, alive.shape)
    common = _common_dtype(drop.dtype, grow.dtype)
    if common not in (drop.dtype, grow.dtype):
        drop = selection.Scores(selection.read(drop).astype(common), jnp.positive)
        grow = selection.Scores(_at_least_lowest(selection.read(grow)).astype(common), jnp.positive)
    # What comes first says of which dtype scores are.
    grow_first = drop.dtype != common
    weights = (grow.weights, drop.weights) if grow_first else (drop.weights, grow.weights)
    return selection.Scores(weights, _OfRoles(drop.of, grow.of, common, grow_first))


def _as_floats(scores: jax.Array | selection.Scores, shape: tuple[int, ...]) -> selection.Scores:
    if scores.shape != shape:
        raise ValueError(
            f'scores of shape {scores.shape} do not fit a mask of shape {shape}; give one score for each weight'
        )
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        scores = selection.read(scores).astype(jnp.float32)
    return (
        scores
        if isinstance(scores, selection.Scores)
        else selection.Scores(jnp.asarray(scores), jnp.positive)
    )


def _common_dtype(first: jnp.dtype, second: jnp.dtype) -> jnp.dtype:
    """One that holds all numbers of both; JAX promotes no floats of 8 bits, and none at all where it is strict."""
    return (
        first
        if first == second
        else jnp.dtype('float64' if 'float64' in (first, second) else 'float32')
    )


def _at_least_lowest(scores: jax.Array) -> jax.Array:
    """Scores without NaN and -inf, which are as low as the lowest number instead.

    They would not rank above what is kept: after an overflow weights must come back somewhere.
    """
    lowest = jnp.finfo(scores.dtype).min
    return jnp.where(scores >= lowest, scores, lowest)


@dataclasses.dataclass(frozen=True)
class _OfRoles:
    """Scores of what may be dropped, or may come back; the rest comes last."""

    drop: Callable[[Any], jax.Array]
    grow: Callable[[Any], jax.Array]
    dtype: jnp.dtype
    grow_first: bool

    def __call__(self, known: tuple[Any, Any, jax.Array]) -> jax.Array:
        *weights, role = known
        dropped, grown = reversed(weights) if self.grow_first else weights
        drop, grow = (
            self.drop(dropped).astype(self.dtype),
            _at_least_lowest(self.grow(grown)).astype(self.dtype),
        )
        return jnp.where(role == _KEPT, drop, jnp.where(role == _MISSING, grow, -jnp.inf))


def _number(flags: jax.Array, in_layers: bool) -> jax.Array:
    return selection.count_true(
        flags, tuple(range(int(in_layers), flags.ndim)), selection.counter_for(flags.size)
    )
