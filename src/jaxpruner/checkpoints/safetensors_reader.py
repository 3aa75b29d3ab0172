"""Reads safetensors: a file, or several under an index.

The library checks a file's header; the weights are read past it, since it maps files into memory and older releases
of it know no bfloat16 in NumPy.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.parts import Part
from jaxpruner.core import input_files
from jaxpruner.core.system_errors import errors_named

INDEX_NAME = 'model.safetensors.index.json'
METADATA_KEY = '__metadata__'
_MOST_AXES = 32  # of an array in the oldest NumPy that is allowed
_LONGEST_AXIS = 2**31  # of a tensor without weights; others are as long as the file at most

DTYPES: dict[str, np.dtype] = {
    'BOOL': np.dtype('bool'),
    'U8': np.dtype('uint8'),
    'I8': np.dtype('int8'),
    'U16': np.dtype('uint16'),
    'I16': np.dtype('int16'),
    'U32': np.dtype('uint32'),
    'I32': np.dtype('int32'),
    'U64': np.dtype('uint64'),
    'I64': np.dtype('int64'),
    'F16': np.dtype('float16'),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F32': np.dtype('float32'),
    'F64': np.dtype('float64'),
    'C64': np.dtype('complex64'),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
    'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
    'F8_E8M0': np.dtype(ml_dtypes.float8_e8m0fnu),
}


class Header(NamedTuple):
    """What stands before the weights of a safetensors file.

    >>> Header({'w': Leaf((2,), DTYPES['F32'])}, {'w': 100}, {}).starts['w']
    100
    """

    leaves: dict[str, Leaf]  # in the order of the header's keys
    starts: dict[str, int]  # byte of the file at which each tensor starts
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file.

    Args:
      path: the file.

    Raises:
      ValueError: it is no safetensors file, or not all of one, or has a dtype or a shape that is not read here.
      OSError: there is no such file, or it is no file, or cannot be read.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.ones(2)}, {'format': 'np'})
    ...     read_header(Path(folder) / 'a.safetensors').metadata
    {'format': 'np'}
    """
    input_files.check_file(path)
    try:
        with errors_named(path), path.open('rb') as file:
            with safe_open(
                path, framework='numpy'
            ):  # which calls a file missing that may not be read
                pass
            (length,) = struct.unpack('<Q', file.read(8))
            entries = input_files.parse_json(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f'{path} is no safetensors file, or only a part of one: {error} (it has {path.stat().st_size} bytes); '
            'write or download it anew'
        ) from error
    metadata = entries.pop(METADATA_KEY, None) or {}
    for name, entry in entries.items():
        if entry['dtype'] not in DTYPES:
            raise ValueError(
                f'{path}: {name} has dtype {entry["dtype"]}; known are {", ".join(DTYPES)}'
            )
        _check_shape(entry['shape'], f'{path}: {name}')
    leaves = {
        name: Leaf(tuple(entry['shape']), DTYPES[entry['dtype']]) for name, entry in entries.items()
    }
    return Header(
        leaves,
        {name: 8 + length + entry['data_offsets'][0] for name, entry in entries.items()},
        metadata,
    )


def _check_shape(shape: list[int], where: str) -> None:
    if len(shape) > _MOST_AXES:
        raise ValueError(
            f'{where} has {len(shape)} axes; at most {_MOST_AXES} are read: write the file anew'
        )
    if 0 in shape and max(shape) > _LONGEST_AXIS:
        raise ValueError(
            f'{where} has no weights, but an axis of length {max(shape)}; at most 2^31 is read: write the file anew'
        )


