"""What each algorithm does that the others do not."""

import collections
import dataclasses
import itertools

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import compiling
from jaxpruner import sparsity_distributions, sparsity_schedules

PARAMS = {
    'a': jax.random.normal(jax.random.key(0), (16, 8)),
    'b': jax.random.normal(jax.random.key(1), (8, 8)) * 0.01,
}
GRADS = jax.tree.map(lambda leaf: leaf[::-1], PARAMS)


def half(params):
    return sparsity_distributions.uniform(params, 0.5)


def periodic(freq=1, start=0, end=None):
    return sparsity_schedules.PeriodicSchedule(freq, start, end)


def states(updater, steps, tx=None, params=PARAMS, grads=GRADS):
    """The parameters and states after each step."""
    tx = updater.wrap_optax(tx or optax.sgd(0.01, momentum=0.9))
    state = tx.init(params)
    params = updater.post_gradient_update(params, state)
    update = jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


ONE_SHOT = {
    'magnitude': lambda p, g: np.abs(p),
    'saliency': lambda p, g: np.abs(p * g),
}


@pytest.mark.parametrize('name', ONE_SHOT)
def test_one_shot_scores(name):
    updater = jaxpruner.create_updater_from_config({'algorithm': name, 'sparsity': 0.5})
    pruned, masks = updater.instant_sparsify(PARAMS, GRADS)
    for leaf in PARAMS:
        scores = ONE_SHOT[name](np.asarray(PARAMS[leaf]), np.asarray(GRADS[leaf]))
        np.testing.assert_array_equal(masks[leaf], scores > np.median(scores))
        np.testing.assert_array_equal(pruned[leaf], PARAMS[leaf] * masks[leaf])


def test_random_masks_are_nested_and_depend_on_the_seed():
    schedule = sparsity_schedules.PolynomialSchedule(1, 0, 6)
    masks = [
        state.masks['a']
        for _, state in states(jaxpruner.RandomPruning(schedule, sparsity_distribution_fn=half), 6)
    ]
    for earlier, later in itertools.pairwise(masks):
        assert not ((later == 1) & (earlier == 0)).any()
    other = jaxpruner.RandomPruning(
        sparsity_distribution_fn=half, rng_seed=jax.random.key(1)
    ).instant_sparsify(PARAMS)[1]
    assert not np.array_equal(
        other['a'],
        jaxpruner.RandomPruning(sparsity_distribution_fn=half).instant_sparsify(PARAMS)[1]['a'],
    )


def test_global_ranking_without_normalisation_empties_small_layers():
    settings = {'sparsity_distribution_fn': half}
    plain = jaxpruner.GlobalMagnitudePruning(**settings, normalize_scores=False).instant_sparsify(
        PARAMS
    )[1]
    normal = jaxpruner.GlobalMagnitudePruning(**settings).instant_sparsify(PARAMS)[1]
    for masks in (plain, normal):
        assert sum(int(mask.sum()) for mask in masks.values()) == 96
    assert int(plain['b'].sum()) < 5 < int(normal['b'].sum())
    flat = {
        leaf: np.abs(np.asarray(PARAMS[leaf])) / (np.linalg.norm(PARAMS[leaf]) + 1e-8)
        for leaf in PARAMS
    }
    threshold = np.sort(np.concatenate([scores.ravel() for scores in flat.values()]))[-96]
    for leaf in PARAMS:
        np.testing.assert_array_equal(normal[leaf], flat[leaf] >= threshold)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason='older XLA writes squares down before it adds them'
)
def test_normalised_ranking_writes_no_copy_of_the_scores():
    scores, targets = (
        {'a': jnp.ones((1000, 300)), 'b': jnp.ones((3, 3, 100, 100))},
        {'a': 0.5, 'b': 0.5},
    )
    lowered = jax.jit(jaxpruner.GlobalMagnitudePruning().create_masks).lower(scores, targets)
    assert compiling.as_written(lowered).memory_analysis().temp_size_in_bytes < 0.2 * (
        300_000 + 90_000
    )


def test_global_leaves_keep_what_their_own_targets_sum_to():
    updater = jaxpruner.GlobalMagnitudePruning(
        sparsity_distribution_fn=lambda params: {'a': 0.75, 'b': 0.25}
    )
    masks = updater.instant_sparsify(PARAMS)[1]
    assert sum(int(mask.sum()) for mask in masks.values()) == 32 + 48
    dense = jaxpruner.GlobalMagnitudePruning(
        sparsity_distribution_fn=lambda params: {'a': None, 'b': None}
    )
    with pytest.warns(UserWarning, match='prunes no leaf of 2'):
        assert dense.instant_sparsify(PARAMS)[1] == {'a': None, 'b': None}


