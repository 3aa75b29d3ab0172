"""A folder of results belongs to one recipe, and to one process at a time."""

import subprocess
import sys

import pytest

from jaxpruner.baselines.recipe import Recipe, read_recipe
from jaxpruner.baselines.sweeps import claimed, keep_recipe

RECIPE = Recipe('resnet')
HOLDER = """
import fcntl, sys
file = open(sys.argv[1], 'a')
fcntl.flock(file, fcntl.LOCK_EX)
print('locked', flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_share_a_folder(tmp_path):
    command = [sys.executable, '-c', HOLDER, str(tmp_path / '.lock')]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with (
            pytest.raises(
                ValueError,
                match=r'another process is writing to .*: wait until it has finished, or',
            ),
            claimed(tmp_path, RECIPE),
        ):
            pass
        assert not (tmp_path / 'recipe.toml').exists()
        process.kill()
    with claimed(tmp_path, RECIPE):
        pass


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
    with (
        pytest.raises(
            ValueError,
            match=r"is another recipe \('steps = 10' there, 'steps = 1000' now\).*another --out",
        ),
        claimed(tmp_path, RECIPE),
    ):
        pass
    (tmp_path / 'recipe.toml').write_text('steps = [')
    with pytest.raises(ValueError, match=r'recipe\.toml'), claimed(tmp_path, RECIPE):
        pass
