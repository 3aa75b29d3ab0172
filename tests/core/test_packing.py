"""One bit per weight: packing loses nothing along any axis, and the axis keeps what a device has in whole bytes."""

import logging
import math

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.core import masking, packing

# Operations are compiled for each shape: few shapes, with all kinds of axes (of length 1, whole bytes, bits beyond).
SHAPES = [
    (),
    (1,),
    (7,),
    (8,),
    (1, 1),
    (1, 9),
    (16, 3),
    (3, 16),
    (5, 1, 3),
    (2, 8, 4),
    (9, 17, 2),
    (2, 1, 3, 12),
]
masks = st.sampled_from(SHAPES).flatmap(
    lambda shape: hypothesis_numpy.arrays(np.uint8, shape, elements=st.integers(0, 1))
)
# For each axis how much of it a device has, and how many devices it is divided over.
divided_shapes = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 8])), min_size=1, max_size=4
)


@hypothesis.settings(max_examples=50)
@hypothesis.given(masks)
def test_unpacking_undoes_packing(mask):
    bits = packing.pack(jnp.asarray(mask))
    assert bits.dtype == jnp.uint8
    assert bits.shape == packing.packed_shape(mask.shape)
    np.testing.assert_array_equal(packing.unpack(bits, mask.shape), mask)


@hypothesis.settings(max_examples=20)
@hypothesis.given(masks)
def test_unpacking_finds_the_axis(mask):
    for axis in range(-mask.ndim, 0):
        bits = packing.pack(jnp.asarray(mask), axis)
        np.testing.assert_array_equal(bits, np.packbits(mask, axis))
        assert bits.shape == packing.packed_shape(mask.shape, axis)
        np.testing.assert_array_equal(packing.unpack(bits, mask.shape), mask)


@hypothesis.settings(max_examples=20)
@hypothesis.given(masks)
def test_every_way_to_store_a_mask_is_understood(mask):
    # Along an axis of length 1 nothing is packed unless there is no other: packed, such a mask would look unpacked.
    axes = [axis for axis in range(-mask.ndim, 0) if mask.shape[axis] > 1 or mask.size == 1]
    mask = jnp.asarray(mask)
    flat = jnp.packbits(mask) if mask.ndim else jnp.packbits(mask.reshape(1))
    for stored in (
        mask,
        mask != 0,
        packing.pack(mask),
        *(packing.pack(mask, axis) for axis in axes),
        flat,
    ):
        np.testing.assert_array_equal(packing.unpack_like(stored, mask.shape), mask)


