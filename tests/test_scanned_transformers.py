"""Scanned transformers as Gemma writes them: one-shot pruning, channels, compiled weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparse
from jaxpruner.structure import channel_groups
from uses.scanned_transformers import IDS, MODELS

MODEL = pytest.mark.parametrize(('apply_fn', 'shapes', 'groups'), MODELS.values(), ids=MODELS)


def params_of(shapes):
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for name, shape in shapes.items()
    }


def kernels_of(params):
    others = 'scale', 'bias', 'gamma', 'beta', 'embedding', 'embeddings', 'embedder'
    return {name for name in params if not name.endswith(others)}


@MODEL
def test_wanda_prunes_each_kernel_along_its_inputs(apply_fn, shapes, groups):
    params = params_of(shapes)
    pruned, masks = jaxpruner.prune(
        params, None, 'wanda', sparsity_type='2:4', apply_fn=apply_fn, batches=[IDS]
    )
    assert {name for name, mask in masks.items() if mask is not None} == kernels_of(params)
    for name in kernels_of(params):
        assert int(masks[name].sum()) * 2 == params[name].size, name
        np.testing.assert_array_equal(pruned[name], params[name] * masks[name])


@MODEL
def test_channels_of_all_layers_are_found_and_removed(apply_fn, shapes, groups):
    params = params_of(shapes)
    graph = channel_groups(apply_fn, params, IDS)
    found = graph.groups.values()
    assert sorted((each.size, each.parameters, each.exact) for each in found) == groups
    keep = {each.name: list(range(each.size // 2)) for each in found if each.exact}
    assert graph.verify(params, keep, IDS).verdict == 'equal'


@MODEL
def test_compiled_weights_compute_what_the_zeroed_ones_do(apply_fn, shapes, groups):
    params = params_of(shapes)
    graph = channel_groups(apply_fn, params, IDS)
    keep = {
        group.name: list(range(group.size // 2))
        for group in graph.groups.values()
        if group.exact and not group.is_depth
    }
    zeroed = graph.zeroed(params, keep)
    sparse_fn, packed, report = sparse.compile(apply_fn, zeroed, IDS, formats='smaller')
    assert report.layers.keys() == kernels_of(params)
    assert {layer.format for layer in report.layers.values()} == {'smaller'}
    expected = jax.jit(apply_fn)(zeroed, jnp.asarray(IDS))
    np.testing.assert_allclose(sparse_fn(packed, IDS), expected, atol=1e-5)
