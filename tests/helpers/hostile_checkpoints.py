"""Checkpoints that somebody has damaged, or made to do damage: each a function that puts one under a path.

What is wrong inside of a header of safetensors is for its own library to find: a few rows show that its word is
passed on.
"""

import json
import os
import struct

import numpy as np

from jaxpruner.checkpoints import write_safetensors
from jaxpruner.checkpoints.reading import INDEX_NAME

DEEP = b'[' * 100_000


def with_bytes(content):
    return lambda path: path.write_bytes(content)


def with_header(**entry):
    """A file of 8 bytes of weights whose header says this of them."""
    entry = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8], **entry}
    text = json.dumps({'w': entry}).encode()
    return with_bytes(struct.pack('<Q', len(text)) + text + b'8 bytes.')


def changed(change):
    """A file that was whole before its bytes were changed."""

    def make(path):
        write_safetensors(path, {'w': np.arange(6.0).reshape(2, 3)})
        path.write_bytes(change(path.read_bytes()))

    return make


FILES = {
    'empty': with_bytes(b''),
    'a text': with_bytes(b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n'),
    'a byte too few': changed(lambda content: content[:-1]),
    'a deep header': with_bytes(struct.pack('<Q', len(DEEP)) + DEEP),
    'a shape that overflows': with_header(shape=[2**62, 2**62]),
    'an unknown dtype': with_header(dtype='F33'),
    'a folder': lambda path: path.mkdir(),
    'a pipe': os.mkfifo,
    'a link to itself': lambda path: path.symlink_to(path),
    'zeros without end': lambda path: path.symlink_to('/dev/zero'),
    'missing': lambda path: None,
}


def index(content):
    """A folder of shards with this index, as an object or as bytes."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / INDEX_NAME).write_bytes(text)


def second(name, make=None):
    """A folder whose second shard has this name, and is made so."""

    def make_both(folder):
        if make is not None:
            make(folder / name)
        index({'weight_map': {'w': 'one.safetensors', 'v': name}})(folder)

    return make_both


# What makes an index, beside the shard one.safetensors with the tensor w.
INDICES = {
    'a text': index(b'weights'),
    'no UTF-8': index(b'{"weight_map": {"w": "\xff"}}'),
    'no map': index({'metadata': {'total_size': 8}}),
    'a map that is null': index({'weight_map': None}),
    'an empty map': index({'weight_map': {}}),
    'deep': index(b'{"weight_map":' + DEEP),
    'a tensor twice': index(b'{"weight_map": {"w": "one.safetensors", "w": "two.safetensors"}}'),
    'half a letter': index(b'{"weight_map": {"w": "\\ud800"}}'),
    'the folder above': second('..'),
    'a file from the root': second('/etc/passwd'),
    'a name with a line break': second('one\n.safetensors'),
    'a name that is a number': second(2),
    'a missing shard': second('two.safetensors'),
    'a shard that lacks a tensor': second('one.safetensors'),
    'a pipe as a shard': second('two.safetensors', os.mkfifo),
    'a shard with more': second(
        'two.safetensors',
        lambda path: write_safetensors(path, {'v': np.zeros(1), 'stray': np.zeros(1)}),
    ),
    'a pipe as index': lambda folder: os.mkfifo(folder / INDEX_NAME),
}
