"""Packed arrays and files that somebody has damaged are refused by name, before the memory is taken that they claim."""

import json
import tracemalloc
import zlib

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.hostile_checkpoints import DEEP
from jaxpruner import checkpoints, sparse

VALUES = np.arange(1.0, 5.0, dtype=np.float32)
SHAPE = np.int64([2, 8])
GOOD = {  # one leaf in each format
    'bitmask': {
        'compressed': VALUES,
        'bitmask': np.uint8([0b10100000, 0b00000110]),
        'shape': SHAPE,
    },
    'csr': {
        'compressed': VALUES,
        'row_offsets': np.int32([0, 3, 4]),
        'column_indices': np.uint16([0, 2, 5, 7]),
        'shape': SHAPE,
    },
    'n_by_m': {
        'compressed': VALUES.reshape(2, 1, 2),
        'indices': np.uint8([0b01110010]),  # 1 3 and 0 2
        'pattern': np.int64([2, 4, 1]),
    },
    'blocks': {
        'values': np.ones((2, 1, 1, 4), np.float32),
        'indices': np.uint16([[0], [1]]),
        'shape': SHAPE,
    },
}
EMPTY = {'compressed': np.zeros(0, np.float32), 'column_indices': np.zeros(0, np.uint32)}
ARRAYS = [  # format, arrays that are changed, words of the message
    ('bitmask', {'bitmask': np.uint8([0b10110000, 6])}, r'compressed.*\(5,\)'),
    ('bitmask', {'bitmask': np.zeros(3, np.uint8)}, r'bitmask has shape \(3,\)'),
    ('bitmask', {'bitmask': np.zeros(2, np.float32)}, 'bitmask has dtype float32'),
    ('bitmask', {'bitmask': np.uint8([0b10100000, 3]), 'shape': [3, 5]}, 'beyond its 15'),
    ('bitmask', {'shape': [2.0, 8.0]}, 'shape has .*whole numbers'),
    ('bitmask', {'shape': [-2, -8]}, r'\[-2, -8\], which is no list of lengths'),
    ('bitmask', {'shape': [0, 2**62]}, 'too large for any memory'),
    ('bitmask', {'shape': [1] * 100}, '100 axes'),
    ('bitmask', {'shape': [2**19, 2**19]}, 'bitmask has shape'),
    ('csr', {'row_offsets': np.int32([0, 5, 4])}, 'fall behind row 1'),
    ('csr', {'row_offsets': np.int32([1, 3, 4])}, 'run from 1 to 4'),
    ('csr', {'row_offsets': np.int32([0, 3, 3])}, 'run from 0 to 3'),
    ('csr', {'row_offsets': np.int32([0, 4])}, 'row_offsets has shape'),
    ('csr', {'column_indices': np.uint16([0, 2, 8, 7])}, 'column_indices has 8'),
    ('csr', {'column_indices': np.int32([-1, 2, 5, 7])}, 'column_indices has -1'),
    ('csr', {'column_indices': np.uint16([0, 2, 2, 7])}, 'has 2 before 2 in one row'),
    ('csr', {'column_indices': np.uint16([0, 2, 5])}, 'compressed has shape'),
    ('csr', {'shape': np.zeros(0, int)}, 'no rows'),
    ('csr', {'shape': [1, 2**38], 'row_offsets': np.int32([0, 0]), **EMPTY}, '1099511627776 bytes'),
    ('n_by_m', {'indices': np.uint8([0b01010010])}, 'indices of a group do not ascend'),
    ('n_by_m', {'pattern': np.int64([2, 1, 1])}, 'must be N, M and an axis'),
    ('n_by_m', {'pattern': np.int64([3, 4, 1])}, 'none for 3:4 along axis 1'),
    ('n_by_m', {'pattern': np.int64([2, 4, 2])}, 'none for 2:4 along axis 2'),
    ('n_by_m', {'pattern': np.int64([2, 4])}, 'pattern has shape'),
    ('blocks', {'indices': np.uint16([[0], [2]])}, 'indices has 2; all must be from 0 to 1'),
    ('blocks', {'values': np.ones((2, 1, 1, 3), np.float32)}, '1×3 do not divide'),
    ('blocks', {'values': np.ones((2, 1, 0, 4), np.float32)}, 'must have 4 axes'),
]


def test_what_is_not_changed_is_unpacked():
    leaves = sparse.unpack(GOOD)
    counts = {name: np.count_nonzero(leaf) for name, leaf in leaves.items()}
    assert counts == {'bitmask': 4, 'csr': 4, 'n_by_m': 4, 'blocks': 8}


@pytest.mark.parametrize(('name', 'changes', 'words'), ARRAYS)
def test_arrays_that_do_not_belong_together(name, changes, words):
    arrays = GOOD[name] | {key: np.asarray(value) for key, value in changes.items()}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf'^mlp\.w: .*{words}.*; pack the tree again'):
            sparse.unpack({'mlp': {'w': arrays}})
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


