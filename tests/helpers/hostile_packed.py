"""Packed files that somebody has damaged, or made to do damage: each a function that writes one."""

import json

import numpy as np

from helpers.hostile_checkpoints import DEEP
from jaxpruner.checkpoints import write_safetensors
from jaxpruner.sparse.storage.digests import digest_of
from jaxpruner.sparse.storage.manifest import MANIFEST_KEY, digest_with_metadata


def good_leaves():
    """One leaf in each format: the arrays, and the fields of the manifest."""
    dtype, shape = 'float32', [2, 8]
    values = np.arange(1.0, 5.0, dtype=np.float32)
    return {
        'bitmask': (
            {
                'compressed': values,
                'bitmask': np.uint8([0b10100000, 0b00000110]),
                'shape': np.int64(shape),
            },
            {'path': ['w'], 'format': 'bitmask', 'dtype': dtype, 'shape': shape},
        ),
        'csr': (
            {
                'compressed': values,
                'row_offsets': np.int32([0, 3, 4]),
                'column_indices': np.uint16([0, 2, 5, 7]),
                'shape': np.int64(shape),
            },
            {'path': ['w'], 'format': 'csr', 'dtype': dtype, 'shape': shape},
        ),
        'n_by_m': (  # 2:6, so that three bits hold more than M
            {
                'compressed': values.reshape(1, 2, 2),
                'indices': np.uint8([0b00000101, 0b11010000]),  # 0 1 and 3 5
                'pattern': np.int64([2, 6, 1]),
            },
            {'path': ['w'], 'format': 'n_by_m', 'dtype': dtype, 'shape': [1, 12]},
        ),
        'blocks': (
            {
                'values': np.ones((2, 1, 1, 4), np.float32),
                'indices': np.uint16([[0], [1]]),
                'shape': np.int64(shape),
            },
            {'path': ['w'], 'format': 'blocks', 'dtype': dtype, 'shape': shape},
        ),
        'dense': (
            {'values': np.ones(shape, np.float32)},
            {'path': ['w'], 'format': 'dense', 'dtype': dtype, 'shape': shape},
        ),
    }


def write(path, arrays, fields, manifest=None):
    """Writes a file with one leaf, without fields that are 'missing'; or with another manifest, an object or words."""
    prefix = 'w' if 'values' in arrays and len(arrays) == 1 else None
    tensors = {prefix or f'w.{key}': np.ascontiguousarray(value) for key, value in arrays.items()}
    if manifest is None:
        fields = {'crc32': digest_of(arrays), **fields}
        fields = {key: value for key, value in fields.items() if value != 'missing'}
        manifest = {'version': 1, 'leaves': {'w': fields}}
    text = manifest if isinstance(manifest, str) else json.dumps(with_digest(manifest))
    write_safetensors(path, tensors, {MANIFEST_KEY: text})


