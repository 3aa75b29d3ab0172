"""Trees saved as packed files, leaf by leaf, and loaded."""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.core.progress import progress_bar
from jaxpruner.sparse.formats import element_types, table
from jaxpruner.sparse.formats.base import ArraySpec, Plan
from jaxpruner.sparse.storage import manifest
from jaxpruner.sparse.storage.leaves import (
    SourceLeaf,
    arranged_like,
    check_sources,
    leaves_of_tree,
    nested,
)

if TYPE_CHECKING:
    from jaxpruner.checkpoints import Checkpoint
    from jaxpruner.sparse.storage.packed_file import PackedFile


def save(
    path: os.PathLike[str] | str,
    tree: tree_lib.PyTree,
    *,
    masks: Any = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = True,
    progress: bool = True,
) -> None:
    """Saves a tree as one safetensors file, each leaf in the format of the fewest bytes.

    The formats are those of `pack`. A manifest in the file's header names the format, dtype and shape of each leaf. The
    file appears when it is whole. Leaves are fetched and packed one at a time. Needs the extra
    `jaxpruner[checkpoint]`.

    Element types that readers of the format lack (float8, int4, complex) are stored as unsigned whole numbers.

    Args:
      path: the file; its folder exists.
      tree: any pytree of arrays, such as parameters or an optimizer state; or a `jaxpruner.checkpoints.Checkpoint`.
      masks: what is kept: a tree of masks, packed or not, `None` where the values decide; or an optimizer state with
        one `SparseState`. Without, all but the bit pattern of +0 is kept. Beside a checkpoint, another one with masks
        under the names of its leaves.
      metadata: strings by name, kept in the file's header.
      overwrite: whether a file that is there is replaced.
      progress: whether a bar is shown if stderr is a terminal.

    Raises:
      TypeError: a leaf is no array whose values this process has, or metadata are no strings.
      ValueError: two leaves have one name, or a mask does not fit or removes what is not +0.
      FileExistsError: a file is there that must not be replaced.
      FileNotFoundError: the folder does not exist.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f'{folder}/a.safetensors', {'w': np.eye(256, dtype=np.float32)})
    ...     Path(f'{folder}/a.safetensors').stat().st_size < 3200, load(f'{folder}/a.safetensors')['w'].shape
    (True, (256, 256))
    """
    checkpoints = _checkpoints('save')
    from jaxpruner.checkpoints.pruning import check_target

    _check_metadata(metadata or {})
    check_target(Path(path), overwrite, Path(path).is_dir())
    if isinstance(tree, checkpoints.Checkpoint):
        sources = _leaves_of_checkpoint(tree, masks)
    else:
        sources = leaves_of_tree(tree, masks)
    with _leaf_progress(sources, progress, rounds=2) as on_leaf:
        planned = []
        for source in sources:
            on_leaf(source)
            planned.append((source, _plan(source)))
        _write(Path(path), planned, metadata or {}, overwrite, on_leaf)


def load(
    path: os.PathLike[str] | str, *, like: tree_lib.PyTree = None, progress: bool = True
) -> Any:
    """Loads a tree that `save` wrote, bit by bit as it was.

    Leaves are read and unpacked one at a time. `open_packed` reads single leaves.

    Args:
      path: the file.
      like: a tree of arrays or shapes, whose structure the result has. If an entry has a sharding, its leaf is placed
        so, and leaves the host before the next one is read.
      progress: whether a bar is shown if stderr is a terminal.

    Returns:
      Without `like`, nested dictionaries of NumPy's arrays by the names of the leaves.

    Raises:
      ValueError: it is no packed file, or damaged, or of a newer version; or it does not fit `like`.
      OSError: it cannot be read; the error names it.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f'{folder}/a.safetensors', {'layers': [jnp.eye(2), -jnp.zeros(2)]})
    ...     load(f'{folder}/a.safetensors', like={'layers': [jnp.ones((2, 2)), jnp.ones(2)]})['layers'][1]
    Array([-0., -0.], dtype=float32)
    """
    file = open_packed(path)
    with _reading(file, progress) as read:
        if like is not None:
            specs = {name: (leaf.shape, leaf.dtype) for name, leaf in file.leaves.items()}
            try:
                return arranged_like(like, specs, read)
            except ValueError as error:
                raise ValueError(_named(file.path, error)) from error
        leaves = {}
        for name, leaf_path in file.paths.items():
            leaves[leaf_path] = read(name)
    return nested(leaves)


def load_packed(path: os.PathLike[str] | str, *, progress: bool = True) -> Any:
    """Loads a tree that `save` wrote as `pack` would return it: packed.

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
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f'{folder}/a.safetensors', {'w': np.eye(256, dtype=np.float32)})
    ...     load_packed(f'{folder}/a.safetensors')['w']['compressed'].shape
    (256,)
    """
    file = open_packed(path)
    leaves: dict[tree_lib.Path, Any] = {}
    with _reading(file, progress, is_packed=True) as read:
        for name, leaf_path in file.paths.items():
            arrays = read(name)
            leaves[leaf_path] = arrays['values'] if file.formats[name] == 'dense' else arrays
    return nested(leaves)


