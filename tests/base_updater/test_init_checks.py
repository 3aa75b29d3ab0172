"""A wrapped optimizer says at its `init` what would otherwise run to the end and prune nothing, or too little."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules

PARAMS = {'dense': {'kernel': jnp.arange(1.0, 513).reshape(32, 16), 'bias': jnp.ones(16)}}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
ONCE = sparsity_schedules.OneShotSchedule(0)
NEVER = sparsity_schedules.NoUpdateSchedule()
NO_MULTIPLE = sparsity_schedules.PeriodicSchedule(
    update_freq=1000, update_start_step=1, update_end_step=500
)
TOO_SHORT = sparsity_schedules.PolynomialSchedule(
    update_freq=100, update_start_step=0, update_end_step=150
)


def at(sparsity, **settings):
    return {
        'sparsity_distribution_fn': functools.partial(
            sparsity_distributions.uniform, sparsity=sparsity, **settings
        )
    }


def init(pruner, params=PARAMS):
    return pruner.wrap_optax(optax.adam(1e-3)).init(params)


def config(**settings):
    return jaxpruner.create_updater_from_config({'sparsity': 0.8} | settings)


class Straight(jaxpruner.BaseUpdater):
    """Prunes in its own forward pass."""

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, params)

    def pre_forward_update(self, params, sparse_state):
        return params


class Fridays:
    """A schedule of one's own."""

    def is_mask_update_iter(self, step):
        raise AssertionError('asked before the first step')

    def get_sparsity_at_step(self, target_sparsities, step):
        return target_sparsities


# A pruner, and what its warning has to say: the setting, and the remedy.
WARNINGS = {
    'no schedule': (
        lambda: jaxpruner.MagnitudePruning(**at(0.8)),
        [
            'MagnitudePruning never updates its masks',
            'sparsity 0.8',
            'NoUpdateSchedule()',
            'HostSchedule',
            'plan(params)',
        ],
    ),
    'no multiple in the window': (
        lambda: jaxpruner.MagnitudePruning(NO_MULTIPLE, **at(0.8)),
        ['never updates', 'update_freq=1000', 'update_start_step=1', 'update_end_step=500'],
    ),
    'no steps': (
        lambda: jaxpruner.SaliencyPruning(sparsity_schedules.StepsSchedule(()), **at(0.8)),
        ['SaliencyPruning never updates', 'StepsSchedule(steps=())'],
    ),
    'a global pruner': (
        lambda: jaxpruner.GlobalMagnitudePruning(**at(0.8)),
        ['never updates', 'sparsity 0.8'],
    ),
    'phases that never begin': (
        lambda: jaxpruner.ACDC(NO_MULTIPLE, **at(0.8)),
        ['ACDC never updates'],
    ),
    'ends short': (
        lambda: jaxpruner.MagnitudePruning(TOO_SHORT, **at(0.8)),
        [
            'ends at sparsity 0.7721, not 0.8',
            'step 100',
            'update_end_step=150',
            'update_end_step=101',
            'update_end_step=200',
        ],
    ),
    'iterative N:M ends short': (
        lambda: jaxpruner.IterativeNMPruning(
            sparsity_schedules.PolynomialSchedule(100, 0, 190, power=1), sparsity_type='1:4'
        ),
        ['dense/kernel ends at 2 of 4, not 1', 'update_end_step=200'],
    ),
    'SET never updates': (
        lambda: jaxpruner.SET(**at(0.8)),
        ['SET never updates', 'stay as they were drawn', 'StaticRandomSparse'],
    ),
    'RigL has no multiple': (
        lambda: jaxpruner.RigL(NO_MULTIPLE, **at(0.8)),
        ['RigL never updates', 'update_freq=1000'],
    ),
    'RigL drops nothing': (
        lambda: jaxpruner.RigL(
            sparsity_schedules.PeriodicSchedule(100),
            drop_fraction_fn=optax.constant_schedule(0.0),
            **at(0.8),
        ),
        ['RigL replaces no weight', 'drop_fraction_fn is 0', 'StaticRandomSparse'],
    ),
    'the default updater': (
        lambda: jaxpruner.MagnitudePruning(),
        [
            'MagnitudePruning prunes no leaf of 2',
            'dense/kernel: its target is 0',
            'dense/bias',
            'sparsity=0.9',
            'NoPruning()',
        ],
    ),
    'sparsity 0 of one that starts sparse': (
        lambda: jaxpruner.StaticRandomSparse(**at(0.0)),
        ['StaticRandomSparse prunes no leaf of 2', 'dense/kernel: its target is 0'],
    ),
    'a filter that matches nothing': (
        lambda: jaxpruner.MagnitudePruning(
            ONCE, **at(0.8, filter_fn=lambda path, leaf: path[-1] == 'w')
        ),
        ['prunes no leaf', 'dense/bias, dense/kernel: filter_fn leaves it out', 'plan(params)'],
    ),
}


