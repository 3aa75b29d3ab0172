"""Packed files that somebody has damaged, or made to do damage: each a function that writes one."""

import functools
import json
import zlib

import numpy as np

from helpers.hostile_checkpoints import DEEP
from jaxpruner.checkpoints import write_safetensors
from jaxpruner.checkpoints.writing import digest_of
from jaxpruner.sparse.storage.packed_files import MANIFEST_KEY

_VALUES = np.arange(1.0, 5.0, dtype=np.float32)
_SHAPE = np.int64([2, 8])
GOOD = {  # one leaf in each format: its arrays and its shape
    'bitmask': (
        {'compressed': _VALUES, 'bitmask': np.uint8([0b10100000, 0b00000110]), 'shape': _SHAPE},
        [2, 8],
    ),
    'csr': (
        {
            'compressed': _VALUES,
            'row_offsets': np.int32([0, 3, 4]),
            'column_indices': np.uint16([0, 2, 5, 7]),
            'shape': _SHAPE,
        },
        [2, 8],
    ),
    'n_by_m': (
        {
            'compressed': _VALUES.reshape(2, 1, 2),
            'indices': np.uint8([0b01110010]),  # 1 3 and 0 2
            'pattern': np.int64([2, 4, 1]),
        },
        [2, 4],
    ),
    'blocks': (
        {
            'values': np.ones((2, 1, 1, 4), np.float32),
            'indices': np.uint16([[0], [1]]),
            'shape': _SHAPE,
        },
        [2, 8],
    ),
    'dense': ({'values': np.ones((2, 8), np.float32)}, [2, 8]),
}


def write(path, format_name, arrays=(), fields=(), manifest=None, more=()):
    """Writes a file with the leaf `w`; arrays and fields that are `None` are missing; `more` leaves are dense."""
    good, shape = GOOD[format_name]
    arrays = {key: value for key, value in {**good, **dict(arrays)}.items() if value is not None}
    prefix = 'w' if format_name == 'dense' else None
    tensors = {prefix or f'w.{key}': np.ascontiguousarray(value) for key, value in arrays.items()}
    digest = digest_of(*[value for _, value in sorted(arrays.items())])
    entry = {
        'path': ['w'],
        'format': format_name,
        'dtype': 'float32',
        'shape': shape,
        'crc32': digest,
    }
    entry |= dict(fields)
    leaves = {'w': {key: value for key, value in entry.items() if value is not None}}
    for name, parts in dict(more).items():
        tensors.setdefault(name, np.ones(2, np.float32))
        array = tensors[name]
        leaves[name] = {
            'path': parts,
            'format': 'dense',
            'dtype': 'float32',
            'shape': list(array.shape),
        }
        leaves[name]['crc32'] = digest_of(array)
    if not isinstance(manifest, str):
        manifest = {'version': 1, 'leaves': leaves, **(manifest or {})}
        text = json.dumps({'leaves': manifest['leaves'], 'metadata': {}}, sort_keys=True)
        manifest = json.dumps({'crc32': f'{zlib.crc32(text.encode()):08x}', **manifest})
    write_safetensors(path, tensors, {MANIFEST_KEY: manifest})


def good(format_name, **changes):
    return functools.partial(write, format_name=format_name, **changes)


def arrays(format_name, **changes):
    return good(format_name, arrays=changes)


def shaped(format_name, shape, **changes):
    """The leaf claims another shape, in the manifest and in its arrays."""
    if 'shape' in GOOD[format_name][0]:
        changes['shape'] = np.array(shape, np.int64)
    return good(format_name, arrays=changes, fields={'shape': list(shape)})


def fields(**changes):
    return good('bitmask', fields=changes)


def manifest(changes):
    return good('bitmask', manifest=changes)


def damaged(path):
    """One bit of a weight is another: all arrays still belong together."""
    write(path, 'dense')
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


_NOTHING = {'compressed': np.zeros(0, np.float32), 'column_indices': np.zeros(0, np.uint32)}

