"""`pruning` and `pruning_apply`: the masks of each method, every kind of state, masks that are carried on, refusals."""

import collections
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training import train_state

import jaxpruner
from helpers import steps
from jaxpruner import NByM, jax_pruning, pruning, pruning_apply, tree


def masks_of(params, method, rate, **arguments):
    strategy = {1: {'method': method, 'prune_rate_pattern': rate}}
    return pruning(params, 1, prune_strategy=strategy, **arguments)[1]


VALUES = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)


@pytest.mark.parametrize('density', [0.05, 0.3, 0.75])
def test_unstructured_masks_are_those_of_the_core(density):
    params = {'a': {'kernel': VALUES, 'bias': np.ones(3)}, 'b': {'kernel': VALUES[:4] / 4}}
    params = jax.tree.map(jnp.asarray, params)
    alone = jaxpruner.MagnitudePruning(sparsity=1 - density)
    joint = jaxpruner.GlobalMagnitudePruning(sparsity=1 - density, use_normalization=False)
    pruners = {'unstr_local': alone, 'unstr_unified_local': alone, 'unstr_global': joint}
    for method, pruner in pruners.items():
        steps.assert_equal(masks_of(params, method, density), pruner.instant_sparsify(params)[1])


@pytest.mark.parametrize(('pattern', 'axis'), [((1, 2), -1), ((2, 4), 0), ((3, 5), 1)])
@pytest.mark.filterwarnings('ignore:.*does not divide:UserWarning')
def test_structured_masks_are_those_of_the_core(pattern, axis):
    params = {'kernel': jnp.asarray(VALUES)}
    kind = NByM(*pattern, axis, allow_partial=True)
    expected = jaxpruner.MagnitudePruning(sparsity_type=kind).instant_sparsify(params)[1]
    for method in ('str_local', 'str_unified_local', 'str_global'):
        entry = {'method': method, 'prune_rate_pattern': pattern, 'prune_axis': axis}
        steps.assert_equal(pruning(params, 1, None, {1: entry})[1], expected)


# What is a kernel, and what a name means.


def two(*names):
    return {name: jnp.ones((2, 2)) for name in names}


def equinox_net():
    key = jax.random.key(0)
    layers = {
        'embedding': eqx.nn.Embedding(7, 8, key=key),
        'norm': eqx.nn.LayerNorm((8, 8)),
        'cell': eqx.nn.GRUCell(8, 4, key=key),
        'patch_embedding': eqx.nn.Conv2d(1, 4, 3, key=key),
    }
    return eqx.filter(layers, eqx.is_array)


KERNELS = {
    'flax': (two('kernel', 'bias', 'scale', 'embedding'), 'kernel'),
    'equinox': (equinox_net(), 'cell/weight_ih cell/weight_hh patch_embedding/weight'),
    'haiku': ({'mlp/~/linear_0': two('w', 'b'), 'layer_norm': two('scale')}, 'mlp/~/linear_0/w'),
    'one array': (jnp.ones((2, 2)), 'kernel'),
    'a list': ([jnp.ones((2, 2)), jnp.ones(2)], '0'),
    'by hand': (two('W1', 'b1', 'window'), 'W1'),
    'layers': ({'dense': (jnp.ones((2, 2)),), 'embed': [jnp.ones((2, 2))]}, 'dense/0'),
    'parts': (two('kernel', 'kernel_scale', 'weight_g', 'weight_in'), 'kernel weight_in'),
    'short names': ({name: two('weight') for name in ('wte', 'ln_f', 'inline')}, 'inline/weight'),
    'numbers': ({'a': two('kernel'), 'kernel': jnp.ones((2, 2), jnp.int32)}, 'a/kernel'),
    'keras': ({'conv': two('depthwise_kernel', 'moving_mean')}, 'conv/depthwise_kernel'),
}  # fmt: skip


