"""Names and configurations: every source and key, and what is refused."""

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

import jaxpruner
from helpers import steps
from jaxpruner import api, sparsity_distributions, sparsity_schedules

PARAMS = {
    'a': {'kernel': jnp.arange(1.0, 65).reshape(8, 8), 'bias': jnp.ones(8)},
    'head': {'kernel': jnp.ones((8, 4))},
}
WINDOW = {'update_freq': 10, 'update_start_step': 20, 'update_end_step': 100}
CONFIG = WINDOW | {
    'algorithm': 'magnitude',
    'dist_type': 'erk',
    'sparsity': 0.9,
    'sparsity_type': 'block_2,2',
    'rng_seed': 3,
    'use_packed_masks': True,
}
Settings = dataclasses.make_dataclass(
    'Settings', [(key, Any, value) for key, value in (CONFIG | {'drop_fraction': None}).items()]
)


def make(algorithm='magnitude', **settings):
    return api.create_updater_from_config({'algorithm': algorithm} | settings)


@pytest.fixture
def registry(monkeypatch):
    """What a test registers is forgotten after it."""
    for name in ('ALGORITHM_REGISTRY', 'ONE_SHOT_REGISTRY'):
        monkeypatch.setattr(api, name, dict(getattr(api, name)))


def written(path, text):
    path.write_text(text)
    return path


TOML = '\n'.join(f'{key} = {json.dumps(value)}' for key, value in CONFIG.items())
SOURCES = {
    'dict': lambda folder: CONFIG,
    'FrozenConfigDict': lambda folder: ml_collections.FrozenConfigDict(CONFIG),
    'dataclass': lambda folder: Settings(),
    'JSON': lambda folder: written(folder / 'config.json', json.dumps(CONFIG)),
    'TOML': lambda folder: str(written(folder / 'config.toml', TOML)),
}


@pytest.mark.parametrize('source', SOURCES.values(), ids=SOURCES)
def test_every_source_gives_the_same_updater(source, tmp_path):
    pruner = api.create_updater_from_config(source(tmp_path))
    expected = jaxpruner.MagnitudePruning(
        sparsity_schedules.PolynomialSchedule(10, 20, 100),
        sparsity_distribution_fn=functools.partial(sparsity_distributions.erk, sparsity=0.9),
        sparsity_type=jaxpruner.Block((2, 2)),
        rng_seed=3,
        use_packed_masks=True,
    )
    assert type(pruner) is type(expected)
    for name in ('scheduler', 'sparsity_type', 'rng_seed', 'use_packed_masks'):
        assert getattr(pruner, name) == getattr(expected, name)
    assert pruner.get_target_sparsities(PARAMS) == expected.get_target_sparsities(PARAMS)


@pytest.mark.parametrize('name', jaxpruner.all_algorithm_names())
def test_the_algorithm_alone_can_be_exchanged(name):
    # Keys of other algorithms are accepted.
    keys = {'drop_fraction': 0.3, 'use_normalization': True, 'reset_optimizer': False, 'power': 2}
    pruner = make(**WINDOW | keys | {'sparsity': 0.5, 'algorithm': name})
    assert type(pruner) is jaxpruner.ALGORITHM_REGISTRY[name]
    if name != 'no_prune':
        expected = sparsity_schedules.PolynomialSchedule(10, 20, 100, power=2)
        if name == 'acdc':  # whose phases begin where masks would be updated
            due = map(pruner.scheduler.is_mask_update_iter, range(120))
            assert [step for step, is_due in enumerate(due) if is_due] == [*range(20, 101, 10)]
        else:
            assert pruner.scheduler == expected


@pytest.mark.parametrize('name', ['magnitude', 'acdc'])
def test_masks_may_change_once(name):
    once = {'update_freq': 1000, 'update_start_step': 1, 'update_end_step': 1}
    _, state = steps.history(make(name, sparsity=0.5, **once), 3, PARAMS)[-1]
    assert jaxpruner.sparsity_metrics(state)['_mask_sparsity'] == 0.5