# Each with a word of the message beside the file's name.
FILES = {
    'a text': (lambda path: path.write_bytes(b'weights'), 'safetensors'),
    'foreign': (lambda path: write_safetensors(path, {'w': np.ones(2)}), 'no packed file'),
    'a manifest that is no JSON': (manifest('{'), 'JSON'),
    'a manifest that is deep': (manifest(DEEP.decode()), 'deep'),
    'a manifest that is a list': (manifest('[]'), 'version None'),
    'a newer version': (manifest({'version': 2}), 'version 2.*newer jaxpruner'),
    'a version that is true': (manifest({'version': True}), 'version True'),
    'no leaves': (manifest('{"version": 1}'), 'are damaged'),
    'leaves as a list': (manifest({'leaves': ['w']}), 'are damaged'),
    'a leaf that is a word': (manifest({'leaves': {'w': 'csr'}}), 'w: its entry'),
    'a leaf twice': (manifest('{"version": 1, "leaves": {"w": {}, "w": {}}}'), 'given twice'),
    'a tensor beside the manifest': (manifest({'leaves': {}}), '0 times in its manifest'),
    'one bit of a weight is another': (damaged, 'w: its bytes are damaged.*crc32'),
    'another digest of the manifest': (manifest({'crc32': '00000000'}), "are damaged.*'00000000'"),
    'another digest': (fields(crc32='00000000'), 'w: its bytes are damaged.*00000000'),
    'a digest that is a number': (fields(crc32=12345678), '12345678'),
    'no digest': (fields(crc32=None), "w: .*'crc32'"),
    'no path': (fields(path=None), "w: .*'path'"),
    'an empty path': (fields(path=[]), 'path'),
    'a path of numbers': (fields(path=[1]), 'w: its entry'),
    'a path elsewhere': (fields(path=['v']), 'does not lead to its name'),
    'a path through a leaf': (good('dense', more={'w.b': ['w', 'b']}), 'through the leaf'),
    'an unknown format': (fields(format='zip'), "'zip'"),
    'a format that is a list': (fields(format=[]), 'w: its entry'),
    'another format': (fields(format='csr'), '0 times in it'),
    'an unknown dtype': (fields(dtype='float7'), "'float7'"),
    'another dtype': (fields(dtype='int32'), 'int32 is stored as'),
    'a shape in words': (fields(shape='2x8'), "'2x8'"),
    'half a shape': (fields(shape=[2.5, 8]), '2.5'),
    'a negative shape': (fields(shape=[-2, -8]), '-2'),
    'a shape of truths': (fields(shape=[True, True]), 'True'),
    'a hundred axes': (fields(shape=[1] * 100), '100 axes'),
    'another shape': (fields(shape=[4, 4]), 'manifest says'),
    'a dense leaf of another shape': (shaped('dense', [4, 8]), 'manifest says'),
    'a shape that overflows': (shaped('bitmask', [2**62, 4, 16]), 'too large'),
    'a shape without weights that overflows': (shaped('bitmask', [0, 2**62]), 'too large'),
    'an array is missing': (arrays('csr', row_offsets=None), 'row_offsets is 0 times in it'),
    'a tensor too many': (arrays('bitmask', stray=np.ones(2)), 'stray is 1 times in it'),
    'a tensor of two leaves': (
        good('bitmask', more={'w.compressed': ['w.compressed']}),
        'w.compressed is 1 times in it, and 2',
    ),
    'a bit too many': (arrays('bitmask', bitmask=np.uint8([0b10110000, 6])), r'compressed.*\(5,\)'),
    'a byte of bits too many': (arrays('bitmask', bitmask=np.zeros(3, np.uint8)), 'bitmask'),
    'bits that are floats': (arrays('bitmask', bitmask=np.zeros(2, np.float32)), 'bitmask'),
    'bits beyond the last': (
        shaped('bitmask', [3, 5], bitmask=np.uint8([0b10100000, 0b00000011])),
        'beyond',
    ),
    'a shape of floats': (arrays('bitmask', shape=np.array([2.0, 8.0])), 'shape'),
    'row offsets that fall': (arrays('csr', row_offsets=np.int32([0, 5, 4])), 'fall behind row 1'),
    'row offsets that begin late': (arrays('csr', row_offsets=np.int32([1, 3, 4])), 'from 1'),
    'a row offset too few': (arrays('csr', row_offsets=np.int32([0, 4])), 'row_offsets'),
    'a column outside': (arrays('csr', column_indices=np.uint16([0, 2, 8, 7])), 'has 8'),
    'a negative column': (arrays('csr', column_indices=np.int32([-1, 2, 5, 7])), 'has -1'),
    'a column twice': (arrays('csr', column_indices=np.uint16([0, 2, 2, 7])), '2 before 2'),
    'a column too few': (arrays('csr', column_indices=np.uint16([0, 2, 5])), 'compressed'),
    'rows of nothing': (shaped('csr', []), 'no rows'),
    'an index twice in a group': (arrays('n_by_m', indices=np.uint8([0b01010010])), 'ascend'),
    'indices too many': (arrays('n_by_m', indices=np.zeros(3, np.uint8)), 'indices'),
    'N above M': (arrays('n_by_m', pattern=np.int64([2, 1, 1])), 'N, M and an axis'),
    'an endless M': (arrays('n_by_m', pattern=np.int64([2, 2**40, 1])), 'N, M and an axis'),
    'another N': (arrays('n_by_m', pattern=np.int64([3, 4, 1])), 'none for 3:4'),
    'an axis that is not there': (arrays('n_by_m', pattern=np.int64([2, 4, 2])), 'axis 2'),
    'a pattern too short': (arrays('n_by_m', pattern=np.int64([2, 4])), 'pattern'),
    'a block outside': (arrays('blocks', indices=np.uint16([[0], [2]])), 'indices has 2'),
    'a negative block': (arrays('blocks', indices=np.int32([[0], [-1]])), 'indices has -1'),
    'a block twice': (
        arrays(
            'blocks', values=np.ones((2, 2, 1, 4), np.float32), indices=np.uint16([[0, 1], [1, 1]])
        ),
        'ascend',
    ),
    'blocks that do not divide': (
        arrays('blocks', values=np.ones((2, 1, 1, 3), np.float32)),
        'do not divide',
    ),
    'blocks of nothing': (arrays('blocks', values=np.ones((2, 1, 0, 4), np.float32)), '4 axes'),
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
        shaped('csr', [1, 2**38], row_offsets=np.int32([0, 0]), **_NOTHING),
        '1099511627776 bytes',
    ),
    'a terabyte in one bit a weight': (
        shaped('bitmask', [2**19, 2**19], compressed=_NOTHING['compressed']),
        '1099511627776 bytes|bitmask',
    ),
}
