"""Recipes: to TOML and back, overrides, the optimizers and pruners that they name, and what is refused."""

import dataclasses
import tomllib

import jax
import numpy as np
import pytest

import jaxpruner
from jaxpruner import api
from jaxpruner.baselines import WORKLOADS, sweeps
from jaxpruner.baselines.recipe import (
    Optimizer,
    Pruning,
    Recipe,
    Schedule,
    parse_override,
    read_recipe,
)
from jaxpruner.baselines.training import (
    make_optimizer,
    make_schedule,
    make_updater,
    target_sparsities,
)
from jaxpruner.sparsity_distributions import NOT_DIM_ONE_FILTER as FILTER

ALL = [(workload, preset) for workload in WORKLOADS.values() for preset in workload.presets]
BASE = Recipe('resnet', model={'width': 8, 'stages': (1, 1)}, task={'shift': 0, 'name': 'a "b"\n'})


@pytest.mark.parametrize(
    ('workload', 'preset'), ALL, ids=lambda value: getattr(value, 'name', value)
)
def test_presets_go_to_toml_and_back(workload, preset, tmp_path):
    recipe = workload.default(preset)
    assert (recipe.workload, recipe.preset) == (workload.name, preset)
    recipe.write(tmp_path / 'recipe.toml')
    changed = dataclasses.replace(recipe, steps=1, optimizer=Optimizer('adam'))
    assert changed.digest() != recipe.digest()
    again = read_recipe(tmp_path / 'recipe.toml', changed)
    assert again == recipe
    assert again.digest() == recipe.digest()
    assert [path.name for path in tmp_path.iterdir()] == ['recipe.toml']


@pytest.mark.parametrize(
    ('text', 'changes'),
    [
        ('steps=4e5', {'steps': 400_000}),
        ('optimizer.learning_rate = 1', {'optimizer': {'learning_rate': 1.0}}),
        ('model.stages=[2, 2]', {'model': {'stages': (2, 2)}}),
        ('task.name=x', {'task': {'name': 'x'}}),
    ],
)
def test_overrides(text, changes):
    assert BASE.updated(parse_override(text)) == BASE.updated(changes) != BASE


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('steps = ', 'no valid TOML'),
        ('workload = "vit"', "recipe of the workload 'vit', not of 'resnet'"),
        (
            '[pruning]\nstrat = 0.1',
            "recipe.toml: the recipe has no key 'pruning.strat'; did you mean 'start'",
        ),
    ],
)
def test_files_that_are_refused(content, message, tmp_path):
    path = tmp_path / 'recipe.toml'
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_recipe(path, BASE)


def changed(text):
    return lambda: BASE.updated(parse_override(text))


def trained(**settings):
    return lambda: make_optimizer(Recipe('resnet', **settings))


def pruned(**settings):
    recipe = Recipe('resnet', pruning=Pruning(**settings))
    shapes = {'wide': jax.ShapeDtypeStruct((64, 64), 'float32')}
    return lambda: make_updater(
        'set', target_sparsities(shapes, 'set', 0.5, recipe, FILTER), recipe
    )


REFUSED = [
    (changed('steps'), "'steps' is no key=value"),
    (changed('stepz=3'), "no key 'stepz'; did you mean 'steps'"),
    (changed('steps=1.5'), 'steps must be a whole number, got 1.5'),
    (changed('model.stages=1'), 'model.stages must be a list, got 1'),
    (changed('steps=0'), 'steps must be at least 1, got 0'),
    (changed('dtype=float16'), "dtype must be 'float32' or 'bfloat16'"),
    (changed('pruning.end=75.0'), 'pruning.end must lie in'),
    (changed('pruning.decay=0.5'), "no key 'pruning.decay'; .*--modules"),  # not imported
    (lambda: WORKLOADS['resnet'].default('ful'), "has no preset 'ful'; did you mean 'full'"),
    (trained(optimizer=Optimizer('adm')), "'adm' is unknown; did you mean 'adam'"),
    (trained(schedule=Schedule(decay='cosin')), "'cosin' is unknown; did you mean"),
    (trained(schedule=Schedule(decay='steps', boundaries=(0.5, 0.2))), 'must be growing shares'),
    (pruned(distribution='erik'), "'erik' is unknown; did you mean 'erk'"),
    (pruned(drop_fraction=1.5), 'drop_fraction must be a number between 0 and 1'),
]