def open_packed(path: os.PathLike[str] | str) -> 'PackedFile':
    """Opens a file that `save` wrote, to read it leaf by leaf.

    Args:
      path: the file.

    Returns:
      An open file with `leaves`, `formats`, `read(name)`, `read_packed(name)` and `stored_mask(name)`. It is a
      `jaxpruner.checkpoints.Checkpoint`, too.

    Raises:
      ValueError: it is no packed file, or damaged, or of a newer version.
      OSError: it cannot be read; the error names it.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f'{folder}/a.safetensors', {'w': np.eye(256, dtype=np.float32)})
    ...     file = open_packed(f'{folder}/a.safetensors')
    ...     file.leaves['w'].bytes, file.formats['w'], file.stored_bytes['w'], file.read('w')[3, 3].item()
    (262144, 'csr', 2580, 1.0)
    """
    _checkpoints('open_packed')
    from jaxpruner.sparse.storage.packed_file import PackedFile

    return PackedFile(Path(path))


def _checkpoints(name: str) -> ModuleType:
    try:
        from jaxpruner import checkpoints  # loads libraries that the core does without
    except ModuleNotFoundError as error:
        raise ImportError(
            f"sparse.{name} needs {error.name}, which is not installed: pip install 'jaxpruner[checkpoint]'"
        ) from error
    return checkpoints


def _check_metadata(metadata: Mapping[Any, Any]) -> None:
    for name, text in metadata.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f'metadata must map strings to strings, got {name!r}: {text!r}')
        if name == manifest.MANIFEST_KEY:
            raise ValueError(f'metadata: {name} is the name of the manifest; choose another one')


def _leaves_of_checkpoint(checkpoint: 'Checkpoint', masks: 'Checkpoint | None') -> list[SourceLeaf]:
    """Lists the leaves of a checkpoint, whose names stay as they are."""
    masks_by_name: Sequence[str] = [] if masks is None else list(masks.leaves)
    for name in masks_by_name:
        if name not in checkpoint.leaves:
            raise ValueError(
                f'masks: {name!r} is no tensor of {checkpoint.path}; '
                f'{tree_lib.nearest(name, list(checkpoint.leaves))}'
            )
    sources = []
    for name, leaf in checkpoint.leaves.items():
        read_mask = None
        if masks is not None and name in masks_by_name:
            read_mask = functools.partial(masks.read, name)
        source = SourceLeaf(
            path=(name,),
            shape=leaf.shape,
            dtype=leaf.dtype,
            read_values=functools.partial(checkpoint.read, name),
            read_mask=read_mask,
        )
        sources.append(source)
    check_sources(sources)
    return sources


def _plan(source: SourceLeaf) -> Plan:
    pattern = source.pattern(source.values())
    plans = table.plans_of(pattern, source.dtype)
    return table.smallest(plans, table.dense_bytes(pattern, source.dtype))


def _write(
    path: Path,
    planned: Sequence[tuple[SourceLeaf, Plan]],
    metadata: Mapping[str, str],
    overwrite: bool,
    on_leaf: Any,
) -> None:
    from jaxpruner.checkpoints import Leaf, SafetensorsWriter
    from jaxpruner.checkpoints.safetensors_reader import METADATA_KEY

    entries: list[manifest.Entry] = []
    tensors: dict[str, Leaf] = {}
    for source, plan in planned:
        entry = manifest.Entry(
            source.name, source.path, plan.format_name, source.dtype, source.shape
        )
        entries.append(entry)
        for key, spec in plan.arrays.items():
            tensor = entry.tensor_name(key)
            if tensor == METADATA_KEY:
                raise ValueError(
                    f'{tensor}: safetensors files keep this name for metadata; rename the leaf'
                )
            if tensor in tensors:
                raise ValueError(
                    f'{source.name}: its array {tensor!r} is the name of another leaf; rename one'
                )
            tensors[tensor] = Leaf(*_stored_spec(spec))
    texts = {**metadata, manifest.MANIFEST_KEY: manifest.to_text(entries)}
    with SafetensorsWriter(path, tensors, texts, overwrite=overwrite) as writer:
        for entry, (source, plan) in zip(entries, planned, strict=True):
            on_leaf(source)
            for key, array in _packed(source, plan).items():
                writer.write(entry.tensor_name(key), element_types.to_stored(array))


def _packed(source: SourceLeaf, plan: Plan) -> dict[str, np.ndarray]:
    """Packs a leaf; the values themselves are freed before they are written."""
    values = source.values()
    if plan.format_name == 'dense':
        return {'values': values}
    mask = source.pattern(values).mask
    arrays = table.FORMATS[plan.format_name].pack(values, mask, plan)
    return {key: arrays[key] for key in plan.arrays}  # in the order of the file


def _stored_spec(spec: ArraySpec) -> ArraySpec:
    shape = element_types.stored_shape(spec.shape, spec.dtype)
    return ArraySpec(shape, element_types.stored_dtype(spec.dtype))


@contextlib.contextmanager
def _leaf_progress(sources: Sequence[SourceLeaf], is_shown: bool, rounds: int) -> Iterator[Any]:
    """Shows which leaf is being read; yields a function to call with it before."""
    total = rounds * sum(source.bytes for source in sources)
    with progress_bar(total, is_shown, in_bytes=True) as show:
        bytes_behind = 0

        def on_leaf(source: SourceLeaf) -> None:
            nonlocal bytes_behind
            show(source.name, bytes_behind)
            bytes_behind += source.bytes

        yield on_leaf


@contextlib.contextmanager
def _reading(file: 'PackedFile', is_shown: bool, is_packed: bool = False) -> Iterator[Any]:
    """Yields a function that reads a leaf and shows which."""
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
    """The words of an error, which name the file once."""
    return str(error) if str(error).startswith(f'{path}: ') else f'{path}: {error}'
