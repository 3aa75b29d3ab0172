"""Every key of a configuration is checked for type and range, whatever the algorithm."""

import collections
import dataclasses
import math
import random
import re
import types

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import api, sparsity_schedules
from jaxpruner.base_updater import config_keys

PARAMS = {
    'a': {'kernel': jnp.arange(1.0, 65).reshape(8, 8), 'bias': jnp.ones(8)},
    'head': {'kernel': jnp.ones((8, 4))},
}


def selects_kernels(path, leaf):
    return path[-1] == 'kernel'


def half(params):
    return jax.tree.map(lambda leaf: 0.5 if leaf.ndim > 1 else None, params)


@dataclasses.dataclass(frozen=True)
class Values:
    """What a key takes and what it refuses."""

    good: tuple
    bad: tuple


NOT_A_FLAG = ('no', 'true', 0, 1, {}, [], 1.0, object())
NOT_A_FUNCTION = ('x', 3, True, {}, [])
NOT_A_STEP = (
    '10',
    1.5,
    -1,
    -1.0,
    math.inf,
    math.nan,
    True,
    [1],
    {},
    2**31,
    jnp.float32(0.5),
    np.array([3]),
    int,
)
NOT_A_NUMBER = (
    '0.5',
    True,
    np.True_,
    jnp.array(True),
    [],
    {},
    1j,
    b'1',
    float,
    np.array([0.5, 0.5]),
)
FLAG = Values((True, False, np.True_), NOT_A_FLAG)
STEP = Values((0, 7, 8.0, np.int64(9), jnp.int32(3)), NOT_A_STEP)
SHARE = Values(
    (0, 0.0, 0.9, 1, np.float32(0.5), jnp.float32(0.25)),
    (*NOT_A_NUMBER, -0.1, 1.5, 90, math.nan, math.inf),
)
FUNCTION = Values((lambda *values: None,), NOT_A_FUNCTION)
FROM_ZERO = Values((0, 1e-8, 3, np.float64(1.0)), (*NOT_A_NUMBER, -1, math.nan, math.inf))
COUNT = Values((1, 100, np.int32(3)), (0, -1, 2.0, 1.5, '3', True, [], {}, math.nan))
ABOVE_ZERO = Values((0.5, 3, np.float64(1.0)), (*NOT_A_NUMBER, 0, -1, math.nan, math.inf))

