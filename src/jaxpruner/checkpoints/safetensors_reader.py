"""Reads safetensors: a file, or several under an index.

The library checks a file's header; the weights are read past it, since it maps files into memory and older releases
of it know no bfloat16 in NumPy.
"""

import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.parts import Part
from jaxpruner.files import input_files
from jaxpruner.files.system_errors import errors_named

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"checkpoints need {error.name}, which is not installed: pip install 'jaxpruner[checkpoint]'",
        name=error.name,
    ) from error

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
    """What stands before the weights of a safetensors file."""

    leaves: dict[str, Leaf]  # in the order of the header's keys
    starts: dict[str, int]  # byte of the file at which each tensor starts
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file.

    Raises:
      ValueError: it is no safetensors file, or not all of one, or has a dtype or a shape that is not read here.
      OSError: there is no such file, or it is no file, or cannot be read.
    """
    input_files.check_file(path)
    try:
        # Opened first, since safe_open calls a file missing that may not be read.
        with errors_named(path), path.open('rb') as file:
            with safe_open(path, framework='numpy'):
                pass
            (length,) = struct.unpack('<Q', file.read(8))
            entries = input_files.parse_json(file.read(length))
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f'{path} is no safetensors file, or only a part of one: {error} (it has {path.stat().st_size} bytes); '
            'write or download it again'
        ) from error
    header = Header({}, {}, entries.pop(METADATA_KEY, None) or {})
    for name, entry in entries.items():
        if entry['dtype'] not in DTYPES:
            raise ValueError(
                f'{path}: {name} has dtype {entry["dtype"]}; known are {", ".join(DTYPES)}'
            )
        _check_shape(entry['shape'], f'{path}: {name}')
        header.leaves[name] = Leaf(tuple(entry['shape']), DTYPES[entry['dtype']])
        header.starts[name] = 8 + length + entry['data_offsets'][0]
    return header


def _check_shape(shape: list[int], where: str) -> None:
    if len(shape) > _MOST_AXES:
        raise ValueError(
            f'{where} has {len(shape)} axes; at most {_MOST_AXES} are read; write the file again'
        )
    if 0 in shape and max(shape) > _LONGEST_AXIS:
        raise ValueError(
            f'{where} has no weights, but an axis of length {max(shape)}; at most 2^31 is read; write the file again'
        )


class SafetensorsFile:
    """One safetensors file as a checkpoint.

    Raises:
      ValueError: it is no safetensors file, or not all of one.
      FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.header = read_header(self.path)
        self.metadata: Mapping[str, str] = self.header.metadata
        names = sorted(self.header.leaves, key=self.header.starts.__getitem__)
        self.leaves: Mapping[str, Leaf] = {name: self.header.leaves[name] for name in names}

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """Reads a tensor, or a part of it; see `Checkpoint`."""
        leaf = self.leaves[name]
        start = self.header.starts[name]
        shape = leaf.shape
        if part is not None:
            start += part.start * leaf.dtype.itemsize
            shape = part.shape
        array = np.empty(shape, leaf.dtype)
        with errors_named(self.path), self.path.open('rb', buffering=0) as file:
            file.seek(start)
            _fill(file, array, f'{self.path}: {name}')
        return array


def _fill(file: io.FileIO, array: np.ndarray, where: str) -> None:
    unread = array.reshape(-1).view(np.uint8).data
    while unread:
        count = file.readinto(unread)  # at most 2 GiB at a time
        if not count:
            raise ValueError(
                f'{where} ends {len(unread)} bytes too early; the file has changed since it was opened'
            )
        unread = unread[count:]


class ShardedSafetensors:
    """Several safetensors files under a `model.safetensors.index.json` as one checkpoint.

    Attributes:
      files: the shards by file name.

    Raises:
      ValueError: the index or a shard is damaged, or they do not fit each other.
      FileNotFoundError: there is no index, or a shard is missing.
    """

    def __init__(self, index: Path):
        self.index = index
        self.path = index.parent
        weight_map = _read_index(index)
        self.files = {
            name: SafetensorsFile(self.path / name) for name in dict.fromkeys(weight_map.values())
        }
        leaves: dict[str, Leaf] = {}
        metadata: dict[str, str] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self.files.values():
            leaves |= file.leaves
            metadata |= file.metadata
            self._file_of |= dict.fromkeys(file.leaves, file)
        self.leaves: Mapping[str, Leaf] = leaves
        self.metadata: Mapping[str, str] = metadata
        self._check_against(weight_map)

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """Reads a tensor, or a part of it; see `Checkpoint`."""
        return self._file_of[name].read(name, part)

    def _check_against(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.files[file].leaves:
                raise ValueError(
                    f'{self.index} places {name} in {file}, which does not have it; download both again'
                )
        for name, file in self._file_of.items():
            if weight_map.get(name) != file.path.name:
                raise ValueError(
                    f'{file.path} has {name}, which {self.index} does not place there; download both again'
                )


def _read_index(index: Path) -> dict[str, str]:
    """Reads which file each tensor stands in."""
    try:
        content = input_files.parse_json(input_files.read_file(index))
        weight_map = _weight_map(content)
    except ValueError as error:
        raise ValueError(
            f'{index} is no index of safetensors files, {{"weight_map": {{"tensor": "file"}}}}: {error}; '
            'write or download it again'
        ) from error
    for file in sorted(set(weight_map.values())):
        if not (index.parent / file).exists():
            raise FileNotFoundError(
                f'{index} names {file}, which is not beside it; download it, too'
            )
    return weight_map


def _weight_map(content: Any) -> dict[str, str]:
    if not isinstance(content, dict) or 'weight_map' not in content:
        raise ValueError('it has no key weight_map')
    weight_map = content['weight_map']
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError('weight_map is no table of tensors')
    for name, file in weight_map.items():
        if not name:
            raise ValueError('a tensor in weight_map has an empty name')
        if not _is_plain_name(file):
            raise ValueError(
                f'the file of {name} in weight_map is {file!r}, which is no plain file name'
            )
    return weight_map


def _is_plain_name(file: Any) -> bool:
    return (
        isinstance(file, str)
        and file not in ('', '.', '..')
        and not set(file) & set('/\\\0')
        and file.isprintable()
    )
