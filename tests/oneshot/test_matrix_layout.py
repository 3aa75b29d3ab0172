"""Kernels as weight matrices, against products that are written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.oneshot import MatrixLayout

CASES = [
    # layout, and what `einsum` calls its axes
    (MatrixLayout((4, 3), (0,), (1,)), 'io->io'),
    (MatrixLayout((3, 4), (1,), (0,)), 'oi->io'),
    (MatrixLayout((2, 3, 5, 4), (0, 1, 2), (3,)), 'hwio->hwio'),
    (MatrixLayout((4, 5, 2, 3), (2, 3, 1), (0,)), 'oihw->hwio'),
    (MatrixLayout((6, 4, 2, 5), (1,), (2, 3), (0,)), 'edhk->edhk'),
    (MatrixLayout((4, 2, 6, 5), (0, 3), (1,), (2,)), 'doek->edko'),
]


@pytest.mark.parametrize(('layout', 'moved'), CASES)
def test_matrices_and_back(layout, moved):
    leaf = jnp.asarray(np.random.default_rng(0).normal(size=layout.shape))
    found = layout.to_matrices(leaf)
    np.testing.assert_array_equal(found, np.einsum(moved, leaf).reshape(layout.matrices_shape))
    np.testing.assert_array_equal(layout.from_matrices(found), leaf)


def test_a_grouped_convolution_is_a_matrix_for_each_group():
    layout = MatrixLayout((3, 2, 4), (0, 1), (2,), groups=2)
    kernel = jax.random.normal(jax.random.key(0), layout.shape)
    inputs = jax.random.normal(jax.random.key(1), (1, 3, 4))  # one window: a product
    expected = jax.lax.conv_general_dilated(
        inputs,
        kernel,
        (1,),
        'VALID',
        dimension_numbers=('NWC', 'WIO', 'NWC'),
        feature_group_count=2,
    )
    windows = inputs.reshape(3, 2, 2).swapaxes(0, 1).reshape(2, 6)
    matrices = layout.to_matrices(kernel)
    assert matrices.shape == layout.matrices_shape == (2, 6, 2)
    np.testing.assert_allclose(
        jnp.einsum('gi,gio->go', windows, matrices).ravel(), expected.ravel(), rtol=1e-5
    )
    np.testing.assert_array_equal(layout.from_matrices(matrices), kernel)


BAD = [
    (
        lambda: MatrixLayout((2, 3), (0,), ()),
        r'each axis of shape \(2, 3\) must be in one of contract=\(0,\)',
    ),
    (lambda: MatrixLayout((2, 3), (0,), (0, 1)), 'must be in one of'),
    (lambda: MatrixLayout((2, 3), (0,), (1,), groups=2), '2 groups do not divide the 3 outputs'),
]


@pytest.mark.parametrize(('make', 'message'), BAD)
def test_bad_layouts(make, message):
    with pytest.raises(ValueError, match=message):
        make()