VALUES = {
    'algorithm': Values(
        ('magnitude', 'adam-fisher'), ('', 'magnitud', ['set'], {}, 3, True, jaxpruner.SET)
    ),
    'sparsity': SHARE,
    'dist_type': Values(('uniform', 'erk'), ('', 'erdos', {}, ['erk'], 3, True)),
    'filter_fn': Values((selects_kernels,), NOT_A_FUNCTION),
    'custom_sparsity_map': Values(
        (
            {'head/*': None},
            {('a', 'kernel'): 0.5},
            [('head/*', 0.5)],
            [[['a', 'kernel'], None]],
            {},
        ),
        (
            False,
            True,
            0,
            0.5,
            'head/*',
            ['head/*'],
            {3: 0.5},
            {'a/*': 1.5},
            {'a/*': '0.5'},
            {'a/*': True},
            {None: 0.5},
        ),
    ),
    'count_excluded': FLAG,
    'sparsity_distribution_fn': Values((half,), NOT_A_FUNCTION),
    'update_freq': Values((1, 1000, 1e3, np.int32(5)), (*NOT_A_STEP, 0, 0.0)),
    'update_start_step': STEP,
    'update_end_step': STEP,
    'power': ABOVE_ZERO,
    'initial_sparsity': SHARE,
    'scheduler': Values(
        (sparsity_schedules.OneShotSchedule(3), sparsity_schedules.PeriodicSchedule(3)),
        (3, 'never', True, {}, sparsity_schedules.NoUpdateSchedule, half),
    ),
    'sparsity_type': Values(
        (
            '2:4',
            'nm_1,4,0',
            'unstructured',
            jaxpruner.Block((4, 4)),
            {'head/*': None, '*': '2:4'},
            [['*', 'channel_-1']],
        ),
        (
            '',
            'zzz',
            'block_0,4',
            'nm_4,2',
            'channel_x',
            [],
            {},
            (),
            3,
            True,
            jaxpruner.NByM,
            {3: '2:4'},
            ['2:4'],
            {'*': 3},
        ),
    ),
    'stacked': Values(
        ('a/*', [('a', 'kernel')], (), {'a': 1}), (3, True, [3], {'a': 'b'}, {3: 1}, [['a', 3]])
    ),
    'topk_fn': FUNCTION,
    'skip_gradients': FLAG,
    'is_sparse_gradients': FLAG,
    'rng_seed': Values(
        (0, 8, 2**40, np.uint32(5), jax.random.PRNGKey(3), jax.random.key(3)),
        (-1, np.int64(-1), 2**63, 1.5, '8', True, [], {}, np.zeros(3), jnp.float32(1)),
    ),
    'use_packed_masks': FLAG,
    'compact_moments': FLAG,
    'is_packed': FLAG,
    'drop_fraction': SHARE,
    'drop_fraction_fn': Values((optax.constant_schedule(0.3),), NOT_A_FUNCTION),
    'eps': FROM_ZERO,
    'is_debug': FLAG,
    'normalize_scores': FLAG,
    'use_normalization': FLAG,
    'normalization_eps': FROM_ZERO,
    'reset_optimizer': FLAG,
    'reset_adam': FLAG,
    'init_dense_steps_end': STEP,
    'final_sparse_steps_start': STEP,
    'cycle_sparse_steps': STEP,
    'cycle_dense_steps': STEP,
    'per': Values(('output', 'layer'), ('', 'row', {}, 3, True, ['layer'])),
    'owl': FLAG,
    'owl_per': Values(('block', 'leaf'), ('', 'row', {}, 3, True)),
    'owl_multiple': ABOVE_ZERO,
    'owl_deviation': SHARE,
    'sequential': FLAG,
    'blocks': Values(
        (['a/*', 'head/*'], [['a/*', ('head', 'kernel')]]), ('a/*', 3, True, [3], {'a': 1}, [[3]])
    ),
    'damping': FROM_ZERO,
    'block_size': COUNT,
    'keep_zeros': FLAG,
    'rounds': COUNT,
}
BAD = [(key, value) for key, values in VALUES.items() for value in values.bad]
GOOD = [(key, value) for key, values in VALUES.items() for value in values.good]
# Two keys that say the same thing, and values that need another key.
NEEDS = {
    'dist_type': {'sparsity': 0.5},
    'filter_fn': {'sparsity': 0.5},
    'count_excluded': {'sparsity': 0.5},
    'update_start_step': {'update_freq': 5},
    'blocks': {'sequential': True},
}


def test_the_table_has_every_key_of_every_algorithm():
    fields = set()
    for algorithm in (api.ALGORITHM_REGISTRY | api.ONE_SHOT_REGISTRY).values():
        if not algorithm.__module__.startswith('test'):
            fields |= {field.name for field in dataclasses.fields(algorithm) if field.init}
    assert fields <= config_keys.CONFIG_KEYS.keys()
    assert VALUES.keys() == config_keys.CONFIG_KEYS.keys()


@pytest.mark.parametrize(
    'algorithm', ['no_prune', 'magnitude', 'rigl', 'global_magnitude', 'acdc', 'wanda', 'snip']
)
def test_a_bad_value_is_refused_whatever_the_algorithm(algorithm):
    for key, value in BAD:
        config = {'algorithm': algorithm, **NEEDS.get(key, {}), key: value}
        with pytest.raises((TypeError, ValueError), match=rf'\b{key}\b') as error:
            api.create_updater_from_config(config)
        if isinstance(
            value, str | bool | int | complex
        ):  # of a container the message says what is wrong in it
            assert str(value) in str(error.value), (key, value)


@pytest.mark.parametrize(
    ('key', 'value'), GOOD, ids=[f'{key}-{i}' for i, (key, _) in enumerate(GOOD)]
)
def test_a_good_value_is_taken(key, value):
    algorithms = {
        'blocks': 'wanda',
        'rounds': 'snip',
        'damping': 'sparsegpt',
        'drop_fraction_fn': 'rigl',
        'compact_moments': 'rigl',
    }
    config = {'algorithm': algorithms.get(key, 'magnitude'), **NEEDS.get(key, {}), key: value}
    assert isinstance(api.create_updater_from_config(config), jaxpruner.BaseUpdater)


