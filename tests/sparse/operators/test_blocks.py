"""Products with stored blocks are those with the matrix that the blocks make, and so are their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpruner.sparse.operators import block_layout, blocks
from jaxpruner.sparse.operators.blocks import BlockMatrix
from structure.doubles import doubles

TOLERANCES = {'float32': 2e-5, 'bfloat16': 0.05, 'float64': 1e-12}


def drawn(seed, shape, dtype='float32'):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def positions(seed, groups, candidates, stored):
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(candidates)[:stored] for _ in range(groups)]
    return jnp.asarray(np.stack(rows), jnp.int32)


def case(inputs, outputs, block, stored, dtype='float32'):
    """Rows, the matrix that blocks make, its blocks and their positions."""
    groups, candidates = -(-outputs // block[1]), -(-inputs // block[0])
    indices = positions(0, groups, candidates, stored)
    values = block_layout.gather_blocks(drawn(1, (inputs, outputs), dtype), indices, block)
    matrix = block_layout.scatter_blocks(values, indices, inputs, outputs)
    return drawn(2, (5, inputs), dtype), matrix, values, indices


def assert_close(found, expected, dtype='float32'):
    found, expected = np.asarray(found, 'float64'), np.asarray(expected, 'float64')
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=scale * TOLERANCES[dtype])


SHAPES = {
    'whole blocks': (12, 16, (4, 8), 2),
    'padded both ways': (10, 13, (4, 8), 2),
    'one group': (12, 8, (4, 8), 3),
    'all blocks': (6, 4, (2, 2), 3),
    'more groups than are unrolled': (4, 66, (2, 2), 1),
    'a prime number of groups': (4, 37, (2, 1), 1),
}


@pytest.mark.parametrize('dtype', TOLERANCES)
@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_products_and_derivatives_are_those_of_the_matrix(shape, dtype):
    with doubles(dtype == 'float64'):
        rows, matrix, values, indices = case(*shape, dtype=dtype)
        outputs = shape[1]
        cotangent = drawn(3, (5, outputs), dtype)

        @jax.jit
        def both(rows, matrix, values, indices):
            product = functools.partial(blocks.multiply, outputs=outputs)
            found, back = jax.vjp(lambda x, v: product(x, v, indices), rows, values)
            expected, dense_back = jax.vjp(jnp.matmul, rows, matrix)
            dense = dense_back(cotangent)
            gathered = block_layout.gather_blocks(dense[1], indices, shape[2])
            return (found, *back(cotangent)), (expected, dense[0], gathered)

        for found, expected in zip(*both(rows, matrix, values, indices), strict=True):
            assert found.dtype == expected.dtype == dtype
            assert_close(found, expected, dtype)


@settings(max_examples=8)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9)
)
def test_blocks_gathered_are_scattered_back(inputs, outputs, block_inputs, block_outputs, stored):
    groups, candidates = -(-outputs // block_outputs), -(-inputs // block_inputs)
    indices = positions(0, groups, candidates, min(stored, candidates))
    matrix = drawn(0, (inputs, outputs))
    values = block_layout.gather_blocks(matrix, indices, (block_inputs, block_outputs))
    found = np.asarray(block_layout.scatter_blocks(values, indices, inputs, outputs))
    is_stored = np.zeros((candidates, groups), bool)
    is_stored[np.asarray(indices).T, np.arange(groups)] = True
    mask = is_stored.repeat(block_inputs, 0).repeat(block_outputs, 1)[:inputs, :outputs]
    np.testing.assert_array_equal(found, np.where(mask, matrix, 0))


@pytest.mark.parametrize('name', ['padded both ways', 'more groups than are unrolled'])
def test_the_probe_gets_the_norms_of_the_dense_gradient(name):
    inputs, outputs, block, stored = SHAPES[name]
    rows, _, values, indices = case(inputs, outputs, block, stored)
    cotangent = drawn(3, (5, outputs))
    groups, candidates = len(indices), -(-inputs // block[0])
    every = jnp.broadcast_to(jnp.arange(candidates), (groups, candidates))

    @jax.jit
    def norms(probe):
        def total(probe):
            product = blocks.multiply(rows, values, indices, outputs=outputs, probe=probe)
            return jnp.sum(product * cotangent)

        return jax.grad(total)(probe)

    gradient = block_layout.gather_blocks(rows.T @ cotangent, every, block)
    expected = jnp.sqrt(jnp.sum(gradient**2, axis=(2, 3)))
    assert_close(norms(jnp.zeros((groups, candidates))), expected)


def test_a_product_is_mapped_over_seeds_and_differentiated_twice():
    inputs, outputs, block, stored = SHAPES['padded both ways']
    rows, _, values, indices = case(inputs, outputs, block, stored)
    many_values = jnp.stack([values, 2 * values])
    many_indices = jnp.stack([indices, (indices + 1) % 3])

    def norm_of_gradient(values, indices, product):
        gradient = jax.grad(lambda values: jnp.sum(product(values, indices) ** 2))
        return jnp.sum(gradient(values) ** 2)

    def stored_product(values, indices):
        return blocks.multiply(rows, values, indices, outputs=outputs)

    def dense_product(values, indices):
        return rows @ block_layout.scatter_blocks(values, indices, inputs, outputs)

    results = []
    for product in (stored_product, dense_product):
        twice = jax.grad(functools.partial(norm_of_gradient, product=product))
        results.append(jax.jit(jax.vmap(twice))(many_values, many_indices))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-2)


def test_there_may_be_no_rows():
    rows, _, values, indices = case(10, 13, (4, 4), 2)
    probe = jnp.zeros((4, 3))

    @jax.jit
    def with_derivatives(rows, values, probe):
        def product(rows, values, probe):
            return blocks.multiply(rows, values, indices, outputs=13, probe=probe)

        result, back = jax.vjp(product, rows, values, probe)
        return result, *back(result)

    result, of_rows, of_values, norms = with_derivatives(rows[:0], values, probe)
    assert result.shape == (0, 13)
    assert of_rows.shape == (0, 10)
    assert of_values.shape == values.shape
    assert not of_values.any()
    assert norms.shape == probe.shape
    assert not norms.any()


def test_rows_and_values_of_different_types_are_promoted():
    rows, _, values, indices = case(12, 16, (4, 8), 2)
    found, back = jax.vjp(
        lambda x, v: blocks.multiply(x, v, indices, outputs=16), rows.astype('bfloat16'), values
    )
    assert found.dtype == 'float32'
    assert [x.dtype for x in back(found)] == ['bfloat16', 'float32']


def test_a_term_of_low_rank_is_added():
    rows, matrix, values, indices = case(10, 13, (4, 8), 2)
    down, up = drawn(4, (10, 3)), drawn(5, (3, 13))
    operator = BlockMatrix(values, indices, outputs=13, down=down, up=up)
    assert_close(operator.multiply(rows), rows @ (matrix + down @ up))
    leaves, treedef = jax.tree.flatten(operator)
    assert len(leaves) == 4
    assert treedef.unflatten(leaves).outputs == 13
