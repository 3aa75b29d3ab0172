"""A packed file, read leaf by leaf; it is a checkpoint like any other."""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.checkpoints.base import Leaf
from jaxpruner.checkpoints.parts import Part
from jaxpruner.checkpoints.safetensors_reader import SafetensorsFile
from jaxpruner.sparse.formats import element_types, table
from jaxpruner.sparse.formats.base import ArraySpec, StoredArrays
from jaxpruner.sparse.storage import manifest
from jaxpruner.sparse.storage.digests import digest_of

_WRITE_AGAIN = 'write or download it again'


class PackedFile:
    """A file that `save` wrote. Names, shapes and formats are read at once, and weights leaf by leaf.

    Attributes:
      path: of the file.
      leaves: shape and dtype of each leaf, unpacked, by its dotted name.
      metadata: strings by name that `save` was given.
      paths: of each leaf in its tree, by its dotted name.
      formats: of each leaf, by its dotted name: 'dense', 'n_by_m', 'blocks', 'csr' or 'bitmask'.
      stored_bytes: of each leaf in the file, by its dotted name.
    """

    def __init__(self, path: Path | str):
        self._file = SafetensorsFile(Path(path))
        self.path = self._file.path
        metadata = dict(self._file.metadata)
        text = metadata.pop(manifest.MANIFEST_KEY, None)
        if text is None:
            raise ValueError(
                f'{self.path} is no packed file, since its header has no {manifest.MANIFEST_KEY}; '
                'jaxpruner.sparse.save or `jaxpruner pack` makes one'
            )
        specs = {name: ArraySpec(*leaf) for name, leaf in self._file.leaves.items()}
        try:
            entries = manifest.from_text(text, specs, metadata)
        except ValueError as error:
            raise ValueError(f'{self.path}: {error}; {_WRITE_AGAIN}') from error
        leaves: dict[str, Leaf] = {}
        self.leaves: Mapping[str, Leaf] = leaves
        self.metadata: Mapping[str, str] = metadata
        self.paths: dict[str, tree_lib.Path] = {}
        self.formats: dict[str, str] = {}
        self.stored_bytes: dict[str, int] = {}
        self._entries: dict[str, manifest.Entry] = {}
        for entry in entries:
            name = entry.name
            self._entries[name] = entry
            leaves[name] = Leaf(entry.shape, entry.dtype)
            self.paths[name] = entry.path
            self.formats[name] = entry.format_name
            self.stored_bytes[name] = self._bytes_of(entry)
        hold_one_leaf = functools.lru_cache(maxsize=1)
        self._leaf_of_parts = hold_one_leaf(self._unpacked)

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """Reads and unpacks a leaf, or a part of it.

        Args:
          name: the leaf's dotted name.
          part: one of `parts_of` its shape; the leaf is held until another one is read in parts.

        Raises:
          KeyError: there is no such leaf.
          ValueError: its arrays are damaged or do not belong together, or the file has changed since it was opened.
        """
        if part is None:
            return self._unpacked(name)
        leaf = self._leaf_of_parts(name)
        return part.of(leaf).copy()

    def read_packed(self, name: str) -> StoredArrays:
        """Reads the arrays of a leaf as they are stored, checked.

        Raises:
          KeyError: there is no such leaf.
          ValueError: the arrays are damaged or do not belong together, or the file has changed since it was opened.
        """
        entry = self._entry(name)
        arrays: dict[str, np.ndarray] = {}
        for key, tensor in entry.tensors.items():
            arrays[key] = self._file.read(tensor)
        digest = digest_of(arrays)
        values = arrays[entry.values_key]
        arrays[entry.values_key] = element_types.from_stored(values, entry.dtype)
        try:
            if digest != entry.digest:
                raise ValueError(
                    f'its bytes are damaged: their crc32 is {digest}, and by the manifest {entry.digest}'
                )
            shape = table.FORMATS[entry.format_name].shape(arrays)
            if shape != entry.shape:
                raise ValueError(
                    f'its arrays are of shape {shape}, and its manifest says {entry.shape}'
                )
            table.check(entry.format_name, arrays)
        except ValueError as error:
            raise ValueError(f'{self.path}: {name}: {error}; {_WRITE_AGAIN}') from error
        return arrays

    def stored_mask(self, name: str) -> np.ndarray | None:
        """Reads which weights of a leaf are stored: uint8, 1 where one is; `None` if the leaf is dense.

        This is the mask that `save` was given. Without one it has all weights that were not +0, and perhaps more: N:M
        may also store a few zeros, and blocks store all zeros inside of them.

        Raises:
          KeyError: there is no such leaf.
          ValueError: as in `read`.
        """
        if self._entry(name).format_name == 'dense':
            return None
        arrays = self.read_packed(name)
        mask = table.stored_mask(self.formats[name], arrays)
        return mask.astype(np.uint8)

    def _unpacked(self, name: str) -> np.ndarray:
        arrays = self.read_packed(name)
        entry = table.FORMATS[self.formats[name]]
        return entry.unpack(arrays)

    def _bytes_of(self, entry: manifest.Entry) -> int:
        """The bytes that a leaf takes in the file."""
        total = 0
        for tensor in entry.tensors.values():
            total += self._file.leaves[tensor].bytes
        return total

    def _entry(self, name: str) -> manifest.Entry:
        if name not in self._entries:
            raise KeyError(
                f'{self.path} has no leaf {name!r}; {tree_lib.nearest(name, list(self._entries))}'
            )
        return self._entries[name]
