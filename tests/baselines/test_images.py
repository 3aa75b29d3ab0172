"""Convolutions as products, and patches."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpruner.baselines import models
from jaxpruner.baselines.models import convolution_as_matmul


@pytest.mark.parametrize(
    ('size', 'strides', 'padding'),
    [
        (1, (2, 2), 'SAME'),
        (7, (1, 1), 'SAME'),
        (3, (2, 3), 'VALID'),
        (3, (2, 2), ((1, 1), (0, 2))),
    ],
)
def test_convolution_as_matmul_is_a_convolution(size, strides, padding):
    pixels = jax.random.normal(jax.random.key(0), (2, 9, 8, 3))
    kernel = jax.random.normal(jax.random.key(1), (size, size, 3, 4)) / size
    expected = jax.lax.conv_general_dilated(
        pixels,
        kernel,
        strides,
        padding,
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        precision='highest',
    )
    np.testing.assert_allclose(
        convolution_as_matmul(pixels, kernel, strides, padding), expected, atol=1e-4
    )


def test_patches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r'model\.patch 3 does not divide images of 8x8'):
        models.ViT((8, 8, 1), 3, 8, 1, 2, 8, 10, rngs=nnx.Rngs(0))