def with_digest(manifest):
    """A manifest with a digest of itself, unless it has one or is no table of leaves."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get('leaves'), dict):
        return manifest
    return {'crc32': digest_with_metadata(manifest['leaves'], {}), **manifest}


def arrays_with(format_name, **changes):
    """A file of which some arrays are others, or missing if they are `None`."""

    def make(path):
        arrays, fields = good_leaves()[format_name]
        arrays |= changes
        arrays = {key: value for key, value in arrays.items() if value is not None}
        write(path, arrays, fields)

    return make


def shaped(format_name, shape, **changes):
    """A file whose leaf claims another shape, in the manifest and in the arrays."""

    def make(path):
        arrays, fields = good_leaves()[format_name]
        if 'shape' in arrays:
            arrays['shape'] = np.array(shape, np.int64)
        write(path, arrays | changes, {**fields, 'shape': list(shape)})

    return make


def fields_with(**changes):
    """A file of which the manifest says something else of the leaf."""

    def make(path):
        arrays, fields = good_leaves()['bitmask']
        write(path, arrays, fields | changes)

    return make


def manifest_of(manifest):
    def make(path):
        write(path, *good_leaves()['bitmask'], manifest)

    return make


def cut(path):
    write(path, *good_leaves()['bitmask'])
    path.write_bytes(path.read_bytes()[:-3])


def damaged(path):
    """A good file of which one bit of a weight is another: all arrays still belong together."""
    write(path, *good_leaves()['dense'])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def two_leaves(first, second):
    """A file with two dense leaves under these paths."""

    def make(path):
        leaves, tensors = {}, {}
        for parts in (first, second):
            name = '.'.join(parts)
            leaves[name] = {'path': parts, 'format': 'dense', 'dtype': 'float32', 'shape': [2]}
            tensors[name] = np.ones(2, np.float32)
            leaves[name]['crc32'] = digest_of({'values': tensors[name]})
        text = json.dumps(with_digest({'version': 1, 'leaves': leaves}))
        write_safetensors(path, tensors, {MANIFEST_KEY: text})

    return make


def shared_tensor(path):
    """A leaf of one bit a weight, one of whose arrays is another leaf."""
    arrays, fields = good_leaves()['bitmask']
    fields['crc32'] = digest_of(arrays)
    other = {'path': ['w.compressed'], 'format': 'dense', 'dtype': 'float32', 'shape': [4]}
    other['crc32'] = digest_of({'values': arrays['compressed']})
    write(path, arrays, fields, {'version': 1, 'leaves': {'w': fields, 'w.compressed': other}})


def extra_tensor(path):
    arrays, fields = good_leaves()['bitmask']
    write(path, {**arrays, 'stray': np.ones(2)}, fields)


NOTHING = np.zeros(0, np.float32)
GOOD = 'float32'

# Each with a word of the message beside the file's name.
FILES = {
    'empty': (lambda path: path.write_bytes(b''), 'safetensors'),
    'a text': (lambda path: path.write_bytes(b'weights'), 'safetensors'),
    'truncated': (cut, 'safetensors'),
    'foreign': (lambda path: write_safetensors(path, {'w': np.ones(2)}), 'no packed file'),
    'a manifest that is no JSON': (manifest_of('{'), 'JSON'),
    'a manifest that is deep': (manifest_of(DEEP.decode()), 'deep'),
    'a manifest that is a list': (manifest_of([]), 'no table'),
    'a newer version': (manifest_of({'version': 2, 'leaves': {}}), 'version 2.*newer jaxpruner'),
    'a newer version of unknown form': (manifest_of({'version': 99}), 'version 99'),
    'no version': (manifest_of({'leaves': {}}), 'version None'),
    'a version in words': (manifest_of({'version': '1', 'leaves': {}}), "version '1'"),
    'a version that is true': (manifest_of({'version': True, 'leaves': {}}), 'version True'),
    'no leaves': (manifest_of({'version': 1}), 'no table of leaves'),
    'leaves as a list': (manifest_of({'version': 1, 'leaves': ['w']}), 'no table of leaves'),
    'a leaf that is a word': (
        manifest_of({'version': 1, 'leaves': {'w': 'csr'}}),
        'w: .*fields',
    ),
    'a leaf twice': (
        manifest_of('{"version": 1, "leaves": {"w": {}, "w": {}}}'),
        'given twice',
    ),
    'a tensor beside the manifest': (
        manifest_of({'version': 1, 'leaves': {}}),
        'not in its manifest',
    ),
    'one bit of a weight is another': (damaged, 'w: its bytes are damaged.*crc32'),
    'another digest of the manifest': (
        manifest_of({'version': 1, 'crc32': '00000000', 'leaves': {}}),
        "manifest or its metadata are damaged.*'00000000'",
    ),
    'no digest of the manifest': (
        manifest_of('{"version": 1, "leaves": {}}'),
        'manifest or its metadata are damaged.*None',
    ),
    'another digest': (fields_with(crc32='00000000'), 'w: its bytes are damaged.*00000000'),
    'no digest': (fields_with(crc32='missing'), 'w: .*fields'),
    'a digest that is a number': (fields_with(crc32=12345678), 'crc32 is 12345678'),
    'a digest that is a word': (fields_with(crc32='damaged!'), "crc32 is 'damaged!'"),
    'no path': (fields_with(path='missing'), 'w: .*fields'),
    'a field too many': (fields_with(scale=1), 'w: .*fields'),
    'an empty path': (fields_with(path=[]), 'path'),
    'a path of numbers': (fields_with(path=[1]), 'path'),
    'a path elsewhere': (fields_with(path=['v']), "path \\['v'\\]"),
    'a path through a leaf': (two_leaves(['a'], ['a', 'b']), 'through the leaf'),
    'a leaf above others': (two_leaves(['a', 'b'], ['a']), 'leaves below'),
    'an unknown format': (fields_with(format='zip'), "'zip'"),
    'a format that is a number': (fields_with(format=3), '3'),
    'another format': (fields_with(format='csr'), 'column_indices is missing'),
    'an unknown dtype': (fields_with(dtype='float7'), "'float7'"),
    'another dtype': (fields_with(dtype='int32'), 'int32 is stored as'),
    'a dtype of other width': (fields_with(dtype='complex128'), 'complex128 is stored as'),
    'a shape in words': (fields_with(shape='2x8'), "'2x8'"),
    'a negative shape': (fields_with(shape=[-2, -8]), '-2'),
    'half a shape': (fields_with(shape=[2.5, 8]), '2.5'),
    'a shape of truths': (fields_with(shape=[True, True]), 'True'),
    'a hundred axes': (fields_with(shape=[1] * 100), '100 axes'),
    'another shape': (fields_with(shape=[4, 4]), 'manifest says'),
    'a shape that overflows': (shaped('bitmask', [2**32, 2**32]), 'too large'),
    'a shape that overflows to what is there': (shaped('bitmask', [2**62, 4, 16]), 'too large'),
    'a shape without weights that overflows': (shaped('bitmask', [0, 2**62]), 'too large'),
    'an array is missing': (arrays_with('csr', row_offsets=None), 'row_offsets is missing'),
    'a tensor too many': (extra_tensor, 'stray'),
    'a tensor of two leaves': (shared_tensor, 'belongs to w'),
    'a dense leaf of another shape': (shaped('dense', [4, 8]), 'by the manifest'),
    'a bit too many': (
        arrays_with('bitmask', bitmask=np.uint8([0b10110000, 0b00000110])),
        'compressed.*\\(5,\\)',
    ),
    'a bit too few': (
        arrays_with('bitmask', bitmask=np.uint8([0b10000000, 0b00000110])),
        'compressed.*\\(3,\\)',
    ),
    'a byte of bits too many': (arrays_with('bitmask', bitmask=np.zeros(3, np.uint8)), 'bitmask'),
    'bits that are signed': (arrays_with('bitmask', bitmask=np.zeros(2, np.int8)), 'uint8'),
    'bits that are floats': (arrays_with('bitmask', bitmask=np.zeros(2, np.float32)), 'bitmask'),
    'bits beyond the last': (
        shaped('bitmask', [3, 5], bitmask=np.uint8([0b10100000, 0b00000011])),
        'beyond',
    ),
    'a shape of floats': (arrays_with('bitmask', shape=np.array([2.0, 8.0])), 'shape'),
    'a shape that is a matrix': (arrays_with('bitmask', shape=np.int64([[2, 8]])), 'shape'),
    'values that are a matrix': (
        arrays_with('bitmask', compressed=np.ones((2, 2), np.float32)),
        'compressed',
    ),
    'row offsets that fall': (
        arrays_with('csr', row_offsets=np.int32([0, 5, 4])),
        'fall behind row 1',
    ),
    'row offsets below zero': (
        arrays_with('csr', row_offsets=np.int32([0, -1, 4])),
        'fall behind row 0',
    ),
    'row offsets that begin late': (arrays_with('csr', row_offsets=np.int32([1, 3, 4])), 'from 1'),
    'row offsets that end early': (arrays_with('csr', row_offsets=np.int32([0, 3, 3])), 'to 3'),
    'a row offset too few': (arrays_with('csr', row_offsets=np.int32([0, 4])), 'row_offsets'),
    'row offsets that are floats': (
        arrays_with('csr', row_offsets=np.float32([0, 3, 4])),
        'row_offsets',
    ),
    'a column outside': (
        arrays_with('csr', column_indices=np.uint16([0, 2, 8, 7])),
        'column_indices has 8',
    ),
    'a negative column': (
        arrays_with('csr', column_indices=np.int32([-1, 2, 5, 7])),
        'column_indices has -1',
    ),
    'a column twice': (
        arrays_with('csr', column_indices=np.uint16([0, 2, 2, 7])),
        '2 before 2',
    ),
    'columns that fall': (arrays_with('csr', column_indices=np.uint16([2, 0, 5, 7])), '2 before 0'),
    'a column too few': (arrays_with('csr', column_indices=np.uint16([0, 2, 5])), 'compressed'),
    'rows of nothing': (shaped('csr', []), 'no rows'),
    'an index at M': (
        arrays_with('n_by_m', indices=np.uint8([0b00000101, 0b11100000])),
        'indices has 6',
    ),
    'an index above M': (
        arrays_with('n_by_m', indices=np.uint8([0b00000101, 0b11110000])),
        'indices has 7',
    ),
    'an index twice in a group': (
        arrays_with('n_by_m', indices=np.uint8([0b00000001, 0b11010000])),
        'ascend',
    ),
    'indices too many': (arrays_with('n_by_m', indices=np.zeros(3, np.uint8)), 'indices'),
    'bits beyond the last index': (
        arrays_with('n_by_m', indices=np.uint8([0b00000101, 0b11010001])),
        'beyond',
    ),
    'N above M': (arrays_with('n_by_m', pattern=np.int64([2, 1, 1])), 'N, M and an axis'),
    'N of nothing': (arrays_with('n_by_m', pattern=np.int64([0, 6, 1])), 'N, M and an axis'),
    'an endless M': (arrays_with('n_by_m', pattern=np.int64([2, 2**40, 1])), 'N, M and an axis'),
    'another N': (arrays_with('n_by_m', pattern=np.int64([3, 6, 1])), 'none for 3:6'),
    'an axis that is not there': (arrays_with('n_by_m', pattern=np.int64([2, 6, 2])), 'axis 2'),
    'a negative axis': (arrays_with('n_by_m', pattern=np.int64([2, 6, -1])), 'N, M and an axis'),
    'a pattern too short': (arrays_with('n_by_m', pattern=np.int64([2, 6])), 'pattern'),
    'another M': (arrays_with('n_by_m', pattern=np.int64([2, 7, 1])), 'manifest says'),
    'a block outside': (arrays_with('blocks', indices=np.uint16([[0], [2]])), 'indices has 2'),
    'a negative block': (arrays_with('blocks', indices=np.int32([[0], [-1]])), 'indices has -1'),
    'a block twice': (
        arrays_with(
            'blocks',
            values=np.ones((2, 2, 1, 4), np.float32),
            indices=np.uint16([[0, 1], [1, 1]]),
        ),
        'ascend',
    ),
    'blocks that do not divide': (
        arrays_with('blocks', values=np.ones((2, 1, 1, 3), np.float32)),
        'do not divide',
    ),
    'blocks of nothing': (
        arrays_with('blocks', values=np.ones((2, 1, 0, 4), np.float32)),
        '4 axes',
    ),
    'blocks of three axes': (
        arrays_with('blocks', values=np.ones((2, 1, 4), np.float32)),
        '4 axes',
    ),
    'groups that do not divide': (
        arrays_with(
            'blocks', values=np.ones((3, 1, 1, 4), np.float32), indices=np.zeros((3, 1), np.uint16)
        ),
        'groups',
    ),
    'an index of a block too few': (
        arrays_with('blocks', indices=np.zeros((2, 0), np.uint16)),
        'indices has shape',
    ),
    'a terabyte of zeros in blocks': (
        shaped(
            'blocks',
            [2**19, 2**19],
            values=np.zeros((1, 0, 8, 128), np.float32),
            indices=np.zeros((1, 0), np.uint16),
        ),
        '1099511627776 bytes',
    ),
    'a terabyte of zeros in one row': (
        shaped(
            'csr',
            [1, 2**38],
            compressed=NOTHING,
            column_indices=np.zeros(0, np.uint32),
            row_offsets=np.int32([0, 0]),
        ),
        '1099511627776 bytes',
    ),
    'a terabyte in one bit a weight': (
        shaped('bitmask', [2**19, 2**19], compressed=NOTHING),
        '1099511627776 bytes|bitmask',
    ),
}
