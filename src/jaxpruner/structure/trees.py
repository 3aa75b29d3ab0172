"""Cuts trees: the parameters, the state of the model, trees of their structure, and optimizer states.

An array belongs to the parameter whose path ends the array's own path, as in `mu/dense/kernel`. It is cut like the
parameter if it has the parameter's shape, or if it is the parameter's mask, packed or not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, atoms, sizes_of
from jaxpruner.structure.cut import Cut, take_along
from jaxpruner.structure.traces import Trace
from jaxpruner.tree import Path, PyTree

Shape = tuple[int, ...]
_SIZES = 'sizes'  # of a `SparseState`, also of one that NNX took apart


class _Change(NamedTuple):
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
    free: Sequence[int] = ()

    def fits(self, shape: Shape) -> bool:
        """Whether an array has the shape of the leaf."""
        own = list(self.before)
        for i in self.free if len(shape) == len(own) else ():
            own[i] = shape[i]
        return tuple(own) == shape


_Changes = Mapping[Path, _Change]


def shrink(tree: Any, traces: Sequence[Trace], cut: Cut) -> Any:
    """The tree without removed channels."""
    return _map_tree(tree, _changes(traces, cut, cut.take, sizes_of, cut.shape))


def zeroed(tree: Any, traces: Sequence[Trace], cut: Cut) -> Any:
    """The tree with zeros at removed channels, in the same shapes."""
    return _map_tree(tree, _changes(traces, cut, cut.zero, sizes_of, sizes_of))


def expand(tree: Any, traces: Sequence[Trace], cut: Cut) -> Any:
    """The tree with kept channels back in their places, and zeros for the others."""

    def put_back(value: Any, axes: Axes) -> Any:
        for i in reversed(cut.order(axes)):  # owners of lists first
            stays = cut.stays(axes, i)
            # The number of a position among the kept ones; beyond the end where it was removed.
            source = np.where(stays, np.cumsum(stays, axis=i) - 1, cut.size(axes[i]))
            value = take_along(value, source, i, mode='fill', fill_value=0)
        return value

    return _map_tree(tree, _changes(traces, cut, put_back, cut.shape, sizes_of))


def _changes(
    traces: Sequence[Trace],
    cut: Cut,
    apply: Callable[[Any, Axes], Any],
    before: Callable[[Axes], Shape],
    after: Callable[[Axes], Shape],
) -> _Changes:
    """The changes of the parameters, and of the states of all programs.

    Args:
      traces: of the programs.
      cut: the channels that stay.
      apply: (value, axes of a leaf) -> changed value.
      before: axes of a leaf -> its shape before.
      after: axes of a leaf -> its shape after.
    """

    def change(axes: Axes) -> _Change:
        of_leaf = (lambda value: apply(value, axes)) if cut.shrinks(axes) else None
        return _Change(before(axes), after(axes), of_leaf)

    changes = {path: change(axes) for path, axes in traces[0].named_leaves}
    cut_atoms = cut.owners.union(cut.lists)
    for trace in traces:
        for path, axes in trace.named_states:
            # The size of other axes does not matter to the cut.
            free = [i for i, axis in enumerate(axes) if cut_atoms.isdisjoint(atoms(axis))]
            changes.setdefault(path, change(axes)._replace(free=free))
    return changes


def _map_tree(tree: PyTree, changes: _Changes) -> PyTree:
    """Changes the arrays of a tree that belong to parameters.

    Raises:
      ValueError: an array has neither the shape of its parameter nor that of the parameter's mask; or it has the path
        of no parameter, but the shape of one that is cut.
    """
    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    changed = [_map_leaf(path, leaf, changes) for path, leaf in zip(paths, leaves, strict=True)]
    return jax.tree.unflatten(treedef, changed)


def _map_leaf(path: Path, value: Any, changes: _Changes) -> Any:
    starts = [start for start in range(len(path)) if path[start:] in changes]
    owner, change = path[: starts[0]] if starts else path, None
    if starts:
        change = changes[path[starts[0] :]]
    elif list(changes) == [tree_lib.SINGLE_ARRAY_PATH]:  # one bare array has no name of its own
        change = changes[tree_lib.SINGLE_ARRAY_PATH]
    shape = jnp.shape(value)
    name = tree_lib.path_string(path)
    if change is None:
        fits = any(other.apply is not None and other.fits(shape) for other in changes.values())
        size = sum(math.prod(other.before) for other in changes.values())
        if fits or (shape and math.prod(shape) >= size):  # or it has all parameters in a row
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
        mask = change.apply(sparse_state_lib.unpack_like(value, change.before))
        is_flat = len(shape) != len(change.before)
        return jnp.packbits(mask) if is_flat else sparse_state_lib.pack(mask)
    raise ValueError(
        f'{name} has shape {shape}, but its parameter has {change.before}, so it is unknown where to cut it (factored '
        'moments and histories of parameters cannot be cut); start the optimizer anew with init'
    )


def is_packed(value: Any, shape: Shape) -> bool:
    """Whether an array is the packed mask of a parameter of this shape."""
    if value.dtype != jnp.uint8:
        return False
    is_flat = value.shape == sparse_state_lib.packed_shape((math.prod(shape),))
    return is_flat or sparse_state_lib.axis_of_bits(value.shape, shape) is not None
