"""Where the ties that are kept end, in rows that are counted in few parts or in many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import tie_ends

FEW = tie_ends._FEW_SCORES
MANY = 3 * FEW + 7


def place_after(row, room):
    """The place after the last tie (a 2) that there is room for."""
    return 0 if room == 0 else int(np.flatnonzero(row == 2)[room - 1]) + 1


@pytest.mark.parametrize('unwritten', [False, True], ids=['written', 'unwritten'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
    'shapes',
    [
        [(1, 1)],
        [(1, 3)],
        [(2, 4)],
        [(3, 5)],
        [(2, 3, 33)],
        [(1, FEW)],
        [(1, FEW + 1)],
        [(2, MANY)],
        [
            (1, MANY),
            (1, 2),
            (2, FEW // 2),
        ],  # parts are of the longest row's length, which others may not have
    ],
    ids=str,
)
def test_ends_are_the_places_after_the_last_tie_that_is_kept(shapes, dtype, unwritten):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(1, 4, shape).astype(np.float32) for shape in shapes]
    rows = [row for array in arrays for row in array.reshape(len(array), -1)]
    between = [jnp.tile(jnp.array([2, 3], dtype), (shape[0], 1)) for shape in shapes]
    given = [jnp.asarray(-array if unwritten else array, dtype) for array in arrays]
    if unwritten:
        given = [selection.Scores(array, jnp.negative) for array in given]
    ends = jax.jit(tie_ends.of_rooms)
    numbers = np.array([(row == 2).sum() for row in rows])
    for room in (
        0 * numbers,
        np.minimum(numbers, 1),
        numbers // 3,
        np.maximum(numbers - 1, 0),
        numbers,
    ):
        expected = [place_after(row, own) for row, own in zip(rows, room, strict=True)]
        assert ends(given, between, jnp.asarray(room, jnp.uint32)).tolist() == expected


def test_few_scores_have_few_parts():
    for size in (*range(1, 50), FEW - 1, FEW):
        length = tie_ends._part_length(size)
        assert 1 <= size // length <= tie_ends._FEW_PARTS
