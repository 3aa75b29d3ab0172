"""N:M is found in weights and masks, along the axes along which it was made."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.report import n_by_m_axes

WEIGHTS = np.random.default_rng(0).normal(size=(8, 12, 16)).astype(np.float32)
FOUND = {
    'along the last axis': (jaxpruner.NByM(2, 4), (2, 4), (2,)),
    'along the first axis': (jaxpruner.NByM(2, 4, axis=0), (2, 4), (0,)),
    'sparser than asked': (jaxpruner.NByM(1, 4, axis=1), (2, 4), (1,)),
    'denser than asked': (jaxpruner.NByM(3, 4, axis=1), (2, 4), ()),
    'longer groups': (jaxpruner.NByM(4, 8, axis=0), (4, 8), (0,)),
    'half is not 2:4': (jaxpruner.Unstructured(), (2, 4), ()),
    'm does not divide': (jaxpruner.NByM(2, 5, axis=1, allow_partial=True), (2, 5), ()),
}


@pytest.mark.parametrize(('sparsity_type', 'asked', 'axes'), FOUND.values(), ids=FOUND)
@pytest.mark.parametrize('part', ['params', 'masks'])
def test_the_axes_are_those_of_the_type(sparsity_type, asked, axes, part):
    params = {'layer': {'kernel': jnp.asarray(WEIGHTS), 'bias': jnp.ones(16)}}
    sparsity = 0.5 if sparsity_type == jaxpruner.Unstructured() else None
    pruner = jaxpruner.MagnitudePruning(sparsity=sparsity, sparsity_type=sparsity_type)
    pruned, masks = pruner.instant_sparsify(params)
    tree = pruned if part == 'params' else masks
    assert n_by_m_axes(tree, *asked)['layer/kernel'] == axes
    assert n_by_m_axes(pruned, *asked)['layer/bias'] == ()


def test_axes_that_no_m_divides_are_taken_as_one():
    leaf = np.ones((2, 6, 3))
    leaf.reshape(12, 3)[::2] = 0
    assert n_by_m_axes({'a': leaf}) == {'a': ((0, 1),)}


def test_zeros_fit_any_axis_that_m_divides():
    zeros = {'zeros': jnp.zeros((4, 6, 8), jnp.bfloat16), 'number': jnp.float32(1)}
    assert n_by_m_axes(zeros) == {'number': (), 'zeros': (0, 2)}


def test_packed_masks_and_wrong_patterns_are_refused():
    with pytest.raises(ValueError, match=r'a/kernel .*unpack_masks'):
        n_by_m_axes({'a': {'kernel': np.full((2, 2), 170, np.uint8)}})
    with pytest.raises(ValueError, match='n=5, m=4'):
        n_by_m_axes({}, 5, 4)