def test_acdc_alone_counts_its_phases():
    names = 'init_dense_steps_end final_sparse_steps_start cycle_sparse_steps cycle_dense_steps'
    counts = dict(zip(names.split(), (2, 9.0, 3, 1), strict=True))
    for others in ({}, WINDOW):
        schedule = make('acdc', sparsity=0.5, **counts, **others).scheduler
        assert schedule == jaxpruner.ACDC(**counts).scheduler
        assert make('magnitude', sparsity=0.5, **counts, **others).scheduler != schedule


@pytest.mark.parametrize(
    ('settings', 'fractions'),
    [
        ({'drop_fraction': 0.3} | WINDOW, (0.3, 0.15, 0.0)),
        ({'drop_fraction': 0.3, 'update_freq': 10}, (0.3, 0.3, 0.3)),  # without an end
        ({'update_end_step': 100.0}, (0.1, 0.05, 0.0)),
        ({'update_end_step': 0}, (0.1, 0.1, 0.1)),
    ],
)
def test_the_drop_fraction_decays_to_the_end_of_updates(settings, fractions):
    fraction = make('rigl', **settings).drop_fraction_fn
    assert [float(fraction(step)) for step in (0, 50, 100)] == pytest.approx(fractions, abs=1e-6)


NEVER = sparsity_schedules.NoUpdateSchedule()
OWN = sparsity_schedules.OneShotSchedule(3)
WHEN = [
    ({}, NEVER),
    ({'update_freq': 10, 'update_end_step': 100}, NEVER),
    ({'update_freq': 10, 'update_start_step': None, 'update_end_step': 100}, NEVER),
    (WINDOW | {'update_start_step': 1, 'update_end_step': 1}, jaxpruner.OneShotSchedule(1)),
    ({'update_start_step': 0, 'update_end_step': 0}, jaxpruner.OneShotSchedule(0)),
    ({'update_freq': 10, 'update_start_step': 5}, jaxpruner.PeriodicSchedule(10, 5)),
    (WINDOW | {'update_end_step': 4e5}, jaxpruner.PolynomialSchedule(10, 20, 400000)),
    ({'initial_sparsity': 0.5} | WINDOW, jaxpruner.PolynomialSchedule(10, 20, 100, 3, 0.5)),
    ({'scheduler': OWN}, OWN),
]


@pytest.mark.parametrize(('config', 'schedule'), WHEN)
def test_when_masks_are_updated(config, schedule):
    config = ml_collections.ConfigDict({'algorithm': 'magnitude', 'sparsity': 0.9} | config)
    assert api.create_updater_from_config(config).scheduler == schedule


# Settings, and the target of each kernel.
TARGETS = [
    ({'sparsity': 0.5}, 0.5, 0.5),
    ({'sparsity': 0.5, 'filter_fn': lambda path, leaf: path[0] == 'a'}, 0.5, None),
    ({'sparsity': 0.5, 'custom_sparsity_map': {('a', 'kernel'): 0.25, 'head/*': None}}, 0.25, None),
    ({'sparsity': 0.5, 'custom_sparsity_map': [['head/*', None], ['*/kernel', 0.25]]}, 0.25, None),
    ({'sparsity': 0.5, 'custom_sparsity_map': [[['a', 'kernel'], 0.25]]}, 0.25, 0.5),
    ({'sparsity_type': '1:4'}, 0.75, 0.75),
    ({'sparsity_type': {'head/*': 'dense', '*': '1:4'}}, 0.75, None),
    ({'sparsity_type': '1:4', 'filter_fn': lambda path, leaf: path[0] == 'a'}, 0.75, None),
    ({'algorithm': 'iterative_nm', 'filter_fn': lambda path, leaf: path[0] == 'a'}, 0.5, None),
    ({'sparsity_type': [['head/*', None], ['*', '2:4']], 'sparsity': 0.5}, 0.5, None),
]


@pytest.mark.parametrize(('settings', 'kernel', 'head'), TARGETS)
def test_targets_of_kernels(settings, kernel, head):
    targets = make(**settings).get_target_sparsities(PARAMS)
    assert (targets['a']['kernel'], targets['head']['kernel']) == (kernel, head)


def test_rules_that_a_config_dict_has_sorted_are_refused():
    rules = {'head/*': None, '*': '2:4'}  # '*' comes first where keys are sorted
    config = {'algorithm': 'magnitude', 'sparsity': 0.5, 'sparsity_type': rules}
    pruner = api.create_updater_from_config(ml_collections.ConfigDict(config))
    with pytest.raises(ValueError, match=r'sparsity_type.*ConfigDict'):
        pruner.instant_sparsify(PARAMS)