@pytest.mark.parametrize(
    ('algorithm', 'key'),
    [
        ('MagnitudePruning', 'use_packed_masks'),
        ('MagnitudePruning', 'is_sparse_gradients'),
        ('MagnitudePruning', 'stacked'),
        ('MagnitudePruning', 'rng_seed'),
        ('MagnitudePruning', 'sparsity_type'),
        ('MagnitudePruning', 'scheduler'),
        ('GlobalMagnitudePruning', 'normalization_eps'),
        ('GlobalMagnitudePruning', 'custom_sparsity_map'),
        ('GlobalMagnitudePruning', 'filter_fn'),
        ('SET', 'drop_fraction_fn'),
        ('ACDC', 'reset_optimizer'),
    ],
)
def test_classes_check_their_fields_by_the_same_table(algorithm, key):
    for value in VALUES[key].bad:
        with pytest.raises((TypeError, ValueError), match=rf'\b{key}\b'):
            getattr(jaxpruner, algorithm)(**{key: value})


def test_fields_of_ones_own_are_ones_own(monkeypatch):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))

    @dataclasses.dataclass
    class Mine(jaxpruner.MagnitudePruning):
        per: tuple[int, ...] = (1,)
        filter_fn: str = 'all'
        is_sparse_gradients: bool = True

    api.register_algorithm('mine', Mine)
    updater = api.create_updater_from_config({'algorithm': 'mine', 'per': (2, 3), 'sparsity': 0.5})
    assert updater.per == (2, 3)
    with pytest.raises(TypeError, match=r'is_sparse_gradients must be true or false'):
        Mine(is_sparse_gradients='no')
    with pytest.raises(TypeError, match=r'per must be'):
        api.create_updater_from_config({'algorithm': 'magnitude', 'per': (2, 3)})


OWN_FIELDS = {
    'rate': Values((1, 0.5, np.float32(1), jnp.float32(2)), ('0.9', True, [1.0], None)),
    'steps': Values((1, np.int64(3), jnp.int32(2)), (1.5, '3', True, jnp.ones(2, int))),
    'is_fast': Values((True, np.False_), ('yes', 1)),
    'label': Values(('', 'x'), (3, b'x')),
    'late': Values((1.0,), ('1',)),  # its annotation is a string
    'unset': Values((None, 2), ('2',)),
    'anything': Values((3, 'x', [1], None), ()),
}


@dataclasses.dataclass
class Own(jaxpruner.MagnitudePruning):
    rate: float = 1.0
    steps: int = 1
    is_fast: bool = False
    label: str = ''
    late: 'float' = 1.0
    unset: float = None
    anything: list[str] | object = None

    def __post_init__(self):
        _ = self.rate + 1  # fails for words, unless the key was looked at before
        super().__post_init__()


@pytest.mark.parametrize(('key', 'values'), OWN_FIELDS.items(), ids=OWN_FIELDS)
def test_fields_of_ones_own_are_checked_by_simple_annotations(key, values, monkeypatch):
    monkeypatch.setitem(api.ALGORITHM_REGISTRY, 'own', Own)
    for value in values.good:
        assert getattr(Own(sparsity=0.5, **{key: value}), key) is value
        api.create_updater_from_config({'algorithm': 'own', 'sparsity': 0.5, key: value})
    for value in values.bad:
        if value is not None:
            with pytest.raises(TypeError, match=rf'^{key} must be .*, got'):
                api.create_updater_from_config({'algorithm': 'own', 'sparsity': 0.5, key: value})
        if key != 'rate':
            with pytest.raises(TypeError, match=rf'^{key} must be .*, got'):
                Own(sparsity=0.5, **{key: value})


def test_numbers_that_are_traced_are_numbers():
    kept = jax.vmap(lambda rate: Own(sparsity=0.5, rate=rate).rate)(jnp.arange(3.0))
    assert kept.tolist() == [0.0, 1.0, 2.0]


def test_two_keys_for_one_thing():
    for first, second in [
        ({'scheduler': sparsity_schedules.NoUpdateSchedule()}, {'update_freq': 5}),
        ({'sparsity_distribution_fn': half}, {'sparsity': 0.5}),
        ({'drop_fraction_fn': optax.constant_schedule(0.3)}, {'drop_fraction': 0.3}),
        ({'is_packed': True}, {'use_packed_masks': False}),
    ]:
        with pytest.raises(ValueError, match=next(iter(second))) as error:
            api.create_updater_from_config({'algorithm': 'rigl'} | first | second)
        assert next(iter(first)) in str(error.value)


