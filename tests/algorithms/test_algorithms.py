"""What each algorithm does that the others do not, beside NumPy."""

import dataclasses
import itertools

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import steps
from jaxpruner import sparsity_schedules

PARAMS = {
    'a': jax.random.normal(jax.random.key(0), (16, 8)),
    'b': jax.random.normal(jax.random.key(1), (8, 8)) * 0.01,
}
GRADS = jax.tree.map(lambda leaf: leaf[::-1], PARAMS)


def make(cls, schedule=None, **settings):
    schedule = schedule or sparsity_schedules.NoUpdateSchedule()
    return getattr(jaxpruner, cls)(schedule, **({'sparsity': 0.5} | settings))


def every(freq=1, start=0, end=None):
    return sparsity_schedules.PeriodicSchedule(freq, start, end)


def states(pruner, number, tx=None, params=PARAMS, grads=GRADS):
    """Parameters and state after each step."""
    return steps.history(pruner, number, params, grads, tx)[1:]


def test_random_masks_are_nested_and_depend_on_the_seed():
    schedule = sparsity_schedules.PolynomialSchedule(1, 0, 6)
    masks = [state.masks['a'] for _, state in states(make('RandomPruning', schedule), 6)]
    for earlier, later in itertools.pairwise(masks):
        assert not ((later == 1) & (earlier == 0)).any()
    one, other = (
        make('RandomPruning', rng_seed=seed).instant_sparsify(PARAMS)[1]['a'] for seed in (1, 2)
    )
    assert not np.array_equal(one, other)


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_one_number_that_is_not_finite_does_not_empty_a_leaf_in_global_ranking(bad):
    params = {'a': jnp.arange(1.0, 9).at[0].set(bad)[None], 'b': jnp.arange(1.0, 9)[None]}
    masks = make('GlobalMagnitudePruning').instant_sparsify(params)[1]
    assert 3 <= int(masks['a'].sum()) <= 5


def test_global_leaves_keep_what_their_own_targets_sum_to():
    def targets(params):
        return {'a': 0.75, 'b': 0.25}

    pruner = make('GlobalMagnitudePruning', sparsity=None, sparsity_distribution_fn=targets)
    masks = pruner.instant_sparsify(PARAMS)[1]
    assert sum(int(mask.sum()) for mask in masks.values()) == 32 + 48


@pytest.mark.parametrize('cls', ['SteMagnitudePruning', 'SteRandomPruning', 'MovementPruning'])
def test_straight_through_gradients_pass(cls):
    pruner = make(cls, every(), sparsity_type='block_4,4')
    (_, state), (params, _) = states(pruner, 2)
    forward = pruner.pre_forward_update(params, state)

    def total(params):
        return sum(jnp.sum(p**2) for p in pruner.pre_forward_update(params, state).values())

    np.testing.assert_allclose(jax.grad(total)(params)['a'], 2 * forward['a'])
    tangent = jax.jvp(lambda p: pruner.pre_forward_update(p, state), (params,), (GRADS,))[1]
    np.testing.assert_array_equal(tangent['a'], GRADS['a'])
    # The masks of an update are those of its forward pass.
    if cls != 'MovementPruning':  # whose scores are those after the step
        tx = pruner.wrap_optax(optax.sgd(0.1))
        first = tx.init(params)
        mask = tx.update(GRADS, first, params)[1].masks['a']
        np.testing.assert_array_equal(mask != 0, pruner.pre_forward_update(params, first)['a'] != 0)


def test_a_ranking_of_ones_own_is_that_of_the_forward_pass():
    class Rows(jaxpruner.SteMagnitudePruning):
        def create_masks(self, scores, sparsities):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.uint8).at[:4].set(1), scores)

    pruner = Rows(every(), sparsity=0.9)
    params, state = states(pruner, 1)[0]
    assert int(state.masks['a'].sum()) == 4 * 8
    assert int((pruner.pre_forward_update(params, state)['a'] != 0).sum()) == 4 * 8


