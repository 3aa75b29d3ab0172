"""Each hostile packed file is refused with one error that names the file and what is wrong, before memory is taken."""

import tracemalloc

import numpy as np
import pytest

from helpers import hostile_packed
from jaxpruner import sparse


def test_there_are_enough():
    assert len(hostile_packed.FILES) >= 80


@pytest.mark.parametrize('format_name', hostile_packed.good_leaves())
def test_the_files_are_good_before_they_are_changed(format_name, tmp_path):
    path = tmp_path / 'good.safetensors'
    arrays, fields = hostile_packed.good_leaves()[format_name]
    hostile_packed.write(path, arrays, fields)
    leaf = sparse.load(path)['w']
    assert leaf.shape == tuple(fields['shape'])
    assert np.count_nonzero(leaf) == {'dense': 16, 'blocks': 8}.get(format_name, 4)


@pytest.mark.parametrize('name', hostile_packed.FILES)
def test_hostile_files(name, tmp_path):
    path = tmp_path / 'hostile.safetensors'
    make, words = hostile_packed.FILES[name]
    make(path)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f'(?s)hostile.safetensors.*({words})') as error:
            sparse.load(path)
        with pytest.raises(ValueError, match=r'hostile\.safetensors'):
            sparse.load_packed(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(error.value).count('hostile.safetensors') == 1
    assert len(str(error.value)) < 1000
    assert peak < 2**24


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match='nothing'):
        sparse.load(tmp_path / 'nothing.safetensors')
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        sparse.load(tmp_path)


def test_a_file_that_changes_after_it_was_opened(tmp_path):
    path = tmp_path / 'a.safetensors'
    sparse.save(path, {'w': np.eye(64)})
    file = sparse.open_packed(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r'a\.safetensors.*changed'):
        file.read('w')


@pytest.mark.parametrize('name', ['row offsets that fall', 'a column twice', 'a column outside'])
def test_packed_trees_in_memory_are_checked_as_well(name, tmp_path):
    arrays, _ = hostile_packed.good_leaves()['csr']
    changes = {
        'row offsets that fall': {'row_offsets': np.int32([0, 5, 4])},
        'a column twice': {'column_indices': np.uint16([0, 2, 2, 7])},
        'a column outside': {'column_indices': np.uint16([0, 2, 8, 7])},
    }
    with pytest.raises(ValueError, match=r'^mlp\.w: '):
        sparse.unpack({'mlp': {'w': arrays | changes[name]}})
