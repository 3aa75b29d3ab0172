"""What is kept: checked, as flags of positions that stay along an axis, and taken out of arrays.

If all layers of a scan keep the same channels, the flags have only that axis. If each layer keeps channels of its own,
the flags have an axis for the layers, too. In the body of the scan a value belongs to one layer. There the flags have
an axis for the trips, and are read at the current trip.

    keep the same units      flags of a kernel (inputs, units): [1, units]
    units of their own       flags of the stack of kernels (layers, inputs, units): [layers, 1, units]
    in the body of the scan  flags of one kernel, with an axis for the trips in front: [layers, 1, units],
                             and at trip t, which may be traced: [1, units]

In a tree, such as an optimizer state, an array belongs to the parameter whose path ends the array's own path, as in
`mu/dense/kernel`. It is cut like the parameter if it has the parameter's shape, or if it is the parameter's mask,
packed or not.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis, atoms, in_table, indices_of, size_with, sizes_of
from jaxpruner.structure.programs import Trace
from jaxpruner.tree import Path, PyTree

# Name of a group -> the indices of its channels that stay, ascending; or such a list for each trip, expert or head.
KeepByGroup = Mapping[str, Any]
Shape = tuple[int, ...]


class Lists(NamedTuple):
    """The channels that stay, listed for each index of their owners.

    Attributes:
      owners: atoms such as the trips of a scan, experts, or heads.
      table: of shape `(*sizes of the owners, channels that stay)`, ascending along the last axis.
    """

    owners: tuple[Axis, ...]
    table: np.ndarray


class Cut:
    """The channels that stay.

    Attributes:
      lists: atom -> its channels that stay. All channels of other atoms stay.
      trips: in the body of a scan, atom of the trips -> the current trip.
      owners: the atoms that own lists.

    >>> from jaxpruner.structure.axes import product
    >>> heads, features = Axis(2), Axis(3)
    >>> value, axes = jnp.arange(6), (product([heads, features]),)
    >>> Cut({features: Lists((), np.array([0, 2]))}).take(value, axes).tolist()
    [0, 2, 3, 5]
    >>> Cut({features: Lists((heads,), np.array([[0, 2], [1, 2]]))}).take(value, axes).tolist()
    [0, 2, 4, 5]
    """

    def __init__(self, lists: Mapping[Axis, Lists], trips: Mapping[Axis, Any] | None = None):
        self.lists = lists
        self.trips = trips or {}
        # Sizes depend on how many channels stay, not on which ones.
        self._sizes = {atom: own.table.shape[-1] for atom, own in lists.items()}
        self.owners = frozenset([owner for own in lists.values() for owner in own.owners])

    def size(self, axis: Axis) -> int:
        """How many positions of an axis stay."""
        return size_with(axis, self._sizes)

    def size_before(self, axis: Axis, position: int) -> int:
        """How many positions before this one stay, where a part of a concatenation begins or ends."""
        parts = axis.parts if axis.form == 'sum' else (axis,)
        ends = itertools.accumulate(sizes_of(parts))
        before = [part for part, end in zip(parts, ends, strict=True) if end <= position]
        return sum(map(self.size, before))

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of a value of these axes after the cut."""
        return tuple(map(self.size, axes))

    def shapes(self, axes: Axes, free: Shape = ()) -> tuple[Shape, Shape]:
        """The shapes of a value of these axes before and after the cut.

        In a state, axes that the cut does not touch may have any size, such as the batch of a cache: that of `free`.
        """
        before, after = list(sizes_of(axes)), list(self.shape(axes))
        for i, axis in enumerate(axes) if len(free) == len(axes) else ():
            if not any(atom in self.lists or atom in self.owners for atom in atoms(axis)):
                before[i] = after[i] = free[i]
        return tuple(before), tuple(after)

    def shortens(self, axis: Axis) -> bool:
        """Whether an axis gets shorter."""
        return self.size(axis) != axis.size

    def shrinks(self, axes: Axes) -> bool:
        """Whether a value of these axes gets smaller."""
        return any(map(self.shortens, axes))

    def order(self, axes: Axes) -> list[int]:
        """The axes that get shorter, in the order of cutting them. An owner of lists is cut after the lists.

        Raises:
          ValueError: two groups own each other's lists.
        """
        owners: dict[int, set[Axis]] = {}
        for i, axis in enumerate(axes):
            if self.shortens(axis):
                lists = [self.lists[atom].owners for atom in atoms(axis) if atom in self.lists]
                owners[i] = set(itertools.chain(*lists))
        # What owns lists has fewer owners itself.
        order = sorted(owners, key=lambda i: -len(owners[i]))
        for i, later in itertools.combinations(order, 2):
            if not owners[later].isdisjoint(atoms(axes[i])):
                raise ValueError(
                    f"groups along axes of {[axes[i].size for i in owners]} own each other's lists; give one of them "
                    'a single list, or leave it whole'
                )
        return order

    def stays(self, axes: Axes, i: int) -> np.ndarray:
        """Flags of the positions that stay along an axis of a value.

        They have the rank of the scans around the value and of the value together, with one element along axes on which
        they do not depend.
        """
        axes, i = (*self.trips, *axes), len(self.trips) + i
        flags = np.ones([axis.size if k == i else 1 for k, axis in enumerate(axes)], bool)
        for atom in self.lists.keys() & atoms(axes[i]):
            owners, table = self.lists[atom]
            stays_in_list = np.zeros((*table.shape[:-1], atom.size), bool)
            np.put_along_axis(stays_in_list, table, True, axis=-1)
            # Elements with several channels along the axis, as in `h * h`, have an index for each; -1 is none.
            for channels in indices_of(atom, axes[i]):
                index = in_table(axes, owners, i, channels)
                flags = flags & ((index[-1] < 0) | stays_in_list[index])
        return flags

    def take(self, value: Any, axes: Axes, first: int = 0) -> Any:
        """Cuts a value along its axes from `first` on; returns the value itself if all of it stays."""
        trips = len(self.trips)
        for i in [i for i in self.order(axes) if i >= first]:
            flags = np.moveaxis(self.stays(axes, i), trips + i, -1)
            *_, kept = np.nonzero(flags)
            kept = np.moveaxis(kept.reshape(*flags.shape[:-1], self.size(axes[i])), -1, trips + i)
            if trips:  # the positions that stay at the current ones
                numbers = zip(self.trips.values(), kept.shape[:trips], strict=True)
                kept = jnp.asarray(kept)[tuple([trip if size > 1 else 0 for trip, size in numbers])]
            if kept.size == kept.shape[i]:
                value = jnp.take(value, kept.reshape(-1), axis=i, mode='clip')
            else:
                value = jnp.take_along_axis(jnp.asarray(value), kept, axis=i, mode='clip')
        return value

    def zero(self, value: Any, axes: Axes) -> Any:
        """Sets what goes to zero; returns the value itself if all of it stays."""
        for i in self.order(axes):
            value = jnp.where(self.stays(axes, i), value, jnp.zeros_like(value))
        return value


