"""Writes safetensors in parts: the header first, then the weights one after another, beside the file until whole."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.safetensors_reader import DTYPES, METADATA_KEY

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The header's length is a multiple of this, so that weights lie where their dtype wants them.
_ALIGNMENT = 8


class SafetensorsWriter:
    """Writes a file of tensors whose shapes are known, never holding more than it is given at a time.

    Used as a context: what stands under the file's name afterwards is all of it, or what was there before.

    Args:
      path: the file; until all is written, it has `.new` behind its name.
      leaves: the tensors in the order in which they will be given.
      metadata: strings by name.
      keys: the tensors in the order in which the header names them; by default the same.

    Raises:
      ValueError: a dtype that safetensors has no name for, or not all weights have been given.
      FileNotFoundError: the folder does not exist.

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
    ):
        self.path = Path(path)
        self._header = _header(self.path, leaves, metadata or {}, keys or list(leaves))
        self._left = {name: leaf.bytes for name, leaf in leaves.items()}
        self._dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
        self._beside = self.path.with_name(f'{self.path.name}.new')

    def __enter__(self) -> 'SafetensorsWriter':
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f'{self.path}: there is no folder {self.path.parent}')
        self._file = self._beside.open('wb')
        try:
            self._file.write(self._header)
        except BaseException:
            self._discard()
            raise
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
        turn = next((other for other, left in self._left.items() if left), name)
        if array.nbytes and (turn != name or array.dtype != self._dtypes[name] or array.nbytes > self._left[name]):
            raise ValueError(
                f'{self.path}: the next to be written is {turn}, {self._dtypes[turn]}, {self._left[turn]} bytes; got '
                f'{name}, {array.dtype}, {array.nbytes} bytes'
            )
        self._left[name] -= array.nbytes
        if array.nbytes:
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            lacking = [name for name, left in self._left.items() if left]
            if kind is None and lacking:
                raise ValueError(f'{self.path}: {lacking[0]} lacks {self._left[lacking[0]]} bytes')
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._beside, self.path)
        finally:
            self._discard()

    def _discard(self) -> None:
        try:
            self._file.close()  # may fail again, where the disk is full
        finally:
            self._beside.unlink(missing_ok=True)


def _header(path: Path, leaves: Mapping[str, Leaf], metadata: Mapping[str, str], keys: list[str]) -> bytes:
    entries: dict[str, dict] = {}
    end = 0
    for name, leaf in leaves.items():
        if leaf.dtype not in _NAMES:
            raise ValueError(f'{path}: {name} has dtype {leaf.dtype}, which safetensors files do not hold')
        start, end = end, end + leaf.bytes
        entries[name] = {'dtype': _NAMES[leaf.dtype], 'shape': list(leaf.shape), 'data_offsets': [start, end]}
    table: dict[str, dict] = {METADATA_KEY: dict(metadata)} if metadata else {}
    table.update({name: entries[name] for name in keys})
    text = json.dumps(table, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % _ALIGNMENT)
    return struct.pack('<Q', len(text)) + text


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
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
