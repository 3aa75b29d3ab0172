"""Trees with each leaf in its smallest format: in memory, as plain arrays in dictionaries, and as a file.

Packed files are safetensors files. A manifest among the metadata in the header says in which format each leaf stands:

    {"version": 1, "crc32": "0f2c4a88",
     "leaves": {"mlp.kernel": {"path": ["mlp", "kernel"], "format": "csr", "dtype": "float8_e5m2",
                               "shape": [784, 300], "crc32": "d5065190"}}}

The outer digest covers the entries of all leaves and the user's metadata; the inner one covers the bytes of a leaf.
A dense leaf is the tensor of its name; any other has a tensor for each array, such as `mlp.kernel.compressed`.
"""

import collections
import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.files import atomic_files, dtypes, host_arrays, input_files
from jaxpruner.progress import leaf_progress
from jaxpruner.sparse.formats import leaf_arrays, table
from jaxpruner.sparse.formats.leaf_arrays import Kept, Plan, StoredArrays
from jaxpruner.sparse_state import only_sparse_state, outermost_states, unpack_like

if TYPE_CHECKING:
    from jaxpruner.checkpoints import Checkpoint

MANIFEST_KEY = 'jaxpruner_sparse'  # among the metadata
_VERSION = 1
_WRITE_AGAIN = '; write or download it again'


def pack(tree: tree_lib.PyTree, *, masks: Any = None) -> Any:
    """Packs a tree in memory: each leaf in the format of the fewest bytes.

    The formats are dense, N:M, blocks, CSR and one bit a weight. A dense leaf stays an array. Any other becomes a
    dictionary of arrays:

    - N:M: `compressed` [..., N], the axis M times shorter, `indices` uint8, `pattern` [3]: N, M and the axis
    - blocks: `values` [groups, blocks, in, out], `indices` [groups, blocks], `shape`
    - CSR: `compressed` [kept], `row_offsets` [rows + 1], `column_indices` [kept], `shape`
    - one bit a weight: `compressed` [kept], `bitmask` uint8 [size / 8], `shape`

    So a packed tree is a pytree of arrays. It can be saved in checkpoints, moved between devices and sharded like any
    other. Among formats within 1 % of the fewest bytes, one that hardware or kernels can read is chosen: 2:4 before
    one bit a weight. Everything is copied bit by bit: `unpack` returns NaN, -0.0 and kept weights that are zero as they
    were.

    Args:
      tree: any pytree of arrays. Arrays on devices are fetched one by one.
      masks: what is kept: a tree of masks, packed or not, `None` where the values decide; or an optimizer state with
        one `SparseState`. Without masks, all but the bit pattern of +0 is kept.

    Returns:
      Nested dictionaries of NumPy arrays, by the names of the leaves; for a single array its packed arrays.

    Raises:
      TypeError: a leaf is no array whose values this process has.
      ValueError: a mask does not fit or removes what is not +0, or the tree is packed already.

    >>> packed = pack({'w': np.eye(256, dtype=np.float32), 'b': np.ones(2, np.float32)})
    >>> packed['b'], sorted(packed['w'])
    (array([1., 1.], dtype=float32), ['column_indices', 'compressed', 'row_offsets', 'shape'])
    """
    paths, nodes, _ = tree_lib.flatten_with_paths(tree, is_leaf=is_packed)
    for path, node in zip(paths, nodes, strict=True):
        if is_packed(node):
            raise ValueError(
                f'{".".join(path)} has the keys {sorted(node)}, as a packed leaf has; unpack the tree first, or rename '
                'a key'
            )
    leaves: dict[tree_lib.Path, Any] = {}
    named = host_arrays.named_arrays(tree)
    leaf_masks = masks_by_name(tree, masks)
    for name, (path, array) in named.items():
        format_name, arrays = pack_leaf(name, host_arrays.on_host(array), leaf_masks[name])
        leaves[path] = arrays['values'] if format_name == 'dense' else arrays
    return _like(tree, leaves)