def check_keep(groups: Mapping[str, Any], keep: KeepByGroup, allow_inexact: bool = False) -> Cut:
    """The cut that leaves these channels.

    Args:
      groups: of the model, by name.
      keep: as in `ChannelGraph.shrink`.
      allow_inexact: as in `ChannelGraph.shrink`.

    Raises:
      TypeError: `keep` is no mapping, or indices are no whole numbers.
      KeyError: there is no such group.
      IndexError: a group has no such index.
      ValueError: indices are missing, repeated or not in order, or a group is not exact.
    """
    if not isinstance(keep, Mapping):
        raise TypeError(f'keep has to be {{name of a group: indices that stay}}, got {keep!r}')
    lists: dict[Axis, Lists] = {}
    for name, indices in keep.items():
        if name not in groups:
            raise KeyError(f'there is no group {name!r}; {tree_lib.nearest(str(name), groups)}')
        group, entry = groups[name], f'keep[{name!r}]'
        table = np.asarray(indices)  # an error of JAX if they are traced
        owners = group.lists if table.ndim != 1 else ()
        if table.shape[:-1] != sizes_of(owners) or not table.ndim:
            shape = f'{(*sizes_of(group.lists), "kept")}'
            lists_too = f', or an array of lists of shape {shape}' if group.lists else ''
            raise ValueError(
                f'{entry} has shape {table.shape}; give one list of indices{lists_too}'
            )
        if not table.size:
            raise ValueError(f'{entry} is empty; a group keeps at least one channel')
        if not np.issubdtype(table.dtype, np.integer):
            raise TypeError(
                f'{entry} has {table.flat[0]!r}; give indices, whole numbers; of a mask np.flatnonzero(mask)'
            )
        foreign = table[(table < 0) | (table >= group.size)]
        if foreign.size:
            raise IndexError(
                f'{entry} has {foreign[0]}; the group has indices from 0 to {group.size - 1}'
            )
        if (np.diff(table.astype(np.int64)) <= 0).any():
            raise ValueError(f'{entry} has indices twice or out of order; give np.unique(indices)')
        if table.shape[-1] == group.size:
            continue
        if not (group.exact or allow_inexact):
            raise ValueError(
                f'removing channels of {name!r} is not the same as zeroing them: {group.reason}; keep all '
                f'{group.size} of them, or pass allow_inexact=True and train the smaller model'
            )
        lists[group.atom] = Lists(owners, table)
    return Cut(lists)


