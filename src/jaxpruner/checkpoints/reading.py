"""Checkpoints of any format, read tensor by tensor: safetensors files, shards under an index, folders of orbax.

The library `safetensors` reads and checks a file's header. Weights are read past it: it maps files into memory, and in
NumPy it knows no floats of 8 bits.
"""

import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxpruner.files import dtypes, input_files

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError as error:
    error.msg += "; checkpoints need it: pip install 'jaxpruner[checkpoint]'"
    raise

INDEX_NAME = 'model.safetensors.index.json'
_INDEX_ENDING = '.safetensors.index.json'
_MOST_AXES = 32  # of an array in the oldest NumPy that is allowed
_LONGEST_AXIS = 2**31


class Leaf(NamedTuple):
    """Shape and dtype of a tensor in a checkpoint.

    >>> Leaf((2, 3), np.dtype('float16')).bytes
    12
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes, stored dense."""
        return self.size * self.dtype.itemsize


@runtime_checkable
class Checkpoint(Protocol):
    """Tensors by name, read one at a time.

    >>> import tempfile
    >>> from jaxpruner.checkpoints import open_checkpoint, write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.ones(2)})
    ...     isinstance(open_checkpoint(Path(folder) / 'a.safetensors'), Checkpoint)
    True
    """

    path: Path
    leaves: Mapping[str, Leaf]  # in the order of their bytes
    metadata: Mapping[str, str]

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor into an array of its own that may be written to.

        Args:
          name: the tensor's.

        Raises:
          KeyError: there is no such tensor.
          ValueError: the file ends too early.
        """
        ...


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a checkpoint; reads names, shapes and dtypes, no weights.

    Args:
      path: a `.safetensors` file; a folder with such a file or with a `model.safetensors.index.json`, or that index; or
        a folder that orbax wrote.

    Raises:
      ValueError: it is none of these, or only a part of one.
      FileNotFoundError: there is nothing under the path.
      OSError: it cannot be read, or is a pipe or a device; the error names it.

    >>> import tempfile
    >>> import numpy as np
    >>> from jaxpruner.checkpoints import write_safetensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder) / 'a.safetensors', {'w': np.ones((2, 3))})
    ...     open_checkpoint(folder).leaves
    {'w': Leaf(shape=(2, 3), dtype=dtype('float64'))}
    """
    path = Path(path)
    if not os.path.lexists(path):
        raise FileNotFoundError(f'{path}: there is no such file or folder')
    if not path.is_dir():
        is_index = path.name.endswith(_INDEX_ENDING)
        return ShardedSafetensors(path) if is_index else SafetensorsFile(path)
    indexes = sorted(path.glob(f'[!.]*{_INDEX_ENDING}'))
    found = indexes or sorted(path.glob('[!.]*.safetensors'))
    if len(found) == 1:
        return open_checkpoint(found[0])
    if found:
        several = ', '.join(file.name for file in found[:4])
        raise ValueError(f'{path} has several safetensors files ({several}); name one of them')
    if 'orbax-checkpoint-tmp' in path.name:
        raise ValueError(
            f'{path} is a checkpoint that orbax has not finished writing; use a finished one'
        )
    # In a step's folder orbax keeps what it saved under a name, this one by default.
    for folder in (path, path / 'default'):
        if (folder / '_METADATA').is_file():
            from jaxpruner.checkpoints import orbax_folder  # orbax takes seconds to load

            return orbax_folder.OrbaxFolder(folder)
    steps = sorted([name for name in os.listdir(path) if name.isdecimal()], key=int)[-4:]
    hint = f'; it has the steps {", ".join(steps)}: name one of these folders' if steps else ''
    raise ValueError(
        f'{path} is no checkpoint: it has no *.safetensors, no {INDEX_NAME}, and no _METADATA of orbax{hint}'
    )


class SafetensorsFile:
    """One safetensors file as a checkpoint."""

    def __init__(self, path: Path):
        self.path = path
        input_files.check_file(path)
        leaves: dict[str, Leaf] = {}
        try:
            # Opened first, since safe_open calls a file missing that may not be read.
            with path.open('rb'), safe_open(path, 'numpy') as file:
                self.metadata: Mapping[str, str] = file.metadata() or {}
                for name in file.offset_keys():
                    tensor = file.get_slice(name)
                    dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                    is_array = len(shape) <= _MOST_AXES and max(shape, default=0) <= _LONGEST_AXIS
                    if dtype not in dtypes.SAFETENSORS or not is_array:
                        raise ValueError(f'{name} is {dtype} {shape}, which is not supported')
                    leaves[name] = Leaf(shape, dtypes.SAFETENSORS[dtype])
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f'{path} is no safetensors file, or only a part of one: {error} (it has {path.stat().st_size} bytes); '
                'write or download it again'
            ) from error
        self.leaves: Mapping[str, Leaf] = leaves
        # The library has checked that the tensors fill the file behind its header without holes, in this order.
        sizes = [leaf.bytes for leaf in leaves.values()]
        starts = itertools.accumulate(sizes, initial=path.stat().st_size - sum(sizes))
        self._starts = dict(zip(leaves, starts, strict=False))

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor; see `Checkpoint`."""
        leaf = self.leaves[name]
        found = np.fromfile(self.path, np.uint8, leaf.bytes, offset=self._starts[name])
        if len(found) < leaf.bytes:
            raise ValueError(
                f'{self.path}: {name} ends {leaf.bytes - len(found)} bytes too early; the file has changed since it '
                'was opened'
            )
        return found.view(leaf.dtype).reshape(leaf.shape)


class ShardedSafetensors:
    """Several safetensors files under a `model.safetensors.index.json` as one checkpoint."""

    def __init__(self, index: Path):
        self.index = index
        self.path = index.parent
        content = input_files.read_file(index)
        try:
            self._file_of: dict[str, str] = {**input_files.parse_json(content)['weight_map']}
            names = list(dict.fromkeys(self._file_of.values()))
            for name in names:
                if Path(name).name != name or not name.isprintable():
                    raise ValueError(f'the file {name!r} in weight_map has no plain name')
            if not names:
                raise ValueError('weight_map is empty')
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{index} is no index of safetensors files, {{"weight_map": {{"tensor": "file"}}}}: {error}; '
                'write or download it again'
            ) from error
        self.files = {name: SafetensorsFile(self.path / name) for name in names}
        self.leaves: Mapping[str, Leaf] = {}
        self.metadata: Mapping[str, str] = {}
        for file in self.files.values():
            self.leaves = {**self.leaves, **file.leaves}
            self.metadata = {**self.metadata, **file.metadata}
        found = {(name, file) for file in names for name in self.files[file].leaves}
        for name, file in found ^ set(self._file_of.items()):
            raise ValueError(
                f'{index} and {self.path / file} do not agree on whether {name!r} is in this file; download both again'
            )

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor; see `Checkpoint`."""
        return self.files[self._file_of[name]].read(name)
