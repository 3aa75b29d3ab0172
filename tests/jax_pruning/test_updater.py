"""`StrategyPruning` does what the loop over epochs does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from contract import front_ends, training
from helpers import steps
from jaxpruner import StrategyPruning, gradual_strategy, pruning, pruning_apply

STEPS_PER_EPOCH = 4


def unstructured(density, scope='unified_local'):
    return {'method': f'unstr_{scope}', 'prune_rate_pattern': density}


STRATEGIES = {
    'gradual': gradual_strategy([1, 2, 3], 0.25),
    'structured': gradual_strategy([1, 2, 3], '1:4'),
    'growing': {1: unstructured(0.25), 2: unstructured(0.75)},
    'mixed': {
        1: unstructured({'first-kernel': 0.5}, 'local'),
        2: {'method': 'str_unified_local', 'prune_rate_pattern': (2, 4)},
        3: unstructured(0.25, 'global'),
    },
}
_START, _APPLY = front_ends.make('dict', seed=0)
INNER = optax.adam(1e-2)


def make_step(tx):
    def loss(params, batch):
        return jnp.mean((_APPLY(params, batch[0]) - batch[1]) ** 2)

    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step)


def trained(tx):
    step, state = make_step(tx), (_START, tx.init(_START))
    for batch in training.batches():
        state = step(*state, batch)
    assert step._cache_size() == 1
    return state


def loop_over_epochs(strategy, packed):
    """`pruning_apply` after every step, `pruning` and `pruning_apply` after an epoch's last one."""
    step, params, opt_state, mask_key = make_step(INNER), _START, INNER.init(_START), None
    for i, batch in enumerate(training.batches(), start=1):
        params, opt_state = step(params, opt_state, batch)
        params, _ = pruning_apply(params, mask_key)
        if i % STEPS_PER_EPOCH == 0:
            epoch = i // STEPS_PER_EPOCH
            _, mask_key = pruning(params, epoch, mask_key, strategy, use_packed_masks=packed)
            params, _ = pruning_apply(params, mask_key)
    return params, mask_key


@pytest.mark.parametrize(
    ('name', 'packed'), [(name, i % 2 == 0) for i, name in enumerate(STRATEGIES)]
)
def test_equal_to_the_loop_over_epochs(name, packed):
    strategy = STRATEGIES[name]
    expected, mask_key = loop_over_epochs(strategy, packed)
    pruner = StrategyPruning(strategy, STEPS_PER_EPOCH, use_packed_masks=packed)
    params, opt_state = trained(pruner.wrap_optax(INNER))
    steps.assert_equal(opt_state.masks, mask_key)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours == 0, theirs == 0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_target_is_what_the_last_entry_gives():
    last = {'method': 'str_local', 'prune_rate_pattern': {'second-kernel': '1:4'}}
    pruner = StrategyPruning(STRATEGIES['mixed'] | {3: last}, 10)
    assert pruner.get_target_sparsities(_START) == {
        'first': {'bias': None, 'kernel': 0.5},
        'second': {'bias': None, 'kernel': 0.75},
    }
    plan = pruner.plan(_START)
    assert [plan[name].target for name in ('first/kernel', 'second/kernel')] == [0.5, 0.75]
    assert (plan['second/kernel'].kept, plan.kept) == (12, 96 + 12 + 12 + 4)
    assert plan['first/bias'].why_dense == 'no entry of the strategy means it'
    metrics = jaxpruner.sparsity_metrics(pruner.wrap_optax(optax.sgd(0.1)).init(_START))
    assert float(metrics['first/kernel']) == 0.0
    assert float(metrics['_target_sparsity']) == pytest.approx((96 + 36) / (192 + 48))


def test_all_entries_at_once_and_none():
    pruned, masks = StrategyPruning(STRATEGIES['mixed'], 10).instant_sparsify(_START)
    kept = [int(mask.sum()) for mask in jax.tree.leaves(masks)]
    assert sum(kept) == 240 * 0.25
    assert [int((pruned[name]['kernel'] != 0).sum()) for name in ('first', 'second')] == kept
    tx = StrategyPruning({}, 10).wrap_optax(optax.sgd(0.1))
    with pytest.warns(UserWarning, match='prunes no leaf of 4'):
        params, state = trained(tx)
    assert state.masks['first']['kernel'] is None
    assert params['first']['kernel'].all()


HALF, UNKNOWN = {1: unstructured(0.5)}, {1: unstructured({'x': 0.5}, 'local')}
REFUSED = [
    (lambda: StrategyPruning({3 * 10**9: HALF[1]}, 1), r'to 2147483647, got'),
    (lambda: StrategyPruning({0: HALF[1]}, 10), r'epoch 0, .* pass first_epoch=0'),
    (lambda: StrategyPruning(HALF, 0), r'steps_per_epoch must be from 1 .* got 0'),
    (lambda: StrategyPruning(HALF, 1, first_epoch=-1), r'first_epoch .* got -1'),
    (lambda: StrategyPruning(UNKNOWN, 1).init_state(_START), r"prune_strategy\[1\]: 'x' matches"),
]  # fmt: skip


@pytest.mark.parametrize(('make', 'message'), REFUSED)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_epochs_counted_from_zero():
    strategy = {0: unstructured(0.5), 2: unstructured(0.25)}
    # A whole number of steps, as a division gives it.
    pruner = StrategyPruning(strategy, 1000 / 100, first_epoch=0)
    assert [i for i in range(30) if pruner.scheduler.is_mask_update_iter(i)] == [9, 29]
