"""Each refusal names the value and the place, before anything is computed; pruning nothing is warned of once."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_distributions, sparsity_schedules

PARAMS = {
    'dense': {'kernel': jnp.arange(1.0, 513).reshape(32, 16), 'bias': jnp.ones(16)},
    'head': jax.random.normal(jax.random.key(0), (16, 6)),
}
KERNEL = {'kernel': PARAMS['dense']['kernel'], 'bias': jnp.ones(16)}
ONCE = sparsity_schedules.OneShotSchedule(0)
NO_MULTIPLE = sparsity_schedules.PeriodicSchedule(1000, 1, 500)
TOO_SHORT = sparsity_schedules.PolynomialSchedule(100, 0, 150)
REACHED = sparsity_schedules.PolynomialSchedule(100, 100, 500)
DECAY = optax.cosine_decay_schedule(0.3, 500)


def uniform(sparsity=0.5, **settings):
    return functools.partial(sparsity_distributions.uniform, sparsity=sparsity, **settings)


OWN = {'sparsity_distribution_fn': uniform()}


def from_distribution(distribution):
    return {'sparsity': None, 'sparsity_distribution_fn': distribution}


def nothing(path, leaf):
    return False


def too_much(params):
    return jax.tree.map(lambda leaf: 1.5, params)


def never(*arguments):
    raise AssertionError('scores were computed')


def first_of_all(scores, sparsity):
    return (jnp.arange(scores.size) == 0).reshape(scores.shape).astype(jnp.uint8)


def init(pruner, params=KERNEL, tx=None):
    return pruner.wrap_optax(tx or optax.adam(1e-3)).init(params)


# Class, its settings, and what the error says.
SETTINGS = [
    ('MagnitudePruning', {'sparsity_distribution_fn': 0.5}, 'sparsity_distribution_fn.*0.5'),
    ('MagnitudePruning', {'topk_fn': 3}, 'topk_fn.*3'),
    ('MagnitudePruning', {'sparsity': 1.5}, 'sparsity.*1.5'),
    ('MagnitudePruning', {'sparsity_distribution_fn': uniform(1.5)}, 'sparsity.*1.5'),
    ('GlobalSaliencyPruning', {'sparsity_type': 'block_2,2'}, 'GlobalSaliency.*Unstruct'),
    ('GlobalMagnitudePruning', {'stacked': '*'}, 'stacked'),
    ('GlobalMagnitudePruning', {'topk_fn': first_of_all}, 'topk_fn'),
    ('GlobalMagnitudePruning', {'custom_sparsity_map': {}} | OWN, 'custom_.*sparsity_distrib'),
    ('RigL', {'sparsity': 0.9} | OWN, 'sparsity and sparsity_distribution_fn'),
    ('RigL', {'topk_fn': first_of_all}, 'topk_fn'),
    ('RigL', {'drop_fraction_fn': lambda step: 1.3}, 'drop_fraction_fn.*1.3'),
    ('RigL', {'nothing': 1}, 'nothing'),
    ('ACDC', {'scheduler': sparsity_schedules.StepsSchedule((3,))}, 'ACDC.*Periodic'),
    ('FixedMask', {'masks': None}, 'FixedMask'),
    ('FixedMask', {'masks': {'w': jnp.array([0, 0.5])}}, 'w holds.*masks_from_zeros'),
    ('FixedMask', {'masks': {'w': jnp.ones(2)}, 'sparsity': 0.9}, 'masks'),
]


@pytest.mark.parametrize(('cls', 'settings', 'words'), SETTINGS)
def test_bad_settings_fail_at_construction(cls, settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(jaxpruner, cls)(**settings)


# Settings of a class that fit no parameter, and what the error says.
SHAPES = [
    ('MagnitudePruning', {'sparsity_type': '2:4'}, r'head: .*\(16, 6\).* 6 .*-1.*4'),
    ('MagnitudePruning', {'sparsity_type': 'channel_2'}, 'dense/kernel: .* 2 '),
    ('MagnitudePruning', {'sparsity_type': {'c/*': None}}, r"sparsity_type.*'c/\*'"),
    ('MagnitudePruning', {'stacked': 'layer/*'}, r"stacked.*'layer/\*'"),
    ('MagnitudePruning', from_distribution(too_much), r'dense/bias.*\[0, 1\].*1.5'),
    ('GlobalMagnitudePruning', {'sparsity_type': {'*': '2:4'}}, 'Unstructured'),
    ('RigL', {'sparsity_type': {'dense/kernel': '2:4'}}, 'dense/kernel.*RigL|RigL.*dense/kernel'),
    ('IterativeNMPruning', {'sparsity_type': {'dense/*': '2:4'}, 'sparsity': None}, 'NByM'),
]


@pytest.mark.parametrize(('cls', 'settings', 'words'), SHAPES)
def test_what_fits_no_leaf_fails_before_anything_is_computed(cls, settings, words):
    pruner = getattr(jaxpruner, cls)(**{'sparsity': 0.5} | settings)
    pruner.calculate_scores = never
    for call in (pruner.instant_sparsify, pruner.plan, functools.partial(init, pruner)):
        if call != pruner.instant_sparsify or cls != 'RigL':
            with pytest.raises(ValueError, match=words):
                call(PARAMS)


def test_one_error_names_all_leaves_that_cannot_take_n_by_m():
    params = PARAMS | {'a': jnp.ones((8, 6)), 'b': jnp.ones((4, 8, 3)), 'c': jnp.ones((8, 8))}
    pruner = jaxpruner.MagnitudePruning(sparsity_type='2:4', stacked='b')
    with pytest.raises(ValueError, match=r'a: .*\(8, 6\).*b: .*\(8, 3\).*head: .*\(16, 6\)'):
        pruner.plan(params)


@pytest.mark.parametrize('leaf', [jax.nn.relu, 'relu'])
def test_a_leaf_that_is_no_array_is_refused_by_name(leaf):
    params = {'w': jnp.ones((2, 2)), 'f': leaf}
    distribution = lambda params: {'w': 0.5, 'f': None}  # noqa: E731
    pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=distribution)
    for function in (pruner.get_target_sparsities, pruner.instant_sparsify):
        with pytest.raises(TypeError, match=r'^f: '):
            function(params)


def half(cls, **settings):
    return getattr(jaxpruner, cls)(sparsity=0.5, **settings)


def sgd(pruner):
    return pruner.wrap_optax(optax.sgd(0.1))


WRONG_MASK = {'kernel': jnp.ones(3, jnp.uint8), 'bias': None}
# A call that cannot be answered, and what the error says.
CALLS = [
    (lambda: jaxpruner.BaseUpdater().calculate_scores(KERNEL), NotImplementedError, 'calculate_s'),
    (lambda: half('RandomPruning').instant_sparsify(KERNEL, model=len), TypeError, 'model'),
    (lambda: half('SaliencyPruning').instant_sparsify(KERNEL), ValueError, 'gradients'),
    (lambda: half('MovementPruning').instant_sparsify(KERNEL), ValueError, 'wrap_optax.*grads'),
    (lambda: half('AdamFisherPruning').instant_sparsify(KERNEL), ValueError, 'wrap_optax'),
    (lambda: half('RigL').instant_sparsify(KERNEL), RuntimeError, 'instant_sparsify'),
    (lambda: init(half('AdamFisherPruning'), tx=optax.sgd(0.1)), ValueError, r'\(32, 16\).*kernel'),
    (lambda: half('MagnitudePruning').wrap_optax(optax.adam), TypeError, 'wrap_optax'),
    (lambda: sgd(half('MagnitudePruning')).update(KERNEL, (), KERNEL), TypeError, 'State.*tuple'),
    (lambda: init(jaxpruner.FixedMask(WRONG_MASK)), ValueError, r'\(3,\)'),
    (lambda: half('MagnitudePruning').post_gradient_update(KERNEL), TypeError, 'state once'),
]


@pytest.mark.parametrize(('call', 'error', 'words'), CALLS)
def test_calls_that_cannot_be_answered(call, error, words):
    with pytest.raises(error, match=words):
        call()


class Fridays:
    """A schedule of one's own, which is not asked before the first step."""

    def is_mask_update_iter(self, step):
        raise AssertionError('asked')

    def get_sparsity_at_step(self, target_sparsities, step):
        return target_sparsities


