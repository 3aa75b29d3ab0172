"""Names and configurations: every source and key, and what is refused."""

import contextlib
import dataclasses
import json
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import optax
import pytest

import jaxpruner
from jaxpruner import api, sparsity_schedules

CONFIG = {
    'algorithm': 'magnitude',
    'dist_type': 'erk',
    'sparsity': 0.9,
    'update_freq': 10,
    'update_start_step': 20,
    'update_end_step': 100,
    'sparsity_type': 'block_2,2',
    'rng_seed': 3,
    'use_packed_masks': True,
}


@dataclasses.dataclass
class Settings:
    algorithm: str = 'magnitude'
    dist_type: str = 'erk'
    sparsity: float = 0.9
    update_freq: int = 10
    update_start_step: int = 20
    update_end_step: int = 100
    sparsity_type: str = 'block_2,2'
    rng_seed: int = 3
    use_packed_masks: bool = True
    drop_fraction: float | None = None


def as_json(folder):
    path = folder / 'config.json'
    path.write_text(json.dumps(CONFIG))
    return path


def as_toml(folder):
    path = folder / 'config.toml'
    path.write_text('\n'.join(f'{key} = {json.dumps(value)}' for key, value in CONFIG.items()))
    return str(path)


SOURCES = {
    'dict': lambda folder: CONFIG,
    'ConfigDict': lambda folder: ml_collections.ConfigDict(CONFIG),
    'FrozenConfigDict': lambda folder: ml_collections.FrozenConfigDict(CONFIG),
    'dataclass': lambda folder: Settings(),
    'JSON': as_json,
    'TOML': as_toml,
}


@pytest.mark.parametrize('source', SOURCES.values(), ids=SOURCES)
def test_every_source_gives_the_same_updater(source, tmp_path):
    updater = api.create_updater_from_config(source(tmp_path))
    assert type(updater) is jaxpruner.MagnitudePruning
    assert updater.scheduler == sparsity_schedules.PolynomialSchedule(10, 20, 100)
    assert updater.sparsity_type == jaxpruner.Block((2, 2))
    assert updater.rng_seed == 3
    assert updater.use_packed_masks
    assert updater.get_target_sparsities({'w': jnp.ones((8, 8)), 'b': jnp.ones(8)}) == {
        'w': pytest.approx(0.9, abs=0.01),
        'b': None,
    }


@pytest.mark.parametrize('name', jaxpruner.all_algorithm_names())
def test_the_algorithm_alone_can_be_exchanged(name):
    # Keys of other algorithms are accepted.
    config = {
        'drop_fraction': 0.3,
        'normalize_scores': True,
        'reset_optimizer': False,
        'power': 2,
        'count_excluded': False,
    }
    config |= {key: value for key, value in CONFIG.items() if key != 'sparsity_type'}
    updater = api.create_updater_from_config(config | {'algorithm': name})
    assert type(updater) is jaxpruner.ALGORITHM_REGISTRY[name]


@pytest.mark.parametrize('name', ['static_sparse', 'set', 'rigl', 'acdc'])
def test_methods_that_are_sparse_from_the_start_get_the_same_schedule(name):
    config = {key: value for key, value in CONFIG.items() if key != 'sparsity_type'} | {
        'algorithm': name
    }
    assert api.create_updater_from_config(
        config
    ).scheduler == sparsity_schedules.PolynomialSchedule(10, 20, 100)


def test_acdc_counts_its_phases_itself_where_it_is_told_their_lengths():
    counts = {
        'init_dense_steps_end': 2,
        'final_sparse_steps_start': 9.0,
        'cycle_sparse_steps': 3,
        'cycle_dense_steps': 1,
    }
    for others in ({}, {'update_freq': 10, 'update_start_step': 20, 'update_end_step': 100}):
        config = {'algorithm': 'acdc', 'sparsity': 0.5} | counts | others
        schedule = api.create_updater_from_config(config).scheduler
        assert [step for step in range(12) if schedule.is_mask_update_iter(step)] == [2, 5, 6]
        assert (
            api.create_updater_from_config(config | {'algorithm': 'magnitude'}).scheduler
            != schedule
        )


