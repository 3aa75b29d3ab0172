"""Each hostile packed file is refused with one error that names the file and what is wrong, before memory is taken."""

import tracemalloc

import numpy as np
import pytest

from helpers import hostile_packed
from jaxpruner import sparse


@pytest.mark.parametrize('format_name', hostile_packed.GOOD)
def test_the_files_are_good_before_they_are_changed(format_name, tmp_path):
    path = tmp_path / 'good.safetensors'
    hostile_packed.write(path, format_name)
    leaf = sparse.load(path)['w']
    assert list(leaf.shape) == hostile_packed.GOOD[format_name][1]
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
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(error.value).count('hostile.safetensors') == 1
    assert len(str(error.value)) < 1000
    assert peak < 2**24


def test_a_file_that_changes_after_it_was_opened(tmp_path):
    path = tmp_path / 'a.safetensors'
    sparse.save(path, {'w': np.eye(64)})
    file = sparse.open_packed(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r'a\.safetensors.*changed'):
        file.read('w')


def test_packed_trees_in_memory_are_checked_as_well():
    arrays, _ = hostile_packed.GOOD['csr']
    with pytest.raises(ValueError, match=r'^mlp\.w: row_offsets fall'):
        sparse.unpack({'mlp': {'w': arrays | {'row_offsets': np.int32([0, 5, 4])}}})