def meant(params, masks):
    paths, _, treedef = tree.flatten_with_paths(params)
    found = zip(paths, tree.leaves_like(treedef, masks), strict=True)
    return {tree.path_string(path) for path, mask in found if mask is not None}


@pytest.mark.parametrize(('params', 'names'), KERNELS.values(), ids=KERNELS)
def test_kernels(params, names):
    assert meant(params, masks_of(params, 'unstr_local', 0.5)) == set(names.split())


PARAMS = {'Dense_0': two('kernel', 'bias'), 'block': {'Dense_0': two('kernel')}, 'a/~/b': two('w')}
NAMES = {
    'Dense_0-kernel': 'Dense_0/kernel',
    'Dense_0': 'Dense_0/kernel Dense_0/bias',
    '*Dense_0-*': 'Dense_0/kernel Dense_0/bias block/Dense_0/kernel',
    'a/~/b-w': 'a/~/b/w',
    ('block', 'Dense_0', 'kernel'): 'block/Dense_0/kernel',
}


@pytest.mark.parametrize(('name', 'leaves'), NAMES.items())
def test_names(name, leaves):
    assert meant(PARAMS, masks_of(PARAMS, 'unstr_local', {name: 0.5})) == set(leaves.split())


# Every kind of state.

HALF = {3: {'method': 'unstr_unified_local', 'prune_rate_pattern': 0.5}}


class Trainer(eqx.Module):
    params: dict
    opt_state: Any


NamedState = collections.namedtuple('NamedState', 'params opt_state')


def linen_state(params, opt_state=None):
    tx = optax.adam(0.1)
    return train_state.TrainState.create(apply_fn=nn.Dense(12).apply, params=params, tx=tx)


@pytest.mark.parametrize('make', [linen_state, NamedState, Trainer])
def test_states_that_hold_parameters(make):
    params = {'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)}}
    state = make(params, optax.adam(0.1).init(params))
    updated, mask_key = pruning(state, 3, None, HALF)
    assert updated is True
    pruned, same = pruning_apply(state, mask_key)
    assert type(pruned) is type(state)
    assert same is mask_key
    assert int((pruned.params['Dense_0']['kernel'] == 0).sum()) == VALUES.size // 2
    assert jax.tree.all(jax.tree.map(jnp.array_equal, pruned.opt_state, state.opt_state))


class Holder(eqx.Module):
    params: dict
    head: eqx.nn.Linear


def test_where_the_parameters_are():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 12, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)  # counters and keys
            self.norm = nnx.BatchNorm(12, rngs=rngs)

    state = nnx.split(Net(nnx.Rngs(0)))[1]
    pruned, mask_key = pruning_apply(state, pruning(state, 3, None, HALF)[1])
    assert isinstance(pruned, nnx.State)
    assert len(jax.tree.leaves(mask_key)) == 1
    # A container may have an entry called params, a model a field.
    kernel = {'kernel': jnp.asarray(VALUES)}
    mask_key = pruning(FrozenDict({'params': {'Dense_0': kernel}}), 3, None, HALF)[1]
    assert mask_key['params']['Dense_0']['kernel'].shape == VALUES.shape
    model = Holder(kernel, eqx.nn.Linear(4, 4, key=jax.random.key(0)))
    sparsity = jaxpruner.summarize_sparsity(
        pruning_apply(model, pruning(model, 3, None, HALF)[1])[0]
    )
    assert (sparsity['params/kernel'], sparsity['head/weight']) == (0.5, 0.5)