@pytest.mark.parametrize('stacked', ['', 'a'])
def test_movement_beside_numpy(stacked):
    """Each forward pass uses the largest sums of minus weight times gradient; pruned weights wait."""

    def largest_half(scores):
        rows = scores if stacked else scores.reshape(1, -1)
        mask = np.zeros(rows.shape)
        order = np.argsort(-rows, axis=1, kind='stable')[:, : rows.shape[1] // 2]
        np.put_along_axis(mask, order, 1, axis=1)
        return mask.reshape(scores.shape)

    shape = (16, 2, 4) if stacked else (16, 8)
    params = {'a': PARAMS['a'].reshape(shape)}
    pruner = make('MovementPruning', every(), stacked=stacked or ())
    tx = pruner.wrap_optax(optax.sgd(0.1))
    state, update = tx.init(params), jax.jit(tx.update)
    weights, scores = np.asarray(PARAMS['a'], np.float64), np.zeros((16, 8))
    for seed in range(5):
        forward = pruner.pre_forward_update(params, state)['a'].reshape(16, 8)
        np.testing.assert_allclose(forward, weights * largest_half(scores), rtol=1e-5)
        grads = {'a': jax.random.normal(jax.random.key(seed), shape)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        gradient = np.asarray(grads['a'], np.float64).reshape(16, 8)
        scores = scores - weights * gradient
        weights = weights - 0.1 * gradient * largest_half(scores)
        np.testing.assert_allclose(params['a'].reshape(16, 8), weights, rtol=1e-5)


@pytest.mark.parametrize('skips', [False, True])
def test_regrown_weights_start_at_zero_where_no_one_masked_the_start(skips):
    pruner = make('RigL', every(), skip_gradients=skips)
    tx = pruner.wrap_optax(optax.sgd(0.1, momentum=0.9))
    state = tx.init(PARAMS)
    updates, new = jax.jit(tx.update)(GRADS, state, PARAMS)
    before, after = (np.asarray(each.masks['a']) for each in (state, new))
    assert (after > before).any()
    assert not np.asarray(optax.apply_updates(PARAMS, updates)['a'])[after > before].any()
    # The optimizer sees no gradients of pruned weights.
    trace = np.asarray(new.inner_state[0].trace['a'])
    np.testing.assert_array_equal(trace, 0 * trace if skips else GRADS['a'] * after)


def test_gradients_may_come_in_another_container():
    pruner = make('RigL')
    state = pruner.init_state(PARAMS)
    expected = pruner.update_state(state, PARAMS, GRADS).masks
    got = pruner.update_state(state, PARAMS, flax.core.freeze(GRADS)).masks
    steps.assert_equal(dict(got), expected)


# AC/DC: periods of a schedule, or counts of steps; and the steps after which masks prune.


def counts(*values):
    names = 'init_dense_steps_end final_sparse_steps_start cycle_sparse_steps cycle_dense_steps'
    return dict(zip(names.split(), values, strict=True))


PHASES = [
    ({'scheduler': every(2, 2, 8)}, [2, 3, *range(6, 16)]),
    (counts(3, 12, 2, 2), [3, 4, 7, 8, 11, 12, 13, 14, 15]),
    (counts(2, 11, 3, 1), [2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15]),  # lengths may differ
    (counts(0, 4, 1, 2), [0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]),
    (counts(5, 5, 0, 0), list(range(5, 16))),
    (counts(4.0, 1e1, 3, 3), [4, 5, 6, *range(10, 16)]),
]


@pytest.mark.parametrize(('settings', 'expected'), PHASES)
def test_acdc_alternates_and_ends_sparse(settings, expected):
    pruner = jaxpruner.ACDC(**settings, sparsity=0.5)
    sparsities = [float(jaxpruner.sparsity_metrics(state)['a']) for _, state in states(pruner, 16)]
    assert sparsities == [0.5 * (step in expected) for step in range(16)]


RESETS = [
    ({'scheduler': every(2, 2, 8)}, True),
    ({'scheduler': every(2, 2, 8), 'reset_optimizer': False}, False),
    (counts(2, 12, 2, 2), False),
    (counts(2, 12, 2, 2) | {'reset_optimizer': True}, True),
]


@pytest.mark.parametrize(('settings', 'resets'), RESETS)
def test_acdc_zeroes_moments_where_a_dense_phase_begins(settings, resets):
    pruner = jaxpruner.ACDC(**settings, sparsity=0.5)
    *_, (_, state) = states(pruner, 5)  # it begins at step 4
    momentum = float(jnp.abs(state.inner_state[0].trace['a']).sum())
    of_one_gradient = float(jnp.abs(GRADS['a']).sum())
    assert (momentum == pytest.approx(of_one_gradient, rel=1e-5)) == resets
    assert resets or momentum > 1.5 * of_one_gradient


BAD_COUNTS = [
    (counts(-1, 4, 2, 2), 'init_dense_steps_end.*-1'),
    (counts(9, 4, 2, 2), '4.*9'),
    (counts(3, 9, 0, 2), 'cycle_sparse_steps'),
    ({**counts(3, 9, 2, 2), 'scheduler': every(2)}, 'scheduler'),
]


@pytest.mark.parametrize(('settings', 'words'), BAD_COUNTS)
def test_bad_counts(settings, words):
    with pytest.raises(ValueError, match=words):
        jaxpruner.ACDC(**settings)


def test_counts_can_be_replaced():
    longer = dataclasses.replace(jaxpruner.ACDC(**counts(3, 12, 2, 2)), cycle_sparse_steps=3)
    due = [step for step in range(15) if longer.scheduler.is_mask_update_iter(step)]
    assert due == [3, 6, 8, 11, 12]


def test_adam_fisher_ranks_by_weight_and_second_moment():
    pruner = make('AdamFisherPruning', every(1, 1))
    (before, old), (_, new) = states(pruner, 2, optax.chain(optax.clip(1e9), optax.adam(0.01)))
    scores = np.asarray(before['a']) ** 2 * np.asarray(old.inner_state[1][0].nu['a'])
    np.testing.assert_array_equal(new.masks['a'], scores > np.median(scores))


@pytest.mark.parametrize('resets', [False, True])
def test_reset_adam_zeroes_the_moments_of_all_weights_after_a_mask_update(resets):
    once = sparsity_schedules.OneShotSchedule(2)
    pruner = make('AdamFisherPruning', once, reset_adam=resets)
    params = PARAMS | {'bias': jnp.ones(8)}
    *_, (_, state) = states(pruner, 3, optax.adam(0.01), params, params)
    moments = state.inner_state[0]
    assert int(moments.count) == 3
    for leaf, grad in params.items():  # dense leaves, too
        assert np.allclose(moments.mu[leaf], 0.1 * grad, rtol=1e-5) == resets


def test_iterative_nm_removes_one_more_of_each_group_at_a_time():
    schedule = sparsity_schedules.PolynomialSchedule(1, 0, 10, power=1)
    pruner = jaxpruner.IterativeNMPruning(schedule, sparsity_type='1:4')
    kept = [set(state.masks['a'].reshape(-1, 4).sum(1).tolist()) for _, state in states(pruner, 12)]
    assert {len(numbers) for numbers in kept} == {1}
    numbers = [number for (number,) in kept]
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[0], numbers[-1], len({*numbers})) == (4, 1, 4)
    masks = jaxpruner.IterativeNMPruning().instant_sparsify(PARAMS)[1]
    assert set(masks['a'].reshape(-1, 4).sum(1).tolist()) == {2}


# Masks that are given.


@pytest.mark.parametrize('given', [jnp.packbits, lambda mask: mask == 1])
def test_masks_of_a_pruned_checkpoint_are_kept(given):
    pruned, _ = make('MagnitudePruning').instant_sparsify(PARAMS | {'bias': jnp.zeros(6)})
    masks = jaxpruner.masks_from_zeros(pruned)
    assert masks['bias'] is None
    pruner = jaxpruner.FixedMask(jax.tree.map(given, masks), use_packed_masks=True)
    steps.assert_equal(pruner.instant_sparsify(pruned), (pruned, masks))
    (params, state) = steps.history(pruner, 3, pruned, tx=optax.adam(0.1))[-1]
    assert float(state.target_sparsities['a']) == 0.5
    for name in PARAMS:
        np.testing.assert_array_equal(params[name] != 0, pruned[name] != 0)
        assert not np.array_equal(params[name], pruned[name])


def test_what_was_not_pruned_gets_no_mask():
    params = {'dense': PARAMS['a'], 'sparse': PARAMS['a'].at[0].set(0), 'bias': jnp.zeros(3)}
    masks = jaxpruner.masks_from_zeros(params)
    assert masks['dense'] is masks['bias'] is None
    assert int(masks['sparse'].sum()) == 120
    chosen = jaxpruner.masks_from_zeros(params, filter_fn=lambda path, leaf: path == ('dense',))
    assert jax.tree.leaves(chosen) == []
    with pytest.warns(UserWarning, match='out'):
        assert jaxpruner.masks_from_zeros({'out': jnp.zeros((3, 3))}) == {'out': None}
