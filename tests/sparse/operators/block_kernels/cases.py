"""Block-sparse matrices to multiply with, and kernels in plain NumPy's terms that say what real ones have to do."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse.operators import blocks
from jaxpruner.sparse.operators.block_kernels import product


class PlainKernels:
    """See `steps.Kernels`: as simple as can be, and as harsh as allowed with what no step leads to."""

    tile = 4

    def tile_of(self, rows):
        return self.tile

    def product(self, rows, blocks, steps, targets):
        assert len(rows) % self.tile == 0
        return plain_kernel_product(rows, blocks, steps, targets)

    def blocks_gradient(self, rows, cotangents, steps, block):
        assert len(rows) % self.tile == 0
        return plain_kernel_gradient(rows, cotangents, steps, block)

    @staticmethod
    def calls_in(program):
        return len(re.findall(r'name=plain_kernel_(?:product|gradient)', str(program)))


@functools.partial(jax.jit, static_argnums=3)
def plain_kernel_product(rows, blocks, steps, targets):
    tiles = rows.reshape(len(rows), -1, blocks.shape[1])
    addends = jnp.einsum('nsi,sio->nso', tiles[:, steps.left], blocks[steps.right])
    result = jnp.full((len(rows), targets, blocks.shape[2]), jnp.nan, rows.dtype)
    result = result.at[:, steps.target].set(0).at[:, steps.target].add(addends)
    return result.reshape(len(rows), -1)


@functools.partial(jax.jit, static_argnums=3)
def plain_kernel_gradient(rows, cotangents, steps, block):
    lefts = rows.reshape(len(rows), -1, block[0])[:, steps.left]
    targets = cotangents.reshape(len(rows), -1, block[1])[:, steps.target]
    return jnp.einsum('nsi,nso->sio', lefts, targets)


class Case(NamedTuple):
    """A product, and a cotangent of its result."""

    rows: jax.Array
    values: jax.Array
    indices: jax.Array
    probe: jax.Array
    cotangent: jax.Array


def drawn(seed, shape, dtype='float32'):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def case(rows, inputs, outputs, block, stored, dtype='float32', seed=0):
    """A matrix of which the first block of inputs is read by no group, if there are enough others."""
    groups, candidates = -(-outputs // block[1]), -(-inputs // block[0])
    rng = np.random.default_rng(seed)
    unread = int(candidates > stored)
    chosen = [unread + rng.permutation(candidates - unread)[:stored] for _ in range(groups)]
    return Case(
        drawn(seed + 1, (rows, inputs), dtype),
        drawn(seed + 2, (groups, stored, *block), dtype),
        jnp.asarray(np.stack(chosen), jnp.int32),
        jnp.zeros((groups, candidates), dtype),
        drawn(seed + 3, (rows, outputs), dtype),
    )


def with_derivatives(multiply, case):
    """The product, and the derivatives for rows, values and the probe."""
    outputs = case.cotangent.shape[1]

    def product(rows, values, probe):
        return multiply(rows, values, case.indices, outputs=outputs, probe=probe)

    result, back = jax.vjp(product, case.rows, case.values, case.probe)
    return result, *back(case.cotangent)


def in_kernels(kernels):
    """`with_derivatives` of the product in these kernels."""
    multiply = functools.partial(product.multiply, kernels=kernels)
    return functools.partial(with_derivatives, multiply)


without_kernels = functools.partial(with_derivatives, blocks.multiply)


def assert_close(found, expected, tolerance=2e-5):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, expected = np.asarray(found, 'float64'), np.asarray(expected, 'float64')
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, atol=scale * tolerance)