def factors_of_two(length):
    return 0 if length % 2 else 1 + factors_of_two(length // 2)


@hypothesis.settings(max_examples=200)
@hypothesis.given(divided_shapes)
def test_a_device_has_whole_bytes_wherever_some_axis_allows_it(divided):
    local_shape = tuple(length for length, _ in divided)
    shape = tuple(length * devices for length, devices in divided)
    axis = packing.packed_axis(shape, local_shape)
    whole = [other for other in range(-len(shape), 0) if local_shape[other] % 8 == 0]
    if whole:
        assert axis in whole
        # Packed, the mask can be divided as its parameter is.
        assert packing.packed_shape(shape, axis)[axis] * 8 == shape[axis]
        assert packing.packed_shape(shape, axis)[axis] % divided[axis][1] == 0
        most = max(factors_of_two(shape[other]) for other in whole)
        assert axis == max(other for other in whole if factors_of_two(shape[other]) == most)
    else:
        undivided = [
            other for other in range(-len(shape), 0) if local_shape[other] == shape[other] > 1
        ]
        among = undivided or range(-len(shape), 0)
        assert axis == max(
            other for other in among if shape[other] == max(shape[one] for one in among)
        )
    assert shape[axis] > 1 or math.prod(shape) == 1
    # An axis of the whole shape that suits the devices is taken, so that both layouts are one.
    if local_shape[packing.packed_axis(shape)] % 8 == 0:
        assert axis == packing.packed_axis(shape)


AXES = [
    ((3, 3, 16, 10), -2),
    ((784, 300), -2),
    ((8, 8), -1),
    ((64, 48), -2),
    ((300, 10), -2),
    ((10, 10), -1),
    ((7,), -1),
    ((1, 5, 3), -2),
    ((1, 1), -1),
]


@pytest.mark.parametrize(('shape', 'axis'), AXES)
def test_the_axis_has_the_most_factors_of_two_or_is_the_longest(shape, axis):
    assert packing.packed_axis(shape) == axis
    np.testing.assert_array_equal(
        packing.pack(jnp.ones(shape, jnp.uint8)), np.packbits(np.ones(shape, np.uint8), axis)
    )


@pytest.mark.parametrize('axis', [-2, -1])
def test_masks_that_replace_packed_ones_are_packed_alike(axis):
    params = {
        'kernel': jnp.ones((16, 24)),
        'new': jnp.ones((16, 24)),
        'one': jnp.ones((1, 1)),
        'bias': jnp.ones(3),
    }
    ones = {name: jnp.ones(param.shape, jnp.uint8) for name, param in params.items()} | {
        'bias': None
    }
    like = {
        'kernel': packing.pack(ones['kernel'], axis),
        'new': None,
        'one': packing.pack(ones['one']),
        'bias': None,
    }
    stored = masking.store_masks(ones, params, packed=True, like=like)
    assert stored['kernel'].shape == packing.packed_shape((16, 24), axis)
    assert stored['new'].shape == packing.packed_shape((16, 24))
    assert int(stored['one'][0, 0]) == 128
    assert stored['bias'] is None
    for name, mask in masking.unpack_masks(stored, params).items():
        assert mask is None or mask.all(), name
    unpacked = masking.store_masks(ones, params, packed=False, like=like)
    assert unpacked['kernel'].shape == (16, 24)


@pytest.mark.parametrize('shape', [(1, 5), (5, 1, 3)])
def test_masks_that_replace_unpacked_ones_are_packed_as_new_ones(shape):
    """An axis of length 1 is no packed axis, though packing would leave its length."""
    mask = jnp.ones(shape, jnp.uint8)
    stored = masking.store_masks(mask, mask, packed=True, like=mask)
    assert stored.shape == packing.packed_shape(shape)


def test_on_one_device_nothing_is_warned_of(caplog):
    with caplog.at_level(logging.INFO):
        masking.store_masks(jnp.ones((3, 5), jnp.uint8), jnp.ones((3, 5)), packed=True)
    assert caplog.text == ''


def test_stacked_masks_pack_alike():
    stacked = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 20, 10)), jnp.uint8)
    one_by_one = jnp.stack([packing.pack(mask) for mask in stacked])
    np.testing.assert_array_equal(jax.vmap(packing.pack)(stacked), one_by_one)
    np.testing.assert_array_equal(packing.unpack_like(one_by_one, stacked.shape), stacked)
    unpack = jax.vmap(lambda bits: packing.unpack_like(bits, stacked.shape[1:]))
    np.testing.assert_array_equal(unpack(one_by_one), stacked)


def test_a_mask_of_another_parameter_is_refused():
    words = (
        r'a mask of shape \(5,\) does not fit a parameter of shape \(16, 4\); unpacked it has that shape, packed '
        r'\(2, 4\) or \(16, 1\), packed flat \(8,\)'
    )
    for unpack in (packing.unpack_like, packing.unpack):
        with pytest.raises(ValueError, match=words):
            unpack(jnp.zeros(5, jnp.uint8), (16, 4))
    for unpack in (packing.unpack_like, packing.unpack):
        with pytest.raises(
            ValueError, match=r'a mask of shape \(5,\) does not fit a parameter of shape \(\)'
        ):
            unpack(jnp.zeros(5, jnp.uint8), ())


def test_counting_kept_weights_counts_bits():
    assert int(packing.kept_weights(jnp.array([[255, 0], [1, 128]], jnp.uint8))) == 10