@dataclasses.dataclass
class Settings:
    algorithm: str = 'set'
    sparsity: float = 0.5
    dist_type: str | None = None
    rng_seed: int | None = None


SOURCES = {
    'dataclass': Settings(),
    'namespace': types.SimpleNamespace(
        algorithm='set', sparsity=0.5, dist_type=None, rng_seed=None
    ),
    'named tuple': collections.namedtuple('Row', 'algorithm sparsity rng_seed')('set', 0.5, None),
    'frozen mapping': types.MappingProxyType({'algorithm': 'set', 'sparsity': 0.5}),
    'ConfigDict with placeholders': ml_collections.ConfigDict(
        {
            'algorithm': 'set',
            'sparsity': 0.5,
            'rng_seed': ml_collections.config_dict.placeholder(int),
        }
    ),
}


@pytest.mark.parametrize('source', SOURCES.values(), ids=SOURCES)
def test_objects_of_all_kinds_are_configurations(source):
    updater = api.create_updater_from_config(source)
    assert type(updater) is jaxpruner.SET
    assert updater.rng_seed == jax.random.key(8)
    assert updater.get_target_sparsities(PARAMS)['a'] == {'kernel': 0.5, 'bias': None}


def test_nested_maps_of_config_dicts():
    config = ml_collections.ConfigDict({'algorithm': 'magnitude', 'sparsity': 0.5})
    config.custom_sparsity_map = {('a', 'kernel'): 0.25, ('head', 'kernel'): None}
    for frozen in (False, True):
        source = ml_collections.FrozenConfigDict(config) if frozen else config
        targets = api.create_updater_from_config(source).get_target_sparsities(PARAMS)
        assert targets == {'a': {'kernel': 0.25, 'bias': None}, 'head': {'kernel': None}}


def test_a_placeholder_that_must_be_filled_is_named():
    config = ml_collections.ConfigDict({'algorithm': 'magnitude'})
    config.sparsity = ml_collections.config_dict.required_placeholder(float)
    with pytest.raises(ValueError, match=r"config key 'sparsity' has no value"):
        api.create_updater_from_config(config)


def test_seeds_may_be_traced():
    def mask(seed):
        updater = api.create_updater_from_config(
            {'algorithm': 'random', 'sparsity': 0.5, 'rng_seed': seed}
        )
        return updater.instant_sparsify(PARAMS)[1]['a']['kernel']

    seeds = jnp.arange(3, dtype=jnp.uint32)
    for seed, stacked in zip(range(3), jax.jit(jax.vmap(mask))(seeds), strict=True):
        assert stacked.tolist() == mask(seed).tolist()
    keys = jax.random.split(jax.random.key(1), 2)
    assert jax.vmap(mask)(keys).sum() == 64


JUNK = (
    'x',
    '',
    [],
    {},
    True,
    -1,
    0,
    1,
    0.5,
    1.5,
    90,
    math.nan,
    math.inf,
    2**40,
    1j,
    b'x',
    (1, 2),
    ['set'],
    half,
)
# Which junk makes sense after all; for all other keys none of it does.
RIGHT_JUNK = {
    'FLAG': (True,),
    'STEP': (0, 1, 90),
    'SHARE': (0, 1, 0.5),
    'FUNCTION': (half,),
    'FROM_ZERO': (0, 1, 0.5, 1.5, 90, 2**40),
    'COUNT': (1, 90, 2**40),
    'ABOVE_ZERO': (1, 0.5, 1.5, 90, 2**40),
    'filter_fn': (half,),
    'drop_fraction_fn': (half,),
    'sparsity_distribution_fn': (half,),
    'sparsity_type': (half,),
    'custom_sparsity_map': ([], {}),
    'update_freq': (1, 90),
    'rng_seed': (0, 1, 90, 2**40),
    'stacked': ('x', '', [], ['set']),
    'blocks': ([], ['set']),
}
for _name in ('FLAG', 'STEP', 'SHARE', 'FUNCTION', 'FROM_ZERO', 'COUNT', 'ABOVE_ZERO'):
    for _key, _values in VALUES.items():
        if _values is globals()[_name]:
            RIGHT_JUNK[_key] = RIGHT_JUNK[_name]