def test_the_drop_fraction_decays_to_the_end_of_updates():
    updater = api.create_updater_from_config(
        {
            'algorithm': 'rigl',
            'drop_fraction': 0.3,
            'update_freq': 10,
            'update_start_step': 0,
            'update_end_step': 100,
        }
    )
    assert [float(updater.drop_fraction_fn(step)) for step in (0, 50, 100)] == pytest.approx(
        [0.3, 0.15, 0.0], abs=1e-6
    )
    without_end = api.create_updater_from_config(
        {'algorithm': 'rigl', 'drop_fraction': 0.3, 'update_freq': 10}
    )
    assert without_end.drop_fraction_fn(500) == 0.3


def test_a_tenth_is_dropped_by_default():
    updater = api.create_updater_from_config({'algorithm': 'set', 'update_end_step': 100.0})
    assert [float(updater.drop_fraction_fn(step)) for step in (0, 50, 100)] == pytest.approx(
        [0.1, 0.05, 0.0], abs=1e-6
    )
    assert (
        api.create_updater_from_config({'algorithm': 'set', 'update_end_step': 0}).drop_fraction_fn(
            500
        )
        == 0.1
    )


def test_a_class_keeps_a_drop_fraction_of_its_own(monkeypatch):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))

    @dataclasses.dataclass
    class Half(jaxpruner.RigL):
        drop_fraction_fn: Any = optax.constant_schedule(0.5)

    api.register_algorithm('half', Half)
    assert api.create_updater_from_config({'algorithm': 'half'}).drop_fraction_fn(0) == 0.5
    assert (
        api.create_updater_from_config(
            {'algorithm': 'half', 'drop_fraction': 0.2}
        ).drop_fraction_fn(0)
        == 0.2
    )


NEVER = sparsity_schedules.NoUpdateSchedule()
WHEN = {
    'nothing': ({}, NEVER),
    'no start': ({'update_freq': 10, 'update_end_step': 100}, NEVER),
    'a start of None': (
        {'update_freq': 10, 'update_start_step': None, 'update_end_step': 100},
        NEVER,
    ),
    'a power alone': ({'power': 2}, NEVER),
    'one-shot': (
        {'update_freq': 1000, 'update_start_step': 1, 'update_end_step': 1},
        sparsity_schedules.OneShotSchedule(1),
    ),
    'one-shot without a period': (
        {'update_start_step': 0, 'update_end_step': 0},
        sparsity_schedules.OneShotSchedule(0),
    ),
    'no end': (
        {'update_freq': 10, 'update_start_step': 5},
        sparsity_schedules.PeriodicSchedule(10, 5),
    ),
    'whole-valued floats': (
        {'update_freq': 1e3, 'update_start_step': 1e4, 'update_end_step': 4e5},
        sparsity_schedules.PolynomialSchedule(1000, 10000, 400000),
    ),
}


@pytest.mark.parametrize(('config', 'schedule'), WHEN.values(), ids=WHEN)
@pytest.mark.parametrize('source', [dict, ml_collections.ConfigDict], ids=['dict', 'ConfigDict'])
def test_when_masks_are_updated(config, schedule, source):
    updater = api.create_updater_from_config(
        source({'algorithm': 'magnitude', 'sparsity': 0.5} | config)
    )
    assert updater.scheduler == schedule


@pytest.mark.parametrize(
    'name', [name for name in jaxpruner.all_algorithm_names() if name != 'no_prune']
)
def test_every_algorithm_takes_one_shot(name):
    config = {
        'algorithm': name,
        'sparsity': 0.5,
        'update_freq': 1000,
        'update_start_step': 1,
        'update_end_step': 1,
    }
    updater = api.create_updater_from_config(config)
    tx, params = updater.wrap_optax(optax.adam(0.1)), {'w': jnp.arange(1.0, 17).reshape(4, 4)}
    # The drop fraction decays to 0 at the end, which is here the only update.
    is_replaced = name in ('set', 'rigl')
    with (
        pytest.warns(UserWarning, match='replaces no weight')
        if is_replaced
        else contextlib.nullcontext()
    ):
        state = tx.init(params)
    params = updater.post_gradient_update(params, state)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    assert jaxpruner.sparsity_metrics(state)['w'] == 0.5


