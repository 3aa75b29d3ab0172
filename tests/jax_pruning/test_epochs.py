"""`pruning` and `pruning_apply`: the masks of each method, every kind of state, masks that are carried on, refusals."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training import train_state

import jaxpruner
from contract import front_ends
from jaxpruner import jax_pruning, pruning, pruning_apply, sparsity_distributions, tree
from jaxpruner import sparse_state as sparse_state_lib


def masks_of(params, method, rate, epoch=1, **arguments):
    return pruning(
        params,
        epoch,
        prune_strategy={1: {'method': method, 'prune_rate_pattern': rate}},
        **arguments,
    )[1]


def reference_unstructured(scores, density):
    """The largest, of equal ones the first, by a stable sort of the whole array."""
    count = max(
        1, int(np.round(np.float32(scores.size) * (np.float32(1) - np.float32(1 - density))))
    )
    order = np.argsort(-scores.ravel(), kind='stable')
    mask = np.zeros(scores.size, np.uint8)
    mask[order[:count]] = 1
    return mask.reshape(scores.shape)


def reference_n_by_m(scores, n, m):
    """The n largest of each m along the last axis, of equal ones the last; the last group may be short."""
    mask = np.zeros(scores.shape, np.uint8)
    for row in np.ndindex(scores.shape[:-1]):
        for start in range(0, scores.shape[-1], m):
            group = scores[row][start : start + m]
            order = sorted(range(len(group)), key=lambda i: (group[i], i))
            for i in order[-n:] if n <= len(group) else order:
                mask[(*row, start + i)] = 1
    return mask


# Few values, so that there are many ties, and both signs.
VALUE = st.sampled_from([-3.0, -2.0, -1.0, -0.5, 0.0, -0.0, 0.5, 1.0, 2.0, 3.0])
MATRICES = hypothesis_numpy.arrays(
    np.float32, st.sampled_from([(4, 6), (3, 10), (2, 2, 8), (1, 1)]), elements=VALUE
)
# A program is compiled for each two shapes: few of them, many values.
TWO_MATRICES = st.sampled_from([((4, 6), (2, 2, 8)), ((3, 10), (1, 1)), ((1, 1), (4, 6))]).flatmap(
    lambda shapes: st.tuples(
        *(hypothesis_numpy.arrays(np.float32, shape, elements=VALUE) for shape in shapes)
    )
)
DENSITIES = st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.75, 0.9, 1.0])
SETTINGS = hypothesis.settings(max_examples=40)


@SETTINGS
@pytest.mark.filterwarnings('ignore:.* prunes no leaf:UserWarning')  # at density 1
@hypothesis.given(TWO_MATRICES, DENSITIES)
def test_unstructured_masks(matrices, density):
    first, second = matrices
    params = {
        'a': {'kernel': jnp.asarray(first), 'bias': jnp.ones(3)},
        'b': {'kernel': jnp.asarray(second)},
    }
    uniform = functools.partial(sparsity_distributions.uniform, sparsity=1 - density)
    for method in ('unstr_local', 'unstr_unified_local'):
        masks = masks_of(params, method, density)
        assert masks['a']['bias'] is None
        _, core = jaxpruner.MagnitudePruning(sparsity_distribution_fn=uniform).instant_sparsify(
            params
        )
        for name, weights in (('a', first), ('b', second)):
            np.testing.assert_array_equal(
                masks[name]['kernel'], reference_unstructured(np.abs(weights), density)
            )
            np.testing.assert_array_equal(masks[name]['kernel'], core[name]['kernel'])
    masks = masks_of(params, 'unstr_global', density)
    joint = reference_unstructured(np.abs(np.concatenate([first.ravel(), second.ravel()])), density)
    np.testing.assert_array_equal(np.ravel(masks['a']['kernel']), joint[: first.size])
    np.testing.assert_array_equal(np.ravel(masks['b']['kernel']), joint[first.size :])
    core = jaxpruner.GlobalMagnitudePruning(
        sparsity_distribution_fn=uniform, normalize_scores=False
    )
    np.testing.assert_array_equal(
        masks['b']['kernel'], core.instant_sparsify(params)[1]['b']['kernel']
    )


@SETTINGS
@hypothesis.given(
    MATRICES, st.sampled_from([(1, 2), (2, 4), (1, 4), (3, 4), (4, 4), (3, 5)]), st.integers(-1, 1)
)
@pytest.mark.filterwarnings('ignore:.*does not divide:UserWarning')
def test_structured_masks(weights, pattern, axis):
    params = {'kernel': jnp.asarray(weights)}
    expected = reference_n_by_m(np.moveaxis(np.abs(weights), axis, -1), *pattern)
    for method in ('str_local', 'str_unified_local', 'str_global'):
        mask = masks_of(params, method, pattern, prune_axis=None if axis == -1 else axis)['kernel']
        np.testing.assert_array_equal(np.moveaxis(np.asarray(mask), axis, -1), expected)
    if weights.shape[axis] % pattern[1] == 0:
        updater = jaxpruner.MagnitudePruning(sparsity_type=jaxpruner.NByM(*pattern, axis))
        np.testing.assert_array_equal(mask, updater.instant_sparsify(params)[1]['kernel'])


def test_an_axis_of_an_entry_comes_before_that_of_the_call():
    params = {'kernel': jnp.arange(16.0).reshape(4, 4)}
    strategy = {1: {'method': 'str_global', 'prune_rate_pattern': '1:2', 'prune_axis': 0}}
    for axis in (None, 1):
        mask = pruning(params, 1, None, strategy, prune_axis=axis)[1]['kernel']
        np.testing.assert_array_equal(mask, np.array([[0], [1], [0], [1]]) * np.ones(4))
    mask = masks_of(params, 'str_global', '1:2', prune_axis=0)['kernel']
    np.testing.assert_array_equal(mask, np.array([[0], [1], [0], [1]]) * np.ones(4))


# Every kind of state.

VALUES = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
HALF = {3: {'method': 'unstr_unified_local', 'prune_rate_pattern': 0.5}}


class NamedState(NamedTuple):
    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class DataclassState:
    params: Any
    opt_state: Any


def linen_state(params):
    return train_state.TrainState.create(
        apply_fn=nn.Dense(12).apply, params=params, tx=optax.adam(0.1)
    )


HOLDERS = {
    'TrainState': linen_state,
    'a NamedTuple': lambda params: NamedState(params, optax.adam(0.1).init(params)),
    'a dataclass': lambda params: DataclassState(params, optax.adam(0.1).init(params)),
}


@pytest.mark.parametrize('make', HOLDERS.values(), ids=HOLDERS)
def test_states_that_hold_parameters(make):
    params = {'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)}}
    state = make(params)
    updated, mask_key = pruning(state, 3, None, HALF)
    assert updated is True
    assert mask_key['Dense_0']['bias'] is None
    pruned, same = pruning_apply(state, mask_key)
    assert type(pruned) is type(state)
    assert same is mask_key
    assert int((pruned.params['Dense_0']['kernel'] == 0).sum()) == VALUES.size // 2
    assert jax.tree.all(jax.tree.map(jnp.array_equal, pruned.opt_state, state.opt_state))


@pytest.mark.parametrize('name', front_ends.FRONT_ENDS)
@pytest.mark.parametrize('packed', [False, True])
def test_parameters_of_every_front_end(name, packed):
    params, _ = front_ends.make(name, seed=0)
    paths, leaves, treedef = tree.flatten_with_paths(params)
    if name in ('list', 'tuple'):
        assert all(len(path) == 1 for path in paths)
    updated, mask_key = pruning(params, 3, None, HALF, use_packed_masks=packed)
    pruned, _ = pruning_apply(params, mask_key)
    assert updated
    assert jax.tree.structure(pruned) == treedef
    for leaf, after, mask in zip(
        leaves, jax.tree.leaves(pruned), tree.leaves_like(treedef, mask_key), strict=True
    ):
        if leaf.ndim == 1:
            assert mask is None
            np.testing.assert_array_equal(leaf, after)
        else:
            assert mask.shape == (
                sparse_state_lib.packed_shape(leaf.shape) if packed else leaf.shape
            )
            assert (
                int((after != 0).sum())
                == leaf.size // 2
                == int(sparse_state_lib.kept_weights(mask))
            )


def test_nnx_states_with_counters_and_keys():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 12, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(12, rngs=rngs)

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    pruned, mask_key = pruning_apply(state, pruning(state, 3, None, HALF)[1])
    merged = nnx.merge(graph, pruned)
    assert isinstance(pruned, nnx.State)
    assert len(jax.tree.leaves(mask_key)) == 1
    assert jaxpruner.summarize_sparsity(nnx.state(merged, nnx.Param))['linear/kernel'] == 0.5


def test_equinox_modules_with_functions_filtered_out():
    model = eqx.nn.MLP(16, 4, 12, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    pruned, _ = pruning_apply(params, pruning(params, 3, None, HALF)[1])
    assert eqx.combine(pruned, static)(jnp.ones(16)).shape == (4,)
    assert int((pruned.layers[0].weight == 0).sum()) == 16 * 12 // 2


def test_a_container_may_have_an_entry_called_params():
    params = FrozenDict({'params': {'Dense_0': {'kernel': jnp.asarray(VALUES)}}})
    pruned, mask_key = pruning_apply(params, pruning(params, 3, None, HALF)[1])
    assert mask_key['params']['Dense_0']['kernel'].shape == VALUES.shape
    assert int((pruned['params']['Dense_0']['kernel'] == 0).sum()) == VALUES.size // 2


class Holder(eqx.Module):
    params: dict
    head: eqx.nn.Linear


class Trainer(eqx.Module):
    params: dict
    opt_state: Any


def test_a_model_may_have_a_field_called_params():
    model = Holder({'kernel': jnp.asarray(VALUES)}, eqx.nn.Linear(4, 4, key=jax.random.key(0)))
    pruned, _ = pruning_apply(model, pruning(model, 3, None, HALF)[1])
    sparsity = jaxpruner.summarize_sparsity(pruned)
    assert (sparsity['params/kernel'], sparsity['head/weight']) == (0.5, 0.5)


def test_moments_of_an_optimizer_are_no_parameters():
    params = {'kernel': jnp.asarray(VALUES)}
    with pytest.raises(
        TypeError, match=r'Trainer has params but no method `replace`; pass state\.params instead'
    ):
        pruning(Trainer(params, optax.adam(0.1).init(params)), 3, None, HALF)


def test_stacked_layers_are_ranked_one_by_one():
    kernels = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32)
    params = {
        'layers': {
            'kernel': kernels * jnp.array([1.0, 2.0, 3.0])[:, None, None],
            'kernel_0': jnp.ones((3, 8)),
        }
    }
    strategy = {
        **HALF,
        4: {'method': 'str_local', 'prune_rate_pattern': {'layers-kernel': '1:2'}, 'prune_axis': 0},
    }
    mask = pruning(params, 3, None, HALF, stacked='layers-*')[1]['layers']
    assert mask['kernel'].sum((1, 2)).tolist() == [32] * 3
    assert mask['kernel_0'] is None  # a vector of each layer
    tx = jaxpruner.StrategyPruning(HALF, 1, first_epoch=3, stacked='layers').wrap_optax(
        optax.sgd(0.0)
    )
    state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[1]
    np.testing.assert_array_equal(state.masks['layers']['kernel'], mask['kernel'])
    groups = pruning(params, 4, None, strategy, stacked='layers')[1]['layers']['kernel'].reshape(
        3, 4, 2, 8
    )
    assert jnp.all(groups.sum(2) == 1)
    with pytest.raises(
        ValueError, match=r"stacked: 'blocks' matches no parameter; the nearest are 'layers-kernel"
    ):
        pruning(params, 3, None, HALF, stacked='blocks')


def test_floats_without_infinity():
    params = {'kernel': jnp.asarray(VALUES, jnp.float8_e4m3fn)}
    for method in ('unstr_local', 'unstr_global'):
        assert int(masks_of(params, method, 0.5)['kernel'].sum()) == VALUES.size // 2


# Inside `jit`, and masks that go elsewhere.


@pytest.mark.parametrize('packed', [False, True])
def test_inside_jit(packed):
    state = linen_state({'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)}})
    strategy = jax_pruning.PruningStrategy.parse(HALF)

    @functools.partial(jax.jit, static_argnames=('epoch', 'prune_strategy'))
    def after_epoch(state, mask_key, epoch, prune_strategy):
        state, mask_key = pruning_apply(state, mask_key)
        updated, mask_key = pruning(state, epoch, mask_key, prune_strategy, use_packed_masks=packed)
        return updated, *pruning_apply(state, mask_key)

    updated, same, mask_key = after_epoch(state, None, 2, strategy)
    assert not updated
    assert mask_key is None
    updated, pruned, mask_key = after_epoch(same, None, 3, strategy)
    assert updated
    expected = pruning(state, 3, None, HALF, use_packed_masks=packed)[1]
    np.testing.assert_array_equal(mask_key['Dense_0']['kernel'], expected['Dense_0']['kernel'])
    assert int((pruned.params['Dense_0']['kernel'] == 0).sum()) == VALUES.size // 2


def test_a_traced_epoch_is_refused():
    with pytest.raises(TypeError, match=r"traced value: jax\.jit\(…, static_argnames='epoch'\)"):
        jax.jit(lambda epoch: pruning({'kernel': jnp.ones((2, 2))}, epoch, None, HALF)[0])(3)


@pytest.mark.parametrize('packed', [False, True])
def test_masks_are_restored_from_a_checkpoint(tmp_path, packed):
    params = {'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)}}
    mask_key = masks_of(params, 'unstr_global', 0.25, use_packed_masks=packed)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'masks', mask_key)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / 'masks', jax.eval_shape(lambda: mask_key))
    pruned, _ = pruning_apply(params, restored)
    np.testing.assert_array_equal(
        pruned['Dense_0']['kernel'], pruning_apply(params, mask_key)[0]['Dense_0']['kernel']
    )


@pytest.mark.parametrize('packed', [False, True])
def test_initial_masks_have_the_structure_of_all_later_ones(packed):
    params = {
        name: {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)} for name in ('a', 'b', 'c')
    }
    strategy = {
        1: {'method': 'unstr_local', 'prune_rate_pattern': {'a-kernel': 0.5}},
        2: {'method': 'unstr_local', 'prune_rate_pattern': {'b-kernel': 0.25}},
    }
    mask_key = jax_pruning.initial_masks(params, strategy, use_packed_masks=packed)
    assert pruning_apply(params, mask_key)[0]['a']['kernel'].all()
    structures = {jax.tree.structure(mask_key)}
    for epoch in (1, 2):
        _, mask_key = pruning(params, epoch, mask_key, strategy, use_packed_masks=packed)
        structures.add(jax.tree.structure(mask_key))
    tx = jaxpruner.StrategyPruning(strategy, 1, use_packed_masks=packed).wrap_optax(optax.sgd(0.1))
    structures.add(jax.tree.structure(tx.init(params).masks))
    assert len(structures) == 1
    counts = jax.tree.map(lambda mask: int(sparse_state_lib.kept_weights(mask)), mask_key)
    assert counts == {
        'a': {'kernel': 96, 'bias': None},
        'b': {'kernel': 48, 'bias': None},
        'c': {'kernel': None, 'bias': None},
    }


def test_under_vmap():
    params = {'kernel': jnp.stack([jnp.asarray(VALUES), jnp.asarray(VALUES[::-1])])}
    masks = jax.vmap(lambda params: pruning(params, 3, None, HALF)[1])(params)
    for i in range(2):
        np.testing.assert_array_equal(
            masks['kernel'][i],
            masks_of({'kernel': params['kernel'][i]}, 'unstr_local', 0.5)['kernel'],
        )


# When nothing is due, and what stays.


@pytest.mark.parametrize('epoch', [None, 2, np.int64(4)])
def test_nothing_is_due(epoch):
    params, given = {'kernel': jnp.ones((2, 2))}, {'kernel': jnp.ones((2, 2), jnp.uint8)}
    updated, mask_key = pruning(params, epoch, mask_key=given, prune_strategy=HALF)
    assert updated is False
    assert mask_key is given
    assert pruning(params, 3, given, None) == (False, given)
    assert pruning(params) == (False, None)
    assert pruning_apply(params, None) == (params, None)


def test_masks_of_layers_that_a_later_entry_does_not_name_stay():
    params = {name: {'kernel': jnp.asarray(VALUES)} for name in ('a', 'b', 'c')}
    strategy = {
        1: {'method': 'unstr_local', 'prune_rate_pattern': {'a-kernel': 0.5}},
        2: {'method': 'str_local', 'prune_rate_pattern': {'b-kernel': '1:4'}},
        3: {
            'method': 'unstr_local',
            'prune_rate_pattern': {'b-*': None, '*-kernel': 0.25, 'c': 0.125},
        },
    }
    with pytest.raises(ValueError, match=r"prune_strategy\[3\]: 'c' is never used"):
        pruning(params, 1, None, strategy)
    del strategy[3]['prune_rate_pattern']['c']
    counts, mask_key = {}, None
    for epoch in (1, 2, 3):
        packed = epoch == 2  # stored as each call asks, however the masks before were
        updated, mask_key = pruning(params, epoch, mask_key, strategy, use_packed_masks=packed)
        params, _ = pruning_apply(params, mask_key)
        assert updated
        unpacked = sparse_state_lib.unpack_masks(mask_key, params)
        counts[epoch] = {
            name: None if m['kernel'] is None else int(m['kernel'].sum())
            for name, m in unpacked.items()
        }
    size = VALUES.size
    assert counts[1] == {'a': size // 2, 'b': None, 'c': None}
    assert counts[2] == {'a': size // 2, 'b': size // 4, 'c': None}
    assert counts[3] == {'a': size // 4, 'b': size // 4, 'c': size // 4}


def test_what_the_masks_prune_counts_as_zero_whether_applied_or_not():
    params = {'kernel': jnp.asarray(VALUES)}
    mask_key = masks_of(params, 'unstr_local', 0.5)
    moved = {'kernel': jnp.where(mask_key['kernel'] == 0, 100.0, params['kernel'])}
    for state in (moved, pruning_apply(moved, mask_key)[0]):
        later = masks_of(state, 'unstr_local', 0.25, mask_key=mask_key)
        np.testing.assert_array_equal(
            later['kernel'], masks_of(params, 'unstr_local', 0.25)['kernel']
        )


def test_a_layer_is_named_with_all_of_its_leaves():
    params = {
        'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.arange(12.0)},
        'head': {'kernel': jnp.asarray(VALUES)},
    }
    masks = masks_of(params, 'unstr_local', {'Dense_0': 0.25})
    assert int(masks['Dense_0']['bias'].sum()) == 3
    assert masks['head']['kernel'] is None
    assert masks_of(params, 'unstr_local', {'Dense_0-kernel': 0.25})['Dense_0']['bias'] is None


def test_a_partial_group_warns_and_names_the_leaf():
    params = {'head': {'kernel': jnp.asarray(VALUES[:, :10])}}
    words = r'prune_strategy\[1\]: head-kernel has length 10 .* m=4 does not divide: its last group keeps 1 of 2'
    with pytest.warns(UserWarning, match=words):
        mask = masks_of(params, 'str_unified_local', (1, 4))['head']['kernel']
    np.testing.assert_array_equal(mask[:, 8:].sum(-1), np.ones(16))


def test_a_layer_that_is_named_twice_is_refused():
    entry = jax_pruning.PruningEntry(1, 'unstr_local', (('kernel', 0.5), ('kernel', 0.25)))
    with pytest.raises(ValueError, match=r"prune_strategy\[1\]: 'kernel' is never used"):
        pruning({'kernel': jnp.ones((2, 2))}, 1, None, jax_pruning.PruningStrategy((entry,)))


REFUSED = {
    'a layer that is not there': (
        {'method': 'unstr_local', 'prune_rate_pattern': {'Dens_0-kernel': 0.5}},
        r"prune_strategy\[7\]: 'Dens_0-kernel' matches no parameter; the nearest are 'Dense_0-kernel'",
    ),
    'an axis that is not there': (
        {'method': 'str_local', 'prune_rate_pattern': {'Dense_0': '2:4'}, 'prune_axis': -2},
        r'prune_strategy\[7\]: Dense_0-bias: axis -2 does not exist in shape \(12,\)',
    ),
    'no floats': (
        {'method': 'unstr_local', 'prune_rate_pattern': {'count': 0.5}},
        r'prune_strategy\[7\]: count holds int32, no floats',
    ),
}  # fmt: skip


@pytest.mark.parametrize(('entry', 'message'), REFUSED.values(), ids=REFUSED)
def test_entries_that_do_not_fit_are_refused_before_their_epoch(entry, message):
    params = {
        'Dense_0': {'kernel': jnp.asarray(VALUES), 'bias': jnp.ones(12)},
        'count': jnp.arange(3),
    }
    for epoch in (None, 1):
        with pytest.raises(ValueError, match=message):
            pruning(params, epoch, None, {**HALF, 7: entry})


def test_parameters_without_kernels_are_refused():
    with pytest.raises(
        ValueError,
        match=r"prune_strategy\[3\]: none of the parameters is known as a kernel \('a-table'\); name",
    ):
        pruning({'a': {'table': jnp.ones((2, 2))}}, 1, None, HALF)


@pytest.mark.parametrize('epoch', [1.0, True, 'three', HALF])
def test_an_epoch_that_is_none_is_refused(epoch):
    for strategy in (HALF, None):
        with pytest.raises(TypeError, match='epoch must be a whole number'):
            pruning({'kernel': jnp.ones((2, 2))}, epoch, None, strategy)


@pytest.mark.parametrize('value', [jnp.tanh, 1.0])
def test_what_is_no_array_is_refused(value):
    with pytest.raises(
        TypeError, match=r'act holds .*, no array; pass parameters alone, .* eqx\.filter'
    ):
        pruning({'kernel': jnp.ones((2, 2)), 'act': value}, 1, None, HALF)


def test_an_axis_that_is_none_is_refused():
    with pytest.raises(
        TypeError, match=r"prune_axis must be a whole number, or None for the last axis, got '0'"
    ):
        pruning({'kernel': jnp.ones((2, 2))}, 1, None, HALF, prune_axis='0')


def test_a_state_whose_parameters_cannot_be_replaced_is_refused():
    class Box:
        def __init__(self):
            self.params = {'kernel': jnp.ones((2, 2))}

    with pytest.raises(
        TypeError, match=r'Box has params but no method `replace`; pass state\.params instead'
    ):
        pruning_apply(Box(), {'kernel': jnp.ones((2, 2), jnp.uint8)})


def test_masks_of_another_model_are_refused():
    with pytest.raises(
        ValueError,
        match=r'kernel: a mask of shape \(3, 2\) does not fit a parameter of shape \(2, 2\)',
    ):
        pruning_apply({'kernel': jnp.ones((2, 2))}, {'kernel': jnp.ones((3, 2), jnp.uint8)})
