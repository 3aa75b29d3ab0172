"""Masks from one ranking of the scores of a whole model against putting them together and sorting them."""

import functools

import jax
import jax.numpy as jnp

import jaxpruner
from benchmarks.compiled import temporary_bytes
from benchmarks.models import TRANSFORMERS
from benchmarks.report import Row
from benchmarks.selection import SPARSITY, by_argsort, number_kept
from benchmarks.timing import bound, interleaved, ratio

# Norms are summed in another order, and a weight next to the threshold may change sides.
MAY_DIFFER = 1e-5
ROUNDS = 20
SECONDS_FOR_SORTING = 30
COLUMNS = (
    'milliseconds',
    'passes over the memory',
    'sorting takes times as long',
    'temporary bytes per weight',
    'sorting: temporary bytes per weight',
)


def run(size: str, rounds: int) -> list[Row]:
    """Times the masks of a transformer's kernels from their magnitudes, normalised and not."""
    params = jax.jit(TRANSFORMERS[size].init)()
    scores = [jnp.abs(leaf) for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    return [_row(scores, normalized, rounds) for normalized in (True, False)]


def _row(scores: list[jax.Array], normalized: bool, rounds: int) -> Row:
    weights = sum(score.size for score in scores)
    masks = functools.partial(
        by_ranking, pruner=jaxpruner.GlobalMagnitudePruning(use_normalization=normalized)
    )
    sorting = functools.partial(by_sorting, normalized=normalized, kept=number_kept(weights))
    calls = {'ours': bound(masks, scores), 'sorting': bound(sorting, scores)}
    pairs = zip(calls['ours'](), calls['sorting'](), strict=True)
    if sum(jnp.sum(mine != other) for mine, other in pairs) > MAY_DIFFER * weights:
        raise AssertionError('the masks by sorting are others')
    times = interleaved(
        {'ours': calls['ours'], 'pass': bound(lambda x: [jnp.max(s) for s in x], scores)}, rounds
    )
    slow = interleaved(calls, rounds, SECONDS_FOR_SORTING)
    return Row(
        f'{weights / 1e6:.1f} million weights in {len(scores)} leaves{", normalised" if normalized else ""}',
        (
            times['ours'].milliseconds,
            ratio(times['ours'], times['pass']),
            ratio(slow['sorting'], slow['ours']),
            temporary_bytes(masks, scores) / weights,
            temporary_bytes(sorting, scores) / weights,
        ),
    )


def by_ranking(
    scores: list[jax.Array], pruner: jaxpruner.GlobalMagnitudePruning
) -> list[jax.Array]:
    """The library's masks."""
    return pruner.create_masks(scores, [SPARSITY] * len(scores))


def by_sorting(scores: list[jax.Array], normalized: bool, kept: int) -> list[jax.Array]:
    """What one would write without the library."""
    if normalized:
        scores = [score / (jnp.linalg.norm(score.astype(jnp.float32)) + 1e-8) for score in scores]
    together = by_argsort(jnp.concatenate([score.ravel() for score in scores]), kept)
    masks = []
    for score in scores:
        mask, together = together[: score.size], together[score.size :]
        masks.append(mask.reshape(score.shape))
    return masks
