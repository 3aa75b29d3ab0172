"""The product with a matrix in CSR, and its derivatives, against the dense matrix."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.sparse import csr_matrix
from jaxpruner.sparse.csr_matrix import CsrMatrix, csr_arrays

MISSING = csr_matrix.why_missing(jnp.float32)
needs_kernel = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def matrix_of(mask, seed=0):
    """The dense matrix, its kept weights and the whole numbers that say where they stand."""
    values = np.random.default_rng(seed).standard_normal(mask.shape).astype(np.float32) * mask
    positions = np.flatnonzero(mask.T)
    arrays = csr_arrays(jnp.asarray(positions), *mask.shape)
    return values, jnp.asarray(values.T.reshape(-1)[positions]), arrays


def rows_of(mask, number=3):
    return jax.random.normal(jax.random.key(1), (number, mask.shape[0]))


EDGES = {
    'one in ten': np.random.default_rng(0).random((12, 9)) < 0.1,
    'empty rows and columns': np.pad(np.ones((2, 2)), 2) > 0,
    'nothing': np.zeros((3, 4), bool),
}


@needs_kernel
@pytest.mark.parametrize('name', EDGES)
def test_product_and_derivatives_are_those_of_the_dense_matrix(name):
    mask = EDGES[name]
    dense, compressed, arrays = matrix_of(mask)
    rows = rows_of(mask)
    weights = jax.random.normal(jax.random.key(2), (3, mask.shape[1]))

    @jax.jit
    def product_and_gradients(rows, compressed, probe):
        def loss(rows, compressed, probe):
            product = CsrMatrix(compressed, **arrays, probe=probe).multiply(rows)
            return jnp.sum(weights * jnp.tanh(product)), product

        return jax.grad(loss, (0, 1, 2), has_aux=True)(rows, compressed, probe)

    def dense_loss(rows, dense):
        return jnp.sum(weights * jnp.tanh(rows @ dense))

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        found, product = product_and_gradients(rows, compressed, jnp.zeros(mask.T.shape))
    of_rows, of_dense = jax.grad(dense_loss, (0, 1))(rows, dense)
    expected = of_rows, of_dense.T[mask.T], of_dense.T
    for one, other in zip((product, *found), (rows @ dense, *expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_what_has_no_kernel_is_refused(monkeypatch, dtype):
    mask = EDGES['one in ten']
    _, compressed, arrays = matrix_of(mask)
    short = CsrMatrix(compressed.astype(dtype), **arrays)
    with pytest.raises(NotImplementedError, match=rf'not for {dtype}; cast'):
        short.multiply(rows_of(mask).astype(dtype))
    monkeypatch.setattr(csr_matrix, '_is_lowered_to_a_kernel', lambda: False)
    with pytest.raises(NotImplementedError, match=r'from 0\.6\.1 on.*upgrade'):
        CsrMatrix(compressed, **arrays).multiply(rows_of(mask))
    monkeypatch.setattr(csr_matrix, '_platform', lambda: 'gpu')
    assert 'not for gpu; run on a CPU' in csr_matrix.why_missing(jnp.float32)
    with pytest.raises(ValueError, match='65536 by 32768'):
        csr_arrays(jnp.zeros(1, int), 2**16, 2**15)