@pytest.mark.parametrize(('call', 'message'), REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@dataclasses.dataclass
class Decaying(jaxpruner.MagnitudePruning):
    """An algorithm with settings of its own."""

    decay: float = 0.9
    bands: tuple = (1, 2)
    mode: str | None = None


@pytest.fixture
def decaying(monkeypatch):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))
    jaxpruner.register_algorithm('decaying', Decaying)
    growing = type('Growing', (jaxpruner.RigL,), {'starts_sparse': False})
    jaxpruner.register_algorithm('growing', growing)


def test_fields_of_an_algorithm_of_ones_own_are_keys(decaying, tmp_path):
    recipe = BASE
    for text in ('pruning.mode=fast', 'pruning.decay=1', 'pruning.bands=[3]', 'pruning.mode=slow'):
        recipe = recipe.updated(parse_override(text))
    assert recipe.digest() != BASE.digest()
    recipe.write(tmp_path / 'recipe.toml')
    toml = tomllib.loads((tmp_path / 'recipe.toml').read_text())
    assert toml['pruning'].items() >= {'decay': 1.0, 'bands': [3], 'mode': 'slow'}.items()
    assert read_recipe(tmp_path / 'recipe.toml', BASE) == recipe
    pruner = make_updater('decaying', {'w': 0.5}, recipe)
    assert (pruner.decay, pruner.bands, pruner.mode) == (1.0, (3,), 'slow')
    assert make_updater('decaying', {'w': 0.5}, BASE).decay == 0.9
    assert type(make_updater('magnitude', {'w': 0.5}, recipe)) is jaxpruner.MagnitudePruning


def test_a_field_that_only_the_new_recipe_sets_makes_it_another(decaying, tmp_path):
    BASE.write(tmp_path / 'recipe.toml')
    (tmp_path / 'cells').mkdir()
    (tmp_path / 'cells/decaying_0.8_0.json').touch()
    recipe, words = BASE.updated(parse_override('pruning.decay=1')), "'nothing' there, 'decay = 1.0"
    with pytest.raises(ValueError, match=words), sweeps.claimed(tmp_path, recipe):
        pass


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('pruning.dekay=1', "no key 'pruning.dekay'; did you mean 'decay'"),
        ('pruning.decay=fast', "pruning.decay must be a number, got 'fast'"),
        ('pruning.mode.a=1', r"pruning.mode must be a plain value, got \{'a': 1\}"),
    ],
)
def test_other_keys_are_refused(text, message, decaying):
    with pytest.raises(ValueError, match=message):
        BASE.updated(parse_override(text))


@pytest.mark.parametrize(
    ('schedule', 'rates'),
    [
        (Schedule(warmup=0.1, decay='constant'), {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
        (Schedule(warmup=0.1, decay='cosine'), {0: 0.0, 10: 1.0, 55: 0.5, 100: 0.0}),
        (Schedule(decay='steps', boundaries=(0.5, 0.75)), {0: 1.0, 49: 1.0, 51: 0.1, 76: 0.01}),
        (Schedule(warmup=0.1, decay='steps', boundaries=(0.5,)), {10: 1.0, 49: 1.0, 51: 0.1}),
        (Schedule(decay='inverse_sqrt'), {0: 1.0, 3: 0.5}),
    ],
)
def test_learning_rates(schedule, rates):
    rate = make_schedule(
        Recipe('resnet', steps=100, optimizer=Optimizer(learning_rate=1.0), schedule=schedule)
    )
    np.testing.assert_allclose([rate(step) for step in rates], list(rates.values()), atol=1e-6)


THOUSAND = Recipe('resnet', steps=1000)


@pytest.mark.parametrize('name', sorted({*jaxpruner.ALGORITHM_REGISTRY} - {'iterative_nm'}))
def test_every_algorithm_is_made(name):  # but for one that takes N:M types alone
    updater = make_updater(name, {'wide': 0.5, 'bias': None}, THOUSAND)
    assert isinstance(updater, jaxpruner.ALGORITHM_REGISTRY[name])


@pytest.mark.parametrize(('name', 'start'), [('magnitude', 200), ('rigl', 0), ('growing', 200)])
def test_when_masks_change(name, start, decaying):
    scheduler = make_updater(name, {'wide': 0.5, 'bias': None}, THOUSAND).scheduler
    assert (scheduler.update_start_step, scheduler.update_end_step) == (start, 750)


@pytest.mark.parametrize('end', [0.5, 0.73, 0.75, 0.999])
def test_gradual_pruning_reaches_its_target_at_the_last_update(end):
    recipe = Recipe('resnet', steps=997, pruning=Pruning(end=end))
    scheduler = make_updater('magnitude', {'wide': 0.5}, recipe).scheduler
    last = max(step for step in range(997) if scheduler.is_mask_update_iter(step))
    assert float(scheduler.get_sparsity_at_step(0.5, last)) == 0.5