def test_stacked_layers_are_ranked_one_by_one():
    scale = jnp.array([1.0, 2.0, 3.0])[:, None, None]
    kernels = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32) * scale
    params = {'layers': {'kernel': kernels, 'kernel_0': jnp.ones((3, 8))}}
    mask = pruning(params, 3, None, HALF, stacked='layers-*')[1]['layers']
    assert mask['kernel'].sum((1, 2)).tolist() == [32] * 3
    assert mask['kernel_0'] is None  # a vector of each layer
    pruner = jaxpruner.StrategyPruning(HALF, 1, first_epoch=3, stacked={'layers': 1})
    _, moved = pruner.instant_sparsify({'layers': {'kernel': jnp.moveaxis(kernels, 0, 1)}})
    np.testing.assert_array_equal(jnp.moveaxis(moved['layers']['kernel'], 1, 0), mask['kernel'])
    entry = {'method': 'str_local', 'prune_rate_pattern': {'layers-kernel': '1:2'}, 'prune_axis': 0}
    mask = pruning(params, 1, None, {1: entry}, stacked='layers')[1]['layers']['kernel']
    assert jnp.all(mask.reshape(3, 4, 2, 8).sum(2) == 1)


# Inside `jit`, and masks that go on.


@pytest.mark.parametrize('packed', [False, True])
def test_inside_jit_and_vmap(packed):
    state = linen_state({'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)}})
    strategy = jax_pruning.PruningStrategy.parse(HALF)

    @functools.partial(jax.jit, static_argnames=('epoch', 'prune_strategy'))
    def after_epoch(state, mask_key, epoch, prune_strategy):
        state, mask_key = pruning_apply(state, mask_key)
        updated, mask_key = pruning(state, epoch, mask_key, prune_strategy, use_packed_masks=packed)
        return updated, *pruning_apply(state, mask_key)

    assert not after_epoch(state, None, 2, strategy)[0]
    updated, pruned, mask_key = after_epoch(state, None, 3, strategy)
    assert updated
    expected = pruning(state, 3, None, HALF, use_packed_masks=packed)[1]['Dense_0']['kernel']
    np.testing.assert_array_equal(mask_key['Dense_0']['kernel'], expected)
    assert int((pruned.params['Dense_0']['kernel'] == 0).sum()) == VALUES.size // 2
    both = {'kernel': jnp.stack([VALUES, VALUES])}
    mapped = jax.vmap(lambda p: pruning(p, 3, None, HALF, use_packed_masks=packed)[1])(both)
    np.testing.assert_array_equal(mapped['kernel'][1], expected)
    with pytest.raises(TypeError, match='an epoch must be a whole number'):
        jax.jit(lambda epoch: pruning(both, epoch, None, HALF)[0])(3)


def test_initial_masks_have_the_structure_of_all_later_ones():
    params = {name: {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)} for name in 'abc'}
    strategy = {
        1: {'method': 'unstr_local', 'prune_rate_pattern': {'a-kernel': 0.5}},
        2: {'method': 'unstr_local', 'prune_rate_pattern': {'b-kernel': 0.25}},
    }
    mask_key = jax_pruning.initial_masks(params, strategy, use_packed_masks=True)
    assert pruning_apply(params, mask_key)[0]['a']['kernel'].all()
    structures = {jax.tree.structure(mask_key)}
    for epoch in (1, 2):
        _, mask_key = pruning(params, epoch, mask_key, strategy, use_packed_masks=True)
        structures.add(jax.tree.structure(mask_key))
    assert len(structures) == 1


def test_nothing_is_due():
    params, given = {'kernel': jnp.ones((2, 2))}, {'kernel': jnp.ones((2, 2), jnp.uint8)}
    for epoch in (None, 2, np.int64(4)):
        assert pruning(params, epoch, mask_key=given, prune_strategy=HALF) == (False, given)
    assert pruning(params, 3, given, None) == (False, given)
    assert pruning(params) == (False, None)
    assert pruning_apply(params, None) == (params, None)


def test_masks_are_carried_on():
    params = {name: {'kernel': jnp.asarray(VALUES)} for name in 'abc'}
    last = {'b-*': None, '*-kernel': 0.25}
    strategy = {
        1: {'method': 'unstr_local', 'prune_rate_pattern': {'a-kernel': 0.5}},
        2: {'method': 'str_local', 'prune_rate_pattern': {'b-kernel': '1:4'}},
        3: {'method': 'unstr_local', 'prune_rate_pattern': last},
    }
    counts, mask_key = [], None
    for epoch in (1, 2, 3):
        packed = epoch == 2  # stored as each call asks, however the masks before were
        updated, mask_key = pruning(params, epoch, mask_key, strategy, use_packed_masks=packed)
        params, _ = pruning_apply(params, mask_key)
        assert updated
        masks = jaxpruner.unpack_masks(mask_key, params)
        kernels = [masks[name]['kernel'] for name in 'abc']
        counts.append([None if mask is None else int(mask.sum()) for mask in kernels])
    size = VALUES.size
    assert counts == [[size // 2, None, None], [size // 2, size // 4, None], [size // 4] * 3]
    last['c'] = 0.125
    with pytest.raises(ValueError, match=r"prune_strategy\[3\]: 'c' is never used"):
        pruning(params, 1, None, strategy)
    # What the masks prune counts as zero, whether they were applied or not.
    params = {'kernel': jnp.asarray(VALUES)}
    mask_key = masks_of(params, 'unstr_local', 0.5)
    moved = {'kernel': jnp.where(mask_key['kernel'] == 0, 100.0, params['kernel'])}
    expected = masks_of(params, 'unstr_local', 0.25)['kernel']
    for state in (moved, pruning_apply(moved, mask_key)[0]):
        later = masks_of(state, 'unstr_local', 0.25, mask_key=mask_key)
        np.testing.assert_array_equal(later['kernel'], expected)


# Warnings and refusals.


def test_a_partial_group_warns_and_names_the_leaf():
    params = {'head': {'kernel': jnp.asarray(VALUES[:, :10])}}
    words = r'prune_strategy\[1\]: head-kernel has length 10 along axis -1, which m=4 .* 1 of 2'
    with pytest.warns(UserWarning, match=words):
        masks_of(params, 'str_unified_local', (1, 4))
    strategy = {1: {'method': 'str_unified_local', 'prune_rate_pattern': (1, 4)}}
    with pytest.warns(UserWarning, match=words):
        jaxpruner.StrategyPruning(strategy, 1).wrap_optax(optax.sgd(0.1)).init(params)


REFUSED = [
    ('unstr_local', {'Dens_0-kernel': 0.5}, r"'Dens_0-kernel' matches no .* 'Dense_0/kernel'"),
    ('unstr_local', {'count': 0.5}, r"'count' matches no parameter"),
    ('str_local', {'*': NByM(2, 4, -2)}, r'Dense_0-bias: axis -2 does not exist in shape \(12,\)'),
]


@pytest.mark.parametrize(('method', 'rates', 'message'), REFUSED)
def test_entries_that_do_not_fit_are_refused_before_their_epoch(method, rates, message):
    params = {'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)}}
    entry = {'method': method, 'prune_rate_pattern': rates}
    for epoch in (None, 1):
        with pytest.raises(ValueError, match=r'prune_strategy\[7\]: ' + message):
            pruning({**params, 'count': jnp.arange(3)}, epoch, None, {**HALF, 7: entry})


def test_what_is_refused():
    params = {'kernel': jnp.ones((2, 2))}
    with pytest.raises(ValueError, match=r"is known as a kernel .*'a-table'\); name those"):
        pruning({'a': {'table': jnp.ones((2, 2))}}, 1, None, HALF)
    with pytest.raises(TypeError, match=r'act: 1.0 is no array; give arrays alone'):
        pruning({**params, 'act': 1.0}, 1, None, HALF)
    for epoch in (1.5, True, 'three', HALF):
        with pytest.raises(TypeError, match='epoch must be a whole number'):
            pruning(params, epoch, None, None)
    with pytest.raises(ValueError, match=r'kernel: a mask of shape \(3, 2\) does not fit'):
        pruning_apply(params, {'kernel': jnp.ones((3, 2), jnp.uint8)})