@pytest.mark.parametrize(('make', 'words'), WARNINGS.values(), ids=list(WARNINGS))
def test_one_warning_names_the_setting_and_the_remedy(make, words):
    pruner = make()
    with pytest.warns(UserWarning, match='never|ends at|replaces no|prunes no') as caught:
        init(pruner)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for word in words:
        assert word in str(caught[0].message)


def test_leaves_of_one_dimension_alone_are_left_dense_with_the_reason():
    vectors = {'scale': jnp.ones(8), 'shift': jnp.ones(8)}
    with pytest.warns(UserWarning, match='scale, shift: the default filter leaves out 1-D leaves'):
        init(jaxpruner.MagnitudePruning(ONCE, **at(0.8)), vectors)


def test_a_tree_without_parameters_is_said():
    with pytest.warns(UserWarning, match='there are no parameters'):
        init(jaxpruner.MagnitudePruning(ONCE, **at(0.8)), {})


# These do what they were asked for.
SILENT = {
    'once': lambda: jaxpruner.MagnitudePruning(ONCE, **at(0.8)),
    'periodic without an end': lambda: jaxpruner.MagnitudePruning(
        sparsity_schedules.PeriodicSchedule(1000), **at(0.8)
    ),
    'an end that is a multiple': lambda: config(
        algorithm='magnitude', update_freq=100, update_start_step=0, update_end_step=200
    ),
    'the last update one step before the end': lambda: config(
        algorithm='magnitude', update_freq=100, update_start_step=0, update_end_step=101
    ),
    'short by less than a thousandth': lambda: config(
        algorithm='magnitude', update_freq=7, update_start_step=0, update_end_step=1000
    ),
    'the host decides': lambda: jaxpruner.MagnitudePruning(
        sparsity_schedules.HostSchedule(), **at(0.8)
    ),
    'RigL by the host': lambda: jaxpruner.RigL(sparsity_schedules.HostSchedule(), **at(0.8)),
    "a user's own schedule": lambda: jaxpruner.MagnitudePruning(Fridays(), **at(0.8)),
    "a user's own schedule for RigL": lambda: jaxpruner.RigL(Fridays(), **at(0.8)),
    'static masks': lambda: jaxpruner.StaticRandomSparse(**at(0.8)),
    'given masks': lambda: jaxpruner.FixedMask(
        {'dense': {'kernel': PARAMS['dense']['kernel'] > 99, 'bias': None}}
    ),
    'straight-through': lambda: jaxpruner.SteMagnitudePruning(**at(0.8)),
    "a user's own straight-through method": lambda: Straight(**at(0.8)),
    'no pruning': lambda: jaxpruner.NoPruning(),
    'phases that end short of a polynomial': lambda: jaxpruner.ACDC(TOO_SHORT, **at(0.8)),
    'N:M, which a polynomial reaches at once': lambda: jaxpruner.MagnitudePruning(
        TOO_SHORT, sparsity_type='2:4'
    ),
    'iterative N:M that ends near enough': lambda: jaxpruner.IterativeNMPruning(
        TOO_SHORT, sparsity_type='1:4'
    ),
    'a drop fraction that ends at 0': lambda: config(
        algorithm='rigl',
        update_freq=100,
        update_start_step=100,
        update_end_step=500,
        drop_fraction=0.3,
    ),
    'a strategy without entries': lambda: jaxpruner.jax_pruning.StrategyPruning(
        {}, steps_per_epoch=10
    ),
    'a strategy': lambda: jaxpruner.jax_pruning.StrategyPruning(
        {1: {'method': 'unstr_local', 'prune_rate_pattern': 0.5}}, steps_per_epoch=10
    ),
}


