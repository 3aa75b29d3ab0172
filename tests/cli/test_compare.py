"""`jaxpruner run` and `jaxpruner compare`: what WORKLOAD means, what is refused, a short training."""

import sys
import tomllib
from typing import get_args

import numpy as np
import pytest

from jaxpruner import api, sparsity_types
from jaxpruner.baselines import WORKLOADS, cell_mapping
from jaxpruner.checkpoints import open_checkpoint, write_safetensors
from jaxpruner.cli.main import main
from jaxpruner.cli.options import Over
from jaxpruner.cli.workload_names import find_workload
from jaxpruner.report import read_cells

TINY = ['--set', 'steps=4', 'eval_every=1.0', 'batch_size=8', 'model.hidden=[4]']


@pytest.mark.parametrize(
    ('arguments', 'data', 'preset'),
    [
        (['lenet'], 'digits', 'default'),
        (['digits-lenet'], 'digits', 'default'),
        (['mnist-lenet'], 'mnist', 'data'),
        (['mnist-lenet', '--preset', 'data'], 'mnist', 'data'),
        (['lenet', '--data-dir', 'nowhere'], 'mnist', 'data'),
        (['lenet', '--preset', 'data', '--data-dir', 'nowhere'], 'mnist', 'data'),
        (['imagenet-vit'], 'imagenet', 'full'),
    ],
)
@pytest.mark.parametrize('command', ['run', 'compare'])
def test_a_name_may_begin_with_data(command, arguments, data, preset, capsys):
    assert main([command, *arguments, '--print-recipe']) == 0
    recipe = tomllib.loads(capsys.readouterr().out)
    assert (recipe['data'], recipe['preset']) == (data, preset)


def test_the_ways_of_training_are_those_of_sweeps():
    assert set(get_args(Over)) == set(get_args(cell_mapping.RequestedMapping))


def test_every_preset_is_reached_by_a_name():
    for workload in WORKLOADS.values():
        assert find_workload(workload.name).preset is None
        for preset in workload.presets:
            data = workload.default(preset).data
            named = find_workload(f'{data}-{workload.name}')
            assert named.workload is workload
            assert workload.default(named.preset).data == data


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['lenett'], "there is no workload 'lenett'; did you mean 'lenet'"),
        (['mnits-vit'], "there is no workload 'mnits-vit'; did you mean 'mnist-vit'"),
        (
            ['digits-lenet', '--preset', 'data'],
            'lenet trains on digits, but --preset, --recipe or --set ask for mnist',
        ),
        (['digits-lenet', '--set', 'data=mnist'], 'ask for mnist: leave them out, or say lenet'),
        (
            ['digits-lenet', '--data-dir', 'here'],
            'digits is read from no folder: leave --data-dir here out',
        ),
        (['mnist-lenet'], "the preset 'data' of lenet needs --data-dir"),
        (['lenet', '--preset', 'ful'], "lenet has no preset 'ful'"),
        (
            ['lenet', '--set', 'step=3'],
            "--set step=3: the recipe has no key 'step'; did you mean 'steps'?",
        ),
        (['lenet', '--recipe', 'nowhere.toml'], "No such file or directory: 'nowhere.toml'"),
        (
            ['lenet', '--algorithms', 'riggl'],
            "--algorithms 'riggl' is unknown; did you mean 'rigl'?",
        ),
        (
            ['lenet', '--sparsities', '80'],
            '--sparsities must lie in [0, 1] (the share of weights removed), got 80.0',
        ),
        (['lenet', '--modules', 'mine.py'], "--modules: 'mine.py' is no name of a module"),
        (['lenet', '--modules', 'my-own'], "'my-own' is no name of a module; write mine for the"),
        (['lenet', '--modules', 'nowhere'], "No module named 'nowhere'; modules are looked for in"),
        (['lenet', '--seeds', '-1'], '--seeds must be a whole number from 0'),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_work(
    arguments, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(['compare', *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count('\n')) == ('', 1)
    assert words in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('wrong', 'words', 'right'),
    [
        ('schedule.decay=cosin', "schedule.decay 'cosin' is unknown", 'schedule.decay=cosine'),
        (
            'pruning.sparsity_type=2-4',
            "unknown sparsity type '2-4'",
            'pruning.sparsity_type=block_2,2',
        ),
        # Wrong for the second algorithm alone.
        (
            'pruning.trainer_start=0.9',
            'pruning.trainer_start, trainer_end: the end 0.75 lies before the start 0.9',
            'pruning.trainer_start=0.1',
        ),
    ],
)
def test_a_wrong_recipe_is_refused_before_training_and_the_corrected_one_is_taken(
    wrong, words, right, tmp_path, capsys
):
    options = ['digits-lenet', '--out', str(tmp_path / 'out'), '--no-compilation-cache', *TINY]
    options += ['--algorithms', 'magnitude', 'set', '--seeds', '0', '--sparsities', '0.5']
    assert main(['compare', *options, '--set', wrong]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['.lock']
    assert main(['compare', *options, '--set', right]) == 0
    assert '2 of 2 cells' in capsys.readouterr().out
    assert main(['compare', *options, '--set', wrong]) == 2
    assert 'is another recipe' in capsys.readouterr().err


MODULE = """
import dataclasses, jax, jax.numpy as jnp, jaxpruner

@dataclasses.dataclass
class Largest(jaxpruner.BaseUpdater):
    strength: float = 1.0

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda param: -self.strength * jnp.abs(param), params)

jaxpruner.register_algorithm('largest', Largest)
jaxpruner.register_sparsity_type(
    'columns', lambda text: jaxpruner.Channel(int(text.split('_')[1]))
)
"""


@pytest.fixture
def own_place(tmp_path, monkeypatch):
    """A folder to be in, with a module that registers an algorithm and a type."""
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))
    monkeypatch.setattr(sparsity_types, '_OWN_TYPES', {})
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.delitem(sys.modules, 'own_largest', raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'own_largest.py').write_text(MODULE)
    return tmp_path


