"""What is kept: checked, as flags of positions that stay along an axis, and taken out of arrays.

If all layers of a scan keep the same channels, the flags have only that axis. If each layer keeps channels of its own,
the flags have an axis for the layers, too. In the body of the scan a value belongs to one layer. There the flags have
an axis for the trips, and are read at the current trip.

    keep the same units      flags of a kernel (inputs, units): [1, units]
    units of their own       flags of the stack of kernels (layers, inputs, units): [layers, 1, units]
    in the body of the scan  flags of one kernel, with an axis for the trips in front: [layers, 1, units],
                             and at trip t, which may be traced: [1, units]
"""

import functools
import graphlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis, atoms, in_table, indices_of, size_with, sizes_of
from jaxpruner.structure.traces import EquationAxes
from jaxpruner.trace.program import bind
from jaxpruner.tree import Path

# Name of a group -> the indices of its channels that stay, ascending; or such a list for each trip, expert or head.
KeepByGroup = Mapping[str, Any]
Values = list[Any]


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

    @functools.cached_property
    def owners(self) -> frozenset[Axis]:
        """The atoms that own lists."""
        return frozenset([owner for own in self.lists.values() for owner in own.owners])

    def size(self, axis: Axis) -> int:
        """How many positions of an axis stay."""
        return size_with(axis, self._sizes)

    def size_before(self, axis: Axis, position: int) -> int:
        """How many positions before this one stay, where a part of a concatenation begins or ends."""
        parts = axis.parts if axis.form == 'sum' else (axis,)
        ends = itertools.accumulate(sizes_of(parts))
        return sum(
            [self.size(part) for part, end in zip(parts, ends, strict=True) if end <= position]
        )

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of a value of these axes after the cut."""
        return tuple(map(self.size, axes))

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
        owners = {}
        for i, axis in enumerate(axes):
            if self.shortens(axis):
                lists = [self.lists[atom].owners for atom in atoms(axis) if atom in self.lists]
                owners[i] = set(itertools.chain(*lists))
        earlier = {
            i: [k for k in owners if k != i and not owners[k].isdisjoint(atoms(axes[i]))]
            for i in owners
        }
        try:
            return list(graphlib.TopologicalSorter(earlier).static_order())
        except graphlib.CycleError:
            raise ValueError(
                f"groups along axes of {[axes[i].size for i in owners]} own each other's lists; give one of them a "
                'single list, or leave it whole'
            ) from None

    def stays(self, axes: Axes, i: int) -> np.ndarray:
        """Flags of the positions that stay along an axis of a value.

        They have the rank of the scans around the value and of the value together, with one element along axes on which
        they do not depend.
        """
        axes, i = (*self.trips, *axes), len(self.trips) + i
        flags = np.ones([axis.size if k == i else 1 for k, axis in enumerate(axes)], bool)
        for atom in dict.fromkeys(atoms(axes[i])):
            if atom not in self.lists:
                continue
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
        for i in self.order(axes):
            if i < first:
                continue
            flags = np.moveaxis(self.stays(axes, i), trips + i, -1)
            *_, kept = np.nonzero(flags)
            kept = np.moveaxis(kept.reshape(*flags.shape[:-1], self.size(axes[i])), -1, trips + i)
            if max(kept.shape[:trips], default=1) == 1:
                kept = kept.reshape(kept.shape[trips:])
            else:  # the positions that stay at the current trips
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


class EquationCut(NamedTuple):
    """An equation with some smaller operands or results.

    Attributes:
      equation: the equation.
      axes: of its operands and results.
      cut: the channels that stay along these axes.
    """

    equation: Any
    axes: EquationAxes
    cut: Cut

    def run(self, operands: Sequence[Any], **changed: Any) -> Values:
        """Runs the primitive on small operands, with some of its parameters changed."""
        return bind(self.equation, operands, changed)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the first result after the cut."""
        return self.cut.shape(self.axes.results[0])


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
        group = groups[name]
        table = _checked_indices(name, group, indices)
        if table.shape[-1] == group.size:
            continue
        if not (group.exact or allow_inexact):
            raise ValueError(
                f'removing channels of {name!r} is not the same as zeroing them: {group.reason}; keep all '
                f'{group.size} of them, or pass allow_inexact=True and train the smaller model'
            )
        owners = group.lists if table.ndim > 1 else ()
        lists[group.atom.resolved()] = Lists(tuple([each.resolved() for each in owners]), table)
    return Cut(lists)


def check_shape(path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuses an array of another shape than a leaf of the model, or of the smaller model."""
    if shape != expected:
        raise ValueError(
            f'{tree_lib.path_string(path)} has shape {shape}, where the model has {expected}; give arrays of the model '
            'that the graph was made of, and to a smaller one what graph.shrink returned'
        )


def _checked_indices(name: str, group: Any, indices: Any) -> np.ndarray:
    entry = f'keep[{name!r}]'
    positions = np.asarray(indices)  # an error of JAX if they are traced
    owners = sizes_of(group.lists)
    if positions.ndim != 1 and not (owners and positions.shape[:-1] == owners):
        lists = f', or an array of lists of shape {(*owners, "kept")}' if owners else ''
        raise ValueError(f'{entry} has shape {positions.shape}; give one list of indices{lists}')
    if not positions.size:
        raise ValueError(f'{entry} is empty; a group keeps at least one channel')
    if not np.issubdtype(positions.dtype, np.integer):
        raise TypeError(
            f'{entry} has {positions.flat[0]!r}; give indices, whole numbers; of a mask np.flatnonzero(mask)'
        )
    foreign = positions[(positions < 0) | (positions >= group.size)]
    if len(foreign):
        raise IndexError(
            f'{entry} has {foreign[0]}; the group has indices from 0 to {group.size - 1}'
        )
    if (np.diff(positions.astype(np.int64)) <= 0).any():
        raise ValueError(f'{entry} has indices twice or out of order; give np.unique(indices)')
    return positions
