"""From names and recipes to updaters."""

import jax
import pytest

import jaxpruner
from jaxpruner.baselines.recipe import Pruning, Recipe
from jaxpruner.baselines.training import make_updater, target_sparsities
from jaxpruner.sparsity_distributions import NOT_DIM_ONE_FILTER as FILTER

RECIPE = Recipe('resnet', steps=1000)
SHAPES = {
    'wide': jax.ShapeDtypeStruct((64, 64), 'float32'),
    'bias': jax.ShapeDtypeStruct((64,), 'float32'),
}


@pytest.mark.parametrize('name', [*jaxpruner.all_algorithm_names(), 'adam-fisher'])
def test_every_algorithm_is_made(name):
    if name == 'iterative_nm':
        pytest.skip('it takes N:M types alone')
    updater = make_updater(name, {'wide': 0.5, 'bias': None}, RECIPE)
    assert isinstance(updater, jaxpruner.ALGORITHM_REGISTRY[name])


@pytest.mark.parametrize(('name', 'start', 'end'), [('magnitude', 200, 750), ('rigl', 0, 750)])
def test_when_masks_change(name, start, end):
    scheduler = make_updater(name, {'wide': 0.5, 'bias': None}, RECIPE).scheduler
    assert (scheduler.update_start_step, scheduler.update_end_step) == (start, end)


@pytest.mark.parametrize('end', [0.5, 0.73, 0.75, 0.999])
def test_gradual_pruning_reaches_its_target_at_the_last_update(end):
    recipe = Recipe('resnet', steps=997, pruning=Pruning(end=end))
    scheduler = make_updater('magnitude', {'wide': 0.5}, recipe).scheduler
    last = max(step for step in range(997) if scheduler.is_mask_update_iter(step))
    assert float(scheduler.get_sparsity_at_step(0.5, last)) == 0.5


@pytest.mark.parametrize(
    ('pruning', 'message'),
    [
        (Pruning(distribution='erik'), "'erik' is unknown; did you mean 'erk'"),
        (Pruning(drop_fraction=1.5), 'drop_fraction must be a number between 0 and 1'),
    ],
)
def test_what_is_refused(pruning, message):
    recipe = Recipe('resnet', pruning=pruning)
    with pytest.raises(ValueError, match=message):
        make_updater('set', target_sparsities(SHAPES, 'set', 0.5, recipe, FILTER), recipe)
