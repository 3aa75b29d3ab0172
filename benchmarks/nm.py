"""N:M masks against ranking each group by sorting it twice."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import masks
from benchmarks.report import Row
from jaxpruner import mask_calculator
from jaxpruner.sparsity_types import NByM

SHAPES = {'small': (64, 64), 'cpu': (2048, 2048), 'gpu': (8192, 8192)}
TYPES = [NByM(n, m, axis) for n, m in ((2, 4), (4, 8)) for axis in (-1, 0)]
ROUNDS = 30
COLUMNS = masks.COLUMNS


def run(size: str, rounds: int) -> list[Row]:
    """Times masks of normal magnitudes, with the groups along rows and along columns."""
    shape = SHAPES[size]
    return [
        _row(shape, dtype, sparsity_type, rounds)
        for dtype in (jnp.float32, jnp.bfloat16)
        for sparsity_type in TYPES
    ]


def _row(shape: tuple[int, ...], dtype: Any, sparsity_type: NByM, rounds: int) -> Row:
    x = jnp.abs(jax.random.normal(jax.random.key(0), shape, dtype))
    mask = functools.partial(
        mask_calculator.get_topk_fn(sparsity_type), sparsity=sparsity_type.n / sparsity_type.m
    )
    name = f'{sparsity_type.n}:{sparsity_type.m} along axis {sparsity_type.axis}, {list(shape)} {dtype.__name__}'
    return masks.row_of(
        name, mask, functools.partial(by_sorting_twice, sparsity_type=sparsity_type), x, rounds
    )


def by_sorting_twice(x: jax.Array, sparsity_type: NByM) -> jax.Array:
    """What one would write without the library: the rank of each weight in its group, by `argsort(argsort)`."""
    along = jnp.moveaxis(x, sparsity_type.axis, -1)
    ranks = jnp.argsort(jnp.argsort(along.reshape(-1, sparsity_type.m)))
    mask = (ranks >= sparsity_type.m - sparsity_type.n).astype(jnp.uint8)
    return jnp.moveaxis(mask.reshape(along.shape), -1, sparsity_type.axis)
