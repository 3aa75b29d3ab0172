"""The contracts of a wrapped optimizer: zeros without help, extra arguments, dtypes, subclasses, states in states."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from helpers import rows
from jaxpruner import sparsity_distributions, sparsity_schedules, sparsity_types
from jaxpruner.core import masking

PARAMS = {
    'a': {'kernel': jax.random.normal(jax.random.key(0), (16, 8)), 'bias': jnp.zeros(8)},
    'b': {'kernel': jax.random.normal(jax.random.key(1), (8, 4))},
}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def half(params):
    return sparsity_distributions.uniform(params, 0.5)


def every(step=1, **kwargs):
    return {
        'scheduler': sparsity_schedules.PeriodicSchedule(step, **kwargs),
        'sparsity_distribution_fn': half,
    }


def run(tx, steps, params=PARAMS, grads=GRADS):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize('packed', [False, True])
def test_pruned_weights_are_exactly_zero_without_help(packed):
    updater = jaxpruner.MagnitudePruning(**every(), use_packed_masks=packed)
    params, state = run(updater.wrap_optax(optax.adam(0.1)), 3)
    assert jaxpruner.summarize_sparsity(params)['a/kernel'] == 0.5
    # Another application of the masks changes nothing.
    again = updater.post_gradient_update(params, state)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), params, again))


def test_inf_and_nan_go_too():
    masks = {'w': jnp.array([0, 0, 1], jnp.uint8)}
    pruned = jaxpruner.apply_mask({'w': jnp.array([jnp.inf, jnp.nan, jnp.inf])}, masks)
    assert pruned['w'].tolist() == [0.0, 0.0, np.inf]


@pytest.mark.parametrize(
    ('param', 'grad'), [('bfloat16', 'bfloat16'), ('bfloat16', 'float32'), ('float32', 'bfloat16')]
)
def test_updates_have_the_result_type(param, grad):
    params = {'w': jax.random.normal(jax.random.key(0), (8, 8)).astype(param)}
    grads = {'w': jnp.ones((8, 8), grad)}
    tx = jaxpruner.MagnitudePruning(**every()).wrap_optax(optax.sgd(0.1))
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates['w'].dtype == jnp.result_type(param, grad)
    new = optax.apply_updates(params, updates)
    assert new['w'].dtype == params['w'].dtype
    assert int((new['w'] == 0).sum()) == int((state.masks['w'] == 0).sum()) == 32


def test_missing_params_give_the_error_of_optax():
    tx, reference = (
        jaxpruner.MagnitudePruning(**every()).wrap_optax(optax.sgd(0.1)),
        optax.add_decayed_weights(0.1),
    )
    with pytest.raises(ValueError, match='not passing `params`') as theirs:
        reference.update(GRADS, reference.init(PARAMS), None)
    with pytest.raises(ValueError, match='not passing `params`') as ours:
        tx.update(GRADS, tx.init(PARAMS))
    assert str(ours.value) == str(theirs.value)


def test_params_may_be_named():
    tx = jaxpruner.MagnitudePruning(**every()).wrap_optax(optax.sgd(0.1))
    tx.update(updates=GRADS, state=tx.init(PARAMS), params=PARAMS)


def test_skipped_steps_move_no_kept_weight():
    updater = jaxpruner.MagnitudePruning(**every(2), skip_gradients=True)
    params, state = run(updater.wrap_optax(optax.sgd(0.1, momentum=0.9)), 1)
    kept = state.masks['a']['kernel'] == 1
    np.testing.assert_array_equal(params['a']['kernel'][kept], PARAMS['a']['kernel'][kept])
    np.testing.assert_array_equal(params['a']['kernel'][~kept], 0)
    np.testing.assert_array_equal(params['a']['bias'], PARAMS['a']['bias'])
    assert not jax.tree.leaves(state.inner_state[0].trace)[0].any()
    # The step after trains again.
    assert not np.array_equal(
        run(updater.wrap_optax(optax.sgd(0.1)), 2)[0]['a']['bias'], PARAMS['a']['bias']
    )


def test_sparse_gradients_reach_the_optimizer():
    updater = jaxpruner.MagnitudePruning(**every(), is_sparse_gradients=True)
    _, state = run(updater.wrap_optax(optax.sgd(0.1, momentum=0.9)), 1)
    np.testing.assert_array_equal(
        state.inner_state[0].trace['a']['kernel'] == 0, state.masks['a']['kernel'] == 0
    )


@dataclasses.dataclass
class Weighted(jaxpruner.MagnitudePruning):
    """Scores by an extra argument of `update`."""

    def calculate_scores(self, params, sparse_state=None, grads=None, importance=None):
        return jax.tree.map(lambda param: jnp.abs(param) * importance, params)


def test_extra_arguments_reach_scores_and_optimizer():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = Weighted(**every()).wrap_optax(inner)
    importance = jnp.zeros((16, 8)).at[0].set(1.0)
    params = {'w': PARAMS['a']['kernel']}
    _, state = tx.update(params, tx.init(params), params, importance=importance, value=7)
    assert seen == [7]
    assert state.masks['w'][0].all()
    masks = Weighted(**every()).instant_sparsify(params, importance=importance)[1]
    np.testing.assert_array_equal(masks['w'], state.masks['w'])


@pytest.mark.parametrize('name', ['magnitude', 'random', 'global_magnitude', 'magnitude_ste'])
def test_pruning_once_refuses_arguments_without_effect(name):
    pruner = jaxpruner.create_updater_from_config({'algorithm': name, 'sparsity': 0.5})
    with pytest.raises(
        TypeError, match=r'calculate_scores does not take apply_fn, batches.*jaxpruner\.prune'
    ):
        pruner.instant_sparsify(PARAMS, apply_fn=lambda params, x: x, batches=[1])


def test_extra_arguments_are_kept_from_an_optimizer_that_takes_none():
    tx = jaxpruner.MagnitudePruning(**every()).wrap_optax(optax.sgd(0.1))
    tx.update(GRADS, tx.init(PARAMS), PARAMS, value=jnp.float32(1))


def test_a_subclass_without_the_base_post_init_works():
    @dataclasses.dataclass
    class Own(jaxpruner.BaseUpdater):
        def __post_init__(self):
            self.mine = True

        def calculate_scores(self, params, sparse_state=None, grads=None):
            return jax.tree.map(jnp.abs, params)

    updater = Own(**every(), sparsity_type='2:4', is_packed=True)
    _, state = run(updater.wrap_optax(optax.sgd(0.1)), 1)
    assert state.masks['a']['kernel'].shape == (2, 8)
    assert (
        updater.instant_sparsify(PARAMS)[1]['b']['kernel'].reshape(-1, 4).sum(1).tolist() == [2] * 8
    )


def test_a_subclass_may_return_packed_masks_and_sees_unpacked_ones():
    shapes = []

    @dataclasses.dataclass
    class Flat(jaxpruner.MagnitudePruning):
        def update_state(self, sparse_state, params, grads):
            shapes.append(sparse_state.masks['a']['kernel'].shape)
            state = super().update_state(sparse_state, params, grads)
            return state._replace(masks=jax.tree.map(jnp.packbits, state.masks))

    _, state = run(Flat(**every(), use_packed_masks=True).wrap_optax(optax.sgd(0.1)), 2)
    assert shapes == [(16, 8)]
    expected = run(jaxpruner.MagnitudePruning(**every()).wrap_optax(optax.sgd(0.1)), 2)[1].masks
    np.testing.assert_array_equal(
        masking.unpack_masks(state.masks, PARAMS)['a']['kernel'], expected['a']['kernel']
    )


def test_a_subclass_that_keeps_weights_dense_is_left_alone():
    @dataclasses.dataclass
    class Dense(jaxpruner.MagnitudePruning):
        def post_gradient_update(self, params, sparse_state):
            return params

    params, state = run(Dense(**every()).wrap_optax(optax.sgd(0.1)), 2)
    assert jaxpruner.summarize_sparsity(params)['a/kernel'] == 0
    assert float(jaxpruner.sparsity_metrics(state)['a/kernel']) == 0.5


def test_is_packed_is_another_name():
    updater = jaxpruner.MagnitudePruning(is_packed=True)
    assert updater.use_packed_masks
    assert updater.is_packed is None
    assert not dataclasses.replace(updater, use_packed_masks=False).use_packed_masks


def test_init_can_be_evaluated_abstractly():
    tx = jaxpruner.RigL(**every(), use_packed_masks=True).wrap_optax(optax.adam(0.1))
    shapes = jax.eval_shape(tx.init, PARAMS)
    real = tx.init(PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(real)
    assert jax.tree.all(
        jax.tree.map(lambda s, r: (s.shape, s.dtype) == (r.shape, r.dtype), shapes, real)
    )


def test_targets_are_arrays_and_may_be_mapped():
    def masks(sparsity):
        fn = functools.partial(sparsity_distributions.uniform, sparsity=sparsity)
        updater = jaxpruner.MagnitudePruning(
            sparsity_distribution_fn=fn, scheduler=every()['scheduler']
        )
        tx = updater.wrap_optax(optax.sgd(0.1))
        return tx.update(GRADS, tx.init(PARAMS), PARAMS)[1].masks['a']['kernel']

    kept = jax.vmap(masks)(jnp.array([0.25, 0.5, 0.75])).sum((1, 2))
    assert kept.tolist() == [96, 64, 32]


def test_layers_that_are_stacked_rank_each_on_its_own():
    params = {'layers': {'kernel': jnp.arange(48.0).reshape(3, 4, 4), 'bias': jnp.ones((3, 4))}}
    updater = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=half_of_stacked, stacked='layers/*'
    )
    masks = updater.instant_sparsify(params)[1]
    assert masks['layers']['bias'] is None
    assert masks['layers']['kernel'].sum((1, 2)).tolist() == [8, 8, 8]
    with pytest.raises(ValueError, match=r"stacked: 'layer/\*' matches no parameter"):
        dataclasses.replace(updater, stacked='layer/*').instant_sparsify(params)


half_of_stacked = functools.partial(sparsity_distributions.uniform, sparsity=0.5)


def test_a_custom_topk_function_is_used_for_every_leaf():
    def first_row(scores, sparsity):
        return jnp.zeros(scores.shape, jnp.uint8).at[0].set(1)

    masks = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=half, topk_fn=first_row
    ).instant_sparsify(PARAMS)[1]
    assert masks['a']['kernel'].sum() == 8
    assert masks['b']['kernel'].sum() == 4


def test_types_by_leaf():
    updater = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=half, sparsity_type={'b/*': None, '*': 'channel_-1'}
    )
    masks = updater.instant_sparsify(PARAMS)[1]
    assert masks['b']['kernel'] is None
    assert set(masks['a']['kernel'].sum(0).tolist()) == {0, 16}


def test_without_a_distribution_everything_is_dense():
    pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=None)
    with pytest.warns(UserWarning, match='prunes no leaf of 3.*sparsity_distribution_fn is None'):
        pruned, masks = pruner.instant_sparsify(PARAMS)
    assert jax.tree.leaves(masks) == []
    assert pruned['a']['kernel'] is PARAMS['a']['kernel']


BAD = [
    (
        lambda: jaxpruner.MagnitudePruning(scheduler=5),
        TypeError,
        'scheduler must have the method is_mask_update_iter',
    ),
    (
        lambda: jaxpruner.MagnitudePruning(sparsity_distribution_fn=0.5),
        TypeError,
        'sparsity_distribution_fn must be a function, got 0.5',
    ),
    (
        lambda: jaxpruner.MagnitudePruning(topk_fn=3),
        TypeError,
        r'topk_fn must be a function \(scores, sparsity\) -> mask, got 3',
    ),
    (
        lambda: jaxpruner.MagnitudePruning(rng_seed='a'),
        TypeError,
        'rng_seed must be a whole number',
    ),
    (lambda: jaxpruner.MagnitudePruning(sparsity_type='3:2'), ValueError, 'n must not exceed m'),
    (
        lambda: jaxpruner.MagnitudePruning(
            sparsity_distribution_fn=functools.partial(sparsity_distributions.uniform, sparsity=1.5)
        ),
        ValueError,
        r'sparsity must lie in \[0, 1\]',
    ),
    (
        lambda: jaxpruner.BaseUpdater().calculate_scores(PARAMS),
        NotImplementedError,
        'BaseUpdater must define calculate_scores',
    ),
]


@pytest.mark.parametrize(('make', 'error', 'message'), BAD)
def test_bad_settings_fail_at_construction(make, error, message):
    with pytest.raises(error, match=message):
        make()


BAD_SHAPES = [
    (
        {'sparsity_type': 'nm_3,5'},
        r'a/kernel: shape \(16, 8\) has length 8 along axis -1, which m=5 does not divide',
    ),
    ({'sparsity_type': 'channel_2'}, r'a/kernel: axis 2 does not exist'),
    ({'sparsity_type': {'c/*': None}}, r"sparsity_type: 'c/\*' matches no parameter"),
    (
        {'sparsity_distribution_fn': lambda params: jax.tree.map(lambda _: 1.5, params)},
        r'the sparsity of a/bias must lie in \[0, 1\]',
    ),
    (
        {'sparsity_distribution_fn': lambda params: {'a': 0.5}},
        'does not fit the structure of the parameters',
    ),
]


@pytest.mark.parametrize(('settings', 'message'), BAD_SHAPES)
def test_bad_shapes_fail_before_anything_is_computed(settings, message):
    def unreachable(*args):
        raise AssertionError('scores were computed')

    updater = jaxpruner.MagnitudePruning(**({'sparsity_distribution_fn': half} | settings))
    updater.calculate_scores = unreachable
    with pytest.raises(ValueError, match=message):
        updater.wrap_optax(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match=message):
        updater.instant_sparsify(PARAMS)


def test_one_error_names_all_leaves_that_cannot_take_n_by_m():
    params = {
        'a': jnp.ones((8, 6)),
        'b': jnp.ones((4, 8, 3)),
        'c': jnp.ones((8, 8)),
        'd': jnp.ones(8),
    }
    updater = jaxpruner.MagnitudePruning(
        sparsity_type={'a': '2:4', 'c': 'nm_2,4,0', '*': '2:4'}, stacked='b'
    )
    setting = re.escape("{'a': None, 'b': None, 'c': 'nm_2,4,0', '*': '2:4'}")
    words = rf'a: shape \(8, 6\) .*; b: shape \(8, 3\) .*sparsity_type={setting}$'
    for call in (updater.instant_sparsify, updater.wrap_optax(optax.sgd(0.1)).init, updater.plan):
        with pytest.raises(ValueError, match=words):
            call(params)
    updater.sparsity_type = lambda path, leaf: sparsity_types.NByM(2, 4)
    with pytest.raises(ValueError, match=r'a: .* b: .* by a sparsity_type that returns None'):
        updater.plan(params)


ODD = {
    'scalar': jnp.float32(2.0),
    'empty': jnp.zeros((0, 4)),
    'one': jnp.ones((1, 1)),
    'w': jnp.arange(1.0, 17).reshape(4, 4),
}


ALL_BUT_N_BY_M = [name for name in jaxpruner.all_algorithm_names() if name != 'iterative_nm']


@pytest.mark.parametrize(('name', 'packed'), rows.crossed(ALL_BUT_N_BY_M, [False, True]))
def test_leaves_of_no_dimension_and_of_no_element(name, packed):
    config = {
        'algorithm': name,
        'sparsity': 0.5,
        'update_freq': 1,
        'update_start_step': 0,
        'update_end_step': 2,
    }
    updater = jaxpruner.create_updater_from_config(
        config | {'is_packed': packed, 'filter_fn': lambda path, leaf: True}
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    params, state = ODD, tx.init(ODD)
    params = updater.post_gradient_update(params, state)
    for _ in range(3):
        grads = jax.tree.map(jnp.ones_like, updater.pre_forward_update(params, state))
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    kept = jaxpruner.summarize_sparsity(updater.pre_forward_update(params, state))
    if name == 'no_prune':
        assert kept['_nparams_nnz'] == 18
    elif name.startswith('global'):
        assert kept['_nparams_nnz'] == 9
    else:
        assert kept['w'] >= 0.5  # weights that have just been regrown are zero, too
        assert float(jaxpruner.sparsity_metrics(state)['w']) == 0.5
        assert kept['scalar'] == kept['one'] == 0.0  # at least one weight of a leaf stays


def test_biases_that_their_type_leaves_dense_are_not_warned_of():
    params = {'query': {'kernel': jnp.ones((8, 4, 2)), 'bias': jnp.ones((4, 2))}}
    with pytest.warns(UserWarning, match='query/bias'):
        jaxpruner.MagnitudePruning(sparsity=0.5).instant_sparsify(params)
    pruner = jaxpruner.MagnitudePruning(sparsity=0.5, sparsity_type={'*/bias': None})
    assert pruner.instant_sparsify(params)[1]['query']['bias'] is None


@dataclasses.dataclass
class OwnSparsity(jaxpruner.MagnitudePruning):
    """Has a field of its own that is called as a keyword of updaters is called now."""

    sparsity: float = 0.5


@dataclasses.dataclass
class OwnDistribution(OwnSparsity):
    """Makes its distribution of its own field."""

    def __post_init__(self):
        self.sparsity_distribution_fn = functools.partial(
            sparsity_distributions.uniform, sparsity=self.sparsity / 2
        )
        super().__post_init__()


EIGHT_TENTHS = {
    'sparsity_distribution_fn': functools.partial(sparsity_distributions.uniform, sparsity=0.8)
}


@pytest.mark.parametrize(
    ('algorithm', 'settings', 'target'),
    [
        (OwnSparsity, {}, 0.5),
        (OwnSparsity, {'sparsity': 0.75}, 0.75),
        (OwnSparsity, EIGHT_TENTHS, 0.8),
        (OwnDistribution, {}, 0.25),
        (OwnDistribution, {'sparsity': 0.75}, 0.375),
    ],
)
def test_a_subclass_may_have_a_field_sparsity_beside_a_distribution(algorithm, settings, target):
    pruner = algorithm(**settings)
    for _ in range(2):
        assert pruner.get_target_sparsities(PARAMS)['b']['kernel'] == target
        pruner = dataclasses.replace(pruner, use_packed_masks=True)
