"""`jaxpruner run`, `compare` and `demo`: what WORKLOAD means, what is refused, a short training."""

import sys
import tomllib

import pytest

from jaxpruner import api
from jaxpruner.baselines import data
from jaxpruner.cli import training
from jaxpruner.cli.main import main
from jaxpruner.report import read_cells

TINY = ['--set', 'steps=4', 'eval_every=1.0', 'batch_size=8', 'model.hidden=[4]']


def printed_recipe(line, capsys):
    assert main([*line.split(), '--print-recipe']) == 0
    recipe = tomllib.loads(capsys.readouterr().out)
    return recipe['data'], recipe['preset']


def test_a_name_may_begin_with_data(capsys):
    expected = {
        'run lenet': ('digits', 'default'),
        'compare digits-lenet': ('digits', 'default'),
        'compare mnist-lenet --preset data': ('mnist', 'data'),
        'run lenet --data-dir nowhere': ('mnist', 'data'),
        'run imagenet-vit': ('imagenet', 'full'),
    }
    for line, names in expected.items():
        assert printed_recipe(line, capsys) == names


REFUSED = {
    'lenett': "there is no workload 'lenett'; did you mean 'lenet'",
    'digits-lenet --preset data': 'digits-lenet trains on digits, but --preset, --recipe or --set',
    'digits-lenet --data-dir here': 'digits is read from no folder: leave --data-dir here out',
    'mnist-lenet': "the preset 'data' of lenet needs --data-dir",
    'lenet --set step=3': "--set step=3: the recipe has no key 'step'; did you mean 'steps'?",
    'lenet --algorithms riggl': "'riggl' is unknown; did you mean 'rigl'?",
    'lenet --seeds -1': 'a seed must be a whole number from 0',
    'lenet --sparsities 80': 'sparsity must lie in [0, 1] (the share of weights removed), got 80.0',
}


@pytest.mark.parametrize('line', REFUSED)
def test_what_cannot_be_meant_is_refused_before_any_work(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(['compare', *line.split()]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count('\n')) == ('', 1)
    assert REFUSED[line] in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_is_wrong_for_one_algorithm_is_refused_before_any_training(tmp_path, capsys):
    options = ['digits-lenet', '--out', str(tmp_path / 'out'), *TINY]
    options += ['--algorithms', 'magnitude', 'set', '--seeds', '0', '--sparsities', '0.5']
    assert main(['compare', *options, '--set', 'pruning.trainer_start=0.9']) == 2  # for set
    assert 'the end 0.75 lies before the start 0.9' in capsys.readouterr().err
    assert list((tmp_path / 'out').iterdir()) == []


MODULE = """
import dataclasses, jax, jax.numpy as jnp, jaxpruner

@dataclasses.dataclass
class Largest(jaxpruner.BaseUpdater):
    strength: float = 1.0

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda param: -self.strength * jnp.abs(param), params)

jaxpruner.register_algorithm('largest', Largest)
"""


def test_algorithms_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(api, 'ALGORITHM_REGISTRY', dict(api.ALGORITHM_REGISTRY))
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.delitem(sys.modules, 'own_largest', raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'own_largest.py').write_text(MODULE)
    options = ['digits-lenet', *TINY, 'pruning.strength=2', '--out', 'out']
    assert main(['run', *options]) == 2
    assert "no key 'pruning.strength'" in capsys.readouterr().err
    assert main(['run', *options, '--modules', 'own_largest', '--algorithm', 'largest']) == 0
    with (tmp_path / 'out' / 'recipe.toml').open('rb') as file:
        assert tomllib.load(file)['pruning']['strength'] == 2.0
    assert (tmp_path / 'out' / 'masks' / 'largest_0.8_0.npz').exists()


def test_a_comparison_prints_its_table_draws_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / 'out' / 'digits-lenet'
    options = ['digits-lenet', *TINY, '--seeds', '0']
    assert main(['compare', *options, '--algorithms', 'no_prune']) == 0
    assert '1 of 1 cells are in out/digits-lenet' in capsys.readouterr().out
    more = ['--algorithms', 'random', '--sparsities', '0.5', '0.9']
    assert main(['compare', *options, *more]) == 0
    printed = capsys.readouterr()
    words = 'lenet (digits): accuracy (%) ↑|no_prune|50% pruned|90% pruned|2 of 2 cells'
    for word in (*words.split('|'), '* is the best', '~ may be as good'):
        assert word in printed.out
    assert printed.err == ''
    names = {'no_prune_0.0_0', 'random_0.5_0', 'random_0.9_0'}
    assert {cell.name for cell in read_cells(out)} == names
    assert main(['compare', 'digits-lenet', '--seeds', '0']) == 2  # other steps
    assert 'recipe.toml is another recipe' in capsys.readouterr().err


def test_the_demo_says_what_comes_and_what_came_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, 'DEMO_ALGORITHMS', ('no_prune', 'random'))
    assert main(['demo', '--out', 'here', *TINY]) == 0
    printed = capsys.readouterr()
    assert printed.err == ''
    assert max(map(len, printed.out.splitlines())) <= 80
    text = ' '.join(printed.out.split())
    for word in ('39 networks', 'Results go to here', 'no_prune', '95% pruned'):
        assert word in text
    assert f'{100 / data.load_digits().x_test.shape[0]:.2f}' in text
    assert (tmp_path / 'here' / 'layers.png').exists()
