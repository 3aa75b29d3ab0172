"""Compiled models add products up in the type, and in the precision, that the model asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpruner import sparse
from jaxpruner.sparse.operators import csr_kernel
from structure.doubles import doubles

HAS_CSR = csr_kernel.why_missing(jnp.float32) is None


def dot(dtype):
    def apply_fn(params, x):
        return lax.dot_general(
            x, params['w'], (((1,), (0,)), ((), ())), preferred_element_type=dtype
        )

    return apply_fn


def convolution(dtype):
    def apply_fn(params, x):
        numbers = ('NHWC', 'HWIO', 'NHWC')
        return lax.conv_general_dilated(
            x, params['w'], (1, 1), 'SAME', dimension_numbers=numbers, preferred_element_type=dtype
        )

    return apply_fn


def half_of(weights):
    """The weights, of which the second half of the outputs is zero."""
    outputs = weights.shape[-1]
    return weights.at[..., outputs // 2 :].set(0)


@pytest.mark.parametrize('setting', ['smaller', 'blocks 8x32'])
def test_integers_are_added_up_in_the_type_the_model_asks_for(setting):
    for apply_fn, x, shape in [
        (dot(jnp.int32), (4, 256), (256, 64)),
        (convolution(jnp.int32), (1, 5, 5, 16), (3, 3, 16, 64)),
    ]:
        params = {'w': half_of(jnp.full(shape, 100, jnp.int8))}
        x = jnp.full(x, 100, jnp.int8)
        apply, packed, _ = sparse.compile(apply_fn, params, x, formats=setting)
        expected = apply_fn(params, x)
        assert expected.max() > 1e6
        np.testing.assert_array_equal(apply(packed, x), expected)


@pytest.mark.parametrize('setting', ['smaller', 'blocks 8x32'])
def test_halves_are_added_up_in_float32(setting):
    apply_fn = dot(jnp.float32)
    weights = jax.random.normal(jax.random.key(0), (512, 256), jnp.bfloat16)
    params, x = (
        {'w': half_of(weights)},
        jax.random.normal(jax.random.key(1), (8, 512), jnp.bfloat16),
    )
    apply, packed, _ = sparse.compile(apply_fn, params, x, formats=setting)
    np.testing.assert_allclose(apply(packed, x), apply_fn(params, x), atol=1e-3)
    gradient = jax.grad(lambda apply, params, x: jnp.sin(apply(params, x)).sum(), 2)
    found, expected = gradient(apply, packed, x), gradient(apply_fn, params, x)
    assert found.dtype == expected.dtype == jnp.bfloat16
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())


@pytest.mark.skipif(not HAS_CSR, reason='no CSR kernel')
def test_csr_adds_up_in_doubles():
    apply_fn = dot(jnp.float64)
    with doubles(True):
        weights = jax.random.normal(jax.random.key(0), (64, 32), jnp.float32)
        params, x = {'w': half_of(weights)}, jnp.full((8, 64), 1 / 3, jnp.float32)
        apply, packed, _ = sparse.compile(apply_fn, params, x, formats='csr')
        np.testing.assert_allclose(apply(packed, x), apply_fn(params, x), atol=1e-12)


def test_training_on_blocks_adds_up_as_the_dense_model_does():
    apply_fn = dot(jnp.float32)
    params = {'w': jax.random.normal(jax.random.key(0), (512, 256), jnp.bfloat16)}
    x = jax.random.normal(jax.random.key(1), (8, 512), jnp.bfloat16)
    model = sparse.block_sparse(apply_fn, params, x, sparsity=0.5, block=(8, 64))
    weights, topology = model.pack(params)
    result = model.apply(weights, topology, x)
    np.testing.assert_allclose(result, apply_fn(model.unpack(weights, topology), x), atol=1e-3)
    gradients = jax.grad(lambda weights: jnp.sin(model.apply(weights, topology, x)).sum())(weights)
    assert gradients['w']['values'].dtype == jnp.bfloat16
