"""The smaller models of every model, against the zeroed ones, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner.structure import channel_groups, load_plan, save_plan
from structure import further_models
from structure.doubles import doubles, in_doubles, keep_of
from structure.values import values_like
from uses import test_models

MODELS = {name: model.make for name, model in test_models.MODELS.items()}
for name, entry in further_models.MODELS.items():
    MODELS[name] = functools.partial(tuple, entry)

# Parts of it are float32 whatever its inputs are.
_IN_SINGLES = frozenset(('linen recurrent', 'nnx tied'))


@pytest.fixture(params=MODELS, scope='module')
def analysed(request):
    """The graph of a model, its parameters, its inputs, and the error that rounding allows."""
    is_single = request.param in _IN_SINGLES
    apply_fn, params, inputs = MODELS[request.param]()
    with doubles(not is_single):
        params, inputs = values_like(params, inputs)
        if not is_single:
            params, inputs = in_doubles((params, inputs))
        graph = channel_groups(apply_fn, params, *inputs)
        exact = [group for group in graph.groups.values() if group.exact]
        if not exact:
            pytest.skip('no group of this model is exact')
        yield graph, exact, params, inputs, 1e-4 if is_single else 1e-8


def check(graph, groups, share, arguments, tolerance):
    """Removes channels until some are removed that are not dead for these inputs; returns what was kept."""
    params, *inputs = arguments
    for seed in range(8):
        rng = np.random.default_rng(seed)
        keep = {group.name: keep_of(group, share, rng) for group in groups}
        verification = graph.verify(params, keep, *inputs)
        assert verification.error <= tolerance * verification.change, keep
        if verification.verdict == 'equal':
            return keep
    raise AssertionError(f'{keep} changes nothing')


@pytest.mark.parametrize('share', [pytest.param(0.25, marks=pytest.mark.slow), 0.5])
def test_models_without_channels_equal_zeroed_ones(analysed, share):
    graph, exact, params, inputs, tolerance = analysed
    keep = check(graph, exact, share, (params, *inputs), tolerance)
    small = graph.shrink(params, keep, verify=False)
    assert sum(map(jnp.size, jax.tree.leaves(small))) < sum(map(jnp.size, jax.tree.leaves(params)))
    expanded = graph.expand(small, keep)
    jax.tree.map(np.testing.assert_array_equal, expanded, graph.zeroed(params, keep))


def test_every_plan_is_saved_and_read_back(analysed, tmp_path):
    graph, _, params, _, _ = analysed
    rng = np.random.default_rng(4)
    keep = {}
    for name, group in graph.groups.items():
        keep[name] = lists_of(group, rng) if group.lists else keep_of(group, 0.5, rng)
    save_plan(graph, keep, tmp_path / 'plan.json')
    small = graph.shrink(params, keep, allow_inexact=True, verify=False)
    jaxpruner.save_small_model(graph, small, keep, tmp_path / 'small.safetensors')
    loaded = jaxpruner.load_small_model(graph, tmp_path / 'small.safetensors')
    jax.tree.map(np.testing.assert_array_equal, loaded.params, small)
    for found in (load_plan(graph, tmp_path / 'plan.json'), loaded.keep):
        assert found.keys() == keep.keys()
        for name, indices in keep.items():
            np.testing.assert_array_equal(found[name], indices)


def lists_of(group, rng):
    """Other channels for each index of a group's owners."""
    sizes = [owner.size for owner in group.lists]
    channels = np.broadcast_to(np.arange(group.size), (*sizes, group.size))
    return np.sort(rng.permuted(channels, axis=-1)[..., : (group.size + 1) // 2], axis=-1)


def test_each_layer_expert_and_head_may_keep_other_channels(analysed):
    graph, exact, params, inputs, tolerance = analysed
    if not any(group.lists for group in exact):
        pytest.skip('no group has lists')
    rng = np.random.default_rng(3)
    keep = {}
    for group in exact:
        keep[group.name] = lists_of(group, rng) if group.lists else keep_of(group, 0.5, rng)
    verification = graph.verify(params, keep, *inputs)
    assert verification.verdict == 'equal'
    assert verification.relative_error <= tolerance
    small = graph.shrink(params, keep, verify=False)
    expanded = graph.expand(small, keep)
    jax.tree.map(np.testing.assert_array_equal, expanded, graph.zeroed(params, keep))


@pytest.mark.slow
def test_models_without_channels_of_a_group_equal_zeroed_ones(analysed):
    graph, exact, params, inputs, tolerance = analysed
    for group in exact:
        check(graph, [group], 0.5, (params, *inputs), tolerance)


def _gradient(apply, params, inputs):
    def loss(params):
        results = jax.tree.leaves(apply(params, *inputs))
        return sum(jnp.sum(jnp.sin(result)) for result in results if result.dtype.kind == 'f')

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.slow
def test_gradients_of_smaller_models_are_those_of_zeroed_ones(analysed):
    graph, exact, params, inputs, tolerance = analysed
    rng = np.random.default_rng(2)
    keep = {group.name: keep_of(group, 0.5, rng) for group in exact}
    if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(params)):
        pytest.skip('has parameters without gradients')
    expected = graph.shrink(
        _gradient(graph.model.apply_fn, graph.zeroed(params, keep), inputs), keep, verify=False
    )
    found = _gradient(graph.small_apply(keep), graph.shrink(params, keep, verify=False), inputs)
    largest = max(float(jnp.abs(leaf).max(initial=0)) for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)
