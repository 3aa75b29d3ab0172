"""Writes safetensors files tensor by tensor, which the format's own library cannot."""

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpruner.checkpoints.reading import Leaf
from jaxpruner.files import atomic_files, dtypes
from jaxpruner.progress import leaf_progress

_METADATA = '__metadata__'
_NAMES = {dtype: name for name, dtype in dtypes.SAFETENSORS.items()}


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays that are at hand into a safetensors file.

    Args:
      path: the file; it is replaced when the new one is whole.
      tensors: arrays by name.
      metadata: strings by name.

    Raises:
      TypeError: metadata are no strings.
      ValueError: a dtype that safetensors has no name for.
      FileNotFoundError: the folder does not exist.
      BlockingIOError: another process is writing to it.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.arange(2)})
    ...     open_checkpoint(Path(folder) / 'a.safetensors').read('w')
    array([0, 1])
    """
    leaves = {name: Leaf(array.shape, array.dtype) for name, array in tensors.items()}
    write_tensors(path, leaves, tensors.__getitem__, metadata)


def write_tensors(
    path: Path,
    leaves: Mapping[str, Leaf],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = True,
    progress: bool = False,
) -> None:
    """Writes tensors of which only names, shapes and dtypes are at hand; `read` returns one at a time, in order."""
    path = Path(path)
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f'metadata must map strings to strings, got {key!r}: {text!r}')
    offset = 0
    for name, leaf in leaves.items():
        if name == _METADATA:
            raise ValueError(f'{name}: safetensors files keep this name; rename the leaf')
        if leaf.dtype not in _NAMES:
            raise ValueError(
                f'{path}: {name} has dtype {leaf.dtype}, which safetensors files do not hold'
            )
        entries[name] = {
            'dtype': _NAMES[leaf.dtype],
            'shape': list(leaf.shape),
            'data_offsets': [offset, offset + leaf.bytes],
        }
        offset += leaf.bytes
    header = json.dumps(entries, separators=(',', ':'), ensure_ascii=False).encode()
    header += b' ' * (-len(header) % 8)  # so that weights lie where their dtype wants them
    with (
        atomic_files.target_claimed(path),
        atomic_files.replacing(path, overwrite) as temporary,
        temporary.open('wb') as file,
        leaf_progress(leaves, progress) as on_leaf,
    ):
        file.write(struct.pack('<Q', len(header)) + header)
        for name, leaf in leaves.items():
            on_leaf(name)
            array = np.asarray(read(name), order='C')
            if (array.shape, array.dtype) != leaf:
                raise ValueError(f'{path}: {name} is {array.dtype}{list(array.shape)}, not {leaf}')
            file.write(array.reshape(-1).view(np.uint8).data)


def digest_of(*arrays: np.ndarray) -> str:
    """Returns the CRC-32 of the bytes of arrays: eight hexadecimal digits, which show damage when a file is read.

    >>> digest_of(np.ones(2, np.float32))
    'd5065190'
    """
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, checksum)
    return f'{checksum:08x}'
