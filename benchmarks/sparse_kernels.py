"""Products with stored blocks in kernels for accelerators, against the dense product, in bfloat16.

Each product runs many times in one program, since it takes less time than handing a program over. The third column of
numbers is the same product without a kernel. On a device for which there are no kernels there is nothing to measure.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.report import Row, Value
from benchmarks.timing import in_program, interleaved, ratio
from jaxpruner.sparse.operators import block_layout, blocks
from jaxpruner.sparse.operators.block_kernels import choosing, product

ROUNDS = 15
SECONDS = 20
COLUMNS = (
    'forward',
    'with derivatives',
    'forward without a kernel',
    'with derivatives, without one',
)
DTYPE = jnp.bfloat16
SPARSITIES = (0.5, 0.75, 0.9, 0.95)
# Products in one program.
TIMES = 20


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
      width: of a square matrix.
      batches: numbers of rows.
      blocks: of stored weights.
    """

    width: int
    batches: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...] = ((64, 64), (128, 128))


SIZES = {
    'small': Sizes(256, (16,), ((128, 128),)),
    'cpu': Sizes(256, (16,), ((128, 128),)),
    'gpu': Sizes(4096, (16, 256, 2048, 8192)),
}

Product = Callable[[jax.Array, jax.Array], jax.Array]


def run(size: str, rounds: int) -> list[Row]:
    """Times each block, batch and sparsity."""
    sizes = SIZES[size]
    missing = choosing.why_missing(DTYPE, sizes.blocks[0])
    if missing:
        return [Row(f'nothing to measure: {missing}', (None,) * len(COLUMNS))]
    rows = []
    for block in sizes.blocks:
        for batch in sizes.batches:
            for sparsity in SPARSITIES:
                name = f'{batch} rows, {block[0]} x {block[1]} blocks, {sparsity:.0%} zero'
                rows.append(Row(name, _ratios(sizes.width, batch, block, sparsity, rounds)))
    return rows


def _ratios(
    width: int, batch: int, block: tuple[int, int], sparsity: float, rounds: int
) -> tuple[Value, ...]:
    """How many times as fast as the dense product."""
    rng = np.random.default_rng(0)
    candidates, groups = width // block[0], width // block[1]
    stored = max(round((1 - sparsity) * candidates), 1)
    positions = [rng.permutation(candidates)[:stored] for _ in range(groups)]
    indices = jnp.asarray(np.stack(positions), jnp.int32)
    matrix = jnp.asarray(rng.normal(size=(width, width)) / width**0.5, DTYPE)
    values = block_layout.gather_blocks(matrix, indices, block)
    rows = jnp.asarray(rng.normal(size=(batch, width)), DTYPE)
    sides: dict[str, tuple[Product, jax.Array]] = {'dense': (jnp.matmul, matrix)}
    for name, multiply in (('kernel', product.multiply), ('plain', blocks.multiply)):
        bound = functools.partial(multiply, indices=indices, outputs=width)
        sides[name] = bound, values
    ratios: dict[str, list[Any]] = {'kernel': [], 'plain': []}
    for measured in (_forward, _with_derivatives):
        calls = {}
        for name, (multiply, weights) in sides.items():
            calls[name] = in_program(TIMES, measured(multiply, weights), rows)
        times = interleaved(calls, rounds, SECONDS)
        for name, of_side in ratios.items():
            of_side.append(ratio(times['dense'], times[name]))
    return *ratios['kernel'], *ratios['plain']


def _forward(multiply: Product, weights: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda rows: multiply(rows, weights)


def _with_derivatives(multiply: Product, weights: jax.Array) -> Callable[[jax.Array], jax.Array]:
    def step(rows: jax.Array) -> jax.Array:
        result, back = jax.vjp(multiply, rows, weights)
        # Without the barrier XLA would compute the one element of the gradient that is read.
        of_rows, of_weights = lax.optimization_barrier(back(result))
        return of_rows + of_weights.reshape(-1)[0]

    return step
