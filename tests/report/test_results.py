"""Cells on disk: what is written is read back, and what is no cell is named."""

import dataclasses
import json
import os
import random
import warnings
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from helpers.made_up_cells import make_cell
from jaxpruner.report import Cell, animation, read_cells, seals, write_cell

texts = st.text(min_size=1, max_size=8)
shares = st.floats(0, 1)
CELLS = st.builds(
    Cell,
    workload=texts,
    data=texts,
    algorithm=st.from_regex(r'[a-z_]{1,12}', fullmatch=True),
    sparsity=shares | st.sampled_from([0, 1]),
    seed=st.integers(0, 2**40),
    metric=texts,
    better=st.sampled_from(['high', 'low']),
    value=st.floats(),
    metrics=st.dictionaries(texts, st.floats()),
    reached=shares,
    layers=st.dictionaries(texts, shares),
    steps=st.integers(0, 10**9),
    seconds=st.floats(0, 1e6),
    recipe=texts,
)


def as_text(cell):
    return json.dumps(dataclasses.asdict(cell))  # in which NaN equals NaN


@hypothesis.given(CELLS)
@hypothesis.settings(max_examples=40)
def test_a_cell_comes_back_as_it_was(tmp_path_factory, cell):
    folder = tmp_path_factory.mktemp('results')
    write_cell(folder, cell)
    (back,) = read_cells(folder)
    assert as_text(back) == as_text(cell)
    assert [path.name for path in folder.glob('cells/*')] == [f'{cell.name}.json']


def test_the_file_is_what_the_format_says(tmp_path):
    write_cell(tmp_path, make_cell())
    content = json.loads((tmp_path / 'cells' / 'magnitude_0.8_0.json').read_text())
    keys = """version workload data algorithm sparsity seed metric better value metrics reached layers steps seconds
    recipe"""
    assert list(content) == [*keys.split(), 'files', 'checksum']
    assert content['version'] == 2


def test_a_second_write_replaces_the_first(tmp_path):
    write_cell(tmp_path, make_cell(value=0.1))
    write_cell(tmp_path, make_cell(value=0.2))
    assert [cell.value for cell in read_cells(tmp_path)] == [0.2]


def test_dense_cells_are_named_the_same_whether_zero_is_whole_or_not():
    assert make_cell('no_prune', 0).name == make_cell('no_prune', 0.0).name == 'no_prune_0.0_0'


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'sparsity': 1.5}, r'sparsity must be a number in \[0, 1\], got 1.5 of type float'),
        ({'reached': float('nan')}, r'reached must be a number in \[0, 1\], got nan'),
        ({'seed': -1}, 'seed must be a whole number of at least 0, got -1'),
        ({'seed': True}, 'seed must be a whole number of at least 0, got True'),
        ({'steps': 1.0}, 'steps must be a whole number of at least 0, got 1.0'),
        ({'better': 'more'}, "better must be 'high' or 'low', got 'more'"),
        ({'better': ['high']}, "better must be 'high' or 'low'"),
        ({'value': '0.9'}, "value must be a number, got '0.9' of type str"),
        ({'layers': {'conv/kernel': 80}}, r'layers must be a dict of numbers in \[0, 1\]'),
        ({'metrics': [0.1]}, 'metrics must be a dict of numbers'),
        ({'workload': ''}, 'workload must be a text that is not empty'),
        ({'algorithm': '../rigl'}, r"algorithm must be a text of .*, got '\.\./rigl'"),
        ({'algorithm': 'größe'}, 'algorithm must be a text of letters without accents'),
        ({'version': 1}, 'version must be 2, got 1'),
    ],
)
def test_a_cell_refuses_what_it_cannot_hold(changes, message):
    with pytest.raises(ValueError, match=message):
        make_cell(**changes)


def change_content(**changes):
    def write(path):
        content = {**json.loads(path.read_text()), **changes}
        del content['checksum']
        kept = {key: value for key, value in content.items() if value is not None}
        path.write_bytes(seals.seal(json.dumps(kept)))

    return write


