"""`jaxpruner table` and `jaxpruner plot`: what they write, and their errors."""

import numpy as np
import pytest

from helpers.made_up_cells import make_cell, make_cells
from jaxpruner.cli.main import main
from jaxpruner.report import write_cell

VALUES = {
    ('no_prune', 0.0): [0.99, 0.98],
    ('rigl', 0.8): [0.95, 0.96],
    ('random', 0.8): [0.9, 0.91],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cell in make_cells(VALUES):
        write_cell(tmp_path / 'results', cell)
    write_cell(tmp_path / 'more', make_cell('set', seed=0, value=0.97))
    (tmp_path / 'results' / 'masks').mkdir()
    masks = {'steps': np.arange(2), 'kernel': np.eye(4, dtype=np.uint8)[None].repeat(2, 0)}
    np.savez(tmp_path / 'results' / 'masks' / 'set_0.8_0.npz', **masks)
    return tmp_path


def test_a_table_is_printed_or_written(folder, capsys):
    assert main(['table', 'results']) == 0
    assert 'rigl       95.50 ± 0.71 *' in capsys.readouterr().out
    assert main('table results more --out new/both.md'.split()) == 0
    assert capsys.readouterr().out.strip() == 'new/both.md'
    row = (folder / 'new' / 'both.md').read_text().splitlines()[2]
    values = [' 98.50 ± 0.71 ', ' 90.50 ± 0.71 ', ' **97.00** ', ' 95.50 ± 0.71 ', ' 1–2 ']
    assert row.split('|')[3:-1] == values


PLOTS = {
    'results': 'results/sparsity.png',
    'results more --kind layers': 'results/layers.png',
    'results --out a.svg': 'a.svg',
    'results --cell set_0.8_0': 'results/masks_set_0.8_0.gif',
}


@pytest.mark.parametrize('line', PLOTS)
def test_a_plot_lies_in_the_first_folder_or_where_it_should(folder, capsys, line):
    assert main(['plot', *line.split()]) == 0
    assert capsys.readouterr().out.strip() == PLOTS[line]
    assert (folder / PLOTS[line]).stat().st_size > 500


REFUSED = {
    'table': 'name at least one folder of results',
    'table nowhere': 'no results in nowhere: looked for',
    'table results --out table.txt': '--out table.txt: end it in .md',
    'plot results more --cell set_0.8_0': 'exactly one folder',
    'plot results --cell set_0.8_0 --out a.png': 'must end in .gif',
    'plot results --cell c': 'no masks of c: looked for results/masks/c.npz; cells '
    'with masks there: set_0.8_0',
}


@pytest.mark.parametrize('line', REFUSED)
def test_refused(line, folder, capsys):
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count('\n')) == ('', 1)
    assert REFUSED[line] in printed.err
