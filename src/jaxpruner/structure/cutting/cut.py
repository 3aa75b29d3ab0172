"""Cuts arrays: finds which positions stay along an axis, and takes them.

A mask says which positions of an axis stay. If all layers of a scan keep the same channels, the mask has that axis
alone. If each layer keeps channels of its own, the mask has an axis for the layers, too. In the body of the scan a
value belongs to one layer. There the mask has an axis for the trips, and is read at the current trip.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.analysis.axes import Axes, Axis, atoms, replace
from jaxpruner.structure.analysis.positions import indices_of, kept_positions


class Lists(NamedTuple):
    """The channels that stay, listed for each index of their owners.

    Attributes:
      owners: atoms such as the trips of a scan, experts, or heads.
      table: of shape `(*sizes of the owners, channels that stay)`, ascending along the last axis.
    """

    owners: tuple[Axis, ...]
    table: np.ndarray

    def stays(self, size: int) -> np.ndarray:
        """Whether each of `size` channels stays: flags of shape `(*sizes of the owners, size)`."""
        flags = np.zeros((*self.table.shape[:-1], size), bool)
        np.put_along_axis(flags, self.table, True, axis=-1)
        return flags


class Cut:
    """The channels that stay.

    Attributes:
      lists: atom -> what stays; of other atoms all channels do.
      trips: atom of the trips of a scan -> the current trip, in its body.

    >>> from jaxpruner.structure.analysis.axes import atom, product
    >>> heads, features = atom(2), atom(3)
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
        self._counted: dict[Axis, np.ndarray] = {}
        for atom, each in lists.items():
            count = each.table.shape[-1]
            self._counted[atom] = np.arange(count)
        self._sizes: dict[int, tuple[Axis, int]] = {}  # by `id`; the axis stays alive

    def inside(self, trips: Mapping[Axis, Any]) -> 'Cut':
        """The same cut in the body of a scan."""
        return Cut(self.lists, {**self.trips, **trips})

    def owners_of(self, channels: Iterable[Axis]) -> set[Axis]:
        """The atoms that own lists of some atoms."""
        owners: set[Axis] = set()
        for atom in channels:
            if atom in self.lists:
                owners.update(self.lists[atom].owners)
        return owners

    def has_lists_of(self, owners: Iterable[Axis]) -> bool:
        """Whether one of these atoms owns lists."""
        owned = self.owners_of(self.lists)
        return not owned.isdisjoint(owners)

    def has_lists_along(self, axes: Axes) -> bool:
        """Whether what stays along one of these axes differs between the indices of an owner."""
        return any(self.owners_of(atoms(axis)) for axis in axes)

    def size(self, axis: Axis) -> int:
        """How many positions of an axis stay."""
        axis = axis.resolved()
        if id(axis) not in self._sizes:
            kept = kept_positions(axis, self._counted)
            self._sizes[id(axis)] = axis, len(kept)
        _, size = self._sizes[id(axis)]
        return size

    def size_before(self, axis: Axis, position: int) -> int:
        """How many positions before this one stay. It is where a part of a concatenation begins, or the end."""
        kept = kept_positions(axis, self._counted)
        return int(np.searchsorted(kept, position))

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of a value of these axes after the cut."""
        return tuple(map(self.size, axes))

    def touches(self, values: Iterable[Axes]) -> bool:
        """Whether one of some values gets smaller."""
        return any(map(self._cut_axes, values))

    def _cut_axes(self, axes: Axes) -> list[int]:
        """The axes of a value that get smaller."""
        return [i for i, axis in enumerate(axes) if self.size(axis) != axis.size]

    def order(self, axes: Axes) -> list[int]:
        """The axes that get smaller, in the order of the cuts: lists are read off owners that are still whole.

        Raises:
          ValueError: two groups own each other's lists.
        """
        remaining = self._cut_axes(axes)
        atoms_along: dict[int, list[Axis]] = {}
        owners_along: dict[int, set[Axis]] = {}
        for i in remaining:
            atoms_along[i] = atoms(axes[i])
            owners_along[i] = self.owners_of(atoms_along[i])
        ordered: list[int] = []
        while remaining:
            for i in remaining:
                others = [owners_along[k] for k in remaining if k != i]
                if set().union(*others).isdisjoint(atoms_along[i]):
                    break
            else:
                sizes = [axes[i].size for i in remaining]
                raise ValueError(
                    f'groups along axes of {sizes} have lists for each channel of the other; give one of them one list'
                )
            ordered.append(i)
            remaining.remove(i)
        return ordered

    def stays(self, axes: Axes, i: int) -> Any:
        """Flags of the positions along an axis that stay.

        They have the rank of the value, and one element along axes that have no part in it.
        """
        rank = len(self.trips) + len(axes)
        flags = np.ones((1,) * rank, bool)
        for atom in dict.fromkeys(atoms(axes[i])):
            if atom in self.lists:
                flags = flags & self._stays_by(atom, axes, i)
        shape = replace(flags.shape, len(self.trips) + i, axes[i].size)
        return np.broadcast_to(flags, shape)

    def _stays_by(self, atom: Axis, axes: Axes, i: int) -> np.ndarray:
        """Which positions along an axis stay as far as one atom is concerned."""
        lists = self.lists[atom]
        index = self.channel_index(axes, i, atom, lists.owners)
        has_no_channel = index[-1] < 0
        return has_no_channel | lists.stays(atom.size)[index]

    def at_trip(self, table: np.ndarray) -> Any:
        """The part of a table that belongs to the current trips; its first axes are those of the scans."""
        count = len(self.trips)
        sizes, shape = table.shape[:count], table.shape[count:]
        if all(size == 1 for size in sizes):
            return table.reshape(shape)
        index = []
        for trip, size in zip(self.trips.values(), sizes, strict=True):
            index.append(trip if size > 1 else 0)
        return jnp.asarray(table)[tuple(index)]

    def take(self, value: Any, axes: Axes, first: int = 0) -> Any:
        """Takes what stays of a value along its axes from `first` on; returns the value itself if all of it stays."""
        for i in self.order(axes):
            if i >= first:
                value = take_along(value, self._places(axes, i), i)
        return value

    def _places(self, axes: Axes, i: int) -> Any:
        """The positions along an axis that stay, in the rank of the value."""
        along = i - len(axes)
        flags = np.moveaxis(self.stays(axes, i), along, -1)
        positions = np.nonzero(flags)[-1]
        places = positions.reshape(*flags.shape[:-1], self.size(axes[i]))
        return self.at_trip(np.moveaxis(places, -1, along))

    def channel_index(
        self, axes: Axes, i: int, atom: Axis, owners: Iterable[Axis]
    ) -> tuple[np.ndarray, ...]:
        """For each element of a value the index of its owners, and last that of its channel along an axis.

        The arrays have the rank of the value, and one element along axes that have no part in them. The channel is -1
        where there is none.
        """
        indices = [self._owner_index(axes, owner) for owner in owners]
        return (*indices, self._index_along(axes, i, atom))

    def _owner_index(self, axes: Axes, owner: Axis) -> np.ndarray:
        """The index of an owner for each element of a value."""
        if owner in self.trips:
            number = list(self.trips).index(owner)
            return self._along(axes, number, np.arange(owner.size))
        for k in range(len(axes)):
            index = self._index_along(axes, k, owner)
            if (index >= 0).any():
                return index
        raise AssertionError(f'a value of shape {axes} has channels, and not what owns their lists')

    def _index_along(self, axes: Axes, i: int, atom: Axis) -> np.ndarray:
        """The index of an atom for each position along an axis, -1 where it has none."""
        return self._along(axes, len(self.trips) + i, indices_of(atom, axes[i]))

    def _along(self, axes: Axes, number: int, index: np.ndarray) -> np.ndarray:
        """An index along one axis, of the trips or of a value, in the rank of both together."""
        ones = (1,) * (len(self.trips) + len(axes))
        return index.reshape(replace(ones, number, -1))


def take_along(value: Any, places: Any, axis: int, **out_of_bounds: Any) -> Any:
    """Takes elements along an axis, on the device where the value is.

    Args:
      value: the value.
      places: of the rank of the value, with one element along axes on which they do not depend.
      axis: of the value.
      **out_of_bounds: settings of `jnp.take` for places beyond the end, if there are some.
    """
    settings = out_of_bounds or {'mode': 'clip'}
    if places.size == places.shape[axis]:
        return jnp.take(value, places.reshape(-1), axis=axis, **settings)
    return jnp.take_along_axis(jnp.asarray(value), places, axis=axis, **settings)
