"""`StrategyPruning` does what the loop over epochs does, with every optimizer and front-end."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from contract import front_ends, tables, training
from helpers import compiling, hlo
from jaxpruner import (
    PruningStrategy,
    StrategyPruning,
    gradual_strategy,
    pruning,
    pruning_apply,
    tree,
)

STEPS_PER_EPOCH, EPOCHS = 4, 3


def unstructured(density, scope='unified_local'):
    return {'method': f'unstr_{scope}', 'prune_rate_pattern': density}


def first_kernel(params):
    masks = pruning(params, 1, None, {1: unstructured(0.5)})[1]
    paths, _, treedef = tree.flatten_with_paths(params)
    leaves = tree.leaves_like(treedef, masks)
    return '-'.join(next(p for p, mask in zip(paths, leaves, strict=True) if mask is not None))


# From the parameters, since a strategy may name leaves, to the strategy.
STRATEGIES = {
    'gradual': lambda params: gradual_strategy([1, 2, 3], 0.25),
    'global': lambda params: {1: unstructured(0.7, 'global'), 3: unstructured(0.3, 'global')},
    'structured': lambda params: gradual_strategy([1, 2, 3], '1:4'),
    'growing': lambda params: {1: unstructured(0.25), 2: unstructured(0.75)},
    'mixed': lambda params: {
        1: unstructured({first_kernel(params): 0.5}, 'local'),
        2: {'method': 'str_unified_local', 'prune_rate_pattern': (2, 4)},
        3: unstructured(0.25, 'global'),
    },
}
# Around the pruner, so that it sees a part of the parameters or of the steps; the loop over epochs sees all.
OUTSIDE = ('multi_steps_outside', 'masked_outside', 'multi_transform_outside')
OPTIMIZERS = [name for name in tables.OPTIMIZERS if name not in OUTSIDE]
FRONT_ENDS = itertools.cycle(front_ends.FRONT_ENDS)
CASES = [
    (optimizer, next(FRONT_ENDS), strategy, number % 2 == 0)
    for number, (optimizer, strategy) in enumerate(
        zip(OPTIMIZERS, itertools.cycle(STRATEGIES), strict=False)
    )
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
    strategy = STRATEGIES[strategy](start)
    wrap = tables.OPTIMIZERS[optimizer].wrap
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


@pytest.mark.parametrize(('strategy', 'first_epoch'), [('gradual', 0), ('mixed', 1)])
def test_bit_by_bit_with_bfloat16(strategy, first_epoch):
    """Where rounding hides in which order XLA computes, everything is equal: masks, parameters, and moments."""
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _START)
    entries = PruningStrategy.parse(STRATEGIES[strategy](start)).entries
    moved = PruningStrategy(
        tuple(dataclasses.replace(entry, epoch=entry.epoch - 1 + first_epoch) for entry in entries)
    )
    inner = optax.sgd(0.1, 0.9)
    params, mask_key, inner_state = loop_over_epochs(
        inner, moved, start, _APPLY, first_epoch=first_epoch
    )
    tx = StrategyPruning(moved, STEPS_PER_EPOCH, first_epoch=first_epoch).wrap_optax(inner)
    ours, opt_state = trained(tx, start, make_step(tx))
    training.assert_same(
        (ours, opt_state.inner_state, opt_state.masks), (params, inner_state, mask_key)
    )


def test_sparse_gradients_are_those_of_the_masks_before_the_step():
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _START)
    # Clipping makes each update depend on all gradients, so that those of pruned weights show.
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    strategy = STRATEGIES['gradual'](start)
    pruner = StrategyPruning(strategy, STEPS_PER_EPOCH, is_sparse_gradients=True)
    tx = pruner.wrap_optax(inner)
    ours, opt_state = trained(tx, start, make_step(tx))
    theirs, inner_state, mask_key = start, inner.init(start), None
    of_loss = jax.jit(gradient(_APPLY))
    for number, batch in enumerate(training.batches(), 1):
        grads, _ = pruning_apply(of_loss(theirs, batch), mask_key)
        updates, inner_state = jax.jit(inner.update)(grads, inner_state, theirs)
        theirs, _ = pruning_apply(optax.apply_updates(theirs, updates), mask_key)
        epoch = None if number % STEPS_PER_EPOCH else number // STEPS_PER_EPOCH
        _, mask_key = pruning(theirs, epoch, mask_key, strategy)
        theirs, _ = pruning_apply(theirs, mask_key)
    training.assert_same(opt_state.masks, mask_key)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        pair = (mine.astype(jnp.float32), other.astype(jnp.float32))
        np.testing.assert_allclose(*pair, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize('optimizer', OUTSIDE)
def test_behind_another_transformation(optimizer):
    """What is masked out is no part of the strategy's model; of gradients that are summed only each second counts."""
    is_summed = optimizer == 'multi_steps_outside'
    pruner = StrategyPruning(gradual_strategy([1, 2, 3], 0.25), 2 if is_summed else 4)
    tx = tables.OPTIMIZERS[optimizer].wrap(pruner)
    params, _ = trained(tx, _START, make_step(tx))
    sparsity = jaxpruner.summarize_sparsity(params)
    assert sparsity['first/kernel'] == 0.75
    assert sparsity['second/kernel'] == (0.75 if is_summed else 0.0)


