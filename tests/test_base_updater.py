"""What a wrapped optimizer promises: zeros without help, extra arguments, dtypes, hooks, states that last."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import steps
from jaxpruner import sparsity_schedules, tree

PARAMS = {
    'a': {'kernel': jax.random.normal(jax.random.key(0), (16, 8)), 'bias': jnp.zeros(8)},
    'b': {'kernel': jax.random.normal(jax.random.key(1), (8, 4))},
}
ONES = jax.tree.map(jnp.ones_like, PARAMS)
W = {'w': PARAMS['a']['kernel']}


def every(freq=1, cls=jaxpruner.MagnitudePruning, **settings):
    return cls(sparsity_schedules.PeriodicSchedule(freq), **({'sparsity': 0.5} | settings))


def last(pruner, number, params=PARAMS, grads=ONES, tx=None, **extra):
    return steps.history(pruner, number, params, grads, tx, **extra)[-1]


def test_inf_and_nan_go_too():
    masks = {'w': jnp.array([0, 0, 1], jnp.uint8)}
    pruned = jaxpruner.apply_mask({'w': jnp.array([jnp.inf, jnp.nan, jnp.inf])}, masks)
    assert pruned['w'].tolist() == [0.0, 0.0, np.inf]


@pytest.mark.parametrize(
    ('param', 'grad'), [('bfloat16', 'bfloat16'), ('bfloat16', 'float32'), ('float32', 'bfloat16')]
)
def test_updates_have_the_result_type(param, grad):
    params = {'w': W['w'].astype(param)}
    tx = every().wrap_optax(optax.sgd(0.1))
    updates, state = tx.update({'w': jnp.ones((16, 8), grad)}, tx.init(params), params)
    assert updates['w'].dtype == jnp.result_type(param, grad)
    new = optax.apply_updates(params, updates)['w']
    assert new.dtype == param
    assert int((new == 0).sum()) == int((state.masks['w'] == 0).sum()) == 64


def test_params_are_needed_as_by_optax_and_may_be_named():
    tx = every().wrap_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match='not passing `params`'):
        tx.update(ONES, tx.init(PARAMS))
    tx.update(updates=ONES, state=tx.init(PARAMS), params=PARAMS)


def test_skipped_steps_move_no_kept_weight():
    params, state = last(every(2, skip_gradients=True), 1)
    kept = state.masks['a']['kernel'] == 1
    np.testing.assert_array_equal(params['a']['kernel'], jnp.where(kept, PARAMS['a']['kernel'], 0))
    np.testing.assert_array_equal(params['a']['bias'], PARAMS['a']['bias'])
    assert not state.inner_state[0].trace['a']['kernel'].any()
    assert last(every(2, skip_gradients=True), 2)[0]['a']['bias'].all(), 'the next step trains'


class Weighted(jaxpruner.MagnitudePruning):
    """Scores by an extra argument of `update`."""

    def calculate_scores(self, params, sparse_state=None, grads=None, importance=None):
        return jax.tree.map(lambda param: jnp.abs(param) * importance, params)


def test_extra_arguments_reach_scores_and_optimizer():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: 0 * u + value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    importance, pruner = jnp.zeros((16, 8)).at[0].set(1.0), every(cls=Weighted)
    tx = pruner.wrap_optax(inner)
    updates, state = tx.update(W, tx.init(W), W, importance=importance, value=7.0)
    assert state.masks['w'][0].all()
    assert set(updates['w'][0].tolist()) == {7.0}
    masks = pruner.instant_sparsify(W, importance=importance)[1]
    np.testing.assert_array_equal(masks['w'], state.masks['w'])
    plain = every().wrap_optax(optax.sgd(0.1))  # takes none, gets none
    plain.update(ONES, plain.init(PARAMS), PARAMS, value=jnp.float32(1))


def test_a_subclass_without_the_base_post_init_works():
    @dataclasses.dataclass
    class Own(jaxpruner.BaseUpdater):
        def __post_init__(self):
            self.mine = True

        def calculate_scores(self, params, sparse_state=None, grads=None):
            return jax.tree.map(jnp.abs, params)

    schedule = sparsity_schedules.PeriodicSchedule(1)
    pruner = Own(schedule, sparsity_type='2:4', is_packed=True)
    _, state = last(pruner, 1)
    assert state.masks['a']['kernel'].size == 16
    masks = pruner.instant_sparsify(PARAMS)[1]
    assert masks['b']['kernel'].reshape(-1, 4).sum(1).tolist() == [2] * 8


def test_sparsities_and_seeds_may_be_mapped():
    def kept(sparsity):
        return last(every(sparsity=sparsity), 1)[1].masks['a']['kernel'].sum()

    assert jax.vmap(kept)(jnp.array([0.25, 0.5, 0.75])).tolist() == [96, 64, 32]

    def drawn(seed):
        pruner = jaxpruner.RandomPruning(sparsity=0.5, rng_seed=seed)
        return pruner.instant_sparsify(PARAMS)[1]['a']['kernel']

    for seeds in (jnp.arange(3, dtype=jnp.uint32), jax.random.split(jax.random.key(1), 3)):
        together = jax.jit(jax.vmap(drawn))(seeds)
        assert together.tolist() == [drawn(seed).tolist() for seed in seeds]


# Leaves of no dimension, of no element and of one; numbers of Python and NumPy.
ODD = {'scalar': jnp.float32(2.0), 'empty': jnp.zeros((0, 4)), 'one': jnp.ones((1, 1))}
NUMBERS = {'w': jnp.arange(1.0, 17).reshape(4, 4), 'scale': 1.0, 'of NumPy': np.float32(2.0)}


def of_everything(name, **settings):
    window = {'sparsity': 0.5, 'update_freq': 1, 'update_start_step': 0, 'update_end_step': 2}
    config = {'algorithm': name, 'filter_fn': lambda path, leaf: True} | window | settings
    return jaxpruner.create_updater_from_config(config)


@pytest.mark.parametrize('name', ['global_magnitude', 'rigl', 'movement'])
def test_leaves_of_no_dimension_and_of_no_element(name):
    pruner, params = of_everything(name, is_packed=name != 'rigl'), ODD | {'w': NUMBERS['w']}
    params, state = last(pruner, 3, params, jax.tree.map(jnp.ones_like, params), optax.adam(0.1))
    zeros = jaxpruner.summarize_sparsity(pruner.pre_forward_update(params, state))
    if name == 'global_magnitude':
        assert zeros['_nparams_nnz'] == 9
    else:
        assert float(jaxpruner.sparsity_metrics(state)['w']) == 0.5
        assert zeros['scalar'] == zeros['one'] == 0.0, 'at least one weight of a leaf stays'


@pytest.mark.parametrize('name', ['rigl', 'global_magnitude'])
def test_numbers_of_python_are_trained_as_arrays_are(name):
    tx, results = of_everything(name).wrap_optax(optax.adam(0.1)), []
    for params in (NUMBERS, jax.tree.map(jnp.asarray, NUMBERS)):
        updates, state = tx.update(params, tx.init(params), params)
        results.append((updates, state.masks))
    steps.assert_equal(*results)


# What an algorithm keeps of its own.


@dataclasses.dataclass
class Counting(jaxpruner.BaseUpdater):
    """Ranks by the sum of the gradients so far, in 32 bits; the simplest algorithm that needs a memory."""

    def init_algorithm_state(self, params, target_sparsities):
        def first(param, target):
            return None if target is None else jnp.zeros(param.shape)

        return tree.map_with_missing(first, params, target_sparsities)

    def track(self, sparse_state, params, grads, weight=1.0):
        def renew(grad, total):
            return None if total is None else total + weight * grad

        sums = tree.map_with_missing(renew, grads, sparse_state.algorithm_state)
        return sparse_state._replace(algorithm_state=sums)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return sparse_state.algorithm_state


@pytest.mark.parametrize('settings', [{'use_packed_masks': True}, {'skip_gradients': True}])
def test_values_of_an_algorithm_are_renewed_in_every_step_and_ranked_when_due(settings):
    grads = jax.tree.map(lambda leaf: leaf[::-1], PARAMS)
    pruner = every(2, cls=Counting, **settings)
    params, state = last(pruner, 5, grads=grads, weight=2.0, unknown=3.0)
    np.testing.assert_allclose(
        state.algorithm_state['a']['kernel'], 10 * grads['a']['kernel'], rtol=1e-5
    )
    assert state.algorithm_state['a']['bias'] is None
    kernel = np.asarray(grads['a']['kernel'])
    np.testing.assert_array_equal(params['a']['kernel'] != 0, kernel > np.median(kernel))


@dataclasses.dataclass
class Keeps(jaxpruner.MagnitudePruning):
    """Keeps what its fields say: from `init` on, and after `track`."""

    first: object = None
    tracked: object = None

    def init_algorithm_state(self, params, target_sparsities):
        return self.first

    def track(self, sparse_state, params, grads):
        return sparse_state._replace(algorithm_state=self.tracked)


@pytest.mark.parametrize(('first', 'words'), [(jnp.int8(0), 'int8.*float32'), (None, 'w')])
def test_an_algorithm_state_that_changes_its_form_is_refused(first, words):
    first = None if first is None else {'w': first}
    with pytest.raises(TypeError, match=f'Keeps.*algorithm_state.*{words}'):
        last(every(cls=Keeps, first=first, tracked={'w': jnp.float32(0)}), 1)


# A pruner may be a static argument.


@dataclasses.dataclass
class Decorated(jaxpruner.BaseUpdater):
    decay: float = 0.9


@pytest.mark.parametrize('make', [jaxpruner.RigL, Decorated], ids=['RigL', 'one of your own'])
def test_a_pruner_is_a_static_argument_that_is_traced_once(make):
    traced = []

    @functools.partial(jax.jit, static_argnames='pruner')
    def step(x, pruner):
        traced.append(pruner)
        return x

    first, second = make(sparsity=0.5), make(sparsity=0.6)
    for pruner in (first, second, first):
        step(1.0, pruner=pruner)
    assert traced == [first, second]


class Wrapped(jaxpruner.MagnitudePruning):
    """Keeps the smallest weights, by a method that looks like that of the base."""

    @functools.wraps(jaxpruner.MagnitudePruning.calculate_scores)
    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda scores: -scores, super().calculate_scores(params))


def test_an_override_that_is_wrapped_is_called():
    masks = Wrapped(sparsity=0.5).instant_sparsify({'w': jnp.array([[3.0, 1.0]])})[1]
    assert masks['w'].tolist() == [[0, 1]]
