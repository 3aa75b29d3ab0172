"""Cuts trees: the parameters, the state of the model, trees of their structure, and optimizer states.

An array belongs to the parameter whose path ends the array's own path, as in `mu/dense/kernel`. It is cut like the
parameter if it has the parameter's shape, or if it is the parameter's mask, packed or not.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.sparse_state import SparseState
from jaxpruner.structure.analysis.axes import Axes, atoms, sizes_of
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.cutting.cut import Cut, take_along
from jaxpruner.tree import Path, PyTree

Shape = tuple[int, ...]
_SIZES = 'sizes'  # of a `SparseState`, also of one that NNX took apart


class Change(NamedTuple):
    """How arrays in the shape of a leaf of the model change.

    Attributes:
      before: their shape before.
      after: their shape after.
      apply: makes the change; `None` if they stay as they are.
      free: axes along which an array may have another size, such as the batch of a cache.
    """

    before: Shape
    after: Shape
    apply: Callable[[Any], Any] | None
    free: frozenset[int]

    def fits(self, shape: Shape) -> bool:
        """Whether an array has the shape of the leaf."""
        if len(shape) != len(self.before):
            return False
        differing = []
        for i, size in enumerate(shape):
            if size != self.before[i]:
                differing.append(i)
        return self.free.issuperset(differing)


Changes = Mapping[Path, Change]


class _Edit(NamedTuple):
    """A way to change all leaves of a model.

    Attributes:
      apply: (value, its axes, cut) -> changed value.
      before: axes of a leaf -> its shape before.
      after: axes of a leaf -> its shape after.
    """

    apply: Callable[[Any, Axes, Cut], Any]
    before: Callable[[Axes], Shape]
    after: Callable[[Axes], Shape]


def shrink(tree: Any, traces: Sequence[Trace], cut: Cut) -> Any:
    """The tree without removed channels."""
    edit = _Edit(_take, before=sizes_of, after=cut.shape)
    return _map_tree(tree, _plan_changes(traces, cut, edit))


def zeroed(tree: Any, traces: Sequence[Trace], cut: Cut) -> Any:
    """The tree with zeros at removed channels, in the same shapes."""
    edit = _Edit(_zero, before=sizes_of, after=sizes_of)
    return _map_tree(tree, _plan_changes(traces, cut, edit))


def expand(tree: Any, traces: Sequence[Trace], cut: Cut) -> Any:
    """The tree with kept channels back in their places, and zeros for the others."""
    edit = _Edit(_expand, before=cut.shape, after=sizes_of)
    return _map_tree(tree, _plan_changes(traces, cut, edit))


def _plan_changes(traces: Sequence[Trace], cut: Cut, edit: _Edit) -> Changes:
    """The changes of the parameters, and of the states of all programs."""
    first = traces[0]
    changes = {}
    for path, axes in first.named_leaves:
        changes[path] = _plan_change(axes, cut, edit, free=())
    for trace in traces:
        for path, axes in trace.named_states:
            free = _free_axes(axes, cut)
            change = _plan_change(axes, cut, edit, free)
            changes.setdefault(path, change)
    return changes


def _plan_change(axes: Axes, cut: Cut, edit: _Edit, free: Iterable[int]) -> Change:
    """The change of arrays with these axes."""

    def apply(value: Any) -> Any:
        return edit.apply(value, axes, cut)

    is_cut = cut.shrinks(axes)
    return Change(
        before=edit.before(axes),
        after=edit.after(axes),
        apply=apply if is_cut else None,
        free=frozenset(free),
    )


def _free_axes(axes: Axes, cut: Cut) -> list[int]:
    """The axes of a leaf of the state whose size does not matter to the cut."""
    owners = cut.owners_of(cut.lists)
    free = []
    for i, axis in enumerate(axes):
        is_owner = not owners.isdisjoint(atoms(axis))
        if not is_owner and not cut.shortens(axis):
            free.append(i)
    return free


def _take(value: Any, axes: Axes, cut: Cut) -> Any:
    return cut.take(value, axes)


def _zero(value: Any, axes: Axes, cut: Cut) -> Any:
    for i in cut.order(axes):
        stays = cut.stays(axes, i)
        zeros = jnp.zeros_like(value)
        value = jnp.where(stays, value, zeros)
    return value


def _expand(value: Any, axes: Axes, cut: Cut) -> Any:
    for i in reversed(cut.order(axes)):  # owners of lists first
        stays = cut.stays(axes, i)
        number_among_kept = np.cumsum(stays, axis=i) - 1
        beyond_the_end = cut.size(axes[i])
        source = np.where(stays, number_among_kept, beyond_the_end)
        value = take_along(value, source, i, mode='fill', fill_value=0)
    return value


def _map_tree(tree: PyTree, changes: Changes) -> PyTree:
    """Changes the arrays of a tree that belong to parameters.

    Raises:
      ValueError: an array has neither the shape of its parameter nor that of the parameter's mask; or it has the path
        of no parameter, but the shape of one that is cut.
    """
    paths, nodes, treedef = tree_lib.flatten_with_paths(tree, is_leaf=_is_sparse_state)
    changed = []
    for path, node in zip(paths, nodes, strict=True):
        if _is_sparse_state(node):
            changed.append(_map_state(node, changes))
        else:
            changed.append(_map_leaf(path, node, changes))
    return jax.tree.unflatten(treedef, changed)


def _is_sparse_state(node: Any) -> bool:
    return isinstance(node, SparseState)


def _map_state(state: SparseState, changes: Changes) -> SparseState:
    """Changes masks, states and sizes. Targets, counts and the thresholds of searches stay the same."""
    sizes = {_SIZES: state.sizes}
    return state._replace(
        masks=_map_tree(state.masks, changes),
        inner_state=_map_tree(state.inner_state, changes),
        algorithm_state=_map_tree(state.algorithm_state, changes),
        sizes=_map_tree(sizes, changes)[_SIZES],
    )


def _find_change(path: Path, changes: Changes) -> tuple[Path, Change | None]:
    """What stands before the longest path of a parameter that ends this path, and the change of this parameter."""
    for start in range(len(path)):
        end = path[start:]
        if end in changes:
            return path[:start], changes[end]
    # A model that is one bare array has no name of its own.
    is_bare = list(changes) == [tree_lib.SINGLE_ARRAY_PATH]
    return path, changes[tree_lib.SINGLE_ARRAY_PATH] if is_bare else None


def _map_leaf(path: Path, value: Any, changes: Changes) -> Any:
    owner, change = _find_change(path, changes)
    shape = jnp.shape(value)
    name = tree_lib.path_string(path)
    if change is None:
        if _looks_cuttable(shape, changes):
            raise ValueError(
                f'{name}, of shape {shape}, has the path of no parameter, so it is unknown where to cut it; leave it '
                'out of the tree, or give an optimizer state whose moments have the structure of the parameters'
            )
        return value
    if not shape and _SIZES in owner:
        return jnp.uint32(math.prod(change.after))
    if change.apply is None:
        return value
    if change.fits(shape):
        return change.apply(value)
    if math.prod(shape) <= 1:  # a number of the leaf
        return value
    if is_packed(value, change.before):
        whole_mask = sparse_state_lib.unpack_like(value, change.before)
        mask = change.apply(whole_mask)
        is_flat = len(shape) != len(change.before)
        return jnp.packbits(mask) if is_flat else sparse_state_lib.pack(mask)
    raise ValueError(
        f'{name} has shape {shape}, but its parameter has {change.before}, so it is unknown where to cut it (factored '
        'moments and histories of parameters cannot be cut); start the optimizer anew with init'
    )


def _looks_cuttable(shape: Shape, changes: Changes) -> bool:
    """Whether an array has the shape of a parameter that is cut, or enough elements for all parameters in a row."""
    size = 0
    for change in changes.values():
        size += math.prod(change.before)
        if change.apply is not None and change.fits(shape):
            return True
    return len(shape) > 0 and math.prod(shape) >= size


def is_packed(value: Any, shape: Shape) -> bool:
    """Whether an array is the packed mask of a parameter of this shape."""
    if value.dtype != jnp.uint8:
        return False
    size = math.prod(shape)
    is_flat = value.shape == sparse_state_lib.packed_shape((size,))
    return is_flat or sparse_state_lib.axis_of_bits(value.shape, shape) is not None
