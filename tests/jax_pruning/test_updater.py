"""`StrategyPruning` does what the loop over epochs does, with every optimizer and front-end."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from contract import front_ends, tables, training
from jaxpruner import (
    StrategyPruning,
    gradual_strategy,
    pruning,
    pruning_apply,
    tree,
)

STEPS_PER_EPOCH, EPOCHS = 4, 3


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
CASES = [
    ('adam', 'nnx', 'gradual', True),
    ('multi_steps_inside', 'dict', 'structured', False),
    ('chain_clip', 'equinox', 'growing', True),
    ('sgd_momentum', 'frozen_dict', 'mixed', False),
]
_START, _APPLY = front_ends.make('dict', seed=0)


def gradient(apply):
    return jax.grad(lambda params, batch: jnp.mean((apply(params, batch[0]) - batch[1]) ** 2))


def make_step(tx, apply=_APPLY):
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(gradient(apply)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step)


def trained(tx, params, step):
    opt_state = tx.init(params)
    for batch in training.batches():
        params, opt_state = step(params, opt_state, batch)
    return params, opt_state


def loop_over_epochs(tx, strategy, params, apply, packed=False, first_epoch=1):
    """`pruning_apply` after every step, `pruning` and `pruning_apply` after an epoch's last one."""
    step, opt_state, mask_key = make_step(tx, apply), tx.init(params), None
    batches = iter(training.batches())
    for epoch in range(first_epoch, first_epoch + EPOCHS):
        for _ in range(STEPS_PER_EPOCH):
            params, opt_state = step(params, opt_state, next(batches))
            params, _ = pruning_apply(params, mask_key)
        _, mask_key = pruning(params, epoch, mask_key, strategy, use_packed_masks=packed)
        params, _ = pruning_apply(params, mask_key)
    return params, mask_key, opt_state


class Inner:
    """Takes the place of an updater in the table of optimizers, to get the optimizer without a pruner."""

    def wrap_optax(self, inner):
        return inner


@pytest.mark.parametrize(('optimizer', 'front_end', 'strategy', 'packed'), CASES)
def test_equal_to_the_loop_over_epochs(optimizer, front_end, strategy, packed):
    start, apply = front_ends.make(front_end, seed=0)
    strategy, wrap = STRATEGIES[strategy], tables.OPTIMIZERS[optimizer].wrap
    params, mask_key, _ = loop_over_epochs(wrap(Inner()), strategy, start, apply, packed)
    tx = wrap(StrategyPruning(strategy, STEPS_PER_EPOCH, use_packed_masks=packed))
    step = make_step(tx, apply)
    ours, opt_state = trained(tx, start, step)
    assert step._cache_size() == 1
    treedef, masks = jax.tree.structure(start), jaxpruner.sparse_states(opt_state)[0].masks
    both = (tree.leaves_like(treedef, masks), tree.leaves_like(treedef, mask_key))
    for mine, theirs in zip(*both, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(mine == 0, theirs == 0)
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def test_bit_by_bit_with_bfloat16():
    """Where rounding hides in which order XLA computes, everything is equal: masks, parameters, and moments."""
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _START)
    strategy = {epoch - 1: entry for epoch, entry in STRATEGIES['mixed'].items()}
    inner = optax.sgd(0.1, 0.9)
    params, mask_key, inner_state = loop_over_epochs(inner, strategy, start, _APPLY, first_epoch=0)
    tx = StrategyPruning(strategy, STEPS_PER_EPOCH, first_epoch=0).wrap_optax(inner)
    ours, opt_state = trained(tx, start, make_step(tx))
    training.assert_same(
        (ours, opt_state.inner_state, opt_state.masks), (params, inner_state, mask_key)
    )


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
        params, state = trained(tx, _START, make_step(tx))
    assert state.masks['first']['kernel'] is None
    assert params['first']['kernel'].all()


HALF = {1: unstructured(0.5)}
REFUSED = [
    (lambda: StrategyPruning({3 * 10**9: HALF[1]}, 1), ValueError, r'to 2147483647, got'),
    (lambda: StrategyPruning({0: HALF[1]}, 10), ValueError, r'epoch 0, .* pass first_epoch=0'),
    (lambda: StrategyPruning(HALF, 0), ValueError, r'steps_per_epoch must be from 1 .* got 0'),
    (lambda: StrategyPruning(HALF, 1, first_epoch=-1), ValueError, r'first_epoch .* got -1'),
    (
        lambda: StrategyPruning({1: unstructured({'x': 0.5})}, 1).init_state(_START),
        ValueError,
        r"prune_strategy\[1\]: 'x' matches no parameter; the nearest are",
    ),
]  # fmt: skip


@pytest.mark.parametrize(('make', 'error', 'message'), REFUSED)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_epochs_counted_from_zero():
    strategy = {0: unstructured(0.5), 2: unstructured(0.25)}
    # A whole number of steps, as a division gives it.
    pruner = StrategyPruning(strategy, 1000 / 100, first_epoch=0)
    assert [i for i in range(30) if pruner.scheduler.is_mask_update_iter(i)] == [9, 29]
