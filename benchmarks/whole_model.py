"""Masks from one ranking of a whole model against putting all scores together and sorting them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jaxpruner
from benchmarks.compiled import temporary_bytes
from benchmarks.models import TRANSFORMERS
from benchmarks.report import Row
from benchmarks.selection import SPARSITY, by_argsort, number_kept
from benchmarks.timing import bound, interleaved, ratio
from jaxpruner import sparsity_distributions

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
    """Times the masks of a transformer's kernels, with normalised scores and without."""
    params = jax.jit(TRANSFORMERS[size].init)()
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    return [_row(params, kernels, normalized, rounds) for normalized in (True, False)]


def _row(params: Any, kernels: list[jax.Array], normalized: bool, rounds: int) -> Row:
    weights = sum(kernel.size for kernel in kernels)
    pruner = jaxpruner.GlobalMagnitudePruning(
        sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=SPARSITY),
        normalize_scores=normalized,
    )

    def masks(params: Any) -> list[jax.Array]:
        return jax.tree.leaves(pruner.instant_sparsify(params)[1])

    sorting = functools.partial(by_sorting, normalized=normalized, kept=number_kept(weights))
    calls = {'ours': bound(masks, params), 'sorting': bound(sorting, kernels)}
    pairs = zip(calls['ours'](), calls['sorting'](), strict=True)
    if sum(jnp.sum(mine != other) for mine, other in pairs) > MAY_DIFFER * weights:
        raise AssertionError('the masks by sorting are others')
    times = interleaved({'ours': calls['ours'], 'pass': bound(lambda x: [jnp.max(k) for k in x], kernels)}, rounds)
    slow = interleaved(calls, rounds, SECONDS_FOR_SORTING)
    return Row(
        f'{weights / 1e6:.1f} million weights in {len(kernels)} leaves{", normalised" if normalized else ""}',
        (
            times['ours'].milliseconds,
            ratio(times['ours'], times['pass']),
            ratio(slow['sorting'], slow['ours']),
            temporary_bytes(masks, params) / weights,
            temporary_bytes(sorting, kernels) / weights,
        ),
    )


def by_sorting(kernels: list[jax.Array], normalized: bool, kept: int) -> list[jax.Array]:
    """What one would write without the library."""
    scores = [jnp.abs(kernel) for kernel in kernels]
    if normalized:
        scores = [score / (jnp.linalg.norm(score.astype(jnp.float32)) + 1e-8) for score in scores]
    together = by_argsort(jnp.concatenate([score.ravel() for score in scores]), kept)
    masks = []
    for kernel in kernels:
        mask, together = together[: kernel.size], together[kernel.size :]
        masks.append(mask.reshape(kernel.shape))
    return masks
