"""One bit per weight: packing loses nothing, and its layout depends on the shape alone."""

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import packing

masks = hypothesis_numpy.arrays(
    np.uint8, hypothesis_numpy.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=17), elements=st.integers(0, 1)
)


@hypothesis.settings(max_examples=50)
@hypothesis.given(masks)
def test_unpacking_undoes_packing(mask):
    bits = packing.pack(jnp.asarray(mask))
    assert bits.dtype == jnp.uint8
    assert bits.shape == packing.packed_shape(mask.shape)
    np.testing.assert_array_equal(packing.unpack(bits, mask.shape), mask)


@hypothesis.settings(max_examples=50)
@hypothesis.given(masks)
def test_every_way_to_store_a_mask_is_understood(mask):
    mask = jnp.asarray(mask)
    flat = jnp.packbits(mask) if mask.ndim else jnp.packbits(mask.reshape(1))
    for stored in (mask, packing.pack(mask), flat):
        np.testing.assert_array_equal(packing.unpack_like(stored, mask.shape), mask)


AXES = [
    ((3, 3, 16, 10), -2),
    ((784, 300), -2),
    ((8, 8), -1),
    ((300, 10), -2),
    ((10, 10), -1),
    ((7,), -1),
    ((1, 5, 3), -2),
]


@pytest.mark.parametrize(('shape', 'axis'), AXES)
def test_the_axis_is_the_last_multiple_of_eight_else_the_longest(shape, axis):
    assert packing.packed_axis(shape) == axis
    np.testing.assert_array_equal(packing.pack(jnp.ones(shape, jnp.uint8)), np.packbits(np.ones(shape, np.uint8), axis))


def test_stacked_masks_pack_alike():
    stacked = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 20, 10)), jnp.uint8)
    one_by_one = jnp.stack([packing.pack(mask) for mask in stacked])
    np.testing.assert_array_equal(jax.vmap(packing.pack)(stacked), one_by_one)


def test_a_mask_of_another_parameter_is_refused():
    with pytest.raises(
        ValueError, match=r'a mask of shape \(5,\) does not fit a parameter of shape \(16, 4\).*packed \(2, 4\)'
    ):
        packing.unpack_like(jnp.zeros(5, jnp.uint8), (16, 4))


def test_counting_kept_weights_counts_bits():
    assert int(packing.kept_weights(jnp.array([[255, 0], [1, 128]], jnp.uint8))) == 10
