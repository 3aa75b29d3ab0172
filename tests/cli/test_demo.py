"""`jaxpruner demo`: what it says before, meanwhile and afterwards."""

import math
import re
import sys

import pytest

from helpers.made_up_cells import make_cells
from jaxpruner import cli, progress
from jaxpruner.baselines import data
from jaxpruner.cli import demo
from jaxpruner.cli.main import main

# Accuracies of three seeds; what is not named here is far behind.
VALUES = {
    ('no_prune', 0.0): [0.97, 0.98, 0.99],
    ('magnitude', 0.8): [0.96, 0.97, 0.98],
    ('magnitude_ste', 0.8): [0.96, 0.965, 0.982],  # ahead in one seed, behind in another
    ('random', 0.8): [0.95, 0.96, 0.97],  # behind by the same in each seed
    ('global_magnitude', 0.95): [0.9, 0.91, 0.92],
    ('rigl', 0.95): [0.9, 0.91, 0.92],
}


@pytest.fixture
def table():
    names = [name for name in demo.ALGORITHMS if name != 'no_prune']
    values = {(name, sparsity): [0.5, 0.51, 0.52] for name in names for sparsity in demo.SPARSITIES}
    return demo.result_table(make_cells(values | VALUES))


def rows(table):
    """The numbers of each algorithm with their marks."""
    found = {}
    for line in table.splitlines():
        numbers = re.findall(r'\d+\.\d\d ± \d+\.\d\d(?: [*~])?', line)
        if numbers:
            found[line.split()[0]] = numbers
    return found


def test_the_table_marks_the_best_and_what_may_be_as_good(table):
    shown = rows(table)
    assert len(shown) == len(demo.ALGORITHMS)
    assert shown['magnitude'][0] == '97.00 ± 1.00 *'
    assert shown['magnitude_ste'][0].endswith(' ~')
    assert shown['random'][0] == '96.00 ± 1.00'
    assert shown['rigl'][1] == shown['global_magnitude'][1] == '91.00 ± 1.00 *'
    assert shown['dense'] == ['98.00 ± 1.00'] * 2
    assert shown['set'] == ['51.00 ± 1.00'] * 2


def test_all_stands_in_80_columns_and_says_how_coarse_the_numbers_are(table):
    lines = f'{table}\n{demo.explanation()}'.splitlines()
    assert max(map(len, lines)) <= 80
    assert data.load_digits().x_test.shape[0] == demo.TEST_IMAGES
    assert f'{100 / demo.TEST_IMAGES:.2f}' in demo.explanation()


def test_lines_of_progress_come_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LINES', math.inf)
    show = progress.progress_lines(8)
    for done in (0, 2, 4, 8):
        show(f'part {done}', done)
    first, last = capsys.readouterr().err.splitlines()  # the last is always there
    assert (first.split()[0], last.split()[0]) == ('0%', '100%')
    monkeypatch.setattr(progress, '_SECONDS_BETWEEN_LINES', 0)
    show('part', 2)
    assert capsys.readouterr().err.startswith(' 25% after 0:')


def test_it_says_what_comes_before_jax_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'jaxpruner.cli.training', None)
    monkeypatch.delattr(cli, 'training', raising=False)  # other tests have loaded it
    assert main(['demo', '--out', 'here']) == 2
    words = capsys.readouterr().out
    assert '39 networks' in words
    assert 'minute' in words
    assert 'here' in words


@pytest.mark.slow
def test_a_short_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, 'ALGORITHMS', {'no_prune': 'nothing', 'random': 'any weights'})
    monkeypatch.setattr(demo, 'SEEDS', (0, 1))
    line = 'demo --set steps=4 eval_every=1.0 batch_size=8 model.hidden=[4]'
    assert main(line.split()) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith('100% after')
    assert rows(printed.out).keys() == {'dense', 'random'}
    for name in ('sparsity.png', 'layers.png'):
        assert f'out/demo/{name}' in printed.out
        assert (tmp_path / 'out' / 'demo' / name).exists()
    assert main([*line.split(), '--no-progress']) == 0  # all is there
    assert capsys.readouterr().err == ''