def at_08(cls, *arguments, **settings):
    return lambda: getattr(jaxpruner, cls)(*arguments, **({'sparsity': 0.8} | settings))


# A pruner, and what its warning has to name: class, value, leaf or remedy.
WARNINGS = {
    'no schedule': (at_08('MagnitudePruning'), 'MagnitudePruning.*NoUpdateSchedule'),
    'nothing replaced': (at_08('RigL'), 'RigL never updates.*NoUpdateSchedule'),
    'a share of less than one': (
        at_08('SET', REACHED, drop_fraction_fn=lambda step: 0.004),
        'SET never replaces.* 102.*0.004.*StaticRandomSparse',
    ),
    'no multiple': (at_08('MagnitudePruning', NO_MULTIPLE), '1000.*1.*500'),
    'phases that never begin': (at_08('ACDC', NO_MULTIPLE), 'ACDC'),
    'ends short': (at_08('MagnitudePruning', TOO_SHORT), '100.*150.*update_end_step=101'),
    'the default pruner': (jaxpruner.MagnitudePruning, 'MagnitudePruning.*dense|kernel.*sparsity='),
    'sparse from the start': (at_08('StaticRandomSparse', sparsity=0.0), 'StaticRandom.*kernel'),
    'a filter that matches nothing': (
        at_08('MagnitudePruning', ONCE, **from_distribution(uniform(filter_fn=nothing))),
        'kernel.*filter_fn',
    ),
}