@pytest.mark.parametrize('make', SILENT.values(), ids=list(SILENT))
def test_what_can_be_done_is_done_without_a_word(make):
    init(make())  # warnings are errors


@pytest.mark.parametrize(
    'name', ['no schedule', 'ends short', 'SET never updates', 'the default updater']
)
def test_nothing_is_said_of_a_pruner_that_wraps_no_optimizer(name):
    WARNINGS[name][0]().plan(PARAMS)


def test_pruning_once_needs_no_schedule():
    pruned, _ = jaxpruner.MagnitudePruning(**at(0.75)).instant_sparsify(PARAMS)
    assert jaxpruner.summarize_sparsity(pruned)['dense/kernel'] == 0.75


def test_one_transformation_says_it_once():
    tx = jaxpruner.MagnitudePruning(**at(0.8)).wrap_optax(optax.sgd(0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        tx.init(PARAMS)
        jax.eval_shape(tx.init, PARAMS)  # as for a checkpoint
        jax.jit(tx.init)(PARAMS)
    assert len(caught) == 1


@pytest.mark.parametrize(
    'traced',
    [jax.jit, lambda function: functools.partial(jax.eval_shape, function)],
    ids=['jit', 'eval_shape'],
)
def test_it_is_said_where_init_is_traced(traced):
    tx = jaxpruner.RigL(
        sparsity_schedules.PeriodicSchedule(10),
        drop_fraction_fn=optax.constant_schedule(0.0),
        **at(0.8),
    ).wrap_optax(optax.sgd(0.1))
    with pytest.warns(UserWarning, match='RigL replaces no weight') as caught:
        traced(tx.init)(PARAMS)
    assert [warning.filename for warning in caught] == [__file__]


def test_sparsities_that_are_mapped_are_not_read():
    def masks(sparsity):
        return init(jaxpruner.MagnitudePruning(ONCE, **at(sparsity))).target_sparsities

    assert jax.vmap(masks)(jnp.array([0.5, 0.9]))['dense']['kernel'].shape == (2,)
    with pytest.warns(UserWarning, match='a sparsity that is being traced'):
        jax.vmap(lambda sparsity: init(jaxpruner.MagnitudePruning(**at(sparsity))).count)(
            jnp.array([0.5, 0.9])
        )


def test_the_host_schedule_refuses_to_decide():
    pruner = jaxpruner.MagnitudePruning(sparsity_schedules.HostSchedule(), **at(0.75))
    tx = pruner.wrap_optax(optax.sgd(0.1))
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match='update_masks=True or False'):
        tx.update(GRADS, state, PARAMS)
    _, state = tx.update(GRADS, state, PARAMS, update_masks=True)
    assert float(jaxpruner.sparsity_metrics(state)['dense/kernel']) == 0.75


def test_what_an_algorithm_of_ones_own_says_replaces_it():
    class StartsFromACheckpoint(jaxpruner.MagnitudePruning):
        def check_plan(self, plan):
            assert plan['dense/kernel'].is_pruned

    init(StartsFromACheckpoint(**at(0.8)))