def test_straight_through_weights_stay_dense_and_gradients_pass():
    updater = jaxpruner.SteMagnitudePruning(sparsity_distribution_fn=half)
    *_, (params, state) = states(updater, 3)
    assert jaxpruner.summarize_sparsity(params)['_total_sparsity'] == 0
    forward = updater.pre_forward_update(params, state)
    assert jaxpruner.summarize_sparsity(forward)['_total_sparsity'] == 0.5
    inside = jax.grad(
        lambda p: sum(
            jnp.sum(leaf**2) for leaf in jax.tree.leaves(updater.pre_forward_update(p, state))
        )
    )
    np.testing.assert_allclose(inside(params)['a'], 2 * forward['a'])
    tangent = jax.jvp(lambda p: updater.pre_forward_update(p, state), (params,), (GRADS,))[1]
    np.testing.assert_array_equal(tangent['a'], GRADS['a'])


def test_straight_through_at_random_selects_anew_in_each_step():
    updater = jaxpruner.SteRandomPruning(sparsity_distribution_fn=half)
    forwards = [
        np.asarray(updater.pre_forward_update(params, state)['a']) != 0
        for params, state in states(updater, 2)
    ]
    assert not np.array_equal(*forwards)


@pytest.mark.parametrize('algorithm', [jaxpruner.StaticRandomSparse, jaxpruner.SET, jaxpruner.RigL])
def test_sparse_training_starts_sparse(algorithm):
    updater = algorithm(periodic(3, 3), sparsity_distribution_fn=half)
    masks = []
    for params, state in states(updater, 7):
        masks.append(np.asarray(state.masks['a']))
        assert masks[-1].sum() == 64
        assert not np.asarray(params['a'])[masks[-1] == 0].any()
    changed = [not np.array_equal(*pair) for pair in itertools.pairwise(masks)]
    assert any(changed) == (algorithm is not jaxpruner.StaticRandomSparse)
    with pytest.raises(
        RuntimeError, match='instant_sparsify is not supported in sparse training methods'
    ):
        updater.instant_sparsify(PARAMS)


def test_regrown_weights_start_at_zero_with_zeroed_moments():
    updater = jaxpruner.RigL(
        periodic(3, 3), sparsity_distribution_fn=half, drop_fraction_fn=lambda step: 0.3
    )
    (*_, (before, old), (after, new)) = states(updater, 4)  # the fourth step updates masks
    regrown = (np.asarray(new.masks['a']) == 1) & (np.asarray(old.masks['a']) == 0)
    kept = (np.asarray(new.masks['a']) == 1) & (np.asarray(old.masks['a']) == 1)
    assert 0 < regrown.sum() <= round(64 * 0.3)  # some that were dropped are grown at once
    assert int(new.masks['a'].sum()) == 64
    np.testing.assert_array_equal(np.asarray(after['a'])[regrown], 0)
    np.testing.assert_array_equal(np.asarray(new.inner_state[0].trace['a'])[regrown], 0)
    # Kept weights are not trained in this step.
    np.testing.assert_array_equal(np.asarray(after['a'])[kept], np.asarray(before['a'])[kept])


@pytest.mark.parametrize('container', [collections.OrderedDict, flax.core.freeze])
def test_gradients_may_come_in_another_container(container):
    updater = jaxpruner.RigL(sparsity_distribution_fn=half)
    state = updater.init_state(PARAMS)
    expected, got = (
        updater.update_state(state, PARAMS, grads).masks for grads in (GRADS, container(GRADS))
    )
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize('sparsity_type', [jaxpruner.Block((4, 4)), jaxpruner.Channel()], ids=str)
def test_rigl_replaces_whole_groups(sparsity_type):
    updater = jaxpruner.RigL(
        periodic(2, 2),
        sparsity_distribution_fn=half,
        sparsity_type=sparsity_type,
        drop_fraction_fn=lambda step: 0.5,
    )
    masks = [np.asarray(state.masks['a']) for _, state in states(updater, 3)]
    assert not np.array_equal(masks[0], masks[-1])
    for mask in masks:
        assert mask.sum() == 64
        groups = (
            mask.reshape(4, 4, 2, 4).sum((1, 3))
            if isinstance(sparsity_type, jaxpruner.Block)
            else mask.sum(0)
        )
        assert set(groups.ravel().tolist()) == {0, 16}


