"""Safetensors files, written and read: by this library, and by the format's own."""

import json
import struct

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxpruner.checkpoints import Leaf, SafetensorsWriter, open_checkpoint, write_safetensors
from jaxpruner.checkpoints.parts import parts_of
from jaxpruner.checkpoints.safetensors_reader import DTYPES, INDEX_NAME

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
NAMES = st.text(min_size=1, max_size=8).filter(
    lambda name: name != '__metadata__' and name.isprintable()
)


@st.composite
def tensors(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    found = {}
    for name in names:
        dtype, shape = draw(st.sampled_from(sorted(DTYPES))), draw(SHAPES)
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        # Bits of any kind but for booleans, which have two.
        octets = draw(
            st.lists(st.integers(0, 1 if dtype == 'BOOL' else 255), min_size=size, max_size=size)
        )
        found[name] = np.array(octets, np.uint8).view(DTYPES[dtype]).reshape(shape)
    return found


def octets(array):
    return array.shape, array.dtype, array.tobytes()


@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    tensors(), st.dictionaries(NAMES, st.text(max_size=5), max_size=2), st.integers(1, 7)
)
def test_what_is_written_is_read(tmp_path_factory, written, metadata, part_size):
    path = tmp_path_factory.mktemp('round') / 'a.safetensors'
    write_safetensors(path, written, metadata)
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.leaves) == list(written)
    assert checkpoint.metadata == metadata
    for name, array in written.items():
        assert octets(checkpoint.read(name)) == octets(array)
        parts = [checkpoint.read(name, part) for part in parts_of(array.shape, size=part_size)]
        assert b''.join(part.tobytes() for part in parts) == array.tobytes()
    with safetensors.safe_open(path, 'numpy') as opened:
        assert set(opened.keys()) == set(written)
        assert (opened.metadata() or {}) == metadata


def test_the_formats_own_library_reads_the_same_numbers(tmp_path):
    rng = np.random.default_rng(0)
    written = {
        dtype: rng.integers(0, 50, (3, 5)).astype(dtype)
        for dtype in ('float32', 'float16', 'int8', 'bool', 'float64')
    }
    write_safetensors(tmp_path / 'a.safetensors', written)
    read = safetensors.numpy.load_file(tmp_path / 'a.safetensors')
    for name, array in written.items():
        np.testing.assert_array_equal(read[name], array, strict=True)


@hypothesis.given(SHAPES.filter(len), st.integers(0, 3), st.integers(1, 4), st.integers(1, 30))
def test_parts_cover_an_array_in_order(shape, deepest, multiple, size):
    deepest = min(deepest, len(shape) - 1)
    array, end = np.arange(int(np.prod(shape))).reshape(shape), 0
    for part in parts_of(shape, deepest, multiple, size):
        assert part.start == end
        end += part.size
        place = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
        np.testing.assert_array_equal(
            array[place], array.reshape(-1)[part.start : end].reshape(part.shape), strict=True
        )
        if array.size and part.shape[deepest] < shape[deepest]:
            assert part.offset[deepest] % multiple == 0
    assert end == array.size


def made(path, **tensors):
    write_safetensors(path, tensors or {'w': np.arange(6.0).reshape(2, 3)}, {'format': 'np'})
    return path


def header_of(path, change):
    """The file with another header before the same weights."""
    content = path.read_bytes()
    (length,) = struct.unpack('<Q', content[:8])
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + content[8 + length :])


@pytest.mark.parametrize(
    'damage',
    [
        lambda content: content[:-1],
        lambda content: content[:30],
        lambda content: b'',
        lambda content: b'\x89PNG and so on, no tensors',
        lambda content: content + b'x',
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = made(tmp_path / 'a.safetensors')
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        ValueError, match=r'a\.safetensors is no safetensors file, or only a part of one: .*bytes\)'
    ):
        open_checkpoint(path)


def test_a_file_that_shrinks_is_refused_by_name(tmp_path):
    path = made(tmp_path / 'a.safetensors')
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r'a\.safetensors: w ends 10 bytes too early'):
        checkpoint.read('w')


def test_a_dtype_that_is_not_known_is_refused_by_name(tmp_path, monkeypatch):
    path = made(tmp_path / 'a.safetensors')
    monkeypatch.delitem(DTYPES, 'F64')
    with pytest.raises(ValueError, match=r'a\.safetensors: w has dtype F64; known are BOOL'):
        open_checkpoint(path)


def test_keys_and_bytes_may_stand_in_different_orders(tmp_path):
    path = made(tmp_path / 'a.safetensors', first=np.arange(2.0), second=np.arange(3.0))
    header_of(path, lambda entries: entries.update(first=entries.pop('first')))
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.leaves) == ['first', 'second']
    assert list(checkpoint.header.leaves) == ['second', 'first']
    assert checkpoint.read('second').tolist() == [0, 1, 2]


