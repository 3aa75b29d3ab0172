"""The manifest of a packed file: in which format each leaf stands, among the metadata in the file's header.

    {"version": 1, "crc32": "0f2c4a88",
     "leaves": {"mlp.kernel": {"path": ["mlp", "kernel"], "format": "csr", "dtype": "float8_e5m2",
                               "shape": [784, 300], "crc32": "d5065190"}}}

The outer digest covers the entries of all leaves and the user's metadata; the inner one covers the bytes of a leaf.

A dense leaf is the tensor of its name; any other has a tensor for each array, such as `mlp.kernel.compressed`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.files import input_files
from jaxpruner.sparse.formats import array_checks, element_types, table
from jaxpruner.sparse.formats.base import ArraySpec
from jaxpruner.sparse.storage.digests import digest_of_table
from jaxpruner.sparse.storage.leaves import nested

MANIFEST_KEY = 'jaxpruner_sparse'  # among the metadata
VERSION = 1
_FIELDS = frozenset({'path', 'format', 'dtype', 'shape', 'crc32'})
_DIGEST = re.compile('[0-9a-f]{8}')


class Entry(NamedTuple):
    """What a manifest says about a leaf."""

    name: str
    path: tree_lib.Path
    format_name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    digest: str  # of what is stored

    @property
    def tensors(self) -> dict[str, str]:
        """The name of each array in the file."""
        keys = sorted(table.FORMATS[self.format_name].keys)
        return {key: self.tensor_name(key) for key in keys}

    def tensor_name(self, key: str) -> str:
        """Returns the name of an array in the file."""
        return self.name if self.format_name == 'dense' else f'{self.name}.{key}'

    @property
    def values_key(self) -> str:
        """The array that holds the values of the leaf."""
        return table.FORMATS[self.format_name].values_key


def digest_with_metadata(leaves: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """The digest of the entries of leaves and of the user's metadata."""
    return digest_of_table({'leaves': leaves, 'metadata': dict(metadata)})


def to_text(entries: Iterable[Entry], metadata: Mapping[str, str]) -> str:
    """Writes a manifest, with a digest of itself and of the user's metadata."""
    leaves = {}
    for entry in entries:
        leaves[entry.name] = {
            'path': list(entry.path),
            'format': entry.format_name,
            'dtype': entry.dtype.name,
            'shape': list(entry.shape),
            'crc32': entry.digest,
        }
    digest = digest_with_metadata(leaves, metadata)
    manifest = {'version': VERSION, 'crc32': digest, 'leaves': leaves}
    return json.dumps(manifest, separators=(',', ':'), ensure_ascii=False)


def from_text(
    text: str, tensors: Mapping[str, ArraySpec], metadata: Mapping[str, str]
) -> list[Entry]:
    """Reads a manifest and compares it with the tensors and the user's metadata of its file.

    Raises:
      ValueError: it is of a newer version, damaged, or not that of these tensors.
    """
    try:
        manifest = input_files.parse_json(text.encode())
    except ValueError as error:
        raise ValueError(f'its manifest is no JSON: {error}') from error
    if not isinstance(manifest, dict):
        raise ValueError('its manifest is no table')
    _check_version(manifest.get('version'))
    leaves = manifest.get('leaves')
    if not isinstance(leaves, dict):
        raise ValueError('its manifest has no table of leaves')
    given = manifest.get('crc32')
    found = digest_with_metadata(leaves, metadata)
    if given != found:
        raise ValueError(
            f'its manifest or its metadata are damaged: their crc32 is {found}, and by the manifest {given!r}'
        )
    entries = []
    for name, fields in leaves.items():
        try:
            entries.append(_entry(name, fields))
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from error
    nested({entry.path: entry for entry in entries})
    _check_tensors(entries, tensors)
    return entries


def _check_version(version: Any) -> None:
    if type(version) is not int or version < 1:
        raise ValueError(f'its manifest has the version {version!r}, which is none')
    if version > VERSION:
        raise ValueError(
            f'its manifest has version {version}, and this release reads up to {VERSION}; install a newer jaxpruner'
        )


def _entry(name: str, fields: Any) -> Entry:
    """Reads the entry of a leaf."""
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise ValueError(f'its entry must have the fields {", ".join(sorted(_FIELDS))}')
    path = fields['path']
    is_path = isinstance(path, list) and all(isinstance(part, str) for part in path)
    if not is_path or not path or '.'.join(path) != name:
        raise ValueError(f'its path {path!r} does not lead to its name')
    format_name = fields['format']
    if not isinstance(format_name, str) or format_name not in table.FORMATS:
        raise ValueError(
            f'its format {format_name!r} is unknown; known are {", ".join(table.FORMATS)}'
        )
    dtype = element_types.dtype_named(fields['dtype'])
    shape = fields['shape']
    array_checks.check_shape(shape)
    digest = fields['crc32']
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f'its crc32 is {digest!r}, and not 8 hexadecimal digits')
    return Entry(name, tuple(path), format_name, dtype, tuple(shape), digest)


def _check_tensors(entries: Iterable[Entry], tensors: Mapping[str, ArraySpec]) -> None:
    """Refuses files in which a tensor is missing, is not in the manifest, or has another type."""
    owners: dict[str, str] = {}
    for entry in entries:
        for key, tensor in entry.tensors.items():
            if tensor not in tensors:
                raise ValueError(f'{entry.name}: the tensor {tensor} is missing')
            if tensor in owners:
                raise ValueError(
                    f'{entry.name}: the tensor {tensor} belongs to {owners[tensor]}, too'
                )
            owners[tensor] = entry.name
            if key == entry.values_key:
                _check_values(entry, tensor, tensors[tensor])
    for tensor in tensors:
        if tensor not in owners:
            raise ValueError(f'the tensor {tensor} is not in its manifest')


def _check_values(entry: Entry, tensor: str, spec: ArraySpec) -> None:
    expected = element_types.stored_dtype(entry.dtype)
    if spec.dtype != expected:
        raise ValueError(
            f'{entry.name}: the tensor {tensor} is {spec.dtype}, and {entry.dtype} is stored as {expected}'
        )
    stored_shape = element_types.stored_shape(entry.shape, entry.dtype)
    if entry.format_name == 'dense' and spec.shape != stored_shape:
        raise ValueError(
            f'{entry.name}: the tensor {tensor} has shape {spec.shape}, and by the manifest {stored_shape}'
        )
    if stored_shape != entry.shape and spec.shape[-1:] != stored_shape[-1:]:
        raise ValueError(
            f'{entry.name}: the tensor {tensor} has shape {spec.shape}, and {entry.dtype} takes {stored_shape[-1]} '
            'numbers'
        )
