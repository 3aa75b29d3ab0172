"""Checkpoints that somebody has damaged, or made to do damage: each a function that puts one under a path."""

import gzip
import json
import os
import socket
import struct

import numpy as np

from jaxpruner.checkpoints import write_safetensors
from jaxpruner.checkpoints.reading import INDEX_NAME

DEEP = b'[' * 100_000


def entry(dtype='F32', shape=(2,), offsets=(0, 8)):
    return {'dtype': dtype, 'shape': list(shape), 'data_offsets': list(offsets)}


def with_header(header, data=b'8 bytes.', length=None):
    """A file with this header, as an object or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack('<Q', len(text) if length is None else length) + text + data
    return lambda path: path.write_bytes(content)


def with_bytes(content):
    return lambda path: path.write_bytes(content)


def changed(change):
    """A file that was whole before its bytes were changed."""

    def make(path):
        write_safetensors(path, {'w': np.arange(6.0).reshape(2, 3)})
        path.write_bytes(change(path.read_bytes()))

    return make


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # whole paths may be too long for a socket


FIELD_TWICE = b'{"w":{"dtype":"F32","dtype":"F64","shape":[2],"data_offsets":[0,8]}}'
SURROGATE = b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
TRAILING_COMMA = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],}}'

FILES = {
    'empty': with_bytes(b''),
    'one byte': with_bytes(b'\0'),
    'seven bytes': with_bytes(bytes(7)),
    'a length alone': with_bytes(bytes(8)),
    'a PNG': with_bytes(b'\x89PNG\r\n\x1a\n and so on'),
    'a text': with_bytes(
        b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n'
    ),
    'a zip': with_bytes(b'PK\x03\x04' + bytes(60)),
    'compressed': with_bytes(gzip.compress(b'weights')),
    'half a header': changed(lambda content: content[:30]),
    'a byte too few': changed(lambda content: content[:-1]),
    'a byte too many': changed(lambda content: content + b'x'),
    'a header as long as the universe': with_header({'w': entry()}, length=2**63),
    'a header of 2^64 - 1': with_header({'w': entry()}, length=2**64 - 1),
    'a header longer than the file': with_header({'w': entry()}, length=10_000),
    'a header shorter than it is': with_header({'w': entry()}, length=5),
    'no UTF-8': with_header(b'{"\xff\xfe": 1}'),
    'a list': with_header([entry()]),
    'a word': with_header('weights'),
    'a number': with_header(3),
    'null': with_header(None),
    'deep': with_header(b'{"w":' + DEEP),
    'deep and closed': with_header(b'{"w":' + DEEP + b']' * len(DEEP) + b'}'),
    'a field twice': with_header(FIELD_TWICE),
    'half a letter': with_header(SURROGATE),
    'a comma too many': with_header(TRAILING_COMMA),
    'overlapping': with_header({'w': entry(), 'v': entry(offsets=(4, 12))}, bytes(12)),
    'the same bytes twice': with_header({'w': entry(), 'v': entry()}),
    'a hole': with_header({'w': entry(), 'v': entry(offsets=(16, 24))}, bytes(24)),
    'a negative offset': with_header({'w': entry(offsets=(-8, 0))}),
    'backwards': with_header({'w': entry(offsets=(8, 0))}),
    'past the end': with_header({'w': entry(offsets=(8, 16))}),
    'another length': with_header({'w': entry(offsets=(0, 4))}),
    'half an offset': with_header({'w': entry(offsets=(0, 8.5))}),
    'an offset in words': with_header({'w': entry(offsets=('0', '8'))}),
    'three offsets': with_header({'w': entry(offsets=(0, 8, 16))}),
    'a negative shape': with_header({'w': entry(shape=(-2,))}),
    'a shape that overflows': with_header({'w': entry(shape=(2**62, 2**62))}),
    'a shape that overflows to what is there': with_header({'w': entry(shape=(2**63, 2))}),
    'half a shape': with_header({'w': entry(shape=(2.5,))}),
    'a shape in words': with_header({'w': entry(shape=('two',))}),
    'a hundred axes': with_header({'w': entry(shape=[1] * 100 + [2])}),
    'nothing of great length': with_header({'w': entry(shape=(0, 2**62), offsets=(0, 0))}, b''),
    'an unknown dtype': with_header({'w': entry('F33')}),
    'a number as dtype': with_header({'w': {**entry(), 'dtype': 32}}),
    'no shape': with_header({'w': {'dtype': 'F32', 'data_offsets': [0, 8]}}),
    'a tensor that is a list': with_header({'w': [1, 2]}),
    'metadata that are no words': with_header({'__metadata__': {'format': 1}, 'w': entry()}),
    'a folder': lambda path: path.mkdir(),
    'a pipe': os.mkfifo,
    'a socket': listening,
    'a link to itself': lambda path: path.symlink_to(path),
    'a link to nothing': lambda path: path.symlink_to('nothing'),
    'zeros without end': lambda path: path.symlink_to('/dev/zero'),
    'nothing at all': lambda path: path.symlink_to('/dev/null'),
    'missing': lambda path: None,
}


def index(content):
    """A folder of shards with this index, as an object or as bytes."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / INDEX_NAME).write_bytes(text)