def test_seeds_under_vmap():
    starts = [front_ends.make('dict', seed)[0] for seed in range(2)]
    strategy = STRATEGIES['mixed'](starts[0])
    tx = StrategyPruning(strategy, STEPS_PER_EPOCH).wrap_optax(optax.adam(1e-2))
    step = make_step(tx)
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    states = jax.vmap(tx.init)(together)
    for batch in training.batches():
        together, states = jax.vmap(step, in_axes=(0, 0, None))(together, states, batch)
    for seed, start in enumerate(starts):
        alone = trained(tx, start, step)[1].masks
        training.assert_same(jax.tree.map(lambda leaf, i=seed: leaf[i], states.masks), alone)


def test_a_gradual_strategy_is_compiled_once_and_runs_only_when_due():
    """Each pruned leaf has one selection, whatever the number of entries, and all of them stand inside a loop."""

    def loops(entries):
        strategy = gradual_strategy(range(1, entries + 1), 0.1)
        tx = StrategyPruning(strategy, 2).wrap_optax(optax.adam(1e-2))
        lowered = make_step(tx).lower(_START, tx.init(_START), training.batches()[0])
        return compiling.as_written(lowered).as_text()

    few, many = loops(2), loops(9)
    assert few.count(' while(') == many.count(' while(')
    outside = [i for i in hlo.reached(many, follow_loops=False) if i.opcode == 'while']
    assert len(outside) == 1


def test_the_target_is_what_the_last_entry_gives():
    last = {'method': 'str_local', 'prune_rate_pattern': {'second-kernel': '1:4'}}
    pruner = StrategyPruning(STRATEGIES['mixed'](_START) | {3: last}, 10)
    assert pruner.get_target_sparsities(_START) == {
        'first': {'bias': None, 'kernel': 0.5},
        'second': {'bias': None, 'kernel': 0.75},
    }
    plan = pruner.plan(_START)
    assert [plan[name].target for name in ('first/kernel', 'second/kernel')] == [0.5, 0.75]
    assert (plan['second/kernel'].kept, plan.kept) == (12, 96 + 12 + 12 + 4)
    assert plan['first/bias'].why_dense == 'no entry of the strategy means it'
    assert StrategyPruning(STRATEGIES['global'](_START), 10).plan(_START).kept is None
    metrics = jaxpruner.sparsity_metrics(pruner.wrap_optax(optax.sgd(0.1)).init(_START))
    assert float(metrics['first/kernel']) == 0.0
    assert float(metrics['_target_sparsity']) == pytest.approx((96 + 36) / (192 + 48))


def test_all_entries_at_once_and_none():
    pruned, masks = StrategyPruning(STRATEGIES['mixed'](_START), 10).instant_sparsify(_START)
    kept = [int(mask.sum()) for mask in jax.tree.leaves(masks)]
    assert sum(kept) == 240 * 0.25
    assert [int((pruned[name]['kernel'] != 0).sum()) for name in ('first', 'second')] == kept
    dense = StrategyPruning({}, 10)
    assert dense.instant_sparsify(_START)[1]['first']['kernel'] is None
    tx, inner = dense.wrap_optax(optax.sgd(0.1)), optax.sgd(0.1)
    ours, theirs = (
        trained(tx, _START, make_step(tx))[0],
        trained(inner, _START, make_step(inner))[0],
    )
    np.testing.assert_allclose(ours['first']['kernel'], theirs['first']['kernel'], rtol=1e-6)


HALF = {1: unstructured(0.5)}
REFUSED = [
    (lambda: StrategyPruning(HALF, 1, prune_axis='0'), TypeError, r"prune_axis .* got '0'"),
    (lambda: StrategyPruning({3 * 10**9: HALF[1]}, 1), ValueError, r'must be at most 2147483647'),
    (lambda: StrategyPruning({0: HALF[1]}, 10), ValueError, r'epoch 0, .* pass first_epoch=0'),
    (lambda: StrategyPruning(HALF, 0), ValueError, r'steps_per_epoch must be at least 1, got 0'),
    (lambda: StrategyPruning(HALF, 1.5), TypeError, r'whole number of steps, got 1.5'),
    (lambda: StrategyPruning(HALF, 1, first_epoch=-1), ValueError, r'first_epoch .* got -1'),
    (lambda: StrategyPruning(HALF, 1, sparsity_type='2:4'), TypeError, r"'sparsity_type'"),
    (lambda: StrategyPruning({1: unstructured(7)}, 1), ValueError, r'prune_strategy\[1\]: .* in'),
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
