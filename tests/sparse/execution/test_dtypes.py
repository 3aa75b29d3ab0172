"""Compiled models add products up in the type, and in the precision, that the model asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse
from uses.table import conv


def dot(dtype):
    return lambda params, x: jnp.matmul(x, params['w'], preferred_element_type=dtype)


def convolution(dtype):
    return lambda params, x: conv(x, params['w'], preferred_element_type=dtype)


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