def test_acdc_alternates_and_ends_sparse():
    updater = jaxpruner.ACDC(periodic(2, 2, 8), sparsity_distribution_fn=half)
    sparsities, momenta = [], []
    for _, state in states(updater, 12):
        sparsities.append(float(jaxpruner.sparsity_metrics(state)['a']))
        momenta.append(float(jnp.abs(state.inner_state[0].trace['a']).sum()))
    assert sparsities == [0.0] * 2 + [0.5] * 2 + [0.0] * 2 + [0.5] * 6
    # Where the dense phase begins (step 4) the momentum is that of one gradient alone.
    assert momenta[4] == pytest.approx(float(jnp.abs(GRADS['a']).sum()), rel=1e-5)
    kept = dataclasses.replace(updater, reset_optimizer=False)
    assert [float(jnp.abs(s.inner_state[0].trace['a']).sum()) for _, s in states(kept, 5)][
        4
    ] > momenta[4] * 1.5


def test_adam_fisher_ranks_by_weight_and_second_moment():
    updater = jaxpruner.AdamFisherPruning(periodic(1, 1), sparsity_distribution_fn=half)
    (before, old), (_, new) = states(updater, 2, optax.adam(0.01))
    scores = np.asarray(before['a']) ** 2 * np.asarray(old.inner_state[0].nu['a'])
    np.testing.assert_array_equal(new.masks['a'], scores > np.median(scores))


def test_iterative_nm_removes_one_more_of_each_group_at_a_time():
    schedule = sparsity_schedules.PolynomialSchedule(1, 0, 10, power=1)
    updater = jaxpruner.IterativeNMPruning(schedule, sparsity_type='1:4')
    kept = [
        set(np.asarray(state.masks['a']).reshape(-1, 4).sum(1).tolist())
        for _, state in states(updater, 12)
    ]
    assert kept[0] == {4}
    assert kept[-1] == {1}
    assert [next(iter(numbers)) for numbers in kept] == sorted(
        (max(numbers) for numbers in kept), reverse=True
    )
    one_shot = jaxpruner.IterativeNMPruning(sparsity_distribution_fn=half).instant_sparsify(PARAMS)[
        1
    ]
    assert set(one_shot['a'].reshape(-1, 4).sum(1).tolist()) == {2}


BAD = [
    (
        lambda: jaxpruner.SaliencyPruning(sparsity_distribution_fn=half).instant_sparsify(PARAMS),
        ValueError,
        'saliency scores need gradients',
    ),
    (
        lambda: jaxpruner.GlobalSaliencyPruning(sparsity_type='block_2,2'),
        ValueError,
        'GlobalSaliencyPruning ranks single weights across leaves, so it needs Unstructured',
    ),
    (
        lambda: jaxpruner.GlobalMagnitudePruning(sparsity_type={'*': '2:4'}).instant_sparsify(
            PARAMS
        ),
        ValueError,
        'needs Unstructured',
    ),
    (
        lambda: jaxpruner.GlobalMagnitudePruning(stacked='*'),
        ValueError,
        'topk_fn and stacked have no meaning',
    ),
    (
        lambda: jaxpruner.SET(sparsity_type='2:4'),
        ValueError,
        'SET replaces weights anywhere in a leaf, which N:M groups do not allow',
    ),
    (
        lambda: jaxpruner.RigL(sparsity_type={'a': '2:4'}).init_state(PARAMS),
        ValueError,
        'RigL replaces weights anywhere',
    ),
    (
        lambda: jaxpruner.RigL(drop_fraction_fn=0.3),
        TypeError,
        'drop_fraction_fn must be a function of the step.* got 0.3',
    ),
    (
        lambda: jaxpruner.RigL(drop_fraction_fn=lambda step: 1.3),
        ValueError,
        r'drop_fraction_fn\(0\) must lie in \[0, 1\].*got 1.3',
    ),
    (
        lambda: jaxpruner.RigL().wrap_optax(optax.lbfgs()).init(PARAMS),
        ValueError,
        'cannot be zeroed in this optimizer',
    ),
    (
        lambda: jaxpruner.ACDC().wrap_optax(optax.lbfgs()).init(PARAMS),
        ValueError,
        'cannot be zeroed in this optimizer',
    ),
    (
        lambda: jaxpruner.ACDC(sparsity_schedules.StepsSchedule((3,))),
        TypeError,
        'ACDC needs a PeriodicSchedule',
    ),
    (
        lambda: (
            jaxpruner.AdamFisherPruning(sparsity_distribution_fn=half)
            .wrap_optax(optax.sgd(0.1))
            .init(PARAMS)
        ),
        ValueError,
        r'keeps none \(`nu`\) of shape \(16, 8\) for a; use adam',
    ),
    (
        lambda: jaxpruner.AdamFisherPruning(sparsity_distribution_fn=half).instant_sparsify(PARAMS),
        ValueError,
        "adam_fisher scores by Adam's state, .* wrap_optax",
    ),
    (
        lambda: jaxpruner.IterativeNMPruning(sparsity_type='unstructured'),
        ValueError,
        'so it needs NByM, got Unstructured',
    ),
    (
        lambda: jaxpruner.IterativeNMPruning(sparsity_type={'a': '2:4'}).init_state(PARAMS),
        ValueError,
        'so it needs NByM',
    ),
    (
        lambda: jaxpruner.IterativeNMPruning(topk_fn=lambda s, p: s),
        ValueError,
        'topk_fn has no meaning',
    ),
    (lambda: jaxpruner.FixedMask(None), ValueError, 'FixedMask needs masks'),
    (lambda: jaxpruner.RigL(topk_fn=lambda s, p: s), ValueError, 'topk_fn has no meaning'),
    (
        lambda: jaxpruner.MagnitudePruning().wrap_optax(optax.adam),
        TypeError,
        'wrap_optax takes an optax transformation',
    ),
    (
        lambda: jaxpruner.MagnitudePruning().wrap_optax(optax.sgd(0.1)).update(GRADS, (), PARAMS),
        TypeError,
        'the state of a wrapped optimizer is a SparseState, got tuple',
    ),
    (
        lambda: jaxpruner.FixedMask(masks={'a': jnp.ones(3, jnp.uint8), 'b': None}).init_state(
            PARAMS
        ),
        ValueError,
        r'a mask of shape \(3,\) does not fit',
    ),
]


