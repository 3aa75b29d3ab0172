"""The tournament of N:M against sorting."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import n_by_m

VALUES = [0.0, -0.0, 0.5, 1.0, 2.0, 3.0, -1.0, math.inf, -math.inf, math.nan]
GROUPS = 60


def best(group, n):
    """The n largest, NaN last; ties go to the later one."""
    is_number = ~np.isnan(group)
    ranked = np.lexsort((np.arange(len(group)), np.where(is_number, group, 0), is_number))
    kept = np.zeros(len(group), np.uint8)
    kept[ranked[max(len(group) - n, 0) :]] = 1
    return kept


@pytest.mark.parametrize('m', [1, 2, 4, 5, 33])
@pytest.mark.parametrize('axis', [0, 1])
def test_each_number_of_winners(m, axis):
    groups = np.random.default_rng(m).choice(np.array(VALUES, np.float32), (GROUPS, m))
    scores = jnp.asarray(groups.reshape(2, -1) if axis else groups.reshape(2, -1).T)
    numbers = jnp.arange(m + 2)
    masks = jax.jit(jax.vmap(lambda n: n_by_m.keep_n_of_m(scores, n, m, axis)))(numbers)
    for n, mask in zip(numbers.tolist(), np.asarray(masks), strict=True):
        found = (mask if axis else mask.T).reshape(GROUPS, m)
        np.testing.assert_array_equal(found, [best(group, n) for group in groups])


@pytest.mark.parametrize('axes', [(0, 1), (-1, -3), (2, 1, 0)])
def test_several_axes_are_one_whose_innermost_is_the_last(axes):
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)), jnp.float32)
    others = [axis for axis in range(3) if axis not in {axis % 3 for axis in axes}]
    order = (*others, *(axis % 3 for axis in axes))
    lines = scores.transpose(order).reshape(*[scores.shape[axis] for axis in others], -1)
    expected = n_by_m.keep_n_of_m(lines, 2, 5, -1).reshape([scores.shape[axis] for axis in order])
    mask = n_by_m.keep_n_of_m(scores, 2, 5, axes)
    np.testing.assert_array_equal(mask, expected.transpose(np.argsort(order)))
