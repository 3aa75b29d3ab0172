"""Where the ties that are kept end, in rows that are counted in few chunks or in many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.mask_calculator import selection
from jaxpruner.mask_calculator.selection import masks
from jaxpruner.mask_calculator.selection.scores import RowCursor

FEW = masks._FEW_SCORES
MANY = 3 * FEW + 7


def place_after(row, ties_to_keep):
    """The place after the last tie (a 2) that is kept."""
    return 0 if ties_to_keep == 0 else int(np.flatnonzero(row == 2)[ties_to_keep - 1]) + 1


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
        ],  # chunks are of the longest row's length, which others may not have
    ],
    ids=str,
)
def test_ends_are_the_places_after_the_last_tie_that_is_kept(shapes, dtype, unwritten):
    rng = np.random.default_rng(0)
    arrays = [rng.integers(1, 4, shape).astype(np.float32) for shape in shapes]
    rows = [row for array in arrays for row in array.reshape(len(array), -1)]
    given = [jnp.asarray(-array if unwritten else array, dtype) for array in arrays]
    if unwritten:
        given = [selection.Scores(array, jnp.negative) for array in given]
    between = jnp.array([2, 3], dtype)

    @jax.jit
    def end_in_row(row, ties_to_keep):
        cursor = RowCursor.at_row(given, row, jnp.dtype('uint32'))
        return masks.end_in_row(jnp.uint32(0), cursor, between, ties_to_keep)

    for index, row in enumerate(rows):
        ties = (row == 2).sum()
        for ties_to_keep in {0, min(ties, 1), ties // 3, max(ties - 1, 0), ties}:
            assert end_in_row(index, jnp.uint32(ties_to_keep)) == place_after(row, ties_to_keep)


def test_few_scores_have_few_chunks():
    for size in (*range(1, 50), FEW - 1, FEW):
        length = masks._chunk_length(size)
        assert 1 <= size // length <= masks._FEW_CHUNKS
