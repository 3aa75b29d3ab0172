"""Scanned transformers as Gemma and MaxText write them: one-shot pruning, channels, compiled weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparse
from jaxpruner.structure import channel_groups
from uses.scanned_transformers import IDS, MODELS

MODEL = pytest.mark.parametrize('model', MODELS.values(), ids=MODELS)


def kernels_of(params):
    others = 'scale', 'bias', 'gamma', 'beta', 'embedding', 'embeddings', 'embedder'
    return {name for name in params if not name.endswith(others)}


@MODEL
def test_wanda_prunes_each_kernel_along_its_inputs(model):
    params = model.params()
    pruned, masks = jaxpruner.prune(
        params, None, 'wanda', sparsity_type='2:4', apply_fn=model.apply_fn, batches=[IDS]
    )
    assert {name for name, mask in masks.items() if mask is not None} == kernels_of(params)
    for name in kernels_of(params):
        assert int(masks[name].sum()) * 2 == params[name].size, name
        np.testing.assert_array_equal(pruned[name], params[name] * masks[name])

    inputs = model.query_inputs(params, IDS).reshape(IDS.size, -1)
    matrix = np.asarray(model.query_matrix(params[model.query]))
    scores = np.abs(matrix) * np.linalg.norm(inputs, axis=0)[:, None]
    groups = scores.reshape(-1, 4, matrix.shape[1])
    expected = groups >= np.sort(groups, axis=1)[:, 2:3]
    found = np.asarray(model.query_matrix(masks[model.query]))
    np.testing.assert_array_equal(found.reshape(groups.shape), expected)


@MODEL
def test_channels_of_all_layers_are_found_and_removed(model):
    params = model.params()
    graph = channel_groups(model.apply_fn, params, IDS)
    groups = graph.groups.values()
    found = sorted((group.size, group.parameters, group.exact) for group in groups)
    assert found == model.groups
    keep = {group.name: list(range(group.size // 2)) for group in groups if group.exact}
    assert graph.verify(params, keep, IDS).verdict == 'equal'


@MODEL
def test_compiled_weights_compute_what_the_zeroed_ones_do(model):
    params = model.params()
    graph = channel_groups(model.apply_fn, params, IDS)
    keep = {
        group.name: list(range(group.size // 2))
        for group in graph.groups.values()
        if group.exact and not group.is_depth
    }
    zeroed = graph.zeroed(params, keep)
    apply_fn, packed, report = sparse.compile(model.apply_fn, zeroed, IDS, formats='smaller')
    assert report.layers.keys() == kernels_of(params)
    assert {layer.format for layer in report.layers.values()} == {'smaller'}
    expected = jax.jit(model.apply_fn)(zeroed, jnp.asarray(IDS))
    np.testing.assert_allclose(apply_fn(packed, IDS), expected, atol=1e-5)
