"""Packed files, loaded as a whole or opened to be read leaf by leaf."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpruner import tree as tree_lib
from jaxpruner.progress import progress_bar
from jaxpruner.sparse.storage.extra import checkpoints_for
from jaxpruner.sparse.storage.leaves import arranged_like, nested

if TYPE_CHECKING:
    from jaxpruner.sparse.storage.packed_file import PackedFile


def load(
    path: os.PathLike[str] | str, *, like: tree_lib.PyTree = None, progress: bool = True
) -> Any:
    """Loads a tree that `save` wrote; every bit is as it was.

    Leaves are read and unpacked one at a time. `open_packed` reads single leaves.

    Args:
      path: the file.
      like: a tree of arrays or shapes, whose structure the result has. If an entry has a sharding, its leaf is placed
        so, and leaves the host before the next one is read.
      progress: whether a bar is shown if stderr is a terminal.

    Returns:
      Without `like`, nested dictionaries of NumPy arrays by the names of the leaves.

    Raises:
      ValueError: it is no packed file, or damaged, or of a newer version; or it does not fit `like`.
      OSError: it cannot be read; the error names it.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sparse.save(f'{folder}/a.safetensors', {'layers': [jnp.eye(2), -jnp.zeros(2)]})
    ...     sparse.load(f'{folder}/a.safetensors', like={'layers': [jnp.ones((2, 2)), jnp.ones(2)]})['layers'][1]
    Array([-0., -0.], dtype=float32)
    """
    file = open_packed(path)
    with _reading(file, progress) as read:
        if like is not None:
            specs = {}
            for name, leaf in file.leaves.items():
                specs[name] = leaf.shape, leaf.dtype
            try:
                return arranged_like(like, specs, read)
            except ValueError as error:
                raise ValueError(_named(file.path, error)) from error
        leaves = {}
        for name, leaf_path in file.paths.items():
            leaves[leaf_path] = read(name)
    return nested(leaves)


def load_packed(path: os.PathLike[str] | str, *, progress: bool = True) -> Any:
    """Loads a tree that `save` wrote, packed as `pack` would return it.

    Args:
      path: the file.
      progress: whether a bar is shown if stderr is a terminal.

    Returns:
      Nested dictionaries of arrays; see `pack`.

    Raises:
      ValueError: it is no packed file, or damaged, or of a newer version.
      OSError: it cannot be read; the error names it.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sparse.save(f'{folder}/a.safetensors', {'w': jnp.eye(256)})
    ...     sparse.load_packed(f'{folder}/a.safetensors')['w']['compressed'].shape
    (256,)
    """
    file = open_packed(path)
    leaves: dict[tree_lib.Path, Any] = {}
    with _reading(file, progress, is_packed=True) as read:
        for name, leaf_path in file.paths.items():
            arrays = read(name)
            is_dense = file.formats[name] == 'dense'
            leaves[leaf_path] = arrays['values'] if is_dense else arrays
    return nested(leaves)


def open_packed(path: os.PathLike[str] | str) -> 'PackedFile':
    """Opens a file that `save` wrote, to read it leaf by leaf.

    Args:
      path: the file.

    Returns:
      An open file with `leaves`, `formats`, `read(name)`, `read_packed(name)` and `stored_mask(name)`. It is also a
      `jaxpruner.checkpoints.Checkpoint`.

    Raises:
      ValueError: it is no packed file, or damaged, or of a newer version.
      OSError: it cannot be read; the error names it.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sparse.save(f'{folder}/a.safetensors', {'w': jnp.eye(256)})
    ...     file = sparse.open_packed(f'{folder}/a.safetensors')
    ...     file.leaves['w'].bytes, file.formats['w'], file.stored_bytes['w'], file.read('w')[3, 3].item()
    (262144, 'csr', 2580, 1.0)
    """
    checkpoints_for('open_packed')
    from jaxpruner.sparse.storage.packed_file import PackedFile

    return PackedFile(Path(path))


@contextlib.contextmanager
def _reading(file: 'PackedFile', is_shown: bool, is_packed: bool = False) -> Iterator[Any]:
    """Yields a function that reads a leaf and shows its name in a progress bar."""
    total = sum(file.stored_bytes.values())
    with progress_bar(total, is_shown, in_bytes=True) as show:
        bytes_behind = 0

        def read(name: str) -> Any:
            nonlocal bytes_behind
            show(name, bytes_behind)
            bytes_behind += file.stored_bytes[name]
            return file.read_packed(name) if is_packed else file.read(name)

        yield read


def _named(path: Path, error: ValueError) -> str:
    """The message of an error, which names the file once."""
    message = str(error)
    start = f'{path}: '
    return message if message.startswith(start) else start + message