def test_typed_values_and_is_packed():
    schedule = sparsity_schedules.OneShotSchedule(3)
    config = {
        'algorithm': 'magnitude',
        'sparsity_type': {'*/head/*': None, '*': jaxpruner.Block((2, 2))},
    }
    updater = api.create_updater_from_config(config | {'scheduler': schedule, 'is_packed': True})
    assert updater.scheduler is schedule
    assert updater.use_packed_masks
    assert updater.sparsity_type == {'*/head/*': None, '*': jaxpruner.Block((2, 2))}


def test_rules_that_a_config_dict_has_sorted_are_refused_and_pairs_are_not():
    rules = [['head/*', None], ['*', '2:4']]
    params = {'head': jnp.ones((4, 4)), 'head2': {'w': jnp.ones((4, 4))}} | {
        'head': {'w': jnp.ones((4, 4))}
    }
    sorted_rules = ml_collections.ConfigDict(
        {'algorithm': 'magnitude', 'sparsity': 0.5, 'sparsity_type': dict(rules)}
    )
    with pytest.raises(
        ValueError, match=r"sparsity_type: 'head/\*' is never used.*ConfigDict sorts its keys"
    ):
        api.create_updater_from_config(sorted_rules).instant_sparsify(params)
    pairs = ml_collections.ConfigDict(
        {'algorithm': 'magnitude', 'sparsity': 0.5, 'sparsity_type': rules}
    )
    assert api.create_updater_from_config(pairs).instant_sparsify(params)[1]['head']['w'] is None
    custom = {
        'algorithm': 'magnitude',
        'sparsity': 0.5,
        'custom_sparsity_map': [['head/*', None], ['*', 0.25]],
    }
    assert api.create_updater_from_config(custom).get_target_sparsities(params) == {
        'head': {'w': None},
        'head2': {'w': 0.25},
    }


def test_a_table_without_none_says_dense():
    updater = api.create_updater_from_config(
        {'algorithm': 'magnitude', 'sparsity_type': {'a': 'dense', '*': '2:4'}}
    )
    assert updater.sparsity_type == {'a': None, '*': jaxpruner.NByM(2, 4)}


@pytest.mark.parametrize('name', ['magnitude', 'iterative_nm'])
def test_n_by_m_needs_no_sparsity_beside_a_filter(name):
    config = {
        'algorithm': name,
        'dist_type': 'erk',
        'filter_fn': lambda path, leaf: path[0] != 'head',
    }
    if name == 'magnitude':
        with pytest.raises(ValueError, match=r'has dist_type, filter_fn but no sparsity'):
            api.create_updater_from_config(config | {'sparsity_type': 'block_2,2'})
        config['sparsity_type'] = {'*': '1:4'}
    params = {'body': jnp.ones((4, 8)), 'head': jnp.ones((4, 8))}
    share = 0.75 if name == 'magnitude' else 0.5
    assert api.create_updater_from_config(config).get_target_sparsities(params) == {
        'body': share,
        'head': None,
    }


def test_registering_an_algorithm(monkeypatch):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))

    @dataclasses.dataclass
    class Smallest(jaxpruner.MagnitudePruning):
        temperature: float = 1.0

        def calculate_scores(self, params, sparse_state=None, grads=None):
            return jax.tree.map(lambda param: -jnp.abs(param), params)

    api.register_algorithm('smallest', Smallest)
    again = type(
        'Smallest', (Smallest,), {'__module__': __name__, '__qualname__': Smallest.__qualname__}
    )
    api.register_algorithm('smallest', again)  # as a cell of a notebook does that is run again
    api.register_algorithm('smallest', Smallest)
    updater = api.create_updater_from_config(
        {'algorithm': 'smallest', 'sparsity': 0.5, 'temperature': 2.0}
    )
    assert updater.temperature == 2.0
    assert updater.instant_sparsify({'w': jnp.array([[3.0, 1.0]])})[1]['w'].tolist() == [[0, 1]]
    with pytest.raises(
        TypeError, match=r"'three': an algorithm must be a subclass of jaxpruner.BaseUpdater.*got 3"
    ):
        api.register_algorithm('three', 3)
    with pytest.raises(TypeError, match=r'the name of an algorithm must be a string.*got 3'):
        api.register_algorithm(3, Smallest)


