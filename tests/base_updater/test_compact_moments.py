"""Moments of kept weights alone: the same training as with moments of all weights, and what is refused."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.base_updater.compact_moments import CompactMoments
from jaxpruner.core import masking

SHAPES = {'dense': (8,), 'kernel': (12, 8), 'stack': (3, 8, 12)}
STEPS = 9
SCHEDULE = jaxpruner.PeriodicSchedule(update_freq=3, update_start_step=1, update_end_step=8)
ALGORITHMS = {
    'static': functools.partial(jaxpruner.StaticRandomSparse, sparsity=0.75),
    'SET': functools.partial(jaxpruner.SET, SCHEDULE, sparsity=0.75),
    'RigL': functools.partial(jaxpruner.RigL, SCHEDULE, sparsity=0.75),
    'RigL, stacked': functools.partial(jaxpruner.RigL, SCHEDULE, sparsity=0.75, stacked='stack'),
    'RigL, packed': functools.partial(
        jaxpruner.RigL, SCHEDULE, sparsity=0.75, use_packed_masks=True
    ),
    'RigL, no step skipped': functools.partial(
        jaxpruner.RigL, SCHEDULE, sparsity=0.75, skip_gradients=False
    ),
    'RigL, all gradients': functools.partial(
        jaxpruner.RigL, SCHEDULE, sparsity=0.75, is_sparse_gradients=False
    ),
    'RigL, channels': functools.partial(
        jaxpruner.RigL, SCHEDULE, sparsity=0.5, sparsity_type='channel_-1'
    ),
    'static, 2:4': functools.partial(jaxpruner.StaticRandomSparse, sparsity_type='2:4'),
}


def is_kernel(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda leaf: 'a' if leaf.ndim == 2 else 'b', params)


OPTIMIZERS = {
    'sgd': optax.sgd(0.1),
    'sgd, momentum': optax.sgd(0.1, momentum=0.9, nesterov=True),
    'adam': optax.adam(0.1),
    'adamw': optax.adamw(0.1, weight_decay=0.1),
    'nadam': optax.nadam(0.1),
    'amsgrad': optax.amsgrad(0.1),
    'lion': optax.lion(0.1),
    'rmsprop': optax.rmsprop(0.1, momentum=0.9, centered=True),
    'adagrad': optax.adagrad(0.1),
    'clipped': optax.chain(optax.clip_by_global_norm(0.5), optax.clip(0.1), optax.adam(0.1)),
    'scheduled': optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 9)),
    'accumulated': optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    'masked': optax.chain(optax.masked(optax.scale_by_adam(), is_kernel), optax.scale(-0.1)),
    'two': optax.multi_transform({'a': optax.adam(0.1), 'b': optax.sgd(0.1)}, labels),
}
MASKS = {
    'kernel': np.arange(96).reshape(12, 8) % 5 == 2,
    'stack': np.arange(288).reshape(3, 8, 12) % 7 < 2,
    'dense': None,
}
ALGORITHMS['fixed masks'] = functools.partial(jaxpruner.FixedMask, MASKS)
ALGORITHMS['fixed masks, packed'] = functools.partial(
    jaxpruner.FixedMask, MASKS, use_packed_masks=True
)
PAIRS = [(name, 'adam') for name in ALGORITHMS]
PAIRS += [('RigL', name) for name in OPTIMIZERS if name != 'adam']


def params_at(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        name: jax.random.normal(key, SHAPES[name]) for name, key in zip(SHAPES, keys, strict=True)
    }


def train(pruner, optimizer, seed=0, wrapped=lambda tx: tx):
    """The parameters and states after each step, with other gradients in each."""
    tx = wrapped(pruner.wrap_optax(optimizer))
    params = params_at(seed)
    state = tx.init(params)
    params = pruner.post_gradient_update(params, state)

    @jax.jit
    def step(params, state, noise):
        grads = jax.tree.map(lambda param, extra: param / 10 + extra, params, noise)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    history = [(params, state)]
    for number in range(STEPS):
        history.append(step(*history[-1], params_at(100 + number)))
    return history


def assert_same_training(histories):
    for (params, state), (compact_params, compact_state) in zip(*histories, strict=True):
        for name, leaf in params.items():
            np.testing.assert_allclose(
                compact_params[name], leaf, rtol=2e-5, atol=2e-6, err_msg=name
            )
        (masks,), (compact_masks,) = map(jaxpruner.sparse_states, (state, compact_state))
        jax.tree.map(np.testing.assert_array_equal, masks.masks, compact_masks.masks)


@pytest.mark.parametrize(('algorithm', 'optimizer'), PAIRS)
def test_trains_the_same(algorithm, optimizer):
    make, inner = ALGORITHMS[algorithm], OPTIMIZERS[optimizer]
    if algorithm == 'RigL, all gradients':
        inner = optax.adam(0.1)
    histories = [train(make(compact_moments=compact), inner) for compact in (False, True)]
    assert_same_training(histories)
    state = histories[1][-1][1].inner_state
    masks = masking.unpack_masks(histories[1][-1][1].masks, params_at(0))
    kept = {name: int(masks[name].sum()) for name in ('kernel', 'stack')}
    for name, number in kept.items():
        np.testing.assert_array_equal(
            state.positions[name], np.flatnonzero(masks[name]), err_msg=name
        )
        assert number < masks[name].size
    moments = [leaf for leaf in jax.tree.leaves(state.inner_state) if leaf.ndim]
    assert {moment.size for moment in moments} <= {8, *kept.values()}


def test_accumulated_outside():
    def accumulated(tx):
        return optax.MultiSteps(tx, 2)

    make = ALGORITHMS['RigL']
    pruners = [make(compact_moments=compact) for compact in (False, True)]
    assert_same_training(
        [train(pruner, optax.adam(0.1), wrapped=accumulated) for pruner in pruners]
    )


@pytest.mark.parametrize('algorithm', ['static', 'RigL', 'RigL, packed'])
def test_masks_updated_by_the_host(algorithm):
    results = []
    for compact in (False, True):
        pruner = ALGORITHMS[algorithm](compact_moments=compact)
        tx = pruner.wrap_optax(optax.adam(0.1))
        host = jaxpruner.HostDriven(pruner)
        step = jax.jit(tx.update)
        params = params_at(0)
        state = tx.init(params)
        params = pruner.post_gradient_update(params, state)
        for number in range(STEPS):
            state = host.update(params, state)
            updates, state = step(params_at(100 + number), state, params)
            params = optax.apply_updates(params, updates)
        results.append(params)
    jax.tree.map(
        lambda all_moments, kept: np.testing.assert_allclose(
            kept, all_moments, rtol=2e-5, atol=2e-6
        ),
        *results,
    )


@pytest.mark.parametrize('sparsity', [0.0, 0.99, 1.0])
def test_few_kept_weights_and_many(sparsity):
    results = []
    for compact in (False, True):
        pruner = jaxpruner.RigL(SCHEDULE, sparsity=sparsity, compact_moments=compact)
        tx = pruner.wrap_optax(optax.adam(0.1))
        params = {'kernel': params_at(0)['kernel'][:5, :7]}
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of nothing that is pruned
            state = tx.init(params)
        params = pruner.post_gradient_update(params, state)
        for _ in range(4):
            updates, state = jax.jit(tx.update)(params, state, params)
            params = optax.apply_updates(params, updates)
        assert int(state.count) == 4
        results.append(params['kernel'])
    np.testing.assert_allclose(*results, rtol=2e-5, atol=2e-6)


def test_moments_move_with_their_weights():
    pruner = ALGORITHMS['RigL'](compact_moments=True)
    (before, after) = [state for _, state in train(pruner, optax.adam(0.1))][3:5]
    old, new = before.inner_state, after.inner_state
    dense = jnp.zeros(12 * 8).at[old.positions['kernel']].set(old.inner_state[0].mu['kernel'][0])
    stayed = np.isin(new.positions['kernel'], old.positions['kernel'])
    assert 0 < stayed.sum() < stayed.size  # else this shows nothing
    moved = new.inner_state[0].mu['kernel'][0]
    np.testing.assert_array_equal(moved, dense[new.positions['kernel']])
    assert (moved[~stayed] == 0).all()
    assert (moved[stayed] != 0).all()


def test_under_vmap():
    pruner = ALGORITHMS['RigL'](compact_moments=True)
    tx = pruner.wrap_optax(optax.adam(0.1))

    def run(seed):
        params = params_at(seed)
        state = tx.init(params)
        params = pruner.post_gradient_update(params, state)
        for number in range(3):
            grads = jax.tree.map(lambda a, b: a + b, params, params_at(number))
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    together = jax.jit(jax.vmap(run))(jnp.arange(2))
    for seed in range(2):
        alone = jax.jit(run)(seed)
        jax.tree.map(
            lambda whole, leaf, seed=seed: np.testing.assert_allclose(whole[seed], leaf, rtol=1e-5),
            together,
            alone,
        )


@pytest.mark.parametrize('algorithm', ['RigL', 'fixed masks'])
def test_state_is_known_from_shapes(algorithm):
    pruner = ALGORITHMS[algorithm](compact_moments=True)
    tx = pruner.wrap_optax(optax.adam(0.1))
    shapes = jax.eval_shape(tx.init, params_at(0))
    state = tx.init(params_at(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert [s.shape for s in jax.tree.leaves(shapes)] == [s.shape for s in jax.tree.leaves(state)]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))


def test_memory():
    params = {'kernel': jnp.ones((40, 50))}
    for compact, expected in ((False, 2 * 4 * 2000), (True, 3 * 4 * 100)):
        pruner = jaxpruner.StaticRandomSparse(sparsity=0.95, compact_moments=compact)
        state = pruner.wrap_optax(optax.adam(0.1)).init(params)
        arrays = [leaf for leaf in jax.tree.leaves(state.inner_state) if leaf.ndim]
        assert sum(leaf.nbytes for leaf in arrays) == expected


REFUSED_OPTIMIZERS = {
    'muon': (optax.contrib.muon(0.1), r'scale_by_muon.*dot_general|muon'),
    'adafactor': (optax.adafactor(0.1), 'scale_by_factored_rms'),
    'factored': (optax.adafactor(0.1, min_dim_size_to_factor=4), 'scale_by_factored_rms'),
    'lamb': (optax.lamb(0.1), 'scale_by_trust_ratio.*reduce_sum'),
    'lars': (optax.lars(0.1), 'scale_by_trust_ratio'),
    'block rms': (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), 'clip_by_block_rms'),
    'centralized': (optax.chain(optax.centralize(), optax.sgd(0.1)), 'centralize'),
    'noise': (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), 'add_noise'),
    'norm of updates': (
        optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)),
        'reduce_sum to weights of shape',
    ),
    'lbfgs': (optax.scale_by_lbfgs(3), 'scale_by_lbfgs.*reshape'),
    'extra arguments': (optax.polyak_sgd(), 'before training.*value'),
}


@pytest.mark.parametrize('name', REFUSED_OPTIMIZERS)
@pytest.mark.parametrize('algorithm', ['static'])
def test_refused_optimizers(algorithm, name):
    optimizer, words = REFUSED_OPTIMIZERS[name]
    tx = ALGORITHMS[algorithm](compact_moments=True).wrap_optax(optimizer)
    with pytest.raises(ValueError, match=words):
        tx.init(params_at(0))


def test_norm_of_all_gradients_is_refused():
    pruner = jaxpruner.StaticRandomSparse(
        sparsity=0.75, is_sparse_gradients=False, compact_moments=True
    )
    tx = pruner.wrap_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r'clip_by_global_norm.*reduce_sum'):
        tx.init(params_at(0))


@dataclasses.dataclass
class OwnMasks(jaxpruner.SET):
    """Might keep another number of weights."""

    def update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        return old_mask


@dataclasses.dataclass
class OwnCountedMasks(OwnMasks):
    """Says that it does not."""

    keeps_count = True

    def update_masks(self, old_mask, drop_score, grow_score, drop_fraction):
        return old_mask


@dataclasses.dataclass
class KeepsPruned(jaxpruner.StaticRandomSparse):
    """Leaves pruned weights as they are."""

    def post_gradient_update(self, params, sparse_state=None, *, opt_state=None):
        return params


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (jaxpruner.MagnitudePruning, 'MagnitudePruning'),
        (jaxpruner.RandomPruning, 'RandomPruning'),
        (OwnMasks, 'OwnMasks.*update_masks'),
        (KeepsPruned, 'KeepsPruned.*post_gradient_update'),
    ],
)
def test_refused_pruners(make, words):
    with pytest.raises(ValueError, match=rf'compact_moments=True.*{words}'):
        make(sparsity=0.5, compact_moments=True)


def test_subclass_that_says_so_passes():
    assert OwnCountedMasks(sparsity=0.5, compact_moments=True).compact_moments


def test_masks_that_keep_nothing():
    masks = {'kernel': np.zeros((12, 8), bool)}
    tx = jaxpruner.FixedMask(masks, compact_moments=True).wrap_optax(optax.adam(0.1))
    params = {'kernel': jnp.zeros((12, 8))}
    updates, state = jax.jit(tx.update)({'kernel': jnp.ones((12, 8))}, tx.init(params), params)
    assert state.inner_state.positions['kernel'].shape == (0,)
    assert not updates['kernel'].any()


def test_traced_masks_are_refused():
    def init(masks):
        pruner = jaxpruner.FixedMask({'kernel': masks}, compact_moments=True)
        return pruner.wrap_optax(optax.adam(0.1)).init({'kernel': jnp.ones((12, 8))})

    with pytest.raises(ValueError, match=r'compact_moments=True.*masks of FixedMask.*traced'):
        jax.eval_shape(init, jnp.asarray(MASKS['kernel']))


def test_unknown_count_is_refused():
    pruner = jaxpruner.StaticRandomSparse(
        sparsity=0.5, sparsity_type='block_5,5', compact_moments=True
    )
    with pytest.raises(ValueError, match=r'kernel is not known.*Block'):
        pruner.wrap_optax(optax.adam(0.1)).init(params_at(0))


def test_wrong_count_is_refused():
    @dataclasses.dataclass
    class AllKept(jaxpruner.StaticRandomSparse):
        keeps_count = True

        def get_initial_masks(self, params, target_sparsities):
            return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.uint8), params)

    pruner = AllKept(sparsity=0.75, compact_moments=True)
    with pytest.raises(ValueError, match=r'24 for kernel.*keeps 96'):
        pruner.wrap_optax(optax.adam(0.1)).init({'kernel': jnp.ones((12, 8))})


def test_huge_leaf_is_refused():
    pruner = jaxpruner.StaticRandomSparse(sparsity=0.75, compact_moments=True)
    tx = pruner.wrap_optax(optax.adam(0.1))
    huge = {'kernel': jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)}
    with pytest.raises(ValueError, match=f'kernel has {2**31} weights'):
        jax.eval_shape(tx.init, huge)


@pytest.mark.parametrize('compact', [False, True])
def test_state_of_another_setting_is_refused(compact):
    state = ALGORITHMS['static'](compact_moments=compact).wrap_optax(optax.adam(0.1))
    other = ALGORITHMS['static'](compact_moments=not compact).wrap_optax(optax.adam(0.1))
    params = params_at(0)
    with pytest.raises(ValueError, match=rf'compact_moments={not compact}.*with {compact}'):
        other.update(params, state.init(params), params)


def test_from_a_configuration():
    config = {'algorithm': 'rigl', 'sparsity': 0.5, 'compact_moments': True, 'update_freq': 2}
    config |= {'update_start_step': 1, 'update_end_step': 9}
    pruner = jaxpruner.create_updater_from_config(config)
    state = pruner.wrap_optax(optax.adam(0.1)).init(params_at(0))
    assert isinstance(state.inner_state, CompactMoments)
