"""Masks of some outputs at a time are those of all outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.oneshot import matrix_masks
from jaxpruner.oneshot.output_portions import in_portions
from jaxpruner.sparsity_types import NByM, Unstructured

PORTION = 256


@pytest.mark.parametrize('sparsity_type', [Unstructured(), NByM(2, 4)])
@pytest.mark.parametrize('shape', [(8, 5), (8, 256), (8, 257), (8, 600), (3, 8, 600), (8, 0)])
def test_portions_change_nothing(shape, sparsity_type):
    # Few different values, so that there are ties.
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 4, shape), jnp.float32)

    def keep(scores):
        return matrix_masks.keep_in_matrices(scores, 0.5, sparsity_type)

    np.testing.assert_array_equal(in_portions(keep, scores), keep(scores))


def _shapes_that_are_masked(outputs, is_traced=False):
    shapes = []

    def keep(scores):
        shapes.append(scores.shape)
        return jnp.ones(scores.shape, jnp.uint8)

    call = lambda scores: in_portions(keep, scores)  # noqa: E731
    jax.block_until_ready((jax.jit(call) if is_traced else call)(jnp.ones((4, outputs))))
    return shapes


def test_matrices_with_any_number_of_outputs_are_masked_in_one_shape():
    assert _shapes_that_are_masked(300) == [(4, PORTION)] * 2
    assert _shapes_that_are_masked(768) == [(4, PORTION)] * 3


def test_in_a_program_there_are_no_portions():
    assert _shapes_that_are_masked(768, is_traced=True) == [(4, 768)]
