"""What an algorithm keeps from step to step stays in structure, shapes and dtypes, and `track` returns two values."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import api, sparsity_schedules, tree

PARAMS = {'w': jnp.arange(1.0, 17, dtype=jnp.bfloat16).reshape(4, 4), 'b': jnp.ones(4)}


@dataclasses.dataclass
class Keeps(jaxpruner.BaseUpdater):
    """Keeps what its fields say: from `init` on, after `track`, and after a mask update."""

    first: object = None
    tracked: object = None
    updated: object = None

    def init_algorithm_state(self, params, target_sparsities):
        return self.first

    def track(self, sparse_state, params, grads):
        return sparse_state._replace(algorithm_state=self.tracked), None

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, params)

    def update_state(self, sparse_state, params, grads):
        state = super().update_state(sparse_state, params, grads)
        return state._replace(algorithm_state=self.updated)


def step(pruner, params=PARAMS):
    tx = pruner.wrap_optax(optax.sgd(0.1))
    return jax.jit(tx.update)(params, tx.init(params), params)[1]


def keeps(first, tracked, updated=None):
    updated = tracked if updated is None else updated
    schedule = sparsity_schedules.OneShotSchedule(0)
    return Keeps(schedule, sparsity=0.5, first=first, tracked=tracked, updated=updated)


def zeros(dtype, *shape):
    return jnp.zeros(shape, dtype)


F32, BF16 = zeros('float32', 4), zeros('bfloat16', 4)
DRIFTS = {
    'a dtype': ({'w': BF16}, {'w': F32}, r'/w was bfloat16\[4\] and is float32\[4\]'),
    'a shape': ({'w': F32}, {'w': zeros('float32', 4, 1)}, r'/w was float32\[4\] and is .*\[4,1\]'),
    'made late': (None, {'w': F32}, r'algorithm_state/w was missing and is float32\[4\]'),
    'lost': ({'w': F32, 'v': F32}, {'w': F32, 'v': None}, r'/v was float32\[4\] and is missing'),
    'one array': (zeros('int32'), zeros('float32'), r'algorithm_state was int32\[\] and is float'),
    'renamed': ({'w': F32}, {'v': F32}, r'/w was .* is missing; algorithm_state/v was missing'),
}


@pytest.mark.parametrize(('first', 'then', 'words'), DRIFTS.values(), ids=DRIFTS)
def test_an_algorithm_state_that_changes_is_refused_with_class_leaf_and_remedy(first, then, words):
    remedy = r'init_algorithm_state .*jnp\.zeros_like\(param, dtype=jnp\.float32\)'
    with pytest.raises(TypeError, match=rf'Keeps\.track changes .*{words}.*{remedy}'):
        step(keeps(first, then))
    if then is not None and first is not None:
        with pytest.raises(TypeError, match=rf'Keeps\.update_state changes .*{words}.*{remedy}'):
            step(keeps(first, first, updated=then))


def test_it_is_refused_outside_of_jit_too():
    tx = keeps({'w': BF16}, {'w': F32}).wrap_optax(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r'Keeps\.track changes .*algorithm_state/w'):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


Pair = collections.namedtuple('Pair', 'mean count')
STAYS = {
    'nothing': (None, None),
    'weak types': ({'w': F32, 'n': 0.0}, {'w': F32, 'n': jnp.asarray(1.0)}),
    'another sort of container': ([F32, F32], (F32, F32)),
    'NumPy': (Pair(np.zeros(2, np.float32), jnp.int32(0)), Pair(zeros('float32', 2), jnp.int32(1))),
    'random keys': (jax.random.key(0), jax.random.key(1)),
}


@pytest.mark.parametrize(('first', 'then'), STAYS.values(), ids=STAYS)
def test_an_algorithm_state_that_stays_is_taken(first, then):
    state = step(keeps(first, then))
    assert int(state.masks['w'].sum()) == 8


def test_an_algorithm_state_of_parameters_in_16_bits_may_have_32():
    @dataclasses.dataclass
    class Averages(jaxpruner.BaseUpdater):
        def init_algorithm_state(self, params, target_sparsities):
            def first(param, target):
                return None if target is None else jnp.zeros_like(param, dtype=jnp.float32)

            return tree.map_with_missing(first, params, target_sparsities)

        def track(self, sparse_state, params, grads):
            def renew(grad, average):
                return None if average is None else 0.9 * average + 0.1 * grad**2

            averages = tree.map_with_missing(renew, grads, sparse_state.algorithm_state)
            return sparse_state._replace(algorithm_state=averages), None

        def calculate_scores(self, params, sparse_state=None, grads=None):
            return sparse_state.algorithm_state

    schedule = sparsity_schedules.PeriodicSchedule(1)
    tx = Averages(schedule, sparsity=0.5).wrap_optax(optax.sgd(0.1))
    update, params, state = jax.jit(tx.update), PARAMS, tx.init(PARAMS)
    for _ in range(3):
        updates, state = update(PARAMS, state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
    assert state.algorithm_state['w'].dtype == jnp.float32


NO_PAIRS = {
    'the state alone': (lambda state: state, 'got one SparseState'),
    'nothing': (lambda state: None, 'got one NoneType'),
    'three values': (lambda state: (state, None, None), 'got a tuple of 3'),
    'the other way round': (lambda state: (None, state), 'got a tuple of 2'),
}


@pytest.mark.parametrize(('returned', 'words'), NO_PAIRS.values(), ids=NO_PAIRS)
def test_a_track_that_returns_no_pair_is_refused(returned, words):
    class Mine(jaxpruner.MagnitudePruning):
        def track(self, sparse_state, params):
            return returned(sparse_state)

    with pytest.raises(TypeError, match=rf'Mine\.track must return two values.*{words}.*, None`'):
        step(Mine(sparsity_schedules.OneShotSchedule(0), sparsity=0.5))


@pytest.mark.parametrize('name', api.all_algorithm_names())
def test_algorithms_of_the_library_keep_theirs_in_16_bits(name):
    config = {'algorithm': name, 'sparsity': 0.5, 'sparsity_type': 'unstructured'}
    if name == 'iterative_nm':
        config['sparsity_type'] = '2:4'
    schedule = {'update_freq': 1, 'update_start_step': 0, 'update_end_step': 4}
    pruner = jaxpruner.create_updater_from_config(config | schedule)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    tx = pruner.wrap_optax(optax.adam(0.1))
    before = jax.eval_shape(tx.init, params).algorithm_state
    after = jax.eval_shape(lambda: tx.update(params, tx.init(params), params)[1].algorithm_state)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(before)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)
    ]


@dataclasses.dataclass
class HandsOn(jaxpruner.BaseUpdater):
    """Tracks the mean gradient, and keeps what its mask update gets of it; -1 where that is nothing."""

    def init_algorithm_state(self, params, target_sparsities):
        return jnp.float32(0)

    def track(self, sparse_state, params, grads):
        return sparse_state, jnp.mean(grads['w'], dtype=jnp.float32)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, params)

    def update_state(self, sparse_state, params, grads, tracked=None):
        state = super().update_state(sparse_state, params, grads)
        received = jnp.float32(-1) if tracked is None else tracked
        return state._replace(algorithm_state=received)


@pytest.mark.parametrize('update_masks', [None, True])
@pytest.mark.parametrize('skip_gradients', [False, True])
def test_update_state_gets_what_track_returned(skip_gradients, update_masks):
    schedule = sparsity_schedules.OneShotSchedule(0)
    pruner = HandsOn(schedule, sparsity=0.5, skip_gradients=skip_gradients)
    tx = pruner.wrap_optax(optax.sgd(0.1))
    update = jax.jit(functools.partial(tx.update, update_masks=update_masks))
    _, state = update(PARAMS, tx.init(PARAMS), PARAMS)
    assert float(state.algorithm_state) == 8.5
