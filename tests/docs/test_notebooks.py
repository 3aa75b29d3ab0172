"""The notebooks are notebooks. The build of the site runs them all."""

import ast
import pathlib
import re
import sys

import jupytext
import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / 'docs' / 'notebooks'
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob('*.py'))


def read(name):
    return jupytext.read(FOLDER / f'{name}.py')


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_pictures_have_words_for_those_who_do_not_see_them(name):
    cells = [
        cell
        for cell in read(name).cells
        if re.search(r'^(plt\.show|show_\w+|.*report\.plot_\w+)\(', cell.source, re.MULTILINE)
    ]
    assert len(cells) >= 3
    for cell in cells:
        assert len(cell.metadata['mystnb']['image']['alt']) > 40, cell.source


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_the_first_cell_installs_what_the_others_import(name):
    first, *rest = (cell.source for cell in read(name).cells if cell.cell_type == 'code')
    imported = set(re.findall(r'^(?:import|from) (\w+)', '\n'.join(rest), re.MULTILINE))
    come_with_it = {*sys.stdlib_module_names, 'jax', 'numpy', 'optax'}
    (needed,) = re.findall(r'^NEEDED = (\(.*?\))', first, re.MULTILINE | re.DOTALL)
    assert imported - come_with_it <= set(ast.literal_eval(needed))