def files(**weight_map):
    return index({'weight_map': {'w': 'one.safetensors', **weight_map}})


def shard(make, name='two.safetensors'):
    """A folder whose second shard is hostile."""

    def make_both(folder):
        make(folder / name)
        index({'weight_map': {'w': 'one.safetensors', 'v': name}})(folder)

    return make_both


TENSOR_TWICE = b'{"weight_map": {"w": "one.safetensors", "w": "two.safetensors"}}'
MAP_TWICE = b'{"weight_map": {}, "weight_map": {"w": "one.safetensors"}}'

# What makes an index, beside the shard one.safetensors with the tensor w.
INDICES = {
    'empty': index(b''),
    'a text': index(b'weights'),
    'cut': index(b'{"weight_map": {"w": "one.safe'),
    'no UTF-8': index(b'{"weight_map": {"w": "\xff"}}'),
    'a list': index([{'weight_map': {}}]),
    'a word': index('weight_map'),
    'a number': index(3),
    'no map': index({'metadata': {'total_size': 8}}),
    'a map of pairs': index({'weight_map': [['w', 'one.safetensors']]}),
    'a map that is null': index({'weight_map': None}),
    'a map that is a word': index({'weight_map': 'one.safetensors'}),
    'an empty map': index({'weight_map': {}}),
    'deep': index(b'{"weight_map":' + DEEP),
    'deep and closed': index(b'{"weight_map":' + DEEP + b']' * len(DEEP) + b'}'),
    'a tensor twice': index(TENSOR_TWICE),
    'a map twice': index(MAP_TWICE),
    'the folder above': files(v='..'),
    'this folder': files(v='.'),
    'no name': files(v=''),
    'no name of a tensor': files(**{'': 'one.safetensors'}),
    'a file above': files(v='../one.safetensors'),
    'a file from the root': files(v='/etc/passwd'),
    'a file of Windows': files(v='..\\one.safetensors'),
    'a name with a zero': files(v='one.safetensors\0'),
    'a name with a line break': files(v='one\n.safetensors'),
    'half a letter': index(b'{"weight_map": {"w": "\\ud800"}}'),
    'a name that is a number': files(v=2),
    'a name that is a list': files(v=['one.safetensors']),
    'a name that is null': files(v=None),
    'a name of 300 letters': files(v='a' * 300 + '.safetensors'),
    'a missing shard': files(v='two.safetensors'),
    'a shard that lacks a tensor': files(v='one.safetensors'),
    'the index as a shard': files(v=INDEX_NAME),
    'a folder as a shard': shard(FILES['a folder']),
    'a pipe as a shard': shard(FILES['a pipe']),
    'a link to itself as a shard': shard(FILES['a link to itself']),
    'an empty shard': shard(FILES['empty']),
    'a shard with more': shard(
        lambda path: write_safetensors(path, {'v': np.zeros(1), 'stray': np.zeros(1)})
    ),
    'a folder as index': lambda folder: (folder / INDEX_NAME).mkdir(),
    'a pipe as index': lambda folder: os.mkfifo(folder / INDEX_NAME),
}


def make_index(folder, name):
    """Makes a folder with a hostile index and returns it."""
    folder.mkdir()
    write_safetensors(folder / 'one.safetensors', {'w': np.ones((2, 4), np.float32)})
    INDICES[name](folder)
    return folder
