"""Masks of every sparsity type: exact counts, ties, partial blocks, odd shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import mask_calculator
from jaxpruner.sparsity_types import Block, Channel, NByM, Unstructured


def scores(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def pooled_blocks(values, block_shape, pool):
    """Scores of all blocks and the slices they stand for, block after block in flat order."""
    height, width = block_shape
    found = []
    for leading in np.ndindex(*values.shape[:-2]):
        for row in range(0, values.shape[-2], height):
            for column in range(0, values.shape[-1], width):
                where = (*leading, slice(row, row + height), slice(column, column + width))
                found.append((pool(values[where]), where))
    return found


@pytest.mark.parametrize('use_avg_pooling', [True, False])
@pytest.mark.parametrize(
    ('shape', 'block_shape', 'sparsity'),
    [
        ((8, 12), (4, 4), 0.75),
        ((9, 13), (4, 3), 0.3),
        ((3, 3, 6, 10), (4, 4), 1.0),
        ((3, 5), (8, 8), 0.0),
    ],
)
def test_the_best_blocks_are_kept_whole(shape, block_shape, sparsity, use_avg_pooling):
    values = np.asarray(scores(*shape), np.float64)
    blocks = pooled_blocks(values, block_shape, np.mean if use_avg_pooling else np.max)
    count = max(1, int(np.round(np.float32(len(blocks)) * (1 - np.float32(sparsity)))))
    expected = np.zeros(shape, np.uint8)
    for _, where in sorted(blocks, key=lambda block: -block[0])[:count]:
        expected[where] = 1
    mask = mask_calculator.topk_block_mask_calculator(
        scores(*shape), sparsity, *block_shape, use_avg_pooling
    )
    np.testing.assert_array_equal(mask, expected)


def test_blocks_of_a_vector_lie_in_one_row():
    mask = mask_calculator.topk_block_mask_calculator(
        jnp.array([1.0, 1.0, 9.0, 9.0, 2.0]), 0.5, 4, 2
    )
    np.testing.assert_array_equal(mask, [0, 0, 1, 1, 1])  # round(1.5) blocks of three: 2


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


BAD = [
    (
        lambda: mask_calculator.topk_n_by_m_mask_calculator(scores(4, 6), 0.5, NByM(2, 4)),
        ValueError,
        'scores: shape .4, 6.* m=4 does not divide',
    ),
    (
        lambda: mask_calculator.topk_channel_mask_calculator(scores(4), 0.5, Channel(1)),
        ValueError,
        'axis 1 does not exist',
    ),
    (
        lambda: mask_calculator.get_topk_fn({'*': Unstructured()}),
        TypeError,
        'is no sparsity type',
    ),
    (lambda: mask_calculator.get_topk_fn('nm'), ValueError, "unknown sparsity type 'nm'"),
]


@pytest.mark.parametrize(('make', 'error', 'message'), BAD)
def test_bad_calls(make, error, message):
    with pytest.raises(error, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class Diagonal:
    """A type of a user's own: wrapped diagonals of a square matrix are kept or removed whole."""

    def check_shape(self, shape, where):
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f'{where}: diagonals need a square matrix, got {shape}')

    def group_scores(self, scores):
        return jnp.stack(
            [jnp.trace(jnp.roll(scores, -shift, 1)) for shift in range(scores.shape[0])]
        )

    def spread_groups(self, group_mask, shape):
        rows, columns = jnp.indices(shape)
        return group_mask[(columns - rows) % shape[0]]


def test_a_type_of_a_users_own_is_two_methods():
    mask = mask_calculator.get_topk_fn(Diagonal())(jnp.eye(4) + jnp.roll(jnp.eye(4), 2, 1) * 2, 0.5)
    np.testing.assert_array_equal(mask, np.eye(4) + np.roll(np.eye(4), 2, 1))
    updater = jaxpruner.MagnitudePruning(
        sparsity_type={'w': Diagonal()}, sparsity_distribution_fn=lambda p: {'w': 0.75}
    )
    assert updater.instant_sparsify({'w': scores(8, 8)})[1]['w'].sum() == 16
    with pytest.raises(ValueError, match='w: diagonals need a square matrix'):
        updater.instant_sparsify({'w': scores(8, 4)})


def test_channels_of_narrow_floats_do_not_overflow():
    values = jnp.ones((70000, 4), jnp.float16) * jnp.array([1, 4, 3, 2], jnp.float16)
    kept = mask_calculator.topk_channel_mask_calculator(values, 0.5, Channel())[0]
    assert kept.tolist() == [0, 1, 1, 0]
