"""Masks of whole blocks or channels against pooling with means, sorting the means and repeating the verdicts."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import masks
from benchmarks.report import Row
from benchmarks.selection import SPARSITY, by_argsort, number_kept
from jaxpruner import mask_calculator

SHAPES = {
    'small': [(64, 64), (3, 3, 32, 32)],
    'cpu': [(2048, 2048), (3, 3, 512, 512)],
    'gpu': [(8192, 8192), (3, 3, 2048, 2048)],
}
ROUNDS = 30
COLUMNS = masks.COLUMNS

# A sparsity type, and its mask as one would write it without the library.
Pair = tuple[Any, Callable[[jax.Array], jax.Array]]


def rows(pairs: Mapping[str, Pair], size: str, rounds: int) -> list[Row]:
    """Times masks of normal magnitudes for each sparsity type with its reference."""
    return [
        _row(f'{name}, {list(shape)}', shape, *pairs[name], rounds)
        for shape in SHAPES[size]
        for name in pairs
    ]


def _row(
    name: str,
    shape: tuple[int, ...],
    sparsity_type: Any,
    reference: Callable[..., Any],
    rounds: int,
) -> Row:
    x = jnp.abs(jax.random.normal(jax.random.key(0), shape))
    mask = functools.partial(
        mask_calculator.topk_group_mask_calculator, sparsity=SPARSITY, sparsity_type=sparsity_type
    )
    # Sums of whole numbers do not depend on their order, so that the masks are the same.
    return masks.row_of(name, mask, reference, x, rounds, compared_on=jnp.round(8 * x))


def keep_by_argsort(pooled: jax.Array) -> jax.Array:
    """The mask of the best groups, from a sort of their scores."""
    return by_argsort(pooled, number_kept(pooled.size))