def unpack(packed: Any, like: tree_lib.PyTree = None) -> Any:
    """Returns the tree of which `pack` made this one; every bit is as it was.

    Args:
      packed: what `pack` returned, perhaps restored from a checkpoint.
      like: a tree of arrays or shapes, whose structure the result has. If an entry has a sharding, its leaf is placed
        so.

    Returns:
      Without `like`, nested dictionaries of NumPy arrays; for a single packed leaf the array.

    Raises:
      ValueError: arrays do not belong together, or the tree does not fit `like`.

    >>> weights = np.arange(6.0).reshape(2, 3)
    >>> unpack(pack({'a': [weights, weights]}), like={'a': [weights, weights]})['a'][1]
    array([[0., 1., 2.],
           [3., 4., 5.]])
    """
    paths, nodes, _ = tree_lib.flatten_with_paths(packed, is_leaf=is_packed)
    pairs = list(zip(paths, nodes, strict=True))
    if like is None:
        return _like(packed, {path: _unpacked(path, node) for path, node in pairs})
    by_name = {'.'.join(path): (path, node) for path, node in pairs}
    return arranged_like(like, by_name, lambda name: _unpacked(*by_name[name]))


def pack_leaf(name: str, values: np.ndarray, mask: Any = None) -> tuple[str, StoredArrays]:
    """Packs a leaf in its smallest format; returns the format's name, and the arrays."""
    values = np.asarray(values, order='C')  # a file would hold a transposed view in the wrong order
    kept = kept_weights(name, values, mask)
    best, plan = planned(values, kept)
    return best, table.FORMATS[best].pack(values, kept.mask, plan.settings)


def planned(values: np.ndarray, kept: Kept) -> tuple[str, Plan]:
    """Returns the smallest format of a leaf, and what it takes there."""
    if kept.count == values.size:
        return 'dense', Plan(values.nbytes)
    plans = table.plans_of(kept, values.itemsize)
    best = table.smallest(kept, values.itemsize, plans)
    return best, plans[best]


def kept_weights(name: str, values: np.ndarray, mask: Any) -> Kept:
    """Returns which weights are kept: those of a mask, packed or not, or without one all but +0.

    Raises:
      TypeError: the dtype is none of those that are packed.
      ValueError: the mask does not fit, or something other than +0 stands where it removes.
    """
    if values.dtype.name not in dtypes.PACKED:
        raise TypeError(f'{name}: {values.dtype} is not packed; {", ".join(dtypes.PACKED)} are')
    is_not_zero = values.view(f'uint{8 * values.dtype.itemsize}') != 0
    if mask is None:
        return Kept(is_not_zero)
    with _errors_named(name):
        kept = np.asarray(unpack_like(jnp.asarray(mask), values.shape)) != 0
    lost = int(np.count_nonzero(is_not_zero & ~kept))
    if lost:
        raise ValueError(
            f'{name}: {lost} weights that the mask removes are not +0, and would be lost; give what '
            'jaxpruner.apply_mask(params, masks) returns, or no masks'
        )
    return Kept(kept, is_given=True)


def masks_by_name(tree: tree_lib.PyTree, masks: Any) -> dict[str, Any]:
    """Returns the mask of each leaf by its dotted name, `None` where there is none."""
    paths, _, treedef = tree_lib.flatten_with_paths(tree)
    if outermost_states(masks):
        masks = only_sparse_state(masks).masks
    return dict(zip(map('.'.join, paths), tree_lib.leaves_like(treedef, masks), strict=True))


