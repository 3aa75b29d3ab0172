"""Cuts arrays: finds which positions stay along an axis, and takes them.

Flags say which positions of an axis stay. If all layers of a scan keep the same channels, the flags have only that
axis. If each layer keeps channels of its own, the flags have an axis for the layers, too. In the body of the scan a
value belongs to one layer. There the flags have an axis for the trips, and are read at the current trip.

    keep the same units      flags of a kernel (inputs, units): [1, units]
    units of their own       flags of the stack of kernels (layers, inputs, units): [layers, 1, units]
    in the body of the scan  flags of one kernel, with an axis for the trips in front: [layers, 1, units],
                             and at trip t, which may be traced: [1, units]
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

    def equal(self, other: 'Lists') -> bool:
        """Whether the same channels stay, for the same owners."""
        return self.owners == other.owners and np.array_equal(self.table, other.table)

    def stays(self, size: int) -> np.ndarray:
        """Whether each of `size` channels stays: flags of shape `(*sizes of the owners, size)`."""
        owner_sizes = self.table.shape[:-1]
        flags = np.zeros((*owner_sizes, size), bool)
        np.put_along_axis(flags, self.table, True, axis=-1)
        return flags


class _TripTable(NamedTuple):
    """Flags or positions of a value, for each trip of the scans around it.

    Attributes:
      trip_axes: how many of the first axes are those of scans, the outermost first; 0 outside of scans.
      table: of shape `(*trips, *axes of the value)`, with one element along axes on which it does not depend.
    """

    trip_axes: int
    table: np.ndarray

    def at(self, trips: Iterable[Any]) -> Any:
        """The part for the current trips, in the rank of the value."""
        trip_counts = self.table.shape[: self.trip_axes]
        if all(size == 1 for size in trip_counts):
            shape = self.table.shape[self.trip_axes :]
            return self.table.reshape(shape)
        index = []
        for trip, size in zip(trips, trip_counts, strict=True):
            index.append(trip if size > 1 else 0)
        return jnp.asarray(self.table)[tuple(index)]


class Cut:
    """The channels that stay.

    Attributes:
      lists: atom -> its channels that stay. All channels of other atoms stay.
      trips: in the body of a scan, atom of the trips -> the current trip.

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
        self._first_channels: dict[Axis, np.ndarray] = {}
        for atom, lists_of_atom in lists.items():
            count = lists_of_atom.table.shape[-1]
            self._first_channels[atom] = np.arange(count)
        self._sizes: dict[int, tuple[Axis, int]] = {}  # by `id`; the axis stays alive

    def inside(self, trips: Mapping[Axis, Any]) -> 'Cut':
        """The same cut in the body of a scan."""
        all_trips = {**self.trips, **trips}
        return Cut(self.lists, all_trips)

    def owners_of(self, channels: Iterable[Axis]) -> set[Axis]:
        """The atoms that own lists of some atoms."""
        owners: set[Axis] = set()
        for atom in channels:
            if atom in self.lists:
                owners.update(self.lists[atom].owners)
        return owners

    def has_lists_of(self, owners: Iterable[Axis]) -> bool:
        """Whether one of these atoms owns lists."""
        all_owners = self.owners_of(self.lists)
        return not all_owners.isdisjoint(owners)

    def has_lists_along(self, axes: Axes) -> bool:
        """Whether an owner has lists of the channels along one of these axes."""
        return bool(self._owners_along(axes))

    def _owners_along(self, axes: Iterable[Axis]) -> set[Axis]:
        """The atoms that own lists of channels along some axes."""
        owners: set[Axis] = set()
        for axis in axes:
            owners |= self.owners_of(atoms(axis))
        return owners

    def size(self, axis: Axis) -> int:
        """How many positions of an axis stay."""
        axis = axis.resolved()
        if id(axis) not in self._sizes:
            kept = kept_positions(axis, self._first_channels)
            self._sizes[id(axis)] = axis, len(kept)
        _, size = self._sizes[id(axis)]
        return size

    def size_before(self, axis: Axis, position: int) -> int:
        """How many positions before this one stay. A part of a concatenation begins or ends there."""
        kept = kept_positions(axis, self._first_channels)
        return int(np.searchsorted(kept, position))

    def shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of a value of these axes after the cut."""
        return tuple(map(self.size, axes))

    def shortens(self, axis: Axis) -> bool:
        """Whether an axis gets shorter."""
        return self.size(axis) != axis.size

    def touches(self, values: Iterable[Axes]) -> bool:
        """Whether one of some values gets smaller."""
        return any(map(self.shrinks, values))

    def shrinks(self, axes: Axes) -> bool:
        """Whether a value of these axes gets smaller."""
        return any(map(self.shortens, axes))

    def order(self, axes: Axes) -> list[int]:
        """The axes that get shorter, in the order of cutting them. An owner of lists is cut after the lists.

        Raises:
          ValueError: two groups own each other's lists.
        """
        remaining = [i for i, axis in enumerate(axes) if self.shortens(axis)]
        ordered: list[int] = []
        while remaining:
            i = self._next_to_cut(axes, remaining)
            if i is None:
                sizes = [axes[i].size for i in remaining]
                raise ValueError(
                    f"groups along axes of {sizes} own each other's lists; give one of them a single list"
                )
            ordered.append(i)
            remaining.remove(i)
        return ordered

    def _next_to_cut(self, axes: Axes, remaining: list[int]) -> int | None:
        """The first axis whose channels own no lists of the other axes."""
        for i in remaining:
            others = [axes[k] for k in remaining if k != i]
            owners = self._owners_along(others)
            if owners.isdisjoint(atoms(axes[i])):
                return i
        return None

    def stays(self, axes: Axes, i: int) -> np.ndarray:
        """Flags of the positions that stay along an axis of a value outside of scans.

        They have the rank of the value, with one element along axes on which they do not depend.
        """
        assert not self.trips, 'in the body of a scan flags depend on the trip'
        return self._stays_in_trips(axes, i).table

    def _stays_in_trips(self, axes: Axes, i: int) -> _TripTable:
        """Flags of the positions that stay along an axis, in each trip."""
        ones = self._ones(axes)
        flags = np.ones(ones, bool)
        for atom in dict.fromkeys(atoms(axes[i])):
            if atom in self.lists:
                flags = flags & self._stays_by(atom, axes, i)
        axis_of_flags = len(self.trips) + i
        shape = replace(flags.shape, axis_of_flags, axes[i].size)
        table = np.broadcast_to(flags, shape)
        return _TripTable(len(self.trips), table)

    def _stays_by(self, atom: Axis, axes: Axes, i: int) -> np.ndarray:
        """Flags of the positions that one atom leaves along an axis: the table of a `_TripTable`."""
        lists = self.lists[atom]
        stays_in_list = lists.stays(atom.size)
        stays = np.array(True)
        for index in self.channel_indices(axes, i, atom, lists.owners):
            has_no_channel = index[-1] < 0
            stays = stays & (has_no_channel | stays_in_list[index])
        return stays

    def take(self, value: Any, axes: Axes, first: int = 0) -> Any:
        """Cuts a value along its axes from `first` on; returns the value itself if all of it stays."""
        for i in self.order(axes):
            if i >= first:
                kept = self._kept_along(axes, i)
                value = take_along(value, kept, i)
        return value

    def _kept_along(self, axes: Axes, i: int) -> Any:
        """The positions that stay along an axis at the current trips, in the rank of the value."""
        trip_axes, stays = self._stays_in_trips(axes, i)
        axis = trip_axes + i
        flags = np.moveaxis(stays, axis, -1)
        *_, kept = np.nonzero(flags)
        *other_sizes, _ = flags.shape
        size = self.size(axes[i])
        kept = kept.reshape(*other_sizes, size)
        kept = np.moveaxis(kept, -1, axis)
        return _TripTable(trip_axes, kept).at(self.trips.values())

    def channel_indices(
        self, axes: Axes, i: int, atom: Axis, owners: Iterable[Axis]
    ) -> list[tuple[np.ndarray, ...]]:
        """For each element of a value the indices of its owners, and last the index of its channel along an axis.

        Elements with several channels along the axis, as in `h * h`, have one such tuple for each. The arrays have the
        axes of a `_TripTable`: those of the trips, then those of the value. The channel is -1 where there is none.
        """
        owner_indices = [self._owner_index(axes, owner) for owner in owners]
        channels = self._indices_along(axes, i, atom)
        return [(*owner_indices, channel) for channel in channels]

    def _owner_index(self, axes: Axes, owner: Axis) -> np.ndarray:
        """The index of an owner for each element of a value."""
        if owner in self.trips:
            number = list(self.trips).index(owner)
            trips = np.arange(owner.size)
            return self._spread(axes, number, trips)
        for k in range(len(axes)):
            for index in self._indices_along(axes, k, owner):
                return index  # a value has each owner once
        raise AssertionError(f'a value of shape {axes} has channels, but no owner of their lists')

    def _indices_along(self, axes: Axes, i: int, atom: Axis) -> list[np.ndarray]:
        """The indices of an atom for each position along an axis, -1 where there is none."""
        number = len(self.trips) + i
        return [self._spread(axes, number, index) for index in indices_of(atom, axes[i])]

    def _spread(self, axes: Axes, number: int, index: np.ndarray) -> np.ndarray:
        """An index along one axis of the trips or of a value, in the rank of both together."""
        shape = replace(self._ones(axes), number, -1)
        return index.reshape(shape)

    def _ones(self, axes: Axes) -> tuple[int, ...]:
        """A shape of ones, in the rank of the trips and of a value together."""
        rank = len(self.trips) + len(axes)
        return (1,) * rank


def take_along(value: Any, kept: Any, axis: int, **out_of_bounds: Any) -> Any:
    """Takes elements along an axis, on the device where the value is.

    Args:
      value: the value.
      kept: the positions, in the rank of the value, with one element along axes on which they do not depend.
      axis: of the value.
      **out_of_bounds: settings of `jnp.take` for positions beyond the end. Without them there are none.
    """
    settings = out_of_bounds or {'mode': 'clip'}
    is_one_list = kept.size == kept.shape[axis]
    if is_one_list:
        positions = kept.reshape(-1)
        return jnp.take(value, positions, axis=axis, **settings)
    array = jnp.asarray(value)
    return jnp.take_along_axis(array, kept, axis=axis, **settings)
