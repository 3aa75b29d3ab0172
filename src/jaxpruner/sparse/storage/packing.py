"""Trees packed in memory: each leaf in its smallest format, as plain arrays in dictionaries."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.files import dtypes, host_arrays
from jaxpruner.sparse.formats import table
from jaxpruner.sparse.formats.leaf_arrays import Kept, StoredArrays
from jaxpruner.sparse_state import only_sparse_state, outermost_states, unpack_like


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
    nodes = _nodes(packed)
    if like is None:
        return _like(packed, {path: _unpacked(path, node) for path, node in nodes.items()})
    by_name = {'.'.join(path): (path, node) for path, node in nodes.items()}
    return arranged_like(like, by_name, lambda name: _unpacked(*by_name[name]))


def stored_masks(packed: Any) -> Any:
    """Returns the masks of what a packed tree stores: those that `pack` was given, or the weights that are not zero.

    Args:
      packed: what `pack` or `load_packed` returned.

    Returns:
      Nested dictionaries of uint8 masks, 1 where a weight is stored, `None` where a leaf is dense. If no mask was
      given, blocks store all zeros inside of them, too.

    Raises:
      ValueError: arrays do not belong together.

    >>> weights = np.zeros((8, 256), np.float32)
    >>> mask = np.zeros((8, 256), np.uint8)
    >>> mask[2, 7] = 1
    >>> int(stored_masks(pack({'w': weights}, masks={'w': mask}))['w'].sum())
    1
    """
    masks: dict[tree_lib.Path, Any] = {}
    for path, node in _nodes(packed).items():
        masks[path] = None
        if is_packed(node):
            masks[path] = table.stored_mask(*_checked(path, node))
    return _like(packed, masks)


def pack_leaf(name: str, values: np.ndarray, mask: Any = None) -> tuple[str, StoredArrays]:
    """Packs a leaf in its smallest format; returns the format's name, and the arrays."""
    values = np.asarray(values, order='C')  # a file would hold a transposed view in the wrong order
    kept = kept_weights(name, values, mask)
    if kept.count == values.size:
        return 'dense', {'values': values}
    plans = table.plans_of(kept, values.itemsize)
    best = table.smallest(kept, values.itemsize, plans)
    return best, table.FORMATS[best].pack(values, kept.mask, plans[best].settings)


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
        return Kept.of(is_not_zero)
    try:
        kept = np.asarray(unpack_like(jnp.asarray(mask), values.shape)) != 0
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from error
    lost = int(np.count_nonzero(is_not_zero & ~kept))
    if lost:
        raise ValueError(
            f'{name}: {lost} weights that the mask removes are not +0, and would be lost; give what '
            'jaxpruner.apply_mask(params, masks) returns, or no masks'
        )
    return Kept.of(kept, is_given=True)


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
    frozenset(row.keys): name for name, row in table.FORMATS.items() if name != 'dense'
}


def _is_array(node: Any) -> bool:
    return hasattr(node, 'shape') and hasattr(node, 'dtype')


def _nodes(packed: Any) -> dict[tree_lib.Path, Any]:
    paths, nodes, _ = tree_lib.flatten_with_paths(packed, is_leaf=is_packed)
    return dict(zip(paths, nodes, strict=True))


def _like(tree: Any, leaves: Mapping[tree_lib.Path, Any]) -> Any:
    """Returns nested dictionaries, or the only leaf if the tree was a single leaf, packed or not."""
    return next(iter(leaves.values())) if _is_array(tree) or is_packed(tree) else nested(leaves)


def _checked(path: tree_lib.Path, node: Mapping[str, Any]) -> tuple[str, StoredArrays]:
    """Returns the format of a packed leaf, and its arrays."""
    format_name = _FORMAT_NAMES[frozenset(node)]
    arrays = {key: np.asarray(value) for key, value in node.items()}
    try:
        table.check(format_name, arrays)
    except ValueError as error:
        raise ValueError(f'{".".join(path)}: {error}; pack the tree again') from error
    return format_name, arrays


def _unpacked(path: tree_lib.Path, node: Any) -> np.ndarray:
    if not is_packed(node):
        return np.asarray(node)
    format_name, arrays = _checked(path, node)
    return table.FORMATS[format_name].unpack(arrays)