def nested(leaves: Mapping[tree_lib.Path, Any]) -> Any:
    """Returns nested dictionaries of leaves by path.

    Raises:
      ValueError: a path leads through a leaf.
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        folder = tree
        for depth, part in enumerate(path[:-1], start=1):
            if path[:depth] in leaves:
                raise ValueError(f'{path} leads through the leaf {path[:depth]}')
            folder = folder.setdefault(part, {})
        folder[path[-1]] = leaf
    return tree


def arranged_like(
    like: tree_lib.PyTree,
    stored: Mapping[str, Any],
    read: Callable[[str], np.ndarray],
    where: str = '',
) -> tree_lib.PyTree:
    """Returns stored leaves in the structure of another tree, placed on its devices one by one.

    Args:
      like: a pytree of arrays or shapes.
      stored: what is stored, by the dotted names of the leaves.
      read: returns a leaf of that name.
      where: what errors begin with.

    Raises:
      ValueError: leaves are missing, or are too many, or have another shape or dtype.
    """
    paths, entries, treedef = tree_lib.flatten_with_paths(like)
    names = ['.'.join(path) for path in paths]
    for name in sorted({*names} ^ {*stored}):
        lacking, others = ('`like`', names) if name in stored else ('what is stored', stored)
        near = tree_lib.nearest(name, list(others))
        raise ValueError(f'{where}there is no leaf {name!r} in {lacking}; {near}')

    def placed(name: str, entry: Any) -> Any:
        array = read(name)
        words = f'{array.dtype}{list(array.shape)}'
        expected = f'{entry.dtype}{list(entry.shape)}' if _is_array(entry) else words
        if words != expected:
            raise ValueError(
                f'{where}{name} is {words}, and in `like` {expected}; give a tree of the same shapes and dtypes'
            )
        sharding = getattr(entry, 'sharding', None)
        if sharding is None:
            return array
        return host_arrays.on_device(f'{where}{name}', array, sharding)

    return treedef.unflatten(map(placed, names, entries))


def is_packed(node: Any) -> bool:
    """Whether a node holds the arrays of one leaf, of which the names tell the format; a dense leaf is an array."""
    return (
        isinstance(node, Mapping)
        and frozenset(node) in _FORMAT_NAMES
        and all(map(_is_array, node.values()))
    )


_FORMAT_NAMES = {
    frozenset(row.KEYS): name for name, row in table.FORMATS.items() if name != 'dense'
}


def _is_array(node: Any) -> bool:
    return hasattr(node, 'shape') and hasattr(node, 'dtype')


def _like(tree: Any, leaves: Mapping[tree_lib.Path, Any]) -> Any:
    """Returns nested dictionaries, or the only leaf if the tree was a single leaf, packed or not."""
    return next(iter(leaves.values())) if _is_array(tree) or is_packed(tree) else nested(leaves)


@contextlib.contextmanager
def _errors_named(name: Any, remedy: str = '') -> Iterator[None]:
    """Says in errors what is wrong, and what helps."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{name}: {error}{remedy}') from error


