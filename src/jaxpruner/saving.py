"""Saves a pytree as one safetensors file, leaf by leaf."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.files import host_arrays

_NAME_OF_METADATA = '__metadata__'  # the format's own


def save_safetensors(
    tree: tree_lib.PyTree, path: Path | str, metadata: Mapping[str, str] | None = None
) -> None:
    """Saves a pytree of arrays as a safetensors file, its leaves under dotted names; pruned weights are zeros in it.

    Arrays that are sharded over the devices of this process come to the host one leaf at a time. The file appears when
    it is whole, and replaces one that is there. `jaxpruner.checkpoints.open_checkpoint` reads it, and so does every
    library that knows the format. Needs the extra `jaxpruner[checkpoint]`.

    Args:
      tree: any pytree of arrays or numbers, such as parameters or masks; leaves that are `None` are skipped.
      path: the file; its folder exists.
      metadata: strings by name, kept in the file's header.

    Raises:
      ValueError: two leaves have one name, or a dtype that safetensors files do not hold; the message names the leaves.
      TypeError: a leaf is no array whose values this process has, or metadata are no strings.
      FileNotFoundError: the folder does not exist.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> from jaxpruner import checkpoints
    >>> tree = {'block': [{'kernel': np.array([[0.0, 2.0]], np.float32), 'bias': None}]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_safetensors(tree, Path(folder, 'model.safetensors'))
    ...     saved = checkpoints.open_checkpoint(folder)
    ...     list(saved.leaves), saved.read('block.0.kernel')
    (['block.0.kernel'], array([[0., 2.]], dtype=float32))
    """
    checkpoints = _checkpoints()
    arrays = _arrays_by_name(tree)
    _check_metadata(metadata or {})
    leaves = {}
    # Wide numbers first, as the format's own library has it: each tensor then begins where its dtype may.
    for name in sorted(arrays, key=lambda name: -np.dtype(arrays[name].dtype).itemsize):
        array = arrays[name]
        leaves[name] = checkpoints.Leaf(tuple(array.shape), np.dtype(array.dtype))
    with checkpoints.SafetensorsWriter(Path(path), leaves, metadata) as writer:
        for name in leaves:
            writer.write(name, host_arrays.on_host(arrays[name]))


def _checkpoints() -> ModuleType:
    try:
        from jaxpruner import checkpoints  # loads libraries that the core does without
    except ModuleNotFoundError as error:
        raise ImportError(
            f"save_safetensors needs {error.name}, which is not installed: pip install 'jaxpruner[checkpoint]'"
        ) from error
    return checkpoints


def _arrays_by_name(tree: tree_lib.PyTree) -> dict[str, Any]:
    """The leaves as arrays, under dotted names."""
    paths, leaves, _ = tree_lib.flatten_with_paths(tree)
    arrays: dict[str, Any] = {}
    owners: dict[str, tree_lib.Path] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        name = '.'.join(path)
        if name == _NAME_OF_METADATA:
            raise ValueError(
                f'{name}: safetensors files keep this name for metadata; rename the leaf'
            )
        if name in arrays:
            raise ValueError(
                f'the leaves {owners[name]} and {path} are both called {name!r} in a file; rename one'
            )
        owners[name] = path
        arrays[name] = host_arrays.checked_array(name, leaf)
    return arrays


def _check_metadata(metadata: Mapping[Any, Any]) -> None:
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f'metadata must map strings to strings, got {name!r}: {text!r}')
