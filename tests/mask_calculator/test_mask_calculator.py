"""Masks of every sparsity type: exact counts, ties, partial blocks, odd shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import mask_calculator
from jaxpruner.sparsity_types import Block, Channel, NByM, Unstructured


def scores(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize('use_avg_pooling', [True, False])
@pytest.mark.parametrize(
    ('shape', 'block_shape', 'sparsity'),
    [((9, 13), (4, 3), 0.3), ((3, 3, 6, 10), (4, 4), 1.0), ((3, 5), (8, 8), 0.0)],
)
def test_the_best_blocks_are_kept_whole(shape, block_shape, sparsity, use_avg_pooling):
    height, width = block_shape
    values = np.asarray(scores(*shape), np.float64)
    blocks = [
        (*leading, slice(row, row + height), slice(column, column + width))
        for leading in np.ndindex(*shape[:-2])
        for row in range(0, shape[-2], height)
        for column in range(0, shape[-1], width)
    ]
    pool = np.mean if use_avg_pooling else np.max
    count = max(1, int(np.round(np.float32(len(blocks)) * (1 - np.float32(sparsity)))))
    expected = np.zeros(shape, np.uint8)
    for where in sorted(blocks, key=lambda where: -pool(values[where]))[:count]:
        expected[where] = 1
    mask = mask_calculator.topk_block_mask_calculator(
        scores(*shape), sparsity, *block_shape, use_avg_pooling
    )
    np.testing.assert_array_equal(mask, expected)


ALL_TYPES = [Unstructured(), NByM(2, 4), Block((2, 2)), Block((2, 2), False), Channel()]


@pytest.mark.parametrize(
    ('sparsity_type', 'dtype'),
    [*zip(ALL_TYPES, ['float16', 'bfloat16', 'float32', 'bfloat16', 'float32'], strict=True)],
    ids=str,
)
def test_every_type_keeps_everything_half_or_nothing_of_nothing(sparsity_type, dtype):
    topk = mask_calculator.get_topk_fn(sparsity_type)
    values = scores(8, 8).astype(dtype)
    assert int(topk(values.at[3, 3].set(jnp.nan).at[5].set(-jnp.inf), 0.0).sum()) == 64
    assert int(topk(values, 0.5).sum()) == 32
    assert topk(jnp.zeros((0, 4), dtype), 0.5).shape == (0, 4)
    if not isinstance(sparsity_type, NByM | Channel):
        assert int(topk(values[0, 0], 0.9)) == 1


def test_channels_of_narrow_floats_do_not_overflow():
    values = jnp.ones((70000, 4), jnp.float16) * jnp.array([1, 4, 3, 2], jnp.float16)
    kept = mask_calculator.topk_channel_mask_calculator(values, 0.5, Channel())[0]
    assert kept.tolist() == [0, 1, 1, 0]
