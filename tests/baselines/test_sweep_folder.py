"""A folder of results belongs to one recipe, and to one process at a time."""

import pytest

from jaxpruner.baselines.recipe import Recipe, read_recipe
from jaxpruner.baselines.sweeps import claimed, keep_recipe

RECIPE = Recipe('resnet')


def test_two_processes_do_not_share_a_folder(tmp_path):
    words = 'another process is writing to .*: wait until it has finished, or .* to another --out'
    for _ in range(2):  # it is free again
        with claimed(tmp_path, RECIPE):
            with pytest.raises(ValueError, match=words), claimed(tmp_path, RECIPE):
                pass
    assert not (tmp_path / 'recipe.toml').exists()


@pytest.mark.parametrize('made', ['cells/set_0.8_0.json', 'checkpoints/set_1a/00000/about/x'])
def test_another_recipe_or_a_damaged_one_is_refused_once_a_cell_has_begun(made, tmp_path):
    other = RECIPE.updated({'steps': 10})
    with claimed(tmp_path, RECIPE):
        keep_recipe(tmp_path, RECIPE)
    with claimed(tmp_path, other):
        keep_recipe(tmp_path, other)
    assert read_recipe(tmp_path / 'recipe.toml', RECIPE) == other
    (tmp_path / made).parent.mkdir(parents=True)
    (tmp_path / made).touch()
    words = r"is another recipe \('steps = 10' there, 'steps = 1000' now\).*another --out"
    with pytest.raises(ValueError, match=words), claimed(tmp_path, RECIPE):
        pass
    (tmp_path / 'recipe.toml').write_text('steps = [')
    with pytest.raises(ValueError, match=r'recipe\.toml'), claimed(tmp_path, RECIPE):
        pass