def check_shape(path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuses an array of another shape than a leaf of the model, or of the smaller model."""
    if shape != expected:
        raise ValueError(
            f'{tree_lib.path_string(path)} has shape {shape}, where the model has {expected}; give arrays of the model '
            'that the graph was made of, and to a smaller one what graph.shrink returned'
        )


_SIZES = 'sizes'  # of a `SparseState`, also of one that NNX took apart


def cut_tree(tree: PyTree, traces: Sequence[Trace], cut: Cut, to_zero: bool = False) -> PyTree:
    """The tree without removed channels; or with zeros there, in the same shapes.

    Raises:
      ValueError: an array has neither the shape of its parameter nor that of the parameter's mask; or it has the path
        of no parameter, but the shape of one that is cut.
    """
    change = cut.zero if to_zero else cut.take
    axes_of = dict(traces[0].leaves)
    size_of_model = sum(math.prod(sizes_of(axes)) for axes in axes_of.values())
    for trace in traces:
        axes_of = {**trace.states, **axes_of}

    def fits(shape: Shape, path: Path) -> bool:
        """Whether an array has the shape of a leaf of the model."""
        is_state = path not in traces[0].leaves
        return shape == cut.shapes(axes_of[path], shape if is_state else ())[0]

    def map_leaf(path: Path, value: Any) -> Any:
        shape, name = jnp.shape(value), tree_lib.path_string(path)
        owners = [path[start:] for start in range(len(path)) if path[start:] in axes_of]
        if list(axes_of) == [tree_lib.SINGLE_ARRAY_PATH]:  # one bare array has no name of its own
            owners.append(tree_lib.SINGLE_ARRAY_PATH)
        if not owners:
            is_cut = [each for each, axes in axes_of.items() if cut.shrinks(axes)]
            is_flat_model = shape and math.prod(shape) >= size_of_model
            if is_flat_model or any(fits(shape, each) for each in is_cut):
                raise ValueError(
                    f'{name}, of shape {shape}, has the path of no parameter, so it is unknown where to cut it; leave '
                    'it out of the tree, or give an optimizer state whose moments have the structure of the parameters'
                )
            return value
        owner = owners[0]
        axes = axes_of[owner]
        whole = sizes_of(axes)
        parents = path[: -len(owner)] if path[-len(owner) :] == owner else path
        if not shape and _SIZES in parents:
            return jnp.uint32(math.prod(whole if to_zero else cut.shape(axes)))
        if fits(shape, owner):
            return change(value, axes)
        # Nothing is cut, or it is a number of the leaf.
        if not cut.shrinks(axes) or math.prod(shape) <= 1:
            return value
        if is_packed(value, whole):
            mask = change(sparse_state_lib.unpack_like(value, whole), axes)
            is_flat = len(shape) != len(whole)
            return jnp.packbits(mask) if is_flat else sparse_state_lib.pack(mask)
        raise ValueError(
            f'{name} has shape {shape}, but its parameter has {whole}, so it is unknown where to cut it (factored '
            'moments and histories of parameters cannot be cut); start the optimizer anew with init'
        )

    paths, leaves, treedef = tree_lib.flatten_with_paths(tree)
    return treedef.unflatten(map(map_leaf, paths, leaves))


def is_packed(value: Any, shape: Shape) -> bool:
    """Whether an array is the packed mask of a parameter of this shape."""
    if value.dtype != jnp.uint8:
        return False
    is_flat = value.shape == sparse_state_lib.packed_shape((math.prod(shape),))
    return is_flat or sparse_state_lib.axis_of_bits(value.shape, shape) is not None
