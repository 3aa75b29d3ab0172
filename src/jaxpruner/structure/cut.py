"""What a cut keeps: along any axis the positions that stay, and values with these alone.

Which positions stay along an axis is a mask. Where all layers of a scan keep the same channels it has that axis alone.
Where each layer keeps channels of its own, the mask has the axis of the layers, too; in the body of the scan, where a
value belongs to one layer, that is the axis of the trips, of which the trip at hand is looked up.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner.structure.axes import Axes, Axis, atoms
from jaxpruner.structure.positions import Keep, indices_of, kept_positions, occurrences


class Lists(NamedTuple):
    """Channels that stay for each index of their owners.

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
      trips: atom of the trips of a scan -> the trip at hand, in its body.

    >>> from jaxpruner.structure.axes import atom, product
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
        # How many channels stay says as much of sizes as which ones.
        self._counted: Keep = {
            atom: np.arange(each.table.shape[-1]) for atom, each in lists.items()
        }
        self._sizes: dict[int, tuple[Axis, int]] = {}  # by `id`; the axis stays alive

    def inside(self, trips: Mapping[Axis, Any]) -> 'Cut':
        """The same cut in the body of a scan."""
        return Cut(self.lists, {**self.trips, **trips})

    def has_lists_of(self, owners: Iterable[Axis]) -> bool:
        """Whether one of these atoms owns lists."""
        owned = {owner for each in self.lists.values() for owner in each.owners}
        return not owned.isdisjoint(owners)

    def has_lists_along(self, axes: Axes) -> bool:
        """Whether what stays along one of these axes differs between the indices of an owner."""
        for axis in axes:
            for each in atoms(axis):
                if each in self.lists and self.lists[each].owners:
                    return True
        return False

    def size(self, axis: Axis) -> int:
        """How many positions of an axis stay."""
        axis = axis.resolved()
        if id(axis) not in self._sizes:
            self._sizes[id(axis)] = axis, len(kept_positions(axis, self._counted))
        return self._sizes[id(axis)][1]

    def size_before(self, axis: Axis, position: int) -> int:
        """How many positions before this one stay; the one is where a part of a concatenation begins, or the end."""
        return int(np.searchsorted(kept_positions(axis, self._counted), position))

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of a value of these axes after the cut."""
        return tuple(map(self.size, axes))

    def touches(self, values: Iterable[Axes]) -> bool:
        """Whether one of some values gets smaller."""
        return any(self.size(axis) != axis.size for axes in values for axis in axes)

    def order(self, axes: Axes) -> list[int]:
        """The axes that get smaller: those with lists before their owners, which have to be whole meanwhile.

        Raises:
          ValueError: two groups own each other's lists.
        """
        remaining = [i for i, axis in enumerate(axes) if self.size(axis) != axis.size]
        atoms_along = {i: {each.atom for each in occurrences(axes[i])} for i in remaining}
        ordered: list[int] = []
        while remaining:
            free = [i for i in remaining if not self._owns(i, remaining, atoms_along)]
            if not free:
                sizes = [axes[i].size for i in remaining]
                raise ValueError(
                    f'groups along axes of {sizes} have lists for each channel of the other; give one of them one list'
                )
            ordered.append(free[0])
            remaining.remove(free[0])
        return ordered

    def _owns(self, i: int, others: Iterable[int], atoms_along: Mapping[int, set[Axis]]) -> bool:
        """Whether what lies along an axis owns lists along another one."""
        owners: set[Axis] = set()
        for k in others:
            if k != i:
                for atom in atoms_along[k] & self.lists.keys():
                    owners.update(self.lists[atom].owners)
        return not owners.isdisjoint(atoms_along[i])

    def stays(self, axes: Axes, i: int) -> Any:
        """Flags of the positions along an axis that stay.

        They have the rank of the value, and one element along axes that have no part in it.
        """
        rank = len(self.trips) + len(axes)
        flags = np.ones((1,) * rank, bool)
        for atom in dict.fromkeys([each.atom for each in occurrences(axes[i])]):
            if atom not in self.lists:
                continue
            each = self.lists[atom]
            index = self.channel_index(axes, i, atom, each.owners)
            flags = flags & ((index[-1] < 0) | each.stays(atom.size)[index])
        return np.broadcast_to(flags, _with_size(flags.shape, rank - len(axes) + i, axes[i].size))

    def at_trip(self, table: np.ndarray) -> Any:
        """The part of a table with an axis for each scan that belongs to the trips at hand."""
        trips = list(self.trips.values())
        if not trips or max(table.shape[: len(trips)]) == 1:
            return table.reshape(table.shape[len(trips) :])
        own = [
            trip if size > 1 else 0
            for trip, size in zip(trips, table.shape[: len(trips)], strict=True)
        ]
        return jnp.asarray(table)[tuple(own)]

    def take(self, value: Any, axes: Axes, first: int = 0) -> Any:
        """The part of a value that stays, along its axes from `first` on; the value itself if that is all of it."""
        for i in self.order(axes):
            if i >= first:
                flags = self.stays(axes, i)
                along = i - len(axes)
                moved = np.moveaxis(flags, along, -1)
                places = np.nonzero(moved)[-1].reshape(*moved.shape[:-1], self.size(axes[i]))
                places = self.at_trip(np.moveaxis(places, -1, along))
                value = take_along(value, places, i)
        return value

    def channel_index(
        self, axes: Axes, i: int, atom: Axis, owners: Iterable[Axis]
    ) -> tuple[np.ndarray, ...]:
        """For each element of a value the index of its owners, and last that of its channel along an axis.

        The arrays have the rank of the value, and one element along axes that have no part in them. The channel is -1
        where there is none.
        """
        indices = [self._owner_index(axes, owner) for owner in owners]
        return (*indices, self._along(axes, i, atom))

    def _owner_index(self, axes: Axes, owner: Axis) -> np.ndarray:
        """The index of an owner for each element of a value."""
        if owner in self.trips:
            rank = len(self.trips) + len(axes)
            number = list(self.trips).index(owner)
            return np.arange(owner.size).reshape(_with_size((1,) * rank, number, owner.size))
        for k in range(len(axes)):
            index = self._along(axes, k, owner)
            if (index >= 0).any():
                return index
        raise AssertionError(f'a value of shape {axes} has channels, and not what owns their lists')

    def _along(self, axes: Axes, i: int, atom: Axis) -> np.ndarray:
        """The index of an atom for each position along an axis, -1 where it has none."""
        index = indices_of(atom, axes[i])
        rank = len(self.trips) + len(axes)
        return index.reshape(_with_size((1,) * rank, len(self.trips) + i, axes[i].size))


def _with_size(shape: tuple[int, ...], i: int, size: int) -> tuple[int, ...]:
    return (*shape[:i], size, *shape[i + 1 :])


def take_along(value: Any, places: Any, axis: int, **out_of_bounds: Any) -> Any:
    """Elements along an axis, on the device where the value is.

    Args:
      value: the value.
      places: of the rank of the value, with one element along axes on which they do not depend.
      axis: of the value.
      **out_of_bounds: what stands at places beyond the end, where there are some.
    """
    settings = out_of_bounds or {'mode': 'clip'}
    if places.size == places.shape[axis]:
        return jnp.take(value, places.reshape(-1), axis=axis, **settings)
    return jnp.take_along_axis(jnp.asarray(value), places, axis=axis, **settings)