def _unpacked(path: tree_lib.Path, node: Any) -> np.ndarray:
    if not is_packed(node):
        return np.asarray(node)
    format_name = _FORMAT_NAMES[frozenset(node)]
    arrays = {key: np.asarray(value) for key, value in node.items()}
    with _errors_named('.'.join(path), '; pack the tree again'):
        table.check(format_name, arrays)
    return table.FORMATS[format_name].unpack(arrays)


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

    The formats are those of `pack`. A manifest in the file's header names the format, dtype and shape of each leaf. It
    has a digest of each leaf's bytes, and one of itself with the metadata: they show damage. The file appears when it
    is whole. Leaves are fetched and packed one at a time, and held packed. Needs the extra `jaxpruner[checkpoint]`.

    Element types that readers of the format lack (float8, int4, complex64) are stored as unsigned whole numbers.

    Args:
      path: the file; its folder exists.
      tree: any pytree of arrays, such as parameters or an optimizer state; or a `jaxpruner.checkpoints.Checkpoint`.
      masks: what is kept: a tree of masks, packed or not, `None` where the values decide; or an optimizer state with
        one `SparseState`. Without masks, all but the bit pattern of +0 is kept. Those of a checkpoint are a dictionary,
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
    >>> from jaxpruner import sparse
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, 'a.safetensors')
    ...     sparse.save(path, {'w': np.eye(256, dtype=np.float32)})
    ...     path.stat().st_size < 3200, sparse.load(path)['w'].shape
    (True, (256, 256))
    """
    from jaxpruner.checkpoints import Checkpoint, Leaf  # load libraries that the core does without
    from jaxpruner.checkpoints.writing import digest_of, write_tensors

    path = Path(path)
    metadata = dict(metadata or {})
    if MANIFEST_KEY in metadata:
        raise ValueError(
            f'metadata: {MANIFEST_KEY} is the name of the manifest; choose another one'
        )
    atomic_files.check_target(path, overwrite)

    if isinstance(tree, Checkpoint):
        leaf_masks = masks_by_name(dict.fromkeys(tree.leaves, 0), masks)
        paths = {name: (name,) for name in tree.leaves}
        read = tree.read
    else:
        leaf_masks, named = masks_by_name(tree, masks), host_arrays.named_arrays(tree)
        paths = {name: path for name, (path, _) in named.items()}
        read = lambda name: host_arrays.on_host(named[name][1])  # noqa: E731

    tensors: dict[str, np.ndarray] = {}
    entries: dict[str, Any] = {}
    with leaf_progress(paths, progress) as on_leaf:
        for name, leaf_path in paths.items():
            on_leaf(name)
            values = read(name)
            format_name, arrays = pack_leaf(name, values, leaf_masks[name])
            names = _tensor_names(name, format_name)
            for key, tensor in names.items():
                if tensor in tensors:
                    raise ValueError(
                        f'{name}: its array {tensor!r} is the name of another leaf; rename one'
                    )
                array = np.asarray(arrays[key], order='C')
                tensors[tensor] = array.view(dtypes.stored_dtype(array.dtype))
            entries[name] = {
                'path': list(leaf_path),
                'format': format_name,
                'dtype': values.dtype.name,
                'shape': list(values.shape),
                'crc32': digest_of(*[tensors[tensor] for tensor in names.values()]),
            }
    digest = _manifest_digest(entries, metadata)
    manifest = {'version': _VERSION, 'crc32': digest, 'leaves': entries}
    metadata[MANIFEST_KEY] = json.dumps(manifest, separators=(',', ':'), ensure_ascii=False)
    shapes = {name: Leaf(array.shape, array.dtype) for name, array in tensors.items()}
    write_tensors(path, shapes, tensors.__getitem__, metadata, overwrite)


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
        from jaxpruner.checkpoints import Leaf
        from jaxpruner.checkpoints.reading import SafetensorsFile

        self._file = SafetensorsFile(Path(path))
        self.path = self._file.path
        self.metadata: Mapping[str, str] = dict(self._file.metadata)
        text = self.metadata.pop(MANIFEST_KEY, None)
        if text is None:
            raise ValueError(
                f'{self.path} is no packed file, since its header has no {MANIFEST_KEY}; '
                'jaxpruner.sparse.save or `jaxpruner pack` makes one'
            )
        leaves: dict[str, Leaf] = {}
        self.leaves: Mapping[str, Leaf] = leaves
        self.paths: dict[str, tree_lib.Path] = {}
        self.formats: dict[str, str] = {}
        self.stored_bytes: dict[str, int] = {}
        self._tensors: dict[str, dict[str, str]] = {}  # of each leaf its arrays' names in the file
        self._digests: dict[str, str] = {}
        tensors = self._file.leaves
        claims: dict[str, int] = collections.Counter()
        with _errors_named(self.path, _WRITE_AGAIN):
            for name, entry in _read_manifest(text, self.metadata).items():
                with _errors_named(f'{name}: its entry in the manifest is wrong'):
                    self.paths[name] = parts = tuple(entry['path'])
                    if not parts or '.'.join(parts) != name:
                        raise ValueError(f'its path {parts} does not lead to its name')
                    self.formats[name] = entry['format']
                    self._tensors[name] = names = _tensor_names(name, entry['format'])
                    self._digests[name] = entry['crc32']
                    leaf_arrays.check_shape(entry['shape'])
                    leaves[name] = Leaf(tuple(entry['shape']), dtypes.PACKED[entry['dtype']])
                claims.update(names.values())
            nested(dict.fromkeys(self.paths.values()))
            for tensor in [*tensors, *claims]:
                times = int(tensor in tensors)
                if times != claims[tensor]:
                    raise ValueError(
                        f'the tensor {tensor} is {times} times in it, and {claims[tensor]} times in its manifest'
                    )
        for name, names in self._tensors.items():
            self.stored_bytes[name] = sum(tensors[tensor].bytes for tensor in names.values())

    def read(self, name: str) -> np.ndarray:
        """Reads and unpacks a leaf.

        Args:
          name: the leaf's dotted name.

        Raises:
          KeyError: there is no such leaf.
          ValueError: its arrays are damaged or do not belong together, or the file has changed since it was opened.
        """
        format_name, arrays = self._read(name)
        return table.FORMATS[format_name].unpack(arrays)

    def _read(self, name: str) -> tuple[str, StoredArrays]:
        """Reads the format of a leaf, and its arrays as they are stored, checked."""
        from jaxpruner.checkpoints.writing import digest_of

        if name not in self.leaves:
            raise KeyError(
                f'{self.path} has no leaf {name!r}; {tree_lib.nearest(name, self.leaves)}'
            )
        leaf, format_name = self.leaves[name], self.formats[name]
        arrays = {key: self._file.read(tensor) for key, tensor in self._tensors[name].items()}
        values_key = table.FORMATS[format_name].KEYS[0]
        values, stored_dtype = arrays[values_key], dtypes.stored_dtype(leaf.dtype)
        with _errors_named(f'{self.path}: {name}', _WRITE_AGAIN):
            found, given = digest_of(*arrays.values()), self._digests[name]
            if found != given:
                raise ValueError(
                    f'its bytes are damaged: their crc32 is {found}, and by the manifest {given!r}'
                )
            if values.dtype != stored_dtype:
                raise ValueError(
                    f'its values are {values.dtype}, and {leaf.dtype} is stored as {stored_dtype}'
                )
            arrays[values_key] = values.view(leaf.dtype)
            shape = table.check(format_name, arrays)
            if shape != leaf.shape:
                raise ValueError(
                    f'its arrays are of shape {shape}, and its manifest says {leaf.shape}'
                )
        return format_name, arrays

    def stored_mask(self, name: str) -> np.ndarray | None:
        """Reads which weights of a leaf are stored: uint8, 1 where one is; `None` if the leaf is dense.

        This is the mask that `save` was given. Without one it has all weights that were not +0, and all zeros inside
        of blocks.

        Raises:
          KeyError: there is no such leaf.
          ValueError: as in `read`.
        """
        format_name, arrays = self._read(name)
        return None if format_name == 'dense' else table.stored_mask(format_name, arrays)


def _tensor_names(name: str, format_name: str) -> dict[str, str]:
    """The names in a file of a leaf's arrays."""
    if format_name == 'dense':
        return {'values': name}
    return {key: f'{name}.{key}' for key in sorted(table.FORMATS[format_name].KEYS)}


