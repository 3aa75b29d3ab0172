"""What each format stores, and that it multiplies as the dense matrix does."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpruner.sparse.execution.choosing import Blocks, Csr, Smaller
from jaxpruner.sparse.products import Products
from sparse.training.models import needs_csr
from uses.table import conv

RNG = np.random.default_rng(0)
FORMATS = [pytest.param(Csr(), marks=needs_csr), Smaller(), Blocks((2, 4))]


def leaf_of(shape):
    x, w = jnp.ones((6, shape[0])), jnp.ones(shape)
    return Products(lambda p, x: x @ p['w'], {'w': w}, x).by_leaf['w']


def random_zeros(seed, layers=2, inputs=16, outputs=12):
    """Zeros of all kinds: single weights, blocks, inputs, outputs, and a layer of zeros."""
    random = np.random.default_rng(seed)
    kept = random.random((layers, inputs, outputs)) < random.choice([0.02, 0.3, 1.0])
    kept &= random.random((layers, inputs, 1)) < random.choice([0.3, 1.0])
    kept &= random.random((layers, 1, outputs)) < random.choice([0.3, 1.0])
    kept &= np.repeat(random.random((layers, inputs // 2, 1)) < 0.5, 2, axis=1)
    kept &= random.random((layers, 1, 1)) < 0.9
    values = random.normal(size=kept.shape).astype(np.float32)
    return np.where(kept, values, 0)


@pytest.mark.parametrize('format', FORMATS, ids=str)
@hypothesis.given(seed=st.integers(0, 2**16))
@hypothesis.settings(max_examples=8)
def test_a_format_multiplies_as_the_dense_matrix(format, seed):
    matrices = random_zeros(seed)
    leaf = leaf_of(matrices.shape[1:])
    arrays = format.pack(matrices, leaf)
    rows = RNG.normal(size=(6, 16)).astype(np.float32)
    for layer, matrix in enumerate(matrices):
        of_layer = {key: jnp.asarray(array[layer]) for key, array in arrays.items()}
        found = format.matrix(**of_layer).multiply(rows)
        np.testing.assert_allclose(found, rows @ matrix, rtol=1e-5, atol=1e-5)


def convolved(p, x):
    return conv(x, p['w'], window_strides=(2, 1))


@pytest.mark.parametrize('format', FORMATS, ids=str)
@pytest.mark.parametrize('window', [(1, 1), (3, 2)])
def test_convolutions(format, window):
    kernel = RNG.normal(size=(*window, 6, 12)).astype(np.float32)
    kernel[..., [0, 3], :] = 0
    kernel[..., 4:] = 0
    params = {'w': jnp.asarray(kernel)}
    image = jnp.asarray(RNG.normal(size=(2, 5, 4, 6)), jnp.float32)
    products = Products(convolved, params, image)
    leaf = products.by_leaf['w']
    packed = format.pack(np.asarray(leaf.to_matrix(params['w']))[None], leaf)
    arrays = {key: jnp.asarray(array[0]) for key, array in packed.items()}
    weights = products.put(params, {'w': format.matrix(**arrays)})
    result = products.apply(weights, image)
    np.testing.assert_allclose(result, convolved(params, image), rtol=1e-4, atol=1e-4)
    if isinstance(format, Smaller):
        assert arrays['matrix'].shape == (window[0] * window[1] * 4, 4)
