"""Saves a pytree as one safetensors file, leaf by leaf."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.files import host_arrays


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
    from jaxpruner.checkpoints.reading import Leaf  # loads libraries that the core does without
    from jaxpruner.checkpoints.writing import write_tensors

    arrays = {name: array for name, (_, array) in host_arrays.named_arrays(tree).items()}
    # Wide numbers first, as the format's own library has it: each tensor then begins where its dtype may.
    names = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    leaves = {name: Leaf(arrays[name].shape, np.dtype(arrays[name].dtype)) for name in names}
    write_tensors(Path(path), leaves, lambda name: host_arrays.on_host(arrays[name]), metadata)
