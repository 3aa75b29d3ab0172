"""Layers that are stacked along another axis than the first, as MaxText stacks them: pruned as along the first."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import sparsity_distributions

LAYERS = 3
SHAPES = {'kernel': (8, 12), 'out': (12, 8), 'scale': (8,)}


@functools.cache
def arrays(seed):
    """Layers along the first axis, of unlike size: one ranking over all of them would differ from one a layer."""
    draw = np.random.default_rng(seed).normal
    layers = {
        name: jnp.stack([jnp.asarray(i * draw(size=shape), jnp.float32) for i in (1, 2, 3)])
        for name, shape in SHAPES.items()
    }
    return {'layers': layers, 'head': jnp.asarray(draw(size=(12, 8)), jnp.float32)}


def moved(tree, axis):
    """Moves layers from the first axis to another."""
    layers = {
        name: None if leaf is None else jnp.moveaxis(leaf, 0, axis)
        for name, leaf in tree['layers'].items()
    }
    return {**tree, 'layers': layers}


def masks_after_updates(algorithm, kind, axis, packed):
    sparsity = 0.5 if kind == 'nm_2,4,0' else 0.75
    config = {'algorithm': algorithm, 'sparsity': sparsity, 'sparsity_type': kind}
    config |= {'stacked': {'layers/*': axis}, 'use_packed_masks': packed}
    config |= {'update_freq': 1, 'update_start_step': 0, 'update_end_step': 2, 'drop_fraction': 0.5}
    pruner = jaxpruner.create_updater_from_config(config)
    params, tx = moved(arrays(0), axis), pruner.wrap_optax(optax.sgd(0.1))
    state = tx.init(params)
    if algorithm == 'rigl':  # whose first masks are drawn for the whole leaf
        first = jaxpruner.MagnitudePruning(
            sparsity=0.75, sparsity_type=kind, stacked=pruner.stacked
        )
        masks = sparse_state_lib.store_masks(first.instant_sparsify(params)[1], params, packed)
        state = state._replace(masks=masks)
    plan = pruner.plan(params)
    for seed in range(1, 4):
        updates, state = tx.update(moved(arrays(seed), axis), state, params)
        params = optax.apply_updates(params, updates)
    masks = sparse_state_lib.unpack_masks(state.masks, params)
    for leaf, mask in zip(plan, jax.tree.leaves(masks, is_leaf=lambda x: x is None), strict=True):
        assert leaf.kept == (leaf.size if mask is None else int(mask.sum()))
    return masks


CASES = [
    *[('magnitude', kind) for kind in ('nm_2,4,0', 'block_2,4', 'channel_-1')],
    *[(name, 'unstructured') for name in ('magnitude_ste', 'movement')],
    ('rigl', 'block_2,4'),
]


@pytest.mark.parametrize(('algorithm', 'kind'), CASES)
def test_masks_are_those_of_layers_along_the_first_axis(algorithm, kind):
    expected = masks_after_updates(algorithm, kind, 0, packed=False)
    assert expected['layers']['scale'] is None
    (kept,) = {*expected['layers']['kernel'].sum((1, 2)).tolist()}  # the same of each layer
    assert kept < 8 * 12
    found = masks_after_updates(algorithm, kind, 1, packed=algorithm in ('magnitude', 'rigl'))
    jax.tree.map(np.testing.assert_array_equal, found, moved(expected, 1))


@pytest.mark.parametrize('algorithm', ['random', 'set'])
def test_each_layer_keeps_its_number_of_random_masks(algorithm):
    masks = masks_after_updates(algorithm, 'unstructured', 1, packed=False)
    assert masks['layers']['kernel'].sum(axis=(0, 2)).tolist() == [24] * LAYERS
    assert masks['layers']['scale'] is None


@pytest.mark.parametrize('axis', [1, -2])
@pytest.mark.parametrize('distribution', ['uniform', 'erk'])
def test_distributions_see_one_layer(axis, distribution):
    function = getattr(sparsity_distributions, distribution)
    first = {'layers': {name: leaf for name, leaf in arrays(0)['layers'].items() if leaf.ndim > 2}}
    expected = function(first, 0.5, stacked='layers/*')
    assert function(moved(first, 1), 0.5, stacked={'layers/*': axis}) == expected


def test_the_plan_says_along_which_axis():
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5, stacked={'layers/*': 1})
    plan = pruner.plan(moved(arrays(0), 1))
    assert plan['layers/kernel'].kept == 48 * LAYERS
    assert plan['layers/kernel'].layer_shape == (8, 12)
    assert plan['layers/scale'].why_dense == 'the default filter leaves out 1-D leaves'
    assert 'each layer of axis 1' in re.sub(r'\s+', ' ', str(plan))


def test_names_may_say_different_axes():
    params = {'a': arrays(0)['layers']['kernel'], 'b': moved(arrays(0), 1)['layers']['kernel']}
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5, stacked={'b': 1, '*': 0})
    masks = pruner.instant_sparsify(params)[1]
    np.testing.assert_array_equal(jnp.moveaxis(masks['b'], 1, 0), masks['a'])


def test_axes_that_leaves_do_not_have_are_refused_by_name():
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5, stacked={'layers/*': 2})
    with pytest.raises(ValueError, match=r'layers/scale: axis 2 does not exist in shape \(3, 8\)'):
        pruner.plan(arrays(0))
