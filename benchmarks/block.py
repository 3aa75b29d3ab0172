"""Masks of whole blocks against pooling with means, sorting the means and repeating the verdicts."""

import functools

import jax
import jax.numpy as jnp

from benchmarks import masks
from benchmarks.report import Row
from benchmarks.selection import SPARSITY, by_argsort, number_kept
from jaxpruner import mask_calculator
from jaxpruner.sparsity_types import Block

LENGTHS = (4, 16)
SHAPES = {
    'small': [(64, 64), (3, 3, 32, 32)],
    'cpu': [(2048, 2048), (3, 3, 512, 512)],
    'gpu': [(8192, 8192), (3, 3, 2048, 2048)],
}
ROUNDS = 30
COLUMNS = masks.COLUMNS


def run(size: str, rounds: int) -> list[Row]:
    """Times both blocks for matrices and for convolutions, whose last two axes are blocked."""
    rows = []
    for shape in SHAPES[size]:
        for length in LENGTHS:
            x = jnp.abs(jax.random.normal(jax.random.key(0), shape))
            mask = functools.partial(
                mask_calculator.topk_group_mask_calculator,
                sparsity=SPARSITY,
                sparsity_type=Block((length, length)),
            )
            reference = functools.partial(by_sorting, length=length)
            name = f'blocks of {length} x {length}, {list(shape)}'
            # Sums of whole numbers do not depend on their order, so that the masks are the same.
            compared_on = jnp.round(8 * x)
            rows.append(masks.row_of(name, mask, reference, x, rounds, compared_on=compared_on))
    return rows


def by_sorting(x: jax.Array, length: int) -> jax.Array:
    """What one would write without the library."""
    *first, rows, columns = x.shape
    pooled = x.reshape(*first, rows // length, length, columns // length, length).mean((-3, -1))
    mask = by_argsort(pooled, number_kept(pooled.size))
    return jnp.repeat(jnp.repeat(mask, length, axis=-2), length, axis=-1)