TREE = {'w': np.eye(64, dtype=np.float32), 'v': np.ones(2, np.float32)}
KEY = 'jaxpruner_sparse'


@pytest.fixture
def path(tmp_path):
    sparse.save(tmp_path / 'a.safetensors', TREE)
    return tmp_path / 'a.safetensors'


def rewrite(path, change):
    """Changes the manifest, or writes a text in its place; its digest is made anew."""
    file = checkpoints.open_checkpoint(path)
    text = change
    if callable(change):
        manifest = json.loads(file.metadata[KEY])
        change(manifest)
        covered = json.dumps({'leaves': manifest['leaves'], 'metadata': {}}, sort_keys=True)
        text = json.dumps(manifest | {'crc32': f'{zlib.crc32(covered.encode()):08x}'})
    arrays = {name: file.read(name) for name in file.leaves}
    checkpoints.write_safetensors(path, arrays, {KEY: text})


def leaf(**changes):
    """Changes the entry of the leaf `w`."""
    return lambda manifest: manifest['leaves']['w'].update(changes)


MANIFESTS = [
    ('{', 'no JSON'),
    (DEEP.decode(), 'deep'),
    ('[]', 'version None'),
    ('{"version": 1, "leaves": {"w": {}, "w": {}}}', 'given twice'),
    ('{"version": 1}', 'are damaged'),
    (lambda manifest: manifest.update(version=2), 'version 2.*newer jaxpruner'),
    (lambda manifest: manifest.update(version=True), 'version True'),
    (lambda manifest: manifest['leaves'].pop('v'), 'tensor v is 1 times in it, and 0 times in its'),
    (lambda manifest: manifest['leaves'].update(v='csr'), 'v: its entry'),
    (lambda manifest: manifest['leaves']['w'].pop('crc32'), "w: its entry .*'crc32'"),
    (leaf(crc32='00000000'), 'w: its bytes are damaged.*00000000'),
    (leaf(path=[]), 'does not lead to its name'),
    (leaf(path=['u']), 'does not lead to its name'),
    (leaf(path=[1]), 'w: its entry'),
    (leaf(format='zip'), "'zip'"),
    (leaf(format=[]), 'w: its entry'),
    (leaf(format='dense'), r'tensor w\.\w+ is 1 times in it, and 0 times in its manifest'),
    (leaf(dtype='float7'), "'float7'"),
    (leaf(dtype='int32'), 'int32 is stored as'),
    (leaf(shape='64x64'), "'64x64'"),
    (leaf(shape=[True, True]), 'True'),
    (leaf(shape=[32, 128]), r'manifest says \(32, 128\)'),
]


@pytest.mark.parametrize(('change', 'words'), MANIFESTS)
def test_manifests_that_are_wrong(path, change, words):
    rewrite(path, change)
    with pytest.raises(ValueError, match=f'(?s)a.safetensors.*({words})') as error:
        sparse.load(path)
    assert str(error.value).count('a.safetensors') == 1
    assert len(str(error.value)) < 1000


def test_a_leaf_below_another_is_refused(path):
    sparse.save(path, TREE | {'w.b': np.ones(2)})
    rewrite(path, lambda manifest: manifest['leaves']['w.b'].update(path=['w', 'b']))
    with pytest.raises(ValueError, match=r'leads through the leaf'):
        sparse.load(path)


def test_files_of_others_are_refused(path):
    checkpoints.write_safetensors(path, TREE)
    with pytest.raises(ValueError, match=r'a\.safetensors is no packed file.*jaxpruner pack'):
        sparse.load(path)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp('written') / 'a.safetensors'
    sparse.save(path, TREE, metadata={'word': 'hello'})
    return path, path.read_bytes()


@given(data=st.data())
def test_any_damage_is_refused_or_without_effect(written, data):
    """One byte is another one, or the end is missing."""
    path, content = written
    place = data.draw(st.integers(0, len(content) - 1))
    new = data.draw(st.binary(max_size=1))
    path.write_bytes(content[:place] + (new + content[place + 1 :] if new else b''))
    words = ''
    try:
        found, metadata = sparse.load(path), sparse.open_packed(path).metadata
    except ValueError as error:
        words = str(error)
    if words:
        assert 'a.safetensors' in words
    else:
        assert metadata == {'word': 'hello'}
        jax.tree.map(np.testing.assert_array_equal, found, TREE)


def test_a_file_that_changes_after_it_was_opened(path):
    file = sparse.open_packed(path)
    path.write_bytes(path.read_bytes()[:-8])
    last = list(file.leaves)[-1]
    with pytest.raises(ValueError, match=r'a\.safetensors.*changed'):
        file.read(last)