def test_annotations_without_the_decorator_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))

    class Undecorated(jaxpruner.MagnitudePruning):
        is_new: ClassVar[bool] = True
        decay: float = 0.9
        count: 'int' = 3

    @dataclasses.dataclass
    class Below(Undecorated):
        share: float = 0.5

    for algorithm in (Undecorated, Below):
        with pytest.raises(
            TypeError,
            match=r"'mine': Undecorated annotates decay, count, .*@dataclasses\.dataclass above it",
        ):
            api.register_algorithm('mine', algorithm)
    assert 'mine' not in api.ALGORITHM_REGISTRY

    class Constants(jaxpruner.MagnitudePruning):
        is_new: ClassVar[bool] = True
        name: 'ClassVar[str]' = 'x'
        other = 3

    api.register_algorithm('mine', Constants)
    assert api.ALGORITHM_REGISTRY['mine'] is Constants


def test_registering_a_name_that_is_taken_replaces_it_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))
    monkeypatch.setattr(api, 'ONE_SHOT_REGISTRY', dict(api.ONE_SHOT_REGISTRY))

    @dataclasses.dataclass
    class Mine(jaxpruner.MagnitudePruning):
        pass

    names = api.all_algorithm_names()
    for name in ('acdc', 'adam-fisher', 'wanda'):
        assert type(api.create_updater_from_config({'algorithm': name})) is not Mine
        api.register_algorithm(algorithm_name=name, algorithm=Mine)
        assert type(api.create_updater_from_config({'algorithm': name})) is Mine
        assert caplog.messages[-1].startswith(
            f"the algorithm '{name}' is now {__name__}.test_registering"
        )
    assert {*api.all_algorithm_names()} - {*names} == {'adam-fisher', 'wanda'}
    assert (
        type(api.create_updater_from_config({'algorithm': 'adam_fisher'}))
        is jaxpruner.AdamFisherPruning
    )
    said = len(caplog.messages)
    api.register_algorithm('acdc', Mine)
    assert len(caplog.messages) == said, 'the same class again is no news'


def test_an_algorithm_of_two_names_is_listed_once():
    assert api.ALGORITHMS is api.ALGORITHM_REGISTRY
    assert (
        api.ALGORITHMS['adam-fisher']
        is api.ALGORITHMS['adam_fisher']
        is jaxpruner.AdamFisherPruning
    )
    assert 'adam-fisher' not in jaxpruner.all_algorithm_names()