def half_written(path, error):
    leaves = {'w': Leaf((4,), np.dtype('float32'))}
    with SafetensorsWriter(path, leaves) as writer:
        writer.write('w', np.zeros(2, np.float32))
        if error is not None:
            raise error


@pytest.mark.parametrize('before', [None, b'what was there'])
@pytest.mark.parametrize('error', [KeyboardInterrupt(), ValueError('no'), None])
def test_half_a_file_is_never_left(tmp_path, before, error):
    path = tmp_path / 'a.safetensors'
    if before:
        path.write_bytes(before)
    with pytest.raises(
        (KeyboardInterrupt, ValueError), match=None if error else r'a\.safetensors: w lacks 8 bytes'
    ):
        half_written(path, error)
    assert [file.name for file in tmp_path.iterdir()] == (['a.safetensors'] if before else [])
    assert not before or path.read_bytes() == before


@pytest.mark.parametrize(
    ('name', 'array'),
    [
        ('b', np.zeros(2, np.float32)),
        ('a', np.zeros(2, np.float64)),
        ('a', np.zeros(3, np.float32)),
    ],
)
def test_what_is_not_due_is_refused(tmp_path, name, array):
    leaves = {name: Leaf((2,), np.dtype('float32')) for name in 'ab'}
    words = f'next to be written is a, float32, 8 bytes; got {name}, {array.dtype}, {array.nbytes} bytes'
    with (
        pytest.raises(ValueError, match=words),
        SafetensorsWriter(tmp_path / 'x', leaves) as writer,
    ):
        writer.write(name, array)


def test_metadata_are_replaced_by_strings_as_long(tmp_path):
    path = tmp_path / 'a.safetensors'
    with SafetensorsWriter(path, {'w': Leaf((2,), np.dtype('int8'))}, {'sum': '0000'}) as writer:
        writer.write('w', np.int8([1]))
        writer.replace_metadata({'sum': '1234'})
        with pytest.raises(ValueError, match=r'a\.safetensors: .*same lengths'):
            writer.replace_metadata({'sum': 'a longer text'})
        writer.write('w', np.int8([2]))
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata == {'sum': '1234'}
    assert checkpoint.read('w').tolist() == [1, 2]


def test_what_the_format_does_not_hold_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r'x: w has dtype complex128, which safetensors files do not hold'
    ):
        write_safetensors(tmp_path / 'x', {'w': np.zeros(2, np.complex128)})
    with pytest.raises(FileNotFoundError, match=r'there is no folder .*missing'):
        write_safetensors(tmp_path / 'missing' / 'x', {'w': np.zeros(2)})


def sharded(folder):
    folder.mkdir(exist_ok=True)
    made(folder / 'one.safetensors', a=np.arange(8.0).reshape(2, 4))
    made(folder / 'two.safetensors', b=np.arange(4.0).astype(ml_dtypes.bfloat16))
    write_index(folder, a='one.safetensors', b='two.safetensors')
    return folder


def write_index(folder, **weight_map):
    (folder / INDEX_NAME).write_text(
        json.dumps({'metadata': {'total_size': 72}, 'weight_map': weight_map})
    )


@pytest.mark.parametrize('path', ['.', INDEX_NAME])
def test_shards_are_one_checkpoint(tmp_path, path):
    checkpoint = open_checkpoint(sharded(tmp_path) / path)
    assert {name: leaf.dtype.name for name, leaf in checkpoint.leaves.items()} == {
        'a': 'float64',
        'b': 'bfloat16',
    }
    assert checkpoint.read('b').tolist() == [0, 1, 2, 3]
    assert checkpoint.metadata == {'format': 'np'}


@pytest.mark.parametrize(
    ('weight_map', 'error', 'words'),
    [
        (
            {'a': 'one.safetensors', 'b': 'three.safetensors'},
            FileNotFoundError,
            r'names three\.safetensors, which is',
        ),
        (
            {'a': 'one.safetensors', 'b': 'one.safetensors'},
            ValueError,
            r'places b in one\.safetensors, which',
        ),
        (
            {'b': 'two.safetensors', 'c': 'one.safetensors'},
            ValueError,
            r'places c in one\.safetensors',
        ),
        ({'a': '../one.safetensors'}, ValueError, r'is no index .*no plain file name'),
        ({'a': 3}, ValueError, r'is no index of safetensors files'),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, weight_map, error, words):
    write_index(sharded(tmp_path), **weight_map)
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path)


def test_an_index_that_leaves_out_a_tensor_is_refused(tmp_path):
    sharded(tmp_path)
    made(tmp_path / 'two.safetensors', b=np.zeros(1), stray=np.zeros(1))
    with pytest.raises(
        ValueError, match=r'two\.safetensors has stray, which .* does not place there'
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize('content', [b'', b'[]', b'{}', b'{"weight_map": 3}', b'\xff'])
def test_a_damaged_index_is_refused(tmp_path, content):
    (sharded(tmp_path) / INDEX_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=r'index\.json is no index of safetensors files'):
        open_checkpoint(tmp_path)
