"""A constant mask in the model: kept by compiled models, and refused where weights are trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse
from jaxpruner.sparse.operators import csr_kernel

MASK = np.zeros((16, 32), np.float32)
MASK[::2] = 1
X = jnp.ones((2, 16))
PARAMS = {'w': jax.random.normal(jax.random.key(0), (16, 32)), 'head': jnp.ones((32, 16))}
HAS_CSR = csr_kernel.why_missing(jnp.float32) is None


def apply_fn(params, x):
    return x @ (params['w'] * MASK) @ params['head']


@pytest.mark.parametrize('setting', ['smaller', 'blocks 1x32'])
def test_a_compiled_model_applies_the_mask(setting):
    apply, _, report = sparse.compile(apply_fn, PARAMS, X, formats={'w': setting})
    assert report.layers['w'].density == 0.5
    tuned = {**PARAMS, 'w': PARAMS['w'] + 1}
    np.testing.assert_allclose(apply(apply.pack(tuned), X), apply_fn(tuned, X), rtol=1e-4)


def test_a_leaf_is_not_trained_on_compact_weights_under_a_mask():
    makers = [lambda *model: sparse.block_sparse(*model, sparsity=0.5, block=(4, 8))]
    if HAS_CSR:
        makers.append(lambda *model: sparse.unstructured_sparse(*model, sparsity=0.5))
    for make in makers:
        model = make(apply_fn, PARAMS, X)
        assert list(model.stored_leaves) == ['head']
        assert 'masks it with a constant' in str(model.plan.leaves['w'].note)
        weights, topology = model.pack(PARAMS)
        weights = jax.tree.map(lambda leaf: leaf + 1, weights)
        expected = apply_fn(model.unpack(weights, topology), X)
        np.testing.assert_allclose(model.apply(weights, topology, X), expected, rtol=1e-4)
