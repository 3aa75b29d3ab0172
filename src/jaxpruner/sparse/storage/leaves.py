"""The leaves of a tree, one at a time on the host, with the masks that say what is kept of them."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.files import host_arrays
from jaxpruner.sparse.formats import element_types
from jaxpruner.sparse.formats.base import KeptPattern
from jaxpruner.sparse_state import only_sparse_state, outermost_states


class SourceLeaf(NamedTuple):
    """A leaf that is to be packed; its values are read when they are needed."""

    path: tree_lib.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    read_values: Callable[[], np.ndarray]
    read_mask: Callable[[], Any] | None = None  # packed or not; None where the values decide

    @property
    def name(self) -> str:
        """The dotted name."""
        return '.'.join(self.path)

    @property
    def bytes(self) -> int:
        """The bytes of the leaf as it is."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    def values(self) -> np.ndarray:
        """Returns the values in C order: a file would hold a transposed view in the wrong order."""
        return np.asarray(self.read_values(), order='C')

    def pattern(self, values: np.ndarray) -> KeptPattern:
        """Returns which of the values are kept.

        Raises:
          ValueError: the mask does not fit, or something other than +0 stands where it removes.
        """
        is_not_zero = element_types.is_not_plus_zero(values)
        if self.read_mask is None:
            return KeptPattern.of(is_not_zero)
        try:
            mask = sparse_state_lib.unpack_like(self.read_mask(), self.shape)
        except ValueError as error:
            raise ValueError(f'{self.name}: {error}') from error
        mask = np.asarray(mask) != 0
        lost = int(np.count_nonzero(is_not_zero & ~mask))
        if lost:
            raise ValueError(
                f'{self.name}: {lost} weights that the mask removes are not +0, and would be lost; give what '
                'jaxpruner.apply_mask(params, masks) returns, or no masks'
            )
        return KeptPattern.of(mask, is_given=True)


def leaves_of_tree(tree: tree_lib.PyTree, masks: Any = None) -> list[SourceLeaf]:
    """Lists the leaves of a pytree of arrays.

    Args:
      tree: the pytree.
      masks: a tree of masks, packed or not, `None` where the values decide; or an optimizer state that holds one.

    Raises:
      TypeError: a leaf is no array whose values this process has.
      ValueError: the masks have another structure, or two leaves have one name.
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    if outermost_states(masks):
        masks = only_sparse_state(masks).masks
    leaf_masks = tree_lib.leaves_like(treedef, masks)
    sources = []
    for path, leaf, mask in zip(paths, leaves, leaf_masks, strict=True):
        array = host_arrays.checked_array('.'.join(path), leaf)
        source = SourceLeaf(
            path=path,
            shape=tuple(array.shape),
            dtype=np.dtype(array.dtype),
            read_values=functools.partial(host_arrays.on_host, array),
            read_mask=None if mask is None else functools.partial(jnp.asarray, mask),
        )
        sources.append(source)
    check_sources(sources)
    return sources


def check_sources(sources: Iterable[SourceLeaf]) -> None:
    """Refuses two leaves of one name, and dtypes that files do not know."""
    paths: dict[str, tree_lib.Path] = {}
    for source in sources:
        if source.name in paths:
            raise ValueError(
                f'the leaves {paths[source.name]} and {source.path} are both called {source.name!r}; rename one'
            )
        paths[source.name] = source.path
        try:
            element_types.dtype_named(source.dtype.name)
        except ValueError as error:
            raise TypeError(f'{source.name}: {error}') from error


def nested(leaves: Mapping[tree_lib.Path, Any]) -> Any:
    """Returns nested dictionaries of leaves by path.

    Raises:
      ValueError: a path leads through a leaf.
    """
    tree: dict[str, Any] = {}
    folders: dict[tree_lib.Path, dict[str, Any]] = {(): tree}
    for path, leaf in leaves.items():
        if not path:
            raise ValueError('a leaf has an empty path')
        for depth in range(1, len(path)):
            above = folders[path[: depth - 1]]
            if path[:depth] not in folders:
                if path[depth - 1] in above:
                    raise ValueError(f'{path} leads through the leaf {path[:depth]}')
                folders[path[:depth]] = above[path[depth - 1]] = {}
        above = folders[path[:-1]]
        if path[-1] in above:
            raise ValueError(f'{path} is there twice, or has leaves below it')
        above[path[-1]] = leaf
    return tree


def arranged_like(
    like: tree_lib.PyTree,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    read: Callable[[str], Any],
) -> tree_lib.PyTree:
    """Returns leaves in the structure of another tree, placed on its devices one by one.

    Args:
      like: a pytree of arrays or shapes.
      shapes: shape and dtype of each leaf by its dotted name.
      read: returns a leaf of that name.

    Raises:
      ValueError: leaves are missing, or are too many, or have another shape or dtype.
    """
    paths, entries, treedef = tree_lib.flatten_with_paths(like)
    names = ['.'.join(path) for path in paths]
    _check_names(names, list(shapes))
    for name, entry in zip(names, entries, strict=True):
        _check_entry(name, entry, *shapes[name])
    leaves = []
    for name, entry in zip(names, entries, strict=True):
        # No name holds the array, so it leaves the host before the next one is read.
        leaves.append(_placed(name, read(name), entry))
    return treedef.unflatten(leaves)


def _check_names(wanted: Sequence[str], given: Sequence[str]) -> None:
    for name in wanted:
        if name not in given:
            raise ValueError(
                f'there is no leaf {name!r}, which `like` has; {tree_lib.nearest(name, given)}'
            )
    for name in given:
        if name not in wanted:
            raise ValueError(f'`like` has no leaf {name!r}, which is stored; give a tree with it')


def _check_entry(name: str, entry: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if not hasattr(entry, 'shape') or not hasattr(entry, 'dtype'):
        return  # a number of Python
    if tuple(entry.shape) != shape or entry.dtype != dtype:
        raise ValueError(
            f'{name} is {dtype}{list(shape)}, and in `like` {entry.dtype}{list(entry.shape)}; give a tree of the same '
            'shapes and dtypes'
        )


def _placed(name: str, array: np.ndarray, entry: Any) -> Any:
    sharding = getattr(entry, 'sharding', None)
    if sharding is None:
        return array
    return host_arrays.on_device(name, array, sharding)
