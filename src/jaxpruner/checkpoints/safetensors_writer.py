"""Writes safetensors in parts: the header first, then the weights one after another, beside the file until whole."""

import contextlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.safetensors_reader import DTYPES, METADATA_KEY
from jaxpruner.files import atomic_files
from jaxpruner.files.system_errors import errors_named

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The header's length is a multiple of this, so that weights lie where their dtype wants them.
_ALIGNMENT = 8


class SafetensorsWriter:
    """Writes a file of tensors whose shapes are known, never holding more than it is given at a time.

    Used as a context: what stands under the file's name afterwards is all of it, or what was there before. Meanwhile no
    other process writes to that file.

    Args:
      path: the file.
      leaves: the tensors in the order in which they will be given.
      metadata: strings by name.
      keys: the tensors in the order in which the header names them; by default the same.
      overwrite: whether a file that is there is replaced.

    Raises:
      ValueError: a dtype that safetensors has no name for, or not all weights have been given.
      FileNotFoundError: the folder does not exist.
      FileExistsError: a file is there that must not be replaced, or no file.
      BlockingIOError: another process is writing to it.
      OSError: it cannot be written; the error names it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SafetensorsWriter(Path(folder) / 'a.safetensors', {'w': Leaf((2,), np.dtype('int8'))}) as writer:
    ...         writer.write('w', np.array([1], np.int8))
    ...         writer.write('w', np.array([2], np.int8))
    ...     [file.name for file in Path(folder).iterdir()]
    ['a.safetensors']
    """

    def __init__(
        self,
        path: Path,
        leaves: Mapping[str, Leaf],
        metadata: Mapping[str, str] | None = None,
        keys: list[str] | None = None,
        overwrite: bool = True,
    ):
        self.path = Path(path)
        self._overwrite = overwrite
        self._leaves = leaves
        self._keys = keys or list(leaves)
        self._header = _encode_header(self.path, leaves, metadata or {}, self._keys)
        self._bytes_left = {name: leaf.bytes for name, leaf in leaves.items()}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> 'SafetensorsWriter':
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f'{self.path}: there is no folder {self.path.parent}')
        with contextlib.ExitStack() as stack:
            stack.enter_context(atomic_files.target_claimed(self.path))
            temporary = stack.enter_context(
                atomic_files.replacing(self.path, overwrite=self._overwrite)
            )
            self._file = stack.enter_context(temporary.open('wb', buffering=0))
            self._write(self._header)
            self._stack = stack.pop_all()
        return self

    def write(self, name: str, array: np.ndarray) -> None:
        """Appends a tensor, or the next part of it.

        Args:
          name: the tensor's.
          array: its weights, or the next of them in flat order.

        Raises:
          ValueError: another tensor's turn, another dtype, or more weights than it has.
          KeyError: there is no such tensor.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with SafetensorsWriter(Path(folder) / 'a', {'w': Leaf((1,), np.dtype('int8'))}) as writer:
        ...         writer.write('w', np.array([1], np.int8))
        """
        bytes_left = self._bytes_left[name]
        dtype = self._leaves[name].dtype
        if not array.nbytes:
            return
        due = self._unfinished() or name
        if due != name or array.dtype != dtype or array.nbytes > bytes_left:
            raise ValueError(
                f'{self.path}: the next to be written is {due}, {self._leaves[due].dtype}, '
                f'{self._bytes_left[due]} bytes; got {name}, {array.dtype}, {array.nbytes} bytes'
            )
        self._bytes_left[name] -= array.nbytes
        self._write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def replace_metadata(self, metadata: Mapping[str, str]) -> None:
        """Writes other metadata in the place of those in the header, for what is known only now.

        Args:
          metadata: strings by name, in all as long as those before.

        Raises:
          ValueError: they are longer or shorter.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with SafetensorsWriter(Path(folder) / 'a', {}, {'sum': '0000'}) as writer:
        ...         writer.replace_metadata({'sum': '1234'})
        """
        header = _encode_header(self.path, self._leaves, metadata, self._keys)
        if len(header) != len(self._header):
            raise ValueError(
                f'{self.path}: the header with these metadata takes {len(header)} bytes, and {len(self._header)} are '
                'written; give strings of the same lengths'
            )
        end = self._file.tell()
        self._file.seek(0)
        self._write(header)
        self._file.seek(end)

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._stack:
            if error is not None:
                raise error
            name = self._unfinished()
            if name is not None:
                raise ValueError(f'{self.path}: {name} lacks {self._bytes_left[name]} bytes')

    def _unfinished(self) -> str | None:
        """Returns the first tensor of which bytes are missing."""
        for name, bytes_left in self._bytes_left.items():
            if bytes_left:
                return name
        return None

    def _write(self, data: bytes | memoryview) -> None:
        unwritten = memoryview(data)
        with errors_named(self.path):
            while unwritten:  # a write is cut short at 2 GiB, and where the disk becomes full
                unwritten = unwritten[self._file.write(unwritten) :]


def _encode_header(
    path: Path, leaves: Mapping[str, Leaf], metadata: Mapping[str, str], keys: list[str]
) -> bytes:
    entries: dict[str, dict] = {}
    offset = 0
    for name, leaf in leaves.items():
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
    header: dict[str, dict] = {METADATA_KEY: dict(metadata)} if metadata else {}
    for name in keys:
        header[name] = entries[name]
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % _ALIGNMENT)
    return struct.pack('<Q', len(text)) + text


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays that are at hand into a safetensors file.

    Args:
      path: the file; it is replaced when the new one is whole.
      tensors: arrays by name.
      metadata: strings by name.

    Raises:
      ValueError: a dtype that safetensors has no name for.
      FileNotFoundError: the folder does not exist.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.arange(2)})
    ...     open_checkpoint(Path(folder) / 'a.safetensors').read('w')
    array([0, 1])
    """
    leaves = {name: Leaf(array.shape, array.dtype) for name, array in tensors.items()}
    with SafetensorsWriter(path, leaves, metadata) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