def test_a_placeholder_that_is_not_filled():
    placeholder = ml_collections.config_dict.placeholder(int)
    config = ml_collections.ConfigDict({'algorithm': 'set', 'rng_seed': placeholder})
    assert api.create_updater_from_config(config).rng_seed == jax.random.key(8)
    config.sparsity = ml_collections.config_dict.required_placeholder(float)
    with pytest.raises(ValueError, match="'sparsity'"):
        api.create_updater_from_config(config)


# Values that each kind of key takes and refuses.
FLAG = (True, np.True_), ('no', 1, [])
SHARE = (0, 1, np.float32(0.5)), ('0.5', True, [], -0.1, 1.5, math.nan)
STEP = (0, 8.0, np.int64(9)), ('10', 1.5, -1, math.inf, True, 2**31)
FROM_ZERO = (0, 1e-8), ('0.5', True, -1, math.nan)
ABOVE_ZERO = (0.5, 3), ('0.5', True, 0, -1, math.inf)
COUNT = (1, np.int32(3)), (0, 1.5, '3', True)
FUNCTION = (lambda *values: 0.5,), ('x', 3, True)
NEEDS = {
    'dist_type': {'sparsity': 0.5},
    'filter_fn': {'sparsity': 0.5},
    'update_start_step': {'update_freq': 5},
    'blocks': {'sequential': True},
    'initial_sparsity': WINDOW,
}
OF_WANDA = 'per owl owl_per owl_multiple owl_deviation sequential blocks'.split()
OWNERS = dict.fromkeys(OF_WANDA, 'wanda') | {'rounds': 'snip', 'drop_fraction_fn': 'rigl'}
OWNERS |= {'damping': 'sparsegpt', 'block_size': 'sparsegpt'}
KEYS = {
    'algorithm': (('magnitude', 'adam-fisher'), ('magnitud', ['set'], 3, jaxpruner.SET)),
    'dist_type': (('uniform', 'erk'), ('erdos', ['erk'], 3)),
    'sparsity_distribution_fn': FUNCTION,
    'custom_sparsity_map': (({'head/*': None}, {}), (True, 'head/*', {'a/*': 1.5}, {3: 0.5})),
    'update_freq': ((1, 1e3), (0, '10', 1.5, True)),
    'power': ABOVE_ZERO,
    'scheduler': ((OWN,), (3, 'never', sparsity_schedules.NoUpdateSchedule)),
    'sparsity_type': (('2:4', {'*': '2:4'}), ('zzz', 'nm_4,2', [], 3, {'*': 3}, jaxpruner.NByM)),
    'stacked': (('a/*', [('a', 'kernel')]), (3, True, {'a': 'b'})),
    'rng_seed': ((0, 2**40, jax.random.PRNGKey(3)), (-1, 1.5, '8', True, [])),
    'per': (('output', 'layer'), ('row', 3)),
    'owl_per': (('block', 'leaf'), ('row', 3)),
    'blocks': ((['a/*'],), ('a/*', 3, [3])),
} | {
    key: values
    for keys, values in [
        ('sparsity initial_sparsity drop_fraction owl_deviation', SHARE),
        ('filter_fn topk_fn drop_fraction_fn', FUNCTION),
        ('update_start_step update_end_step init_dense_steps_end final_sparse_steps_start', STEP),
        ('cycle_sparse_steps cycle_dense_steps', STEP),
        ('skip_gradients is_sparse_gradients use_packed_masks is_packed is_debug owl', FLAG),
        ('use_normalization reset_optimizer reset_adam', FLAG),
        ('sequential keep_zeros', FLAG),
        ('eps normalization_eps damping', FROM_ZERO),
        ('owl_multiple', ABOVE_ZERO),
        ('block_size rounds', COUNT),
    ]
    for key in keys.split()
}


def test_every_field_of_every_algorithm_is_a_key_of_the_table():
    every = (api.ALGORITHM_REGISTRY | api.ONE_SHOT_REGISTRY).values()
    fields = {field.name for cls in every for field in dataclasses.fields(cls) if field.init}
    assert fields <= KEYS.keys()


