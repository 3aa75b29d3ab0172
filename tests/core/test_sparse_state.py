"""Finding a pruner's state in any optimizer state, and reading sparsities off it."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpruner
from jaxpruner.core import sparse_state

PARAMS = {'a': jnp.ones((5, 3)), 'b': jnp.ones((8, 4)), 'bias': jnp.ones(4)}


def static(packed=False, sparsity=0.75):
    return jaxpruner.create_updater_from_config(
        {'algorithm': 'static_sparse', 'sparsity': sparsity, 'is_packed': packed}
    )


WRAPPED = {
    'alone': lambda tx: tx,
    'chain': lambda tx: optax.chain(optax.clip(1.0), tx),
    'chain in chain': lambda tx: optax.chain(optax.chain(optax.clip(1.0), tx), optax.trace(0.9)),
    'MultiSteps': lambda tx: optax.MultiSteps(tx, 2),
    'multi_transform': lambda tx: optax.multi_transform(
        {'x': tx, 'y': optax.sgd(0.1)}, {'a': 'x', 'b': 'x', 'bias': 'y'}
    ),
    'masked': lambda tx: optax.masked(tx, {'a': True, 'b': True, 'bias': False}),
    'inject_hyperparams': lambda tx: optax.inject_hyperparams(
        lambda rate: static().wrap_optax(optax.sgd(rate))
    )(rate=0.1),
}


@pytest.mark.parametrize('wrap', WRAPPED.values(), ids=WRAPPED)
def test_the_state_is_found_and_used_anywhere(wrap):
    updater = static()
    state = wrap(updater.wrap_optax(optax.adam(0.1))).init(PARAMS)
    (found,) = jaxpruner.sparse_states(state)
    assert isinstance(found, jaxpruner.SparseState)
    pruned = updater.post_gradient_update(PARAMS, state)
    assert int((pruned['b'] != 0).sum()) == 8
    assert (pruned['bias'] == 1).all()
    assert updater.pre_forward_update(PARAMS, state) is PARAMS


def test_none_and_many_are_refused():
    plain = optax.adam(0.1).init(PARAMS)
    assert jaxpruner.sparse_states(plain) == []
    with pytest.raises(
        ValueError,
        match=r'found 0; pass the state that the init of `updater.wrap_optax.*restored without a target',
    ):
        static().post_gradient_update(PARAMS, plain)
    two = optax.chain(
        static().wrap_optax(optax.sgd(0.1)), static().wrap_optax(optax.sgd(0.1))
    ).init(PARAMS)
    with pytest.raises(
        ValueError,
        match=r'found 2; pass the one that is meant: an entry of `jaxpruner.sparse_states',
    ):
        static().post_gradient_update(PARAMS, two)
    with pytest.raises(ValueError, match='there is no SparseState'):
        jaxpruner.sparsity_metrics(plain)


def test_a_state_inside_a_state_is_found():
    state = static().wrap_optax(static().wrap_optax(optax.sgd(0.1))).init(PARAMS)
    assert len(jaxpruner.sparse_states(state)) == 2


@pytest.mark.parametrize('packed', [False, True])
def test_metrics_are_exact_under_jit(packed):
    state = optax.chain(static(packed).wrap_optax(optax.sgd(0.1))).init(PARAMS)
    metrics = jax.jit(jaxpruner.sparsity_metrics)(state)
    assert float(metrics['a']) == pytest.approx(
        1 - 4 / 15
    )  # 15 weights, whose bits fill two bytes and do not tell
    assert float(metrics['b']) == pytest.approx(0.75)
    assert 'bias' not in metrics
    assert float(metrics['_mask_sparsity']) == pytest.approx(1 - 12 / 47)
    assert float(metrics['_target_sparsity']) == pytest.approx(0.75)
    assert int(metrics['_count']) == 0


@pytest.mark.parametrize('packed', [False, True])
def test_metrics_of_stacked_states_are_their_mean(packed):
    tx = static(packed).wrap_optax(optax.sgd(0.1))
    stacked = jax.vmap(tx.init)(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), PARAMS))
    single, mean = jaxpruner.sparsity_metrics(tx.init(PARAMS)), jaxpruner.sparsity_metrics(stacked)
    np.testing.assert_allclose(mean['_mask_sparsity'], single['_mask_sparsity'], rtol=1e-6)
    np.testing.assert_allclose(mean['b'], single['b'], rtol=1e-6)


@pytest.mark.parametrize('packed', [False, True])
def test_a_leaf_without_weights_does_not_spoil_the_total(packed):
    state = static(packed).wrap_optax(optax.sgd(0.1)).init(PARAMS | {'empty': jnp.zeros((0, 4))})
    metrics = jaxpruner.sparsity_metrics(state)
    assert float(metrics['empty']) == 0.0
    assert float(metrics['_mask_sparsity']) == pytest.approx(1 - 12 / 47)


def test_metrics_of_a_model_without_masks():
    metrics = jaxpruner.sparsity_metrics(
        jaxpruner.NoPruning().wrap_optax(optax.sgd(0.1)).init(PARAMS)
    )
    assert float(metrics['_mask_sparsity']) == 0.0


def test_boxed_states_of_nnx_are_read():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    updater = static(packed=True)
    optimizer = nnx.Optimizer(model, updater.wrap_optax(optax.adam(0.1)), wrt=nnx.Param)
    state = sparse_state.only_sparse_state(optimizer.opt_state)
    assert int(state.count) == 0
    pruned = updater.post_gradient_update(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert jaxpruner.summarize_sparsity(pruned)['kernel'] == 0.75
    assert float(jaxpruner.sparsity_metrics(optimizer.opt_state)['kernel']) == 0.75


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('wrap', [WRAPPED['alone'], WRAPPED['chain in chain']])
def test_states_that_nnx_split_are_read(wrap, packed):
    """MaxText's `train_loop` returns the state of an `nnx.Optimizer`, in which tuples are mappings."""
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    updater = static(packed)
    optimizer = nnx.Optimizer(model, wrap(updater.wrap_optax(optax.adam(0.1))), wrt=nnx.Param)
    params, split = nnx.state(model, nnx.Param), nnx.split(optimizer)[1]
    for state in (split, {'step': 3, 'optimizer': split}):
        (found,) = jaxpruner.sparse_states(state)
        assert int(found.count) == 0
        pruned = updater.post_gradient_update(params, state)
        assert jaxpruner.summarize_sparsity(pruned)['kernel'] == 0.75
        metrics = jaxpruner.sparsity_metrics(state, pruned)
        assert float(metrics['kernel']) == float(metrics['_target_sparsity']) == 0.75
        assert float(metrics['_disagreement']) == 0
    assert jaxpruner.sparse_states({'masks': jnp.ones(3), 'inner_state': jnp.ones(3)}) == []
    with pytest.raises(ValueError, match=r'merge the optimizer first and give its `opt_state`'):
        updater.new_masks(split, params)


def test_a_split_state_without_masks_is_read():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    tx = jaxpruner.NoPruning().wrap_optax(optax.adam(0.1))
    split = nnx.split(nnx.Optimizer(model, tx, wrt=nnx.Param))[1]
    assert float(jaxpruner.sparsity_metrics(split)['_mask_sparsity']) == 0


def test_a_state_that_an_earlier_version_pickled_is_read():
    state = static().wrap_optax(optax.sgd(0.1)).init(PARAMS)
    pickled = pickle.dumps(state, protocol=0)
    assert b'cjaxpruner.core.sparse_state\n' in pickled
    before = pickled.replace(b'cjaxpruner.core.sparse_state\n', b'cjaxpruner.sparse_state\n')
    restored = pickle.loads(before)
    assert type(restored) is jaxpruner.SparseState
    jax.tree.map(np.testing.assert_array_equal, restored, state)
