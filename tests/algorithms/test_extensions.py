"""AC/DC by counts of steps, and Adam's moments after a mask update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_schedules
from jaxpruner.algorithms import acdc

PARAMS = {'u': jax.random.normal(jax.random.key(0), (8, 16)), 'bias': jnp.ones(16)}
GRADS = jax.tree.map(lambda leaf: leaf[::-1], PARAMS)


def sparse_steps(counts, steps, **settings):
    """The steps after which the masks prune, in a compiled training."""
    updater = jaxpruner.create_updater_from_config(
        {'algorithm': 'acdc', 'sparsity': 0.5, **counts, **settings}
    )
    tx, params = updater.wrap_optax(optax.sgd(0.01, momentum=0.9)), PARAMS
    state, found = tx.init(params), []
    update = jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
        if jaxpruner.sparsity_metrics(state)['_mask_sparsity'] > 0:
            found.append(step)
    return found


def counts(*values):
    return dict(zip(acdc.COUNTS, values, strict=True))


PHASES = [
    (counts(3, 12, 2, 2), [3, 4, 7, 8, 11, 12, 13, 14, 15]),
    (counts(2, 11, 3, 1), [2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15]),  # lengths may differ
    (counts(0, 4, 1, 2), [0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]),
    (counts(5, 5, 0, 0), list(range(5, 16))),
    (counts(4.0, 1e1, 3, 3), [4, 5, 6, *range(10, 16)]),
]


@pytest.mark.parametrize(('settings', 'expected'), PHASES)
def test_phases_begin_where_the_counts_say(settings, expected):
    assert sparse_steps(settings, 16) == expected
    schedule = jaxpruner.ACDC(**settings).scheduler
    on_host = [step for step in range(16) if schedule.is_sparse(step)]
    assert on_host == expected
    due = [step for step in range(16) if schedule.is_mask_update_iter(step)]
    traced = jax.vmap(schedule.is_mask_update_iter)(jnp.arange(16))
    assert due == np.flatnonzero(traced).tolist()
    assert due == [step for step in range(16) if (step in expected) != (step - 1 in expected)]


BAD = [
    (counts(-1, 4, 2, 2), 'init_dense_steps_end must not be negative, got -1'),
    (counts(9, 4, 2, 2), 'final_sparse_steps_start=4 lies before init_dense_steps_end=9'),
    (counts(3, 9, 0, 2), 'cycle_sparse_steps is 0'),
    (
        {**counts(3, 9, 2, 2), 'scheduler': sparsity_schedules.PeriodicSchedule(2)},
        'a scheduler or counts of steps',
    ),
]


@pytest.mark.parametrize(('settings', 'message'), BAD)
def test_bad_counts(settings, message):
    with pytest.raises(ValueError, match=message):
        jaxpruner.ACDC(**settings)


def test_counts_can_be_replaced():
    updater = jaxpruner.ACDC(**counts(3, 12, 2, 2))
    longer = dataclasses.replace(updater, cycle_sparse_steps=3, rng_seed=1)
    assert longer.scheduler == acdc.PhasesSchedule(3, 12, 3, 2)
    targets = updater.scheduler.get_sparsity_at_step({'a': 0.5, 'b': None}, 3)
    assert float(targets['a']) == 0.5
    assert float(updater.scheduler.get_sparsity_at_step(0.5, 5)) == 0.0


def test_moments_are_reset_as_the_form_of_the_phases_says():
    assert jaxpruner.ACDC(sparsity_schedules.PeriodicSchedule(2)).reset_optimizer is True
    assert jaxpruner.ACDC(**counts(3, 12, 2, 2)).reset_optimizer is False
    assert jaxpruner.ACDC(**counts(3, 12, 2, 2), reset_optimizer=True).reset_optimizer is True
    momenta = []
    for reset in (False, True):
        updater = jaxpruner.ACDC(**counts(1, 12, 2, 2), reset_optimizer=reset, sparsity=0.5)
        tx, params = updater.wrap_optax(optax.sgd(0.01, momentum=0.9)), PARAMS
        state = tx.init(params)
        for _ in range(4):  # the dense phase begins at step 3
            updates, state = jax.jit(tx.update)(GRADS, state, params)
            params = optax.apply_updates(params, updates)
        momenta.append(float(jnp.abs(state.inner_state[0].trace['u']).sum()))
    assert momenta[1] == pytest.approx(float(jnp.abs(GRADS['u']).sum()), rel=1e-5)
    assert momenta[0] > 1.5 * momenta[1]


@pytest.mark.parametrize('name', ['adam_fisher', 'adam-fisher'])
@pytest.mark.parametrize('resets', [False, True])
def test_reset_adam_zeroes_the_moments_of_all_weights_after_a_mask_update(name, resets):
    config = {'algorithm': name, 'sparsity': 0.5, 'reset_adam': resets}
    schedule = sparsity_schedules.OneShotSchedule(2)
    updater = dataclasses.replace(jaxpruner.create_updater_from_config(config), scheduler=schedule)
    tx, state = updater.wrap_optax(optax.adam(0.01)), None
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = jax.jit(tx.update)(GRADS, state, PARAMS)
    moments = state.inner_state[0]
    assert int(moments.count) == 3
    after_one = jax.tree.map(lambda grad: 0.1 * grad, GRADS)
    for leaf in PARAMS:  # dense leaves, too
        is_of_one_gradient = np.allclose(moments.mu[leaf], after_one[leaf], rtol=1e-5)
        assert is_of_one_gradient == resets
    assert float(jaxpruner.sparsity_metrics(state)['_mask_sparsity']) > 0