def replace_by(make):
    def write(path):
        path.unlink()
        make(path)

    return write


CORRUPT = {
    'empty': (lambda path: path.write_text(''), 'Expecting value'),
    'cut': (lambda path: path.write_text(path.read_text()[:100]), 'Expecting|Unterminated'),
    'bytes': (lambda path: path.write_bytes(b'\xff\xfe\x00'), 'invalid start byte'),
    'a list': (lambda path: path.write_text('[]'), 'holds a list, not a JSON object'),
    'other version': (change_content(version=3), 'its version is 3, not 2'),
    'no version': (change_content(version=None), 'its version is None, not 2'),
    'too little': (change_content(value=None, seed=None), 'it lacks seed, value'),
    'too much': (change_content(colour='red'), 'it has unknown colour'),
    'a wrong value': (change_content(reached=80), r'reached must be a number in \[0, 1\], got 80'),
    'a key twice': (
        lambda path: path.write_bytes(seals.seal('{"version": 2, "version": 2}')),
        "'version' is given twice",
    ),
    'nested': (lambda path: path.write_text('[' * 100_000), 'nested too deep'),
    'a pipe': (replace_by(os.mkfifo), 'is a pipe, a socket or a device'),
    'a folder': (replace_by(os.mkdir), 'is a folder where a file belongs'),
    'itself': (replace_by(lambda path: path.symlink_to(path)), 'Too many levels of symbolic links'),
    'other files': (
        change_content(files={'../a': ''}),
        'files must be metrics/magnitude_0.8_0.jsonl or',
    ),
    'another name': (change_content(seed=7), 'it holds the cell magnitude_0.8_7'),
}


@pytest.mark.parametrize(('spoil', 'message'), CORRUPT.values(), ids=CORRUPT)
@pytest.mark.parametrize('set_aside', [False, True])
def test_a_corrupt_cell_is_named_and_set_aside_if_asked(tmp_path, spoil, message, set_aside):
    write_cell(tmp_path, make_cell())
    write_cell(tmp_path, make_cell('rigl'))
    path = tmp_path / 'cells' / 'magnitude_0.8_0.json'
    spoil(path)
    with pytest.warns(
        UserWarning, match=rf'magnitude_0.8_0.json is no result of this version: .*({message})'
    ):
        cells = read_cells(tmp_path, set_aside)
    assert [cell.name for cell in cells] == ['rigl_0.8_0']
    assert os.path.lexists(path) != set_aside
    assert os.path.lexists(path.with_suffix('.json.corrupt')) == set_aside
    if set_aside:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert len(read_cells(tmp_path)) == 1


FLIPS = 300


def flipped(content, draw):
    place = draw.randrange(8 * len(content))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def test_no_flipped_bit_of_a_cell_is_taken(tmp_path):
    draw = random.Random(0)
    write_cell(tmp_path, make_cell(value=1e-07, metrics={'loss': 0.1, 'größe': float('nan')}))
    path = tmp_path / 'cells' / 'magnitude_0.8_0.json'
    whole = path.read_bytes()
    for _ in range(FLIPS):
        path.write_bytes(flipped(whole, draw))
        with pytest.warns(UserWarning, match='is no result of this version'):
            assert read_cells(tmp_path) == []


def write_with_files(folder, cell):
    for place, content in (('metrics', b'{"step": 5, "loss": 0.5}\n'), ('masks', b'arrays')):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / f'{cell.name}.{"jsonl" if place == "metrics" else "npz"}').write_bytes(
            content
        )
    write_cell(folder, cell)