@pytest.mark.parametrize(('make', 'words'), WARNINGS.values(), ids=list(WARNINGS))
def test_one_warning_says_what_prunes_nothing_or_too_little(make, words):
    tx = sgd(make())
    with pytest.warns(UserWarning, match=words) as caught:
        tx.init(KERNEL)
    assert [warning.filename for warning in caught] == [__file__]


# What has nothing to prune, or what would be pruned by mistake.
MODELS = {
    'vectors': ({'scale': jnp.ones(8), 'shift': jnp.ones(8)}, 0.8, 'scale.*1-D|scale.*dimension'),
    'no parameters': ({}, 0.8, 'no parameters'),
    'NaN alone': ({'a': jnp.full((2, 4), jnp.nan), 'b': jnp.ones((2, 4))}, 0.5, r'\ba\b.*NaN'),
}


@pytest.mark.parametrize(('params', 'sparsity', 'words'), MODELS.values(), ids=list(MODELS))
def test_a_warning_names_the_leaves(params, sparsity, words):
    with pytest.warns(UserWarning, match=words) as caught:
        jaxpruner.MagnitudePruning(sparsity=sparsity).instant_sparsify(params)
    assert [warning.filename for warning in caught] == [__file__]


# These do what they were asked for.
SILENT = {
    'once': at_08('MagnitudePruning', ONCE),
    'without an end': at_08('MagnitudePruning', sparsity_schedules.PeriodicSchedule(1000)),
    "a user's own schedule": at_08('MagnitudePruning', Fridays()),
    'static masks': at_08('StaticRandomSparse'),
    'N:M': at_08('MagnitudePruning', TOO_SHORT, sparsity=None, sparsity_type='2:4'),
    'a drop fraction that ends at 0': at_08('RigL', REACHED, drop_fraction_fn=DECAY),
}


@pytest.mark.parametrize('make', SILENT.values(), ids=list(SILENT))
def test_what_can_be_done_is_done_without_a_word(make):
    init(make())  # warnings are errors


class Slower(sparsity_schedules.PolynomialSchedule):
    """A schedule with a formula of its own, which has come half of the way."""

    def get_sparsity_at_step(self, target_sparsities, step):
        return jax.tree.map(lambda target: target / 2, target_sparsities)


def test_a_schedule_of_ones_own_is_asked_how_far_it_comes():
    with pytest.warns(UserWarning, match=r'MagnitudePruning ends at 50\.0%'):
        init(jaxpruner.MagnitudePruning(Slower(100, 0, 200), sparsity=0.8))


@pytest.mark.parametrize('traced', [jax.jit, lambda init: init])
def test_the_same_line_warns_once_under_the_default_filter_where_init_is_traced_too(traced):
    tx = sgd(half('MagnitudePruning'))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('default')
        for _ in range(3):
            traced(tx.init)(KERNEL)
    assert len(caught) == 1