@pytest.mark.parametrize('key', KEYS)
def test_values_of_a_key_are_taken_or_refused_by_name_whatever_the_algorithm(key):
    good, bad = KEYS[key]
    own, needed = OWNERS.get(key, 'magnitude'), NEEDS.get(key, {})
    for value in good:
        made = make(**{'algorithm': own} | needed | {key: value})
        assert isinstance(made, jaxpruner.BaseUpdater)
    for algorithm in ('no_prune', own):
        for value in bad:
            with pytest.raises((TypeError, ValueError), match=rf'\b{key}\b'):
                make(**{'algorithm': algorithm} | needed | {key: value})


BAD = [
    ({'sparsity': 0.5}, "'algorithm'"),
    ({'algorithm': 'magnitude', 'sparsty': 0.5}, "'sparsty'.*'sparsity'"),
    ({'algorithm': 'magnitude', 'total_steps': 100}, "'total_steps'"),
    ({'algorithm': 'magnitude', 'initial_sparsity': 0.5, 'update_freq': 1}, 'initial_sparsity'),
    ({'algorithm': 'rigl', 'update_start_step': 5}, 'update_start_step=5.*update_freq'),
    ({'algorithm': 'magnitude', 3: 0.5}, 'key 3'),
    (17, '17'),
    ({'algorithm': 'rigl', 'scheduler': NEVER, 'update_freq': 5}, 'scheduler'),
    ({'algorithm': 'rigl', 'sparsity_distribution_fn': len, 'sparsity': 0.5}, 'sparsity'),
    ({'algorithm': 'rigl', 'drop_fraction_fn': abs, 'drop_fraction': 0.3}, 'drop_fraction'),
    ({'algorithm': 'rigl', 'is_packed': True, 'use_packed_masks': False}, 'use_packed_masks'),
]


@pytest.mark.parametrize(('config', 'words'), BAD)
def test_bad_configurations(config, words):
    with pytest.raises((ValueError, TypeError), match=words):
        api.create_updater_from_config(config)


@pytest.mark.parametrize(
    ('name', 'content', 'error'),
    [
        ('missing.toml', None, FileNotFoundError),
        ('config.yaml', 'a: 1', ValueError),
        ('half.json', '{"algorithm": "magn', ValueError),
        ('half.toml', 'algorithm = "magn', ValueError),
        ('list.json', '[1]', ValueError),
    ],
)
def test_bad_files_are_named(name, content, error, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=name):
        api.create_updater_from_config(tmp_path / name)


@dataclasses.dataclass
class Smallest(jaxpruner.MagnitudePruning):
    temperature: float = 1.0
    per: tuple[int, ...] = (1,)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda param: -jnp.abs(param), params)


@pytest.mark.usefixtures('registry')
def test_registering_an_algorithm():
    for _ in range(2):  # as a cell of a notebook does that is run again
        api.register_algorithm('smallest', Smallest)
    pruner = make('smallest', sparsity=0.5, temperature=2.0, per=(2, 3))
    assert (pruner.temperature, pruner.per) == (2.0, (2, 3))
    assert pruner.instant_sparsify({'w': jnp.array([[3.0, 1.0]])})[1]['w'].tolist() == [[0, 1]]
    for name, cls, words in [('three', 3, "'three'.*3"), (3, Smallest, '3')]:
        with pytest.raises(TypeError, match=words):
            api.register_algorithm(name, cls)
    names = api.all_algorithm_names()
    for name in ('acdc', 'adam-fisher', 'wanda'):
        api.register_algorithm(algorithm_name=name, algorithm=Smallest)
        assert type(make(name)) is Smallest
    assert {*api.all_algorithm_names()} - {*names} == {'adam-fisher', 'wanda'}
    assert type(make('adam_fisher')) is jaxpruner.AdamFisherPruning


@pytest.mark.usefixtures('registry')
def test_annotations_without_the_decorator_are_refused_with_the_remedy():
    class Undecorated(jaxpruner.MagnitudePruning):
        decay: float = 0.9

    with pytest.raises(TypeError, match=r'decay.*@dataclasses\.dataclass'):
        api.register_algorithm('mine', Undecorated)
    assert 'mine' not in api.ALGORITHM_REGISTRY
