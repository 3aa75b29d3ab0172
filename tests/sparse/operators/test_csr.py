"""The product with a matrix in CSR, and its derivatives, against the dense matrix."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpruner.sparse.operators import csr, csr_kernel

MISSING = csr_kernel.why_missing(jnp.float32)
needs_kernel = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def matrix_of(mask, seed=0):
    """The dense matrix, its kept weights and their pattern."""
    values = np.random.default_rng(seed).standard_normal(mask.shape).astype(np.float32)
    positions = np.flatnonzero(mask)
    pattern = csr.csr_pattern(jnp.asarray(positions), *mask.shape)
    return values * mask, jnp.asarray(values.reshape(-1)[positions]), pattern


def rows_of(mask, number=3):
    return jax.random.normal(jax.random.key(1), (number, mask.shape[0]))


masks = st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1)).map(
    lambda drawn: np.random.default_rng(drawn[2]).random(drawn[:2]) < 0.4
)


@given(masks)
@settings(max_examples=10, deadline=None)
def test_pattern_is_that_of_both_matrices(mask):
    dense, compressed, pattern = matrix_of(mask)
    assert (pattern.inputs, pattern.outputs) == mask.shape
    whole = np.zeros_like(dense)
    for row in range(pattern.inputs):
        entries = slice(*np.asarray(pattern.row_offsets[row : row + 2]))
        whole[row, pattern.column_indices[entries]] = compressed[entries]
    np.testing.assert_array_equal(whole, dense)
    transposed = np.zeros_like(dense.T)
    for row in range(pattern.outputs):
        entries = slice(*np.asarray(pattern.transposed_row_offsets[row : row + 2]))
        columns = pattern.transposed_column_indices[entries]
        transposed[row, columns] = compressed[pattern.transposed_order[entries]]
    np.testing.assert_array_equal(transposed, dense.T)


EDGES = {
    'one in ten': np.random.default_rng(0).random((12, 9)) < 0.1,
    'one weight': np.eye(1, 20, 7).reshape(4, 5) > 0,
    'empty rows and columns': np.pad(np.ones((2, 2)), 2) > 0,
    'nothing': np.zeros((3, 4), bool),
    'everything': np.ones((3, 4), bool),
}


@needs_kernel
@pytest.mark.parametrize('name', EDGES)
def test_product_and_derivatives_are_those_of_the_dense_matrix(name):
    mask = EDGES[name]
    dense, compressed, pattern = matrix_of(mask)
    rows = rows_of(mask)
    weights = jax.random.normal(jax.random.key(2), (3, mask.shape[1]))

    @jax.jit
    def sparse_loss(rows, compressed, probe):
        return jnp.sum(weights * jnp.tanh(csr.csr_product(rows, compressed, pattern, probe)))

    def dense_loss(rows, dense):
        return jnp.sum(weights * jnp.tanh(rows @ dense))

    np.testing.assert_allclose(
        csr.csr_product(rows, compressed, pattern), rows @ dense, rtol=1e-5, atol=1e-6
    )
    probe = jnp.zeros(mask.shape)
    of_rows, of_compressed, of_probe = jax.grad(sparse_loss, (0, 1, 2))(rows, compressed, probe)
    dense_of_rows, of_dense = jax.grad(dense_loss, (0, 1))(rows, dense)
    np.testing.assert_allclose(of_rows, dense_of_rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_probe, of_dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_compressed, of_dense[mask], rtol=1e-5, atol=1e-6)


@needs_kernel
def test_masks_move_without_compiling_anew():
    compiled = jax.jit(csr.csr_product)
    for seed in range(3):
        mask = np.random.default_rng(seed).permutation(48).reshape(6, 8) < 10
        dense, compressed, pattern = matrix_of(mask)
        rows = rows_of(mask)
        np.testing.assert_allclose(
            compiled(rows, compressed, pattern), rows @ dense, rtol=1e-5, atol=1e-6
        )
    assert compiled._cache_size() == 1


@needs_kernel
def test_under_vmap():
    mask = EDGES['one in ten']
    _, compressed, pattern = matrix_of(mask)
    rows = jnp.stack([rows_of(mask), 2 * rows_of(mask)])

    def loss(rows, compressed):
        return jnp.sum(csr.csr_product(rows, compressed, pattern) ** 2)

    of_both = jax.vmap(jax.grad(loss, (0, 1)))(rows, jnp.stack([compressed, 3 * compressed]))
    of_rows = jax.vmap(jax.grad(loss), (0, None))(rows, compressed)
    for number, scale in enumerate((1, 3)):
        expected = jax.grad(loss, (0, 1))(rows[number], scale * compressed)
        np.testing.assert_allclose(of_both[0][number], expected[0], rtol=1e-5)
        np.testing.assert_allclose(of_both[1][number], expected[1], rtol=1e-5)
        np.testing.assert_allclose(
            of_rows[number], jax.grad(loss)(rows[number], compressed), rtol=1e-5
        )


@needs_kernel
def test_the_operator_multiplies_and_no_warning_is_heard():
    mask = EDGES['one in ten']
    dense, compressed, pattern = matrix_of(mask)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        result = csr.CsrMatrix(compressed, pattern).multiply(rows_of(mask))
    np.testing.assert_allclose(result, rows_of(mask) @ dense, rtol=1e-5, atol=1e-6)


@needs_kernel
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_other_dtypes_are_refused(dtype):
    _, compressed, pattern = matrix_of(EDGES['one in ten'])
    rows = rows_of(EDGES['one in ten']).astype(dtype)
    with pytest.raises(NotImplementedError, match=rf'not for {dtype}; cast'):
        csr.csr_product(rows, compressed.astype(dtype), pattern)


def test_a_missing_kernel_is_refused(monkeypatch):
    monkeypatch.setattr(csr_kernel, '_is_lowered_to_a_kernel', lambda: False)
    _, compressed, pattern = matrix_of(EDGES['one in ten'])
    with pytest.raises(NotImplementedError, match=r'from 0\.6\.1 on.*upgrade'):
        csr.csr_product(rows_of(EDGES['one in ten']), compressed, pattern)


def test_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(csr_kernel, '_platform', lambda: 'gpu')
    assert 'not for gpu; run on a CPU' in csr_kernel.why_missing(jnp.float32)


def test_a_matrix_of_too_many_weights_is_refused():
    with pytest.raises(ValueError, match='65536 by 32768'):
        csr.csr_pattern(jnp.zeros(1, int), 2**16, 2**15)