class SafetensorsFile:
    """One safetensors file as a checkpoint.

    Args:
      path: the file.

    Raises:
      ValueError: it is no safetensors file, or not all of one.
      FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.arange(2)})
    ...     SafetensorsFile(Path(folder) / 'a.safetensors').read('w')
    array([0, 1])
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.header = read_header(self.path)
        self.metadata: Mapping[str, str] = self.header.metadata
        in_file = sorted(self.header.leaves, key=self.header.starts.__getitem__)
        self.leaves: Mapping[str, Leaf] = {name: self.header.leaves[name] for name in in_file}

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """A tensor, or a part of it; see `Checkpoint`."""
        leaf = self.leaves[name]
        array = np.empty(leaf.shape if part is None else part.shape, leaf.dtype)
        with errors_named(self.path), self.path.open('rb', buffering=0) as file:
            file.seek(self.header.starts[name] + (part.start * leaf.dtype.itemsize if part else 0))
            _fill(file, array, f'{self.path}: {name}')
        return array


def _fill(file, array: np.ndarray, what: str) -> None:
    rest = array.reshape(-1).view(np.uint8).data
    while rest:
        # A read is cut short at 2 GiB.
        count = file.readinto(rest)
        if not count:
            raise ValueError(
                f'{what} ends {len(rest)} bytes too early; the file has changed since it was opened'
            )
        rest = rest[count:]


class ShardedSafetensors:
    """Several safetensors files under a `model.safetensors.index.json` as one checkpoint.

    Args:
      index: the index file.

    Attributes:
      files: the shards by file name.

    Raises:
      ValueError: the index or a shard is damaged, or they do not fit each other.
      FileNotFoundError: there is no index, or a shard is missing.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.arange(2)})
    ...     _ = (Path(folder) / INDEX_NAME).write_text('{"weight_map": {"w": "a.safetensors"}}')
    ...     ShardedSafetensors(Path(folder) / INDEX_NAME).read('w')
    array([0, 1])
    """

    def __init__(self, index: Path):
        self.index, self.path = index, index.parent
        file_of = _read_index(index)
        self.files = {
            file: SafetensorsFile(self.path / file) for file in dict.fromkeys(file_of.values())
        }
        self._file_of = {
            name: self.files[file] for file in self.files for name in self.files[file].leaves
        }
        self.leaves: Mapping[str, Leaf] = {
            name: file.leaves[name] for name, file in self._file_of.items()
        }
        self.metadata: Mapping[str, str] = {
            k: v for file in self.files.values() for k, v in file.metadata.items()
        }
        for name, file in file_of.items():
            if name not in self.files[file].leaves:
                raise ValueError(
                    f'{index}: {name} is to stand in {file}, which does not have it; download both anew'
                )
        stray = [
            name for name, file in self._file_of.items() if file_of.get(name) != file.path.name
        ]
        if stray:
            raise ValueError(
                f'{self._file_of[stray[0]].path} has {stray[0]}, which {index} does not place there; download both anew'
            )

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """A tensor, or a part of it; see `Checkpoint`."""
        return self._file_of[name].read(name, part)


def _read_index(index: Path) -> dict[str, str]:
    """Which file each tensor stands in."""
    try:
        content = input_files.parse_json(input_files.read_file(index))
        file_of = _weight_map(content)
    except ValueError as error:
        raise ValueError(
            f'{index} is no index of safetensors files, {{"weight_map": {{"tensor": "file"}}}}: {error}; '
            'write or download it anew'
        ) from error
    missing = sorted({file for file in file_of.values() if not (index.parent / file).exists()})
    if missing:
        raise FileNotFoundError(
            f'{index} names {missing[0]}, which is not beside it: download it, too'
        )
    return file_of


def _weight_map(content: Any) -> dict[str, str]:
    if not isinstance(content, dict) or 'weight_map' not in content:
        raise ValueError('it has no key weight_map')
    file_of = content['weight_map']
    if not isinstance(file_of, dict) or not file_of:
        raise ValueError('weight_map is no table of tensors')
    for name, file in file_of.items():
        if not name:
            raise ValueError('a tensor in weight_map has an empty name')
        if not _is_plain_name(file):
            raise ValueError(
                f'the file of {name} in weight_map is {file!r}, which is no plain file name'
            )
    return file_of


def _is_plain_name(file: Any) -> bool:
    return (
        isinstance(file, str)
        and file not in ('', '.', '..')
        and not set(file) & set('/\\\0')
        and file.isprintable()
    )
