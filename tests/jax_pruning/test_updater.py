"""A strategy inside an optimizer does what the loop over epochs does, under every optimizer and front-end."""

import dataclasses
import functools
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
from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner.jax_pruning import kernels

STEPS_PER_EPOCH, EPOCHS = 4, 3


def unstructured(density, scope='unified_local'):
    return {'method': f'unstr_{scope}', 'prune_rate_pattern': density}


def first_kernel(params):
    paths, leaves, _ = tree.flatten_with_paths(params)
    return next(
        '-'.join(path)
        for path, leaf in zip(paths, leaves, strict=True)
        if kernels.is_kernel(path, leaf)
    )


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
CASES = [
    (*case, number % 2 == 0)
    for number, case in enumerate(
        zip(
            OPTIMIZERS,
            itertools.cycle(front_ends.FRONT_ENDS),
            itertools.cycle(STRATEGIES),
            strict=False,
        )
    )
]


def loss_of(apply):
    def loss(params, batch):
        return jnp.mean((apply(params, batch[0]) - batch[1]) ** 2)

    return loss


def make_step(tx, apply):
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_of(apply))(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step)


def loop_over_epochs(tx, strategy, params, apply, packed, first_epoch=1):
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

    updater = StrategyPruning(strategy, STEPS_PER_EPOCH, use_packed_masks=packed)
    tx = wrap(updater)
    step, ours, opt_state = make_step(tx, apply), start, tx.init(start)
    for batch in training.batches():
        ours, opt_state = step(ours, opt_state, batch)
        assert_zero_where_pruned(ours, opt_state)
    masks = jaxpruner.sparse_states(opt_state)[0].masks
    assert step._cache_size() == 1
    treedef = jax.tree.structure(start)
    for mine, theirs in zip(
        tree.leaves_like(treedef, masks), tree.leaves_like(treedef, mask_key), strict=True
    ):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('first_epoch', [0, 1])
@pytest.mark.parametrize('strategy', ['gradual', 'mixed'])
def test_bit_by_bit_with_bfloat16(strategy, first_epoch):
    """Where rounding hides in which order XLA computes, everything is equal: masks, parameters, and moments."""
    start, apply = front_ends.make('dict', seed=0)
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), start)
    entries = PruningStrategy.parse(STRATEGIES[strategy](start)).entries
    moved = PruningStrategy(
        tuple(dataclasses.replace(entry, epoch=entry.epoch - 1 + first_epoch) for entry in entries)
    )
    params, mask_key, inner_state = loop_over_epochs(
        optax.sgd(0.1, 0.9), moved, start, apply, False, first_epoch
    )
    tx = StrategyPruning(moved, STEPS_PER_EPOCH, first_epoch=first_epoch).wrap_optax(
        optax.sgd(0.1, 0.9)
    )
    step, ours, opt_state = make_step(tx, apply), start, tx.init(start)
    for batch in training.batches():
        ours, opt_state = step(ours, opt_state, batch)
    training.assert_same(ours, params)
    training.assert_same(opt_state.inner_state, inner_state)
    training.assert_same(opt_state.masks, mask_key)


def test_sparse_gradients_are_those_of_the_masks_before_the_step():
    start, apply = front_ends.make('dict', seed=0)
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), start)
    # Clipping makes each update depend on all gradients, so that those of pruned weights show.
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    tx = StrategyPruning(
        STRATEGIES['gradual'](start), STEPS_PER_EPOCH, is_sparse_gradients=True
    ).wrap_optax(inner)
    step, ours, opt_state = make_step(tx, apply), start, tx.init(start)
    theirs, inner_state, mask_key = start, inner.init(start), None
    gradient = jax.jit(jax.grad(loss_of(apply)))
    for number, batch in enumerate(training.batches(), 1):
        ours, opt_state = step(ours, opt_state, batch)
        grads, _ = pruning_apply(gradient(theirs, batch), mask_key)
        updates, inner_state = jax.jit(inner.update)(grads, inner_state, theirs)
        theirs, _ = pruning_apply(optax.apply_updates(theirs, updates), mask_key)
        _, mask_key = pruning(
            theirs,
            number // STEPS_PER_EPOCH if number % STEPS_PER_EPOCH == 0 else None,
            mask_key,
            STRATEGIES['gradual'](start),
        )
        theirs, _ = pruning_apply(theirs, mask_key)
    training.assert_same(opt_state.masks, mask_key)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            mine.astype(jnp.float32), other.astype(jnp.float32), rtol=0.02, atol=1e-3
        )


