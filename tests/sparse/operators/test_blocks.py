"""Products with stored blocks are those with the matrix that the blocks make, and so are their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.sparse.operators.blocks import BlockMatrix
from jaxpruner.sparse.training.layouts import Layout
from structure.doubles import doubles

TOLERANCES = {'float32': 2e-5, 'bfloat16': 0.05, 'float64': 1e-12}


def drawn(seed, shape, dtype='float32'):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def case(inputs, outputs, block, stored, dtype='float32'):
    """Rows, the matrix that blocks make, a function that takes its blocks out, the blocks, and their positions."""
    layout = Layout((), inputs, outputs, stored, block)
    rng = np.random.default_rng(0)
    # No order is needed.
    order = [rng.permutation(layout.candidates)[:stored] for _ in range(layout.groups)]
    indices = jnp.asarray(np.stack(order), jnp.int32)

    def gather(matrix):
        return layout.store(matrix, indices, jax.random.key(0))['values']

    values = gather(drawn(1, (inputs, outputs), dtype))
    matrix = layout.scatter(values, indices)
    return drawn(2, (5, inputs), dtype), matrix, gather, values, indices


def multiply(rows, values, indices, **settings):
    return BlockMatrix(values, indices, **settings).multiply(rows)


def assert_close(found, expected, dtype='float32'):
    found, expected = np.asarray(found, 'float64'), np.asarray(expected, 'float64')
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=scale * TOLERANCES[dtype])


SHAPES = {
    'whole blocks': (12, 16, (4, 8), 2),
    'padded both ways': (10, 13, (4, 8), 2),
    'one group': (12, 8, (4, 8), 3),
    'more groups than are unrolled': (4, 66, (2, 2), 1),
}


@pytest.mark.parametrize(
    ('name', 'dtype'),
    [
        *[(name, 'float32') for name in SHAPES],
        ('padded both ways', 'bfloat16'),
        ('whole blocks', 'float64'),
    ],
)
def test_products_and_derivatives_are_those_of_the_matrix(name, dtype):
    shape = SHAPES[name]
    with doubles(dtype == 'float64'):
        rows, matrix, gather, values, indices = case(*shape, dtype=dtype)
        outputs = shape[1]
        cotangent = drawn(3, (5, outputs), dtype)

        @jax.jit
        def both(rows, matrix, values):
            product = functools.partial(multiply, indices=indices, outputs=outputs)
            found, back = jax.vjp(product, rows, values)
            expected, dense_back = jax.vjp(jnp.matmul, rows, matrix)
            of_rows, of_matrix = dense_back(cotangent)
            return (found, *back(cotangent)), (expected, of_rows, gather(of_matrix))

        for found, expected in zip(*both(rows, matrix, values), strict=True):
            assert found.dtype == expected.dtype == dtype
            assert_close(found, expected, dtype)


def test_the_probe_gets_the_norms_of_the_dense_gradient():
    inputs, outputs, block, stored = SHAPES['padded both ways']
    rows, _, _, values, indices = case(inputs, outputs, block, stored)
    cotangent = drawn(3, (5, outputs))
    layout = Layout((), inputs, outputs, stored, block)

    @jax.jit
    def norms(probe):
        product = functools.partial(multiply, rows, values, indices, outputs=outputs)
        return jax.grad(lambda probe: jnp.sum(product(probe=probe) * cotangent))(probe)

    expected = jnp.linalg.norm(layout.cut(rows.T @ cotangent), axis=(2, 3))
    assert_close(norms(jnp.zeros((layout.groups, layout.candidates))), expected)


def test_a_product_is_mapped_over_seeds_and_differentiated_twice():
    inputs, outputs, block, stored = SHAPES['padded both ways']
    rows, _, _, values, indices = case(inputs, outputs, block, stored)
    layout = Layout((), inputs, outputs, stored, block)

    def norm_of_gradient(values, indices, product):
        gradient = jax.grad(lambda values: jnp.sum(product(values, indices) ** 2))
        return jnp.sum(gradient(values) ** 2)

    def stored_product(values, indices):
        return multiply(rows, values, indices, outputs=outputs)

    def dense_product(values, indices):
        return rows @ layout.scatter(values, indices)

    results = []
    for product in (stored_product, dense_product):
        twice = jax.grad(functools.partial(norm_of_gradient, product=product))
        many = jnp.stack([values, 2 * values]), jnp.stack([indices, (indices + 1) % 3])
        results.append(jax.jit(jax.vmap(twice))(*many))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-2)