def _manifest_digest(entries: Any, metadata: Mapping[str, str]) -> str:
    """Returns the CRC-32 of the entries of leaves and of the user's metadata, whatever their order and spacing."""
    text = json.dumps({'leaves': entries, 'metadata': metadata}, sort_keys=True)
    return f'{zlib.crc32(text.encode()):08x}'


def _read_manifest(text: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Reads the entries of the leaves."""
    with _errors_named('its manifest is no JSON'):
        manifest = input_files.parse_json(text.encode())
    manifest = manifest if isinstance(manifest, dict) else {}
    version, entries, given = (manifest.get(key) for key in ('version', 'leaves', 'crc32'))
    if type(version) is not int or version < 1:
        raise ValueError(f'its manifest has the version {version!r}, which is none')
    if version > _VERSION:
        raise ValueError(
            f'its manifest has version {version}, and this release reads up to {_VERSION}; install a newer jaxpruner'
        )
    found = _manifest_digest(entries, metadata)
    if not isinstance(entries, dict) or given != found:
        raise ValueError(
            f'its manifest or its metadata are damaged: their crc32 is {found}, and by the manifest {given!r}'
        )
    return entries


def open_packed(path: os.PathLike[str] | str) -> PackedFile:
    """Opens a file that `save` wrote, to read it leaf by leaf.

    Args:
      path: the file.

    Returns:
      An open file with `leaves`, `formats`, `read(name)` and `stored_mask(name)`. It is also a
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
    return PackedFile(Path(path))


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
    with leaf_progress(file.stored_bytes, progress) as on_leaf:

        def read(name: str) -> np.ndarray:
            on_leaf(name)
            return file.read(name)

        if like is not None:
            return arranged_like(like, file.leaves, read, f'{file.path}: ')
        return nested({path: read(name) for name, path in file.paths.items()})


def open_packed_or_dense(path: Path) -> 'Checkpoint':
    """Opens a checkpoint; the leaves of a packed file are those that it was made of."""
    from jaxpruner.checkpoints import open_checkpoint

    checkpoint = open_checkpoint(path)
    return PackedFile(checkpoint.path) if MANIFEST_KEY in checkpoint.metadata else checkpoint
