"""`jaxpruner table` and `jaxpruner plot`: their settings read by tyro, what they write, and every error."""

import numpy as np
import pytest
import tyro

from helpers.made_up_cells import make_cell, make_cells
from jaxpruner.cli.plot import Plot
from jaxpruner.cli.table import Table
from jaxpruner.report import write_cell

VALUES = {
    ('no_prune', 0.0): [0.99, 0.98],
    ('rigl', 0.8): [0.95, 0.96],
    ('random', 0.8): [0.9, 0.91],
}


@pytest.fixture
def folder(tmp_path):
    for cell in make_cells(VALUES):
        write_cell(tmp_path / 'results', cell)
    return tmp_path / 'results'


def write_masks(folder, *names):
    (folder / 'masks').mkdir()
    for name in names:
        np.savez(
            folder / 'masks' / f'{name}.npz',
            steps=np.arange(2),
            kernel=np.eye(4, dtype=np.uint8)[None].repeat(2, 0),
        )


def run(command, *arguments):
    tyro.cli(command, args=[str(argument) for argument in arguments]).run()


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        ([], 'no_prune'),
        (['--format', 'terminal'], 'no_prune'),
        (['--format', 'markdown'], '| **95.50 ± 0.71** |'),
        (['--format', 'csv'], 'resnet,digits,'),
    ],
)
def test_a_table_is_printed(folder, capsys, arguments, text):
    run(Table, folder, *arguments)
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ('name', 'arguments'), [('t.md', []), ('t.csv', []), ('t.txt', ['--format', 'markdown'])]
)
def test_a_table_goes_to_a_file(folder, tmp_path, capsys, name, arguments):
    path = tmp_path / 'tables' / name
    run(Table, folder, '--out', path, *arguments)
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    assert text.startswith('workload,' if name == 't.csv' else '| ')
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_folders_are_put_together(folder, tmp_path, capsys):
    write_cell(tmp_path / 'more', make_cell('set', seed=0, value=0.97))
    run(Table, folder, tmp_path / 'more', '--format', 'markdown')
    line = capsys.readouterr().out.splitlines()[2]
    assert line.split('|')[3:-1] == [
        ' 98.50 ± 0.71 ',
        ' 90.50 ± 0.71 ',
        ' **97.00** ',
        ' 95.50 ± 0.71 ',
        '   1–2 ',
    ]


def test_corrupt_cells_are_named_and_left(folder):
    path = folder / 'cells' / 'rigl_0.8_0.json'
    path.write_text('{')
    with pytest.warns(UserWarning, match=r'rigl_0.8_0.json is no result'):
        run(Table, folder)
    assert path.exists()


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        (
            ['--out', 'table.txt'],
            ValueError,
            r'--out table.txt: end it in .md or .csv, or say --format',
        ),
        (
            ['--out', 'table.md', '--format', 'terminal'],
            ValueError,
            '--format terminal cannot go to a file',
        ),
        (['nowhere'], FileNotFoundError, 'no folder nowhere'),
    ],
)
def test_errors_of_table(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        run(Table, folder, *arguments)


@pytest.mark.parametrize('kind', ['sparsity', 'layers'])
def test_a_plot_lies_in_the_first_folder(folder, capsys, kind):
    run(Plot, folder, '--kind', kind)
    assert capsys.readouterr().out.strip() == str(folder / f'{kind}.png')
    assert (folder / f'{kind}.png').stat().st_size > 1000


def test_a_plot_goes_to_a_file(folder, tmp_path):
    run(Plot, folder, '--out', tmp_path / 'a.svg')
    assert (tmp_path / 'a.svg').read_text().startswith('<?xml')


def test_the_only_masks_need_no_name(folder):
    write_masks(folder, 'rigl_0.8_0')
    run(Plot, folder, '--kind', 'masks')
    assert (folder / 'masks_rigl_0.8_0.gif').read_bytes().startswith(b'GIF')


def test_masks_of_a_cell(folder, tmp_path):
    write_masks(folder, 'rigl_0.8_0', 'set_0.8_0')
    run(Plot, folder, '--kind', 'masks', '--cell', 'set_0.8_0', '--out', tmp_path / 'a.gif')
    assert (tmp_path / 'a.gif').exists()


@pytest.mark.parametrize(
    ('masks', 'arguments', 'error', 'message'),
    [
        (
            [],
            ['--cell', 'rigl_0.8_0'],
            ValueError,
            '--cell rigl_0.8_0 is for --kind masks; --kind sparsity draws all',
        ),
        ([], ['--out', 'a.gif'], ValueError, r'cannot write a.gif: its name must end in \.png'),
        ([], ['nowhere'], FileNotFoundError, 'no folder nowhere'),
        ([], ['--kind', 'masks'], FileNotFoundError, r'no masks in .*: looked for .*\*\.npz'),
        ([], ['--kind', 'masks', '--out', 'a.gif'], FileNotFoundError, 'no masks in '),
        (['a_0.8_0', 'b_0.8_0'], ['--kind', 'masks'], ValueError, 'with --cell: a_0.8_0, b_0.8_0'),
        (
            ['a_0.8_0'],
            ['--kind', 'masks', '--cell', 'c'],
            FileNotFoundError,
            'no masks of c: .* there: a_0.8_0',
        ),
        (['a_0.8_0'], ['--kind', 'masks', '--out', 'a.png'], ValueError, 'must end in .gif'),
        (
            ['a_0.8_0'],
            ['elsewhere', '--kind', 'masks'],
            ValueError,
            'draws one folder of results, got 2',
        ),
    ],
)
def test_errors_of_plot(folder, masks, arguments, error, message):
    write_masks(folder, *masks)
    with pytest.raises(error, match=message):
        run(Plot, folder, *arguments)


@pytest.mark.parametrize('command', [Table, Plot])
def test_no_folder_is_refused(command):
    with pytest.raises(ValueError, match='name at least one folder of results'):
        run(command)


@pytest.mark.parametrize('command', [Table, Plot])
def test_help_says_what_each_setting_is(command, capsys):
    with pytest.raises(SystemExit):
        run(command, '--help')
    text = capsys.readouterr().out
    assert 'Folders of results' in text
    assert '--out' in text