# Of keys that are right one by one some exclude each other, or miss another: what such a refusal names.
TOGETHER = (
    'scheduler sparsity_distribution_fn drop_fraction_fn is_packed sparsity sparsity_type topk_fn stacked blocks owl '
    'update_freq update_end_step custom_sparsity_map init_dense_steps_end cycle_sparse_steps '
    'compact_moments'
).split()


def draw_value(draw, key):
    """A value, and whether it makes sense."""
    source = draw.choice(('good', 'good', 'good', 'bad', 'junk', 'none'))
    if source == 'none':
        return None, True
    if source == 'junk':
        value = draw.choice(JUNK)
        return value, any(
            type(value) is type(right) and value == right for right in RIGHT_JUNK.get(key, ())
        )
    return draw.choice(getattr(VALUES[key], source)), source == 'good'


def names_one_of(message, keys):
    return any(re.search(rf'\b{key}\b', message) for key in keys)


def refusal(config):
    """What is said of a configuration that is refused, `None` where it is taken."""
    try:
        api.create_updater_from_config(config)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def test_random_configurations_are_taken_or_refused_by_name():
    draw = random.Random(0)
    counts = collections.Counter()
    for _ in range(500):
        config = {'algorithm': draw.choice([*api.all_algorithm_names(), *api.ONE_SHOT_REGISTRY])}
        wrong = []
        for key in draw.sample(sorted(VALUES), draw.randint(1, 6)):
            config[key], is_right = draw_value(draw, key)
            wrong += [] if is_right else [key]
        if config['algorithm'] is None:
            wrong = ['algorithm']
        message = refusal(config)
        if message is None:
            counts['taken'] += 1
            assert not wrong, f'{config}: {wrong} make no sense'
        else:
            counts['wrong, refused' if wrong else 'right one by one, refused together'] += 1
            assert names_one_of(message, wrong or TOGETHER), (config, message)
    assert min(counts.values()) > 20, counts


# Class, a key of configurations that its constructor lacks, and the remedy.
LACKING = [
    (
        jaxpruner.RigL,
        'custom_sparsity_map',
        r'give sparsity_distribution_fn=.*custom_sparsity_map=',
    ),
    (jaxpruner.RigL, 'drop_fraction', r'give drop_fraction_fn='),
    (jaxpruner.MagnitudePruning, 'drop_fraction', r'leave it out'),
    (jaxpruner.MagnitudePruning, 'update_freq', r'give scheduler=jaxpruner.PolynomialSchedule'),
    (jaxpruner.GlobalMagnitudePruning, 'dist_type', r'leave it out'),
    (jaxpruner.MagnitudePruning, 'algorithm', r'create_updater_from_config'),
]


@pytest.mark.parametrize(('cls', 'key', 'remedy'), LACKING)
def test_a_constructor_says_what_stands_for_a_key_that_it_lacks(cls, key, remedy):
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no setting '{key}'.*{remedy}"):
        cls(**{key: 0.5})


def test_a_constructor_of_ones_own_takes_what_it_likes():
    class Mine(jaxpruner.RigL):
        def __init__(self, drop_fraction, **settings):
            super().__init__(drop_fraction_fn=lambda step: drop_fraction, **settings)

    assert Mine(drop_fraction=0.2, sparsity=0.5).drop_fraction_fn(0) == 0.2
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        jaxpruner.RigL(nothing=1)


@pytest.mark.parametrize(
    ('cls', 'settings'),
    [
        (jaxpruner.RigL, {'sparsity': 0.5}),
        (jaxpruner.GlobalMagnitudePruning, {'custom_sparsity_map': {'a': 0.5}}),
    ],
)
def test_two_settings_of_one_thing_are_named_with_both_remedies(cls, settings):
    def targets(params):
        return params

    with pytest.raises(ValueError, match=r'sparsity_distribution_fn=targets, .*partial') as caught:
        cls(sparsity_distribution_fn=targets, **settings)
    assert {*settings} <= set(re.findall(r'\w+', str(caught.value)))
    assert '<' not in str(caught.value)
