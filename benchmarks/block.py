"""Masks of whole blocks of 4 x 4 and 16 x 16 weights."""

import functools

import jax
import jax.numpy as jnp

from benchmarks import groups
from benchmarks.report import Row
from jaxpruner.sparsity_types import Block

LENGTHS = (4, 16)
ROUNDS = groups.ROUNDS
COLUMNS = groups.COLUMNS


def run(size: str, rounds: int) -> list[Row]:
    """Times both blocks for matrices and for convolutions, whose last two axes are blocked."""
    pairs = {
        f'blocks of {length} x {length}': (
            Block((length, length)),
            functools.partial(by_sorting, length=length),
        )
        for length in LENGTHS
    }
    return groups.rows(pairs, size, rounds)


def by_sorting(x: jax.Array, length: int) -> jax.Array:
    """What one would write without the library."""
    *first, rows, columns = x.shape
    pooled = x.reshape(*first, rows // length, length, columns // length, length).mean((-3, -1))
    mask = groups.keep_by_argsort(pooled)
    return jnp.repeat(jnp.repeat(mask, length, axis=-2), length, axis=-1)