@pytest.mark.parametrize('name', ['metrics/rigl_0.8_0.jsonl', 'masks/rigl_0.8_0.npz'])
@pytest.mark.parametrize('spoil', ['flip', 'cut', 'folder'])
def test_what_belongs_to_a_cell_is_checked(tmp_path, name, spoil):
    write_with_files(tmp_path, make_cell('rigl'))
    assert len(read_cells(tmp_path)) == 1
    path = tmp_path / name
    content = path.read_bytes()
    path.unlink()
    if spoil == 'folder':
        path.mkdir()
    else:
        path.write_bytes(flipped(content, random.Random(0)) if spoil == 'flip' else content[:-1])
    words = rf'{name} has changed since it was written: its checksum does not match'
    with pytest.warns(UserWarning, match=rf'{words}; the result beside it is whole'):
        assert len(read_cells(tmp_path)) == 1
    with pytest.warns(
        UserWarning, match=rf'{words}; it is now .*\.corrupt, and its cell rigl_0.8_0 runs again'
    ):
        assert read_cells(tmp_path, set_aside=True) == []
    assert not list(tmp_path.glob('cells/*.json'))


def test_masks_that_have_changed_are_not_drawn(tmp_path):
    (tmp_path / 'masks').mkdir()
    path = tmp_path / 'masks' / 'rigl_0.8_0.npz'
    np.savez_compressed(
        path, steps=np.arange(2), kernel=np.eye(4, dtype=np.uint8)[None].repeat(2, 0)
    )
    write_cell(tmp_path, make_cell('rigl'))
    whole, draw = path.read_bytes(), random.Random(0)
    assert animation.read_masks(tmp_path, 'rigl_0.8_0')[1]['kernel'].shape == (2, 4, 4)
    for _ in range(FLIPS // 3):
        path.write_bytes(flipped(whole, draw))
        with pytest.raises(ValueError, match=r'rigl_0.8_0\.npz has changed since it was written'):
            animation.read_masks(tmp_path, 'rigl_0.8_0')
    (
        tmp_path / 'cells' / 'rigl_0.8_0.json'
    ).unlink()  # no checksum then, but damage is an error that names the file
    refused = []
    for _ in range(FLIPS):
        path.write_bytes(flipped(whole, draw))
        try:
            animation.read_masks(tmp_path, 'rigl_0.8_0')
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > FLIPS // 2
    assert all(str(path) in words for words in refused)


def test_what_is_missing_beside_cells_is_said_once(tmp_path):
    for seed in range(2):
        write_with_files(tmp_path, make_cell('rigl', seed=seed))
        (tmp_path / 'masks' / f'rigl_0.8_{seed}.npz').unlink()
    with pytest.warns(UserWarning, match='2 files that belong to results .* are missing') as caught:
        assert len(read_cells(tmp_path, set_aside=True)) == 2
    assert len(caught) == 1


def test_cells_of_the_first_version_are_read_with_one_warning(tmp_path):
    for seed in range(2):
        cell = make_cell('rigl', seed=seed)
        content = {**dataclasses.asdict(cell), 'version': 1}
        (tmp_path / 'cells').mkdir(exist_ok=True)
        (tmp_path / 'cells' / f'{cell.name}.json').write_text(json.dumps(content, indent=1) + '\n')
    write_cell(tmp_path, make_cell())
    with pytest.warns(
        UserWarning, match='2 results in .* have no checksum, since version 0.1.0 wrote'
    ) as caught:
        assert len(read_cells(tmp_path)) == 3
    assert len(caught) == 1


def test_a_half_written_file_is_no_cell(tmp_path):
    write_cell(tmp_path, make_cell())
    (tmp_path / 'cells' / 'rigl_0.8_0.json.new').write_text('{"version"')
    assert [cell.name for cell in read_cells(tmp_path)] == ['magnitude_0.8_0']


def test_no_results_are_an_error_that_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'no results in .*: looked for .*cells.\*\.json'):
        read_cells(tmp_path)
    with pytest.raises(FileNotFoundError, match=r'no folder .*nowhere'):
        read_cells(Path(tmp_path, 'nowhere'))
