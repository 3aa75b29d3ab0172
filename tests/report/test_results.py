"""Cells on disk: what is written is read back, and what is no cell is named."""

import dataclasses
import hashlib
import json
import os
import warnings
from pathlib import Path

import pytest

from helpers.made_up_cells import make_cell
from jaxpruner.report import read_cells, write_cell


def test_a_cell_comes_back_as_it_was(tmp_path):
    cell = make_cell(
        sparsity=1, seed=2**40, value=float('nan'), metrics={'größe': 1e-07}, layers={'a/w': 0.5}
    )
    write_cell(tmp_path, make_cell(value=0.1))
    write_cell(tmp_path, dataclasses.replace(cell, value=7.0))
    write_cell(tmp_path, cell)  # replaces it
    back = {one.name: one for one in read_cells(tmp_path)}
    assert len(back) == 2
    first, second = (json.dumps(dataclasses.asdict(one)) for one in (back[cell.name], cell))
    assert first == second  # as texts, in which NaN equals NaN


def test_the_file_is_what_the_format_says(tmp_path):
    write_cell(tmp_path, make_cell())
    text = (tmp_path / 'cells' / 'magnitude_0.8_0.json').read_text()
    content = json.loads(text)
    assert (content['version'], list(content)[-1]) == (2, 'checksum')
    head = text[: text.rindex(' "checksum"')]
    assert content['checksum'] == hashlib.sha256(head.encode()).hexdigest()
    assert make_cell('no_prune', 0).name == make_cell('no_prune', 0.0).name == 'no_prune_0.0_0'


WRONG = [
    ({'sparsity': 1.5}, r'sparsity must be a number in \[0, 1\], got 1.5'),
    ({'better': 'more'}, "better must be 'high' or 'low', got 'more'"),
    ({'layers': {'conv/kernel': 80}}, r'conv/kernel must be a number in \[0, 1\], got 80'),
    ({'algorithm': '../rigl'}, r"algorithm must be letters .*, got '\.\./rigl'"),
]


@pytest.mark.parametrize(('changes', 'message'), WRONG)
def test_a_cell_refuses_what_it_cannot_hold(changes, message):
    with pytest.raises(ValueError, match=message):
        make_cell(**changes)


def change_content(**changes):
    def write(path):
        content = {**json.loads(path.read_text()), **changes}
        del content['checksum']
        head = json.dumps(content, indent=1).removesuffix('\n}') + ',\n'
        digest = hashlib.sha256(head.encode()).hexdigest()
        path.write_text(f'{head} "checksum": "{digest}"\n}}\n')

    return write


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


CORRUPT = {
    'unsealed': (lambda path: path.write_text('{"version": 2}'), 'its checksum does not match'),
    'the first version': (change_content(version=1), 'its version is 1, not 2'),
    'another field': (change_content(extra=1), "unexpected keyword argument 'extra'"),
    'a folder': (replace_by_folder, 'is a folder, a pipe or a device'),
    'another name': (change_content(seed=7), 'it holds the cell magnitude_0.8_7'),
}


@pytest.mark.parametrize(('spoil', 'message'), CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_cell_is_named_and_set_aside_if_asked(tmp_path, spoil, message):
    write_cell(tmp_path, make_cell())
    write_cell(tmp_path, make_cell('rigl'))
    path = tmp_path / 'cells' / 'magnitude_0.8_0.json'
    spoil(path)
    for set_aside in (False, True):
        words = rf'magnitude_0.8_0.json is no result of this version: .*({message})'
        with pytest.warns(UserWarning, match=words):
            cells = read_cells(tmp_path, set_aside)
        assert [cell.name for cell in cells] == ['rigl_0.8_0']
        assert os.path.lexists(path) != set_aside
    assert os.path.lexists(path.with_suffix('.json.corrupt'))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(read_cells(tmp_path)) == 1


def test_no_results_are_an_error_that_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'no results in .*: looked for .*cells.\*\.json'):
        read_cells(tmp_path)
    with pytest.raises(FileNotFoundError, match=r'no results in .*nowhere'):
        read_cells(Path(tmp_path, 'nowhere'))
