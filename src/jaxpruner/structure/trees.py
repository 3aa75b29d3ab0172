"""Cuts trees along: parameters, whatever has their structure, and states of optimizers.

An array of a state belongs to a parameter if its path ends with the parameter's path. It is changed as the parameter is
if it has its shape, or if it is its mask, packed or not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import packing
from jaxpruner.core import tree as tree_lib
from jaxpruner.core.sparse_state import SparseState
from jaxpruner.structure.axes import Axes
from jaxpruner.structure.cut import Cut, take_along

Shape = tuple[int, ...]


class Change(NamedTuple):
    """What becomes of arrays in the shape of a parameter.

    Attributes:
      before: the shape that they have.
      after: the shape that they get.
      apply: does it; `None` if they stay as they are.
    """

    before: Shape
    after: Shape
    apply: Callable[[Any], Any] | None


Changes = Mapping[tree_lib.Path, Change]
# (value, its axes, what stays) -> changed value
Edit = Callable[[Any, Axes, Cut], Any]


def shrink(tree: Any, paths: Sequence[tree_lib.Path], leaves: Sequence[Axes], cut: Cut) -> Any:
    """The tree with what stays; paths and axes are those of the parameters."""
    edit: Edit = lambda value, axes, cut: cut.take(value, axes)  # noqa: E731
    changes = {}
    for path, axes in zip(paths, leaves, strict=True):
        changes[path] = _change(axes, cut, _whole(axes), cut.shape(axes), edit)
    return _map_tree(tree, changes)


def zeroed(tree: Any, paths: Sequence[tree_lib.Path], leaves: Sequence[Axes], cut: Cut) -> Any:
    """The tree with zeros where something is removed, and all shapes as they are."""
    changes = {}
    for path, axes in zip(paths, leaves, strict=True):
        changes[path] = _change(axes, cut, _whole(axes), _whole(axes), _zero)
    return _map_tree(tree, changes)


def expand(tree: Any, paths: Sequence[tree_lib.Path], leaves: Sequence[Axes], cut: Cut) -> Any:
    """The tree with what stayed back in its place, among zeros."""
    changes = {}
    for path, axes in zip(paths, leaves, strict=True):
        changes[path] = _change(axes, cut, cut.shape(axes), _whole(axes), _expand)
    return _map_tree(tree, changes)


def _whole(axes: Axes) -> Shape:
    return tuple([axis.size for axis in axes])


def _change(axes: Axes, cut: Cut, before: Shape, after: Shape, edit: Edit) -> Change:
    def apply(value: Any) -> Any:
        return edit(value, axes, cut)

    return Change(before, after, apply if cut.touches([axes]) else None)


def _zero(value: Any, axes: Axes, cut: Cut) -> Any:
    for i in cut.order(axes):
        value = jnp.where(cut.stays(axes, i), value, jnp.zeros_like(value))
    return value


def _expand(value: Any, axes: Axes, cut: Cut) -> Any:
    for i in reversed(cut.order(axes)):  # owners of lists first
        stays = cut.stays(axes, i)
        beyond_the_end = cut.size(axes[i])
        source = np.where(stays, np.cumsum(stays, axis=i) - 1, beyond_the_end)
        value = take_along(value, source, i, mode='fill', fill_value=0)
    return value


def _map_tree(tree: tree_lib.PyTree, changes: Changes) -> tree_lib.PyTree:
    """Changes what belongs to parameters in any tree.

    Raises:
      ValueError: something that belongs to a parameter has neither its shape nor that of its mask, or nobody knows to
        which parameter something belongs.
    """
    paths, nodes, treedef = tree_lib.flatten_with_paths(tree, is_leaf=_is_sparse_state)
    changed = []
    for path, node in zip(paths, nodes, strict=True):
        is_state = _is_sparse_state(node)
        changed.append(_map_state(node, changes) if is_state else _map_leaf(path, node, changes))
    return jax.tree.unflatten(treedef, changed)


def _is_sparse_state(node: Any) -> bool:
    return isinstance(node, SparseState)


def _map_state(state: SparseState, changes: Changes) -> SparseState:
    """Targets, counts, and the thresholds at which a search begins, are the same in a smaller model."""
    paths, sizes, treedef = tree_lib.flatten_with_paths(state.sizes)
    new_sizes = []
    for path, size in zip(paths, sizes, strict=True):
        change = _owner(path, changes)
        new_sizes.append(size if change is None else jnp.uint32(math.prod(change.after)))
    return state._replace(
        masks=_map_tree(state.masks, changes),
        inner_state=_map_tree(state.inner_state, changes),
        algorithm_state=_map_tree(state.algorithm_state, changes),
        sizes=jax.tree.unflatten(treedef, new_sizes),
    )


def _owner(path: tree_lib.Path, changes: Changes) -> Change | None:
    """What becomes of the parameter with the longest path that ends this path."""
    for start in range(len(path)):
        if path[start:] in changes:
            return changes[path[start:]]
    # A model that is one bare array has no name of its own.
    is_bare = list(changes) == [tree_lib.SINGLE_ARRAY_PATH]
    return changes[tree_lib.SINGLE_ARRAY_PATH] if is_bare else None


def _map_leaf(path: tree_lib.Path, value: Any, changes: Changes) -> Any:
    change = _owner(path, changes)
    shape = jnp.shape(value)
    name = tree_lib.path_string(path)
    if change is None:
        if _looks_cuttable(shape, changes):
            raise ValueError(
                f'{name}, of shape {shape}, has the path of no parameter, so that nobody knows where to cut it; leave '
                'it out of the tree, or give an optimizer state whose moments have the structure of the parameters'
            )
        return value
    if change.apply is None or math.prod(shape) <= 1:  # a number of the leaf
        return value
    if shape == change.before:
        return change.apply(value)
    if _is_packed(value, change.before):
        mask = change.apply(packing.unpack_like(value, change.before))
        is_flat = len(shape) != len(change.before)
        return jnp.packbits(mask) if is_flat else packing.pack(mask)
    raise ValueError(
        f'{name} has shape {shape}, and its parameter {change.before}, so that nobody knows where to cut it (factored '
        'moments and histories of parameters cannot be cut); start the optimizer anew with init'
    )


def _looks_cuttable(shape: Shape, changes: Changes) -> bool:
    """Whether an array has the shape of a parameter that is cut, or room for all parameters, as if put in a row."""
    size = 0
    for change in changes.values():
        size += math.prod(change.before)
        if change.apply is not None and shape == change.before:
            return True
    return len(shape) > 0 and math.prod(shape) >= size


def _is_packed(value: Any, shape: Shape) -> bool:
    is_flat = value.shape == packing.packed_shape((math.prod(shape),))
    return value.dtype == jnp.uint8 and (
        is_flat or packing.axis_of_bits(value.shape, shape) is not None
    )
