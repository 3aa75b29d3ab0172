"""Masks at one bit per weight: packing, unpacking and applying them, against a multiply by an unpacked mask."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.report import Row
from benchmarks.selection import SPARSITY
from benchmarks.timing import bound, interleaved, ratio
from jaxpruner import sparse_state as sparse_state_lib

SHAPES = {
    'small': [(64, 64), (98, 30)],
    'cpu': [(2048, 2048), (784, 300), (3, 3, 256, 256)],
    'gpu': [(8192, 8192), (784, 300), (3, 3, 2048, 2048)],
}
ROUNDS = 100
COLUMNS = ('milliseconds', 'times an unpacked multiply', 'passes over the weights')


def run(size: str, rounds: int) -> list[Row]:
    """Times each function on random masks and normal weights."""
    rows = []
    for shape in SHAPES[size]:
        for dtype in (jnp.float32, jnp.bfloat16):
            rows += _rows(shape, dtype, rounds)
    return rows


def _rows(shape: tuple[int, ...], dtype: Any, rounds: int) -> list[Row]:
    key_of_weights, key_of_mask = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_of_weights, shape, dtype)
    mask = jax.random.bernoulli(key_of_mask, 1 - SPARSITY, shape).astype(jnp.uint8)
    bits = sparse_state_lib.pack(mask)
    calls = {
        'pack': bound(sparse_state_lib.pack, mask),
        'unpack': bound(lambda bits: sparse_state_lib.unpack_like(bits, shape), bits),
        'apply a packed mask': bound(sparse_state_lib.apply_mask, x, bits),
        'apply an unpacked mask': bound(sparse_state_lib.apply_mask, x, mask),
    }
    references = {'multiply': bound(jnp.multiply, x, mask), 'pass': bound(jnp.max, x)}
    times = interleaved({**calls, **references}, rounds)
    rows = []
    for name in calls:
        values = (
            times[name].milliseconds,
            ratio(times[name], times['multiply']),
            ratio(times[name], times['pass']),
        )
        rows.append(Row(f'{name}, {list(shape)} {dtype.__name__}', values))
    return rows