BAD = [
    (
        {'algorithm': 'magnitud'},
        ValueError,
        r"algorithm 'magnitud' is unknown; did you mean 'magnitude'",
    ),
    ({'sparsity': 0.5}, ValueError, r"lacks the key 'algorithm'; known are no_prune, magnitude"),
    (
        {'algorithm': 'magnitude', 'sparsty': 0.5},
        ValueError,
        r"config key 'sparsty' is unknown; did you mean 'sparsity'",
    ),
    (
        {'algorithm': 'rigl', 'init_method': 'random'},
        ValueError,
        r"config key 'init_method' is unknown; the nearest of \d+ names are ('\w+'(, )?){3}$",
    ),
    (
        {'algorithm': 'magnitude', 'total_steps': 100},
        ValueError,
        "config key 'total_steps' is unknown; it may mean update_end_step",
    ),
    ({'algorithm': 'magnitude', 'final_sparsity': 1}, ValueError, 'may mean sparsity$'),
    ({'algorithm': 'magnitude', 'initial_sparsity': 1.5}, ValueError, 'initial_sparsity must lie'),
    (
        {
            'algorithm': 'magnitude',
            'initial_sparsity': 0.5,
            'update_start_step': 0,
            'update_freq': 1,
        },
        ValueError,
        r'initial_sparsity=0\.5 has no effect.*update_end_step=None',
    ),
    (
        {
            'algorithm': 'magnitude',
            'initial_sparsity': 0.5,
            'scheduler': sparsity_schedules.OneShotSchedule(3),
        },
        ValueError,
        'initial_sparsity',
    ),
    ({'algorithm': 'magnitude', 'sparsity': 1.5}, ValueError, r'sparsity must lie in \[0, 1\]'),
    ({'algorithm': 'magnitude', 'sparsity_type': 'nm_4,2'}, ValueError, r'n must not exceed m'),
    ({'algorithm': 'magnitude', 'dist_type': 'erk'}, ValueError, r'has dist_type but no sparsity'),
    (
        {'algorithm': 'magnitude', 'update_start_step': 5, 'update_end_step': 9},
        ValueError,
        r'has update_start_step=5 but no update_freq.*give update_freq',
    ),
    (
        {'algorithm': 'rigl', 'update_start_step': 5},
        ValueError,
        r'has update_start_step=5 but no update_freq',
    ),
    (
        {'algorithm': 'magnitude', 'custom_sparsity_map': {'x': 1.5}},
        ValueError,
        r"custom_sparsity_map\['x'\] must lie",
    ),
    ({'algorithm': 'no_prune', 'sparsity': 7}, ValueError, r'sparsity must lie in \[0, 1\]'),
    ({'algorithm': 'no_prune', 'sparsity_type': 'zzz'}, ValueError, r"unknown sparsity type 'zzz'"),
    (
        {'algorithm': 'no_prune', 'update_freq': -1, 'update_start_step': 0},
        ValueError,
        r'update_freq must',
    ),
    (
        {'algorithm': 'magnitude', 'update_freq': 5, 'update_start_step': 9, 'update_end_step': 3},
        ValueError,
        'lies before',
    ),
    (
        {'algorithm': 'magnitude', 3: 0.5},
        TypeError,
        r"config key 3 is no string; keys are names such as 'sparsity'",
    ),
    (
        17,
        TypeError,
        r'a configuration is a mapping, a dataclass, or the path of a TOML or JSON file; got 17',
    ),
]


@pytest.mark.parametrize(('config', 'error', 'message'), BAD)
def test_bad_configurations(config, error, message):
    with pytest.raises(error, match=message):
        api.create_updater_from_config(config)


FILES = [
    ('missing.toml', None, FileNotFoundError, 'missing.toml'),
    (
        'config.yaml',
        'a: 1',
        ValueError,
        r'config.yaml: a configuration file must end in .toml or .json',
    ),
    ('half.json', '{"algorithm": "magn', ValueError, r'half.json is no valid JSON'),
    ('half.toml', 'algorithm = "magn', ValueError, r'half.toml is no valid TOML'),
    ('list.json', '[1]', ValueError, r'list.json must hold a table of keys, got list'),
]


@pytest.mark.parametrize(('name', 'content', 'error', 'message'), FILES)
def test_bad_files(name, content, error, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        api.create_updater_from_config(tmp_path / name)


@pytest.mark.parametrize(
    'settings',
    [
        {'update_start_step': 10, 'update_end_step': 100},
        {'dist_type': 'erk'},
        {'sparsity_type': 'block_1,4'},
    ],
    ids=' '.join,
)
def test_keys_that_mean_something_to_a_pruner_mean_nothing_to_the_dense_baseline(settings):
    updater = api.create_updater_from_config({'algorithm': 'no_prune', **settings})
    assert updater == jaxpruner.NoPruning()


def test_no_prune_changes_nothing():
    updater = api.create_updater_from_config(
        {'algorithm': 'no_prune', 'sparsity': 0.9, 'update_freq': 1}
    )
    params = {'w': jnp.ones((4, 4))}
    tx, plain = updater.wrap_optax(optax.sgd(0.1)), optax.sgd(0.1)
    updates, state = tx.update(params, tx.init(params), params)
    assert state.masks == {'w': None}
    assert updates['w'].tolist() == plain.update(params, plain.init(params))[0]['w'].tolist()


def test_a_configuration_may_begin_at_a_sparsity():
    config = {'algorithm': 'magnitude', 'sparsity': 0.9, 'initial_sparsity': 0.5}
    window = {'update_freq': 1, 'update_start_step': 0, 'update_end_step': 10}
    schedule = api.create_updater_from_config(config | window).scheduler
    assert schedule == sparsity_schedules.PolynomialSchedule(1, 0, 10, initial_sparsity=0.5)