def assert_zero_where_pruned(params, opt_state):
    masks = sparse_state_lib.unpack_masks(jaxpruner.sparse_states(opt_state)[0].masks, params)
    treedef = jax.tree.structure(params)
    for leaf, mask in zip(jax.tree.leaves(params), tree.leaves_like(treedef, masks), strict=True):
        assert mask is None or np.all(np.asarray(leaf)[np.asarray(mask) == 0] == 0)


@pytest.mark.parametrize('optimizer', OUTSIDE)
def test_behind_another_transformation(optimizer):
    """What is masked out is no part of the strategy's model; of gradients that are summed only each second counts."""
    start, apply = front_ends.make('dict', seed=0)
    steps_per_epoch = (
        STEPS_PER_EPOCH // 2 if optimizer == 'multi_steps_outside' else STEPS_PER_EPOCH
    )
    tx = tables.OPTIMIZERS[optimizer].wrap(
        StrategyPruning(gradual_strategy([1, 2, 3], 0.25), steps_per_epoch)
    )
    step, params, opt_state = make_step(tx, apply), start, tx.init(start)
    for batch in training.batches():
        params, opt_state = step(params, opt_state, batch)
    sparsity = jaxpruner.summarize_sparsity(params)
    assert sparsity['first/kernel'] == 0.75
    assert sparsity['second/kernel'] == (0.75 if optimizer == 'multi_steps_outside' else 0.0)


def test_seeds_under_vmap():
    starts = [front_ends.make('dict', seed)[0] for seed in range(2)]
    apply = front_ends.make('dict', 0)[1]
    tx = StrategyPruning(STRATEGIES['mixed'](starts[0]), STEPS_PER_EPOCH).wrap_optax(
        optax.adam(1e-2)
    )
    step = make_step(tx, apply)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    together, states = stacked, jax.vmap(tx.init)(stacked)
    for batch in training.batches():
        together, states = jax.vmap(step, in_axes=(0, 0, None))(together, states, batch)
    for seed, start in enumerate(starts):
        params, opt_state = start, tx.init(start)
        for batch in training.batches():
            params, opt_state = step(params, opt_state, batch)
        training.assert_same(
            jax.tree.map(lambda leaf, seed=seed: leaf[seed], states.masks), opt_state.masks
        )


def test_outside_jit_and_with_an_extra_argument():
    start, _ = front_ends.make('dict', seed=0)
    tx = StrategyPruning(gradual_strategy([1, 2], 0.5), 2).wrap_optax(optax.sgd(0.1))
    state, params = tx.init(start), start
    sparsities = []
    for _ in range(4):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params, value=1.0)
        params = optax.apply_updates(params, updates)
        sparsities.append(jaxpruner.summarize_sparsity(params)['first/kernel'])
    assert sparsities == [0.0, 0.25, 0.25, 0.5]


def test_a_gradual_strategy_is_compiled_once_and_runs_only_when_due():
    """Each pruned leaf has one selection, whatever the number of entries, and all of them stand inside a loop."""
    start, apply = front_ends.make('dict', seed=0)
    batch = training.batches()[0]

    def loops(entries):
        tx = StrategyPruning(gradual_strategy(range(1, entries + 1), 0.1), 2).wrap_optax(
            optax.adam(1e-2)
        )
        step = make_step(tx, apply)
        return compiling.as_written(step.lower(start, tx.init(start), batch)).as_text()

    few, many = loops(2), loops(9)
    assert few.count(' while(') == many.count(' while(')
    outside = [i for i in hlo.reached(many, follow_loops=False) if i.opcode == 'while']
    assert len(outside) == 1


