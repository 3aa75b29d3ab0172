"""A state that another pruner made: its targets win until it is retargeted."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpruner

PARAMS = {'bias': jnp.ones(4), 'kernel': jnp.arange(32.0).reshape(8, 4) + 1}
GIVEN = r'kernel: the target in the state is 0\.5, and that of \w+ 0\.75'


def pruner(sparsity, cls=jaxpruner.MagnitudePruning, **settings):
    return cls(jaxpruner.PeriodicSchedule(1), sparsity=sparsity, **settings)


def zeros_after(tx, state):
    updates, _ = jax.jit(tx.update)(PARAMS, state, PARAMS)
    return int((optax.apply_updates(PARAMS, updates)['kernel'] == 0).sum())


@pytest.mark.parametrize('wrap', [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)])
@pytest.mark.parametrize('cls', [jaxpruner.MagnitudePruning, jaxpruner.GlobalMagnitudePruning])
def test_targets_of_the_state_hold_until_it_is_retargeted(cls, wrap):
    state = wrap(pruner(0.5, cls).wrap_optax(optax.sgd(0.1))).init(PARAMS)
    later = pruner(0.75, cls)
    tx = wrap(later.wrap_optax(optax.sgd(0.1)))
    assert zeros_after(tx, state) == 16
    retargeted = later.retarget(state, PARAMS)
    assert jax.tree.structure(retargeted) == jax.tree.structure(state)
    assert zeros_after(tx, retargeted) == 24
    assert float(jaxpruner.sparsity_metrics(retargeted)['_target_sparsity']) == 0.75


def test_one_warning_says_where_targets_differ():
    state, later = pruner(0.5).wrap_optax(optax.sgd(0.1)).init(PARAMS), pruner(0.75)
    tx = later.wrap_optax(optax.sgd(0.1))
    with pytest.warns(UserWarning, match=GIVEN) as caught:
        tx.update(PARAMS, tx.update(PARAMS, state, PARAMS)[1], PARAMS)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=GIVEN):
        later.plan(PARAMS, state)
    with pytest.warns(UserWarning, match=GIVEN):
        jaxpruner.sparsity_metrics(state, PARAMS, later)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        retargeted = later.retarget(state, PARAMS)
        tx.update(PARAMS, retargeted, PARAMS)
        later.plan(PARAMS, retargeted)
        jaxpruner.sparsity_metrics(retargeted, PARAMS, later)


@pytest.mark.parametrize('cls', [jaxpruner.StaticRandomSparse, jaxpruner.SET, jaxpruner.RigL])
def test_an_algorithm_that_keeps_its_count_says_that_a_new_state_is_needed(cls):
    state, later = pruner(0.5, cls).wrap_optax(optax.sgd(0.1)).init(PARAMS), pruner(0.75, cls)
    with pytest.warns(UserWarning, match=GIVEN + '.*make a new state'):
        later.plan(PARAMS, state)
    with pytest.warns(UserWarning, match=GIVEN + '.*make a new state'):
        jaxpruner.sparsity_metrics(state, PARAMS, later)


def test_a_traced_target_for_all_leaves_together():
    params = {'a': jnp.ones((4, 4)), 'b': jnp.ones((4, 4))}
    state = pruner(0.5, jaxpruner.GlobalMagnitudePruning).wrap_optax(optax.sgd(0.1)).init(params)

    @jax.jit
    def retarget(sparsity):
        return pruner(sparsity, jaxpruner.GlobalMagnitudePruning).retarget(state, params)

    assert float(retarget(0.75).target_sparsities) == 0.75


def test_init_keeps_no_traced_value():
    tx = pruner(0.5).wrap_optax(optax.sgd(0.1))
    with jax.checking_leaks():
        jax.jit(tx.init)(PARAMS)


def test_states_of_nnx_optimizers():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, pruner(0.5).wrap_optax(optax.sgd(0.1)), wrt=nnx.Param)
    state = pruner(0.75).retarget(optimizer.opt_state, nnx.state(model, nnx.Param))
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    assert float(jaxpruner.sparsity_metrics(state)['_target_sparsity']) == 0.75


def test_what_new_targets_cannot_change_is_refused_by_name():
    state = pruner(0.5).wrap_optax(optax.sgd(0.1)).init(PARAMS)
    other = pruner(0.5, sparsity_type={'kernel': None})
    with pytest.raises(ValueError, match='kernel has a mask in the state, and no target'):
        other.retarget(state, PARAMS)
    fixed = pruner(0.5, jaxpruner.RigL).wrap_optax(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match='RigL keeps as many weights as its first masks'):
        pruner(0.75, jaxpruner.RigL).retarget(fixed, PARAMS)