@pytest.mark.parametrize(('make', 'error', 'message'), BAD)
def test_bad_settings(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_no_weight_is_lost_to_nan_gradients():
    updater = jaxpruner.RigL(
        periodic(1), sparsity_distribution_fn=half, drop_fraction_fn=lambda step: 0.3
    )
    for share in (slice(None), slice(0, 12)):
        grads = {leaf: grad.at[share].set(jnp.nan) for leaf, grad in GRADS.items()}
        for _, state in states(updater, 3, optax.set_to_zero(), grads=grads):
            assert int(state.masks['a'].sum()) == 64


def test_regrown_weights_start_at_zero_even_where_the_optimizer_runs_and_no_one_masked_the_start():
    updater = jaxpruner.RigL(periodic(1), sparsity_distribution_fn=half, skip_gradients=False)
    tx = updater.wrap_optax(optax.sgd(0.1))
    state = tx.init(PARAMS)
    updates, new = jax.jit(tx.update)(GRADS, state, PARAMS)
    params = optax.apply_updates(PARAMS, updates)
    regrown = (np.asarray(new.masks['a']) == 1) & (np.asarray(state.masks['a']) == 0)
    assert regrown.any()
    np.testing.assert_array_equal(np.asarray(params['a'])[regrown], 0)


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_one_number_that_is_not_finite_does_not_empty_a_leaf_in_global_ranking(bad):
    params = {'a': jnp.arange(1.0, 9).at[0].set(bad), 'b': jnp.arange(1.0, 9)}
    updater = jaxpruner.GlobalMagnitudePruning(
        sparsity_distribution_fn=lambda p: {'a': 0.5, 'b': 0.5}
    )
    masks = updater.instant_sparsify(params)[1]
    assert 3 <= int(masks['a'].sum()) <= 5


def test_extra_arguments_reach_scores_below_every_update():
    @dataclasses.dataclass
    class Weighted(jaxpruner.ACDC):
        def calculate_scores(self, params, sparse_state=None, grads=None, importance=None):
            return importance

    tx = Weighted(periodic(), sparsity_distribution_fn=half).wrap_optax(optax.sgd(0.1))
    # An argument that is called like one of ours reaches the optimizer alone.
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, importance=GRADS, grads=3)
    np.testing.assert_array_equal(state.masks['a'], GRADS['a'] > jnp.median(GRADS['a']))


@pytest.mark.parametrize('packed', [False, True])
def test_leaves_without_floats_are_left_alone(packed):
    params = PARAMS | {'steps': jnp.arange(4), 'key': jax.random.key(0)}
    for name in ('magnitude', 'random', 'global_magnitude'):
        updater = jaxpruner.create_updater_from_config(
            {'algorithm': name, 'sparsity': 0.5, 'is_packed': packed}
        )
        pruned, masks = updater.instant_sparsify(params)
        assert masks['steps'] is masks['key'] is None
        assert pruned['steps'] is params['steps']