def test_the_target_is_what_the_last_entry_gives():
    start, _ = front_ends.make('dict', seed=0)
    strategy = STRATEGIES['mixed'](start) | {
        3: {'method': 'str_local', 'prune_rate_pattern': {'second-kernel': '1:4'}}
    }
    targets = StrategyPruning(strategy, 10).get_target_sparsities(start)
    assert targets == {
        'first': {'bias': None, 'kernel': 0.5},
        'second': {'bias': None, 'kernel': 0.75},
    }
    plan = StrategyPruning(strategy, 10).plan(start)
    assert [plan[name].target for name in ('first/kernel', 'second/kernel')] == [0.5, 0.75]
    assert plan['second/kernel'].kept == 12 * 4 // 4
    assert plan['first/bias'].why_dense == 'no entry of the strategy means it'
    metrics = jaxpruner.sparsity_metrics(
        StrategyPruning(strategy, 10).wrap_optax(optax.sgd(0.1)).init(start)
    )
    assert float(metrics['first/kernel']) == 0.0
    assert float(metrics['_target_sparsity']) == pytest.approx(
        (0.5 * 16 * 12 + 0.75 * 12 * 4) / (16 * 12 + 12 * 4)
    )


def test_all_entries_at_once():
    start, _ = front_ends.make('dict', seed=0)
    pruned, masks = StrategyPruning(STRATEGIES['mixed'](start), 10).instant_sparsify(start)
    kept = [int(mask.sum()) for mask in jax.tree.leaves(masks)]
    assert sum(kept) == 240 * 0.25
    assert [int((pruned[name]['kernel'] != 0).sum()) for name in ('first', 'second')] == kept
    assert StrategyPruning({}, 10).instant_sparsify(start)[1]['first']['kernel'] is None


def test_a_strategy_without_entries_trains_densely():
    start, apply = front_ends.make('dict', seed=0)
    tx = StrategyPruning({}, 10).wrap_optax(optax.sgd(0.1))
    step, alone = make_step(tx, apply), make_step(optax.sgd(0.1), apply)
    params, _ = step(start, tx.init(start), training.batches()[0])
    expected, _ = alone(start, optax.sgd(0.1).init(start), training.batches()[0])
    np.testing.assert_allclose(params['first']['kernel'], expected['first']['kernel'], rtol=1e-6)


def test_epochs_counted_from_zero():
    strategy = {0: unstructured(0.5), 2: unstructured(0.25)}
    updater = StrategyPruning(
        strategy, 1000 / 100, first_epoch=0
    )  # a whole number of steps, as a division gives it
    steps = [i for i in range(30) if updater.scheduler.is_mask_update_iter(i)]
    assert steps == [9, 29]


HALF = {1: unstructured(0.5)}
REFUSED = [
    (
        lambda: StrategyPruning(HALF, 1, prune_axis='0'),
        TypeError,
        r"prune_axis must be a whole number, .* got '0'",
    ),
    (
        lambda: StrategyPruning({3 * 10**9: unstructured(0.5)}, 1),
        ValueError,
        r'a step must be at most 2147483647',
    ),
    (
        lambda: StrategyPruning({0: unstructured(0.5)}, 10),
        ValueError,
        r'entry for epoch 0, .* pass first_epoch=0',
    ),
    (lambda: StrategyPruning(HALF, 0), ValueError, r'steps_per_epoch must be at least 1, got 0'),
    (
        lambda: StrategyPruning(HALF, 1.5),
        TypeError,
        r'steps_per_epoch must be a whole number of steps, got 1.5',
    ),
    (
        lambda: StrategyPruning(HALF, 1, first_epoch=-1),
        ValueError,
        r'first_epoch must be .* at least 0, got -1',
    ),
    (
        lambda: StrategyPruning(HALF, 1, sparsity_type='2:4'),
        TypeError,
        r"'sparsity_type' is no setting of StrategyPruning",
    ),
    (
        lambda: StrategyPruning({1: unstructured(7)}, 1),
        ValueError,
        r'prune_strategy\[1\]: prune_rate_pattern must lie in',
    ),
    (
        lambda: (
            StrategyPruning({1: unstructured({'x': 0.5})}, 1)
            .wrap_optax(optax.sgd(1.0))
            .init({'kernel': np.ones((2, 2))})
        ),
        ValueError,
        r"prune_strategy\[1\]: 'x' matches no parameter; the nearest are 'kernel'",
    ),
]


@pytest.mark.parametrize(('make', 'error', 'message'), REFUSED)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_partial_groups_warn_in_init():
    tx = StrategyPruning({1: {'method': 'str_global', 'prune_rate_pattern': '2:4'}}, 1).wrap_optax(
        optax.sgd(0.1)
    )
    with pytest.warns(UserWarning, match=r'prune_strategy\[1\]: kernel has length 6 along axis -1'):
        functools.partial(tx.init, {'kernel': jnp.ones((2, 6))})()
