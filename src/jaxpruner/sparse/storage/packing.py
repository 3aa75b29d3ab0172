"""Trees packed in memory: each leaf in its smallest format, as plain arrays in dictionaries."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.sparse.formats import table
from jaxpruner.sparse.formats.base import StorageFormat, StoredArrays
from jaxpruner.sparse.storage.leaves import SourceLeaf, arranged_like, leaves_of_tree, nested


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
    _check_unpacked(tree)
    sources = leaves_of_tree(tree, masks)
    leaves: dict[tree_lib.Path, Any] = {}
    for source in sources:
        leaves[source.path] = _packed(source)
    if len(sources) == 1 and _is_array(tree):
        (leaf,) = leaves.values()
        return leaf
    return nested(leaves)


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
    if _is_packed(packed):
        return _unpacked('the leaf', packed)
    paths, nodes, _ = tree_lib.flatten_with_paths(packed, is_leaf=_is_packed)
    if like is not None:
        names = map('.'.join, paths)
        by_name = dict(zip(names, nodes, strict=True))
        return _unpacked_like(by_name, like)
    if _is_array(packed):
        return np.asarray(packed)
    leaves = {}
    for path, node in zip(paths, nodes, strict=True):
        name = '.'.join(path)
        leaves[path] = _unpacked(name, node)
    return nested(leaves)


def stored_masks(packed: Any) -> Any:
    """Returns the masks of what a packed tree stores: those that `pack` was given, or the weights that are not zero.

    Args:
      packed: what `pack` or `load_packed` returned.

    Returns:
      Nested dictionaries of uint8 masks, 1 where a weight is stored, `None` where a leaf is dense. If no mask was
      given, N:M may also store a few zeros, and blocks store all zeros inside of them.

    Raises:
      ValueError: arrays do not belong together.

    >>> weights = np.zeros((8, 256), np.float32)
    >>> mask = np.zeros((8, 256), np.uint8)
    >>> mask[2, 7] = 1
    >>> int(stored_masks(pack({'w': weights}, masks={'w': mask}))['w'].sum())
    1
    """
    if _is_packed(packed):
        return _stored_mask('the leaf', packed)
    paths, nodes, _ = tree_lib.flatten_with_paths(packed, is_leaf=_is_packed)
    masks: dict[tree_lib.Path, Any] = {}
    for path, node in zip(paths, nodes, strict=True):
        masks[path] = None
        if _is_packed(node):
            name = '.'.join(path)
            masks[path] = _stored_mask(name, node)
    return nested(masks)


def _packed(source: SourceLeaf) -> Any:
    values = source.values()
    pattern = source.pattern(values)
    plan = table.best_plan(pattern, source.dtype)
    if plan.format_name == 'dense':
        return values
    entry = table.FORMATS[plan.format_name]
    return entry.pack(values, pattern.mask, plan)


def _is_array(tree: Any) -> bool:
    return hasattr(tree, 'shape') and hasattr(tree, 'dtype')


def _format_of(node: Mapping[str, Any]) -> StorageFormat | None:
    """The format whose arrays have these names; a dense leaf is an array itself."""
    keys = frozenset(node)
    for entry in table.FORMATS.values():
        if entry.name != 'dense' and entry.keys == keys:
            return entry
    return None


def _packed_format(node: Any) -> StorageFormat:
    """The format of a node that is packed."""
    entry = _format_of(node)
    assert entry is not None
    return entry


def _is_packed(node: Any) -> bool:
    """Whether a node holds the arrays of one leaf."""
    if not isinstance(node, Mapping) or _format_of(node) is None:
        return False
    return all(_is_array(value) for value in node.values())


def _check_unpacked(tree: Any) -> None:
    paths, nodes, _ = tree_lib.flatten_with_paths(tree, is_leaf=_is_packed)
    for path, node in zip(paths, nodes, strict=True):
        if _is_packed(node):
            raise ValueError(
                f'{".".join(path)} has the keys {sorted(node)}, as a packed leaf has; unpack the tree first, or rename '
                'a key'
            )


def _checked(name: str, node: Any) -> tuple[str, StoredArrays]:
    """The format of a node, and its arrays."""
    format_name = _packed_format(node).name
    arrays = _stored_arrays(node)
    try:
        table.check(format_name, arrays)
    except ValueError as error:
        raise ValueError(f'{name}: {error}; pack the tree again') from error
    return format_name, arrays


def _stored_arrays(node: Mapping[str, Any]) -> StoredArrays:
    return {key: np.asarray(value) for key, value in node.items()}


def _unpacked(name: str, node: Any) -> np.ndarray:
    if not _is_packed(node):
        return np.asarray(node)
    format_name, arrays = _checked(name, node)
    return table.FORMATS[format_name].unpack(arrays)


def _unpacked_like(nodes: Mapping[str, Any], like: tree_lib.PyTree) -> tree_lib.PyTree:
    """The unpacked leaves, in another tree's structure."""
    specs = {}
    for name, node in nodes.items():
        specs[name] = _spec(name, node)

    def read(name: str) -> np.ndarray:
        return _unpacked(name, nodes[name])

    return arranged_like(like, specs, read)


def _stored_mask(name: str, node: Any) -> np.ndarray:
    format_name, arrays = _checked(name, node)
    mask = table.stored_mask(format_name, arrays)
    return mask.astype(np.uint8)


def _spec(name: str, node: Any) -> tuple[tuple[int, ...], np.dtype]:
    if not _is_packed(node):
        return tuple(node.shape), np.dtype(node.dtype)
    entry = _packed_format(node)
    arrays = _stored_arrays(node)
    try:
        shape = entry.shape(arrays)
    except ValueError as error:
        raise ValueError(f'{name}: {error}; pack the tree again') from error
    return shape, arrays[entry.values_key].dtype
