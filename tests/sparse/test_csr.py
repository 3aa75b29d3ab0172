"""What a product with a matrix in CSR refuses; formats and training compare it with the dense one."""

import jax
import jax.numpy as jnp
import pytest

from jaxpruner.sparse import csr_matrix
from jaxpruner.sparse.csr_matrix import CsrMatrix, csr_arrays

ARRAYS = csr_arrays(jnp.array([0, 5]), 4, 3)


@pytest.mark.skipif(csr_matrix.why_missing(jnp.float32) is not None, reason='no CSR kernel')
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_types_without_a_kernel_are_refused(dtype):
    short = CsrMatrix(jnp.ones(2, dtype), **ARRAYS)
    with pytest.raises(NotImplementedError, match=rf'not for {dtype}; cast'):
        short.multiply(jnp.ones((3, 4), dtype))


def test_machines_and_matrices_without_a_kernel_are_refused(monkeypatch):
    monkeypatch.setattr(jax, '__version_info__', (0, 6, 0))
    with pytest.raises(NotImplementedError, match=r'from 0\.6\.1 on.*upgrade'):
        CsrMatrix(jnp.ones(2), **ARRAYS).multiply(jnp.ones((3, 4)))
    with pytest.raises(ValueError, match='65536 by 32768'):
        csr_arrays(jnp.zeros(1, int), 2**16, 2**15)