def test_a_recipe_may_hold_fields_and_types_of_ones_own(own_place, capsys):
    options = ['digits-lenet', *TINY, 'pruning.strength=2', 'pruning.sparsity_type=columns_-1']
    options += ['--out', 'out', '--no-compilation-cache']
    assert main(['run', *options]) == 2
    assert "no key 'pruning.strength'" in capsys.readouterr().err

    write_safetensors(own_place / 'w', {'w': np.array([[3.0, 1], [1, 1]])})
    prune = ['prune', 'w', '--out', 'pruned', '--sparsity', '0.5', '--types', 'columns_-1']
    assert main(prune) == 2
    assert "unknown sparsity type 'columns_-1'" in capsys.readouterr().err
    assert main([*prune, '--modules', 'own_largest']) == 0
    assert open_checkpoint(own_place / 'pruned').read('w').tolist() == [[3, 0], [1, 0]]

    options += ['--modules', 'own_largest', '--algorithm', 'largest']
    assert main(['run', *options]) == 0
    with (own_place / 'out' / 'recipe.toml').open('rb') as file:
        pruning = tomllib.load(file)['pruning']
    assert (pruning['strength'], pruning['sparsity_type']) == (2.0, 'columns_-1')
    with np.load(own_place / 'out' / 'masks' / 'largest_0.8_0.npz') as masks:
        last = masks['dense1/kernel'][-1]
    assert last.sum(0).tolist().count(64) == 1  # of four columns
    assert last.sum() == 64


def test_algorithms_of_modules_that_are_imported_first_have_names(own_place, capsys):
    (own_place / 'needy.py').write_text('import nothing_of_that_name')
    options = ['digits-lenet', *TINY, '--out', 'out', '--no-compilation-cache']
    assert main(['compare', *options, '--modules', 'needy']) == 2
    assert "'needy' cannot be imported: No module named 'nothing_of" in capsys.readouterr().err

    chosen = ['--seeds', '0', '--algorithms', 'magnitude', 'largest']
    assert main(['compare', *options, *chosen]) == 2
    assert "--algorithms 'largest' is unknown" in capsys.readouterr().err
    assert main(['compare', *options, *chosen, '--modules', 'own_largest']) == 0
    assert '2 of 2 cells are in out' in capsys.readouterr().out
    assert main(['run', *options, '--modules', 'own_largest', '--algorithm', 'largest']) == 0
    assert {cell.algorithm for cell in read_cells(own_place / 'out')} == {'magnitude', 'largest'}


def test_plots_are_refused_before_training_where_they_cannot_be_drawn(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert main(['compare', 'lenet', '--plots']) == 2
    assert "plots need matplotlib: pip install 'jaxpruner[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_prints_its_table_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / 'out' / 'digits-lenet'
    options = ['digits-lenet', *TINY, '--plots', '--seeds', '0', '--algorithms']
    assert main(['compare', *options, 'no_prune']) == 0
    assert '1 of 1 cells are in out/digits-lenet' in capsys.readouterr().out
    assert not list(out.glob('*.png'))  # nothing to be seen of a dense model

    assert main(['compare', *options, 'no_prune', 'random', '--sparsities', '0.5', '0.9']) == 0
    printed = capsys.readouterr()
    for words in (
        'lenet (digits): accuracy (%) ↑',
        '50%',
        '90%',
        '3 of 3 cells',
        'sparsity.png',
        'layers.png',
    ):
        assert words in printed.out
    assert printed.err == ''
    assert sorted(path.name for path in out.glob('*.png')) == ['layers.png', 'sparsity.png']
    assert {cell.name for cell in read_cells(out)} == {
        'no_prune_0.0_0',
        'random_0.5_0',
        'random_0.9_0',
    }

    assert main(['compare', 'digits-lenet', '--seeds', '0']) == 2  # other steps
    assert 'recipe.toml is another recipe' in capsys.readouterr().err
