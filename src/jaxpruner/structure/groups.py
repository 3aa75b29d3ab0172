"""Makes the groups of a `ChannelGraph` from the axes of a traced model, and names them."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms_of_values, sizes_of
from jaxpruner.structure.analysis.lists import owners_of_lists
from jaxpruner.structure.analysis.members import Group, Member, PinnedAxis
from jaxpruner.structure.analysis.positions import Occurrence, occurrences
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.analysis.zeros import inexact_atoms
from jaxpruner.structure.graph import ChannelGraph
from jaxpruner.tree import Path


class _Spot(NamedTuple):
    """Where an atom lies along an axis of a leaf of the parameters or of the states.

    Attributes:
      leaf: its number.
      axis: of the leaf.
      occurrence: of the atom in the axis.
    """

    leaf: int
    axis: int
    occurrence: Occurrence


Spots = Sequence[_Spot]


def find_groups(traces: Sequence[Trace]) -> ChannelGraph:
    """Makes the graph of a model with these programs: its groups, pinned axes and unused leaves."""
    trace = traces[0]
    pinned: list[PinnedAxis] = []
    unused: list[Path] = []
    spots_of: dict[Axis, list[_Spot]] = {}
    for leaf, (path, axes) in enumerate(trace.named_leaves):
        is_used = any(trace.used[leaf] for trace in traces)
        if not is_used:
            unused.append(path)
            continue
        if all(axis.size <= 1 for axis in axes):
            pinned.append(PinnedAxis(path, None, 0, 1, None))
        for spot in _spots_in(leaf, axes):
            _, axis, occurrence = spot
            atom = occurrence.atom
            if atom.size <= 1:
                continue
            if atom.pin is None:
                spots_of.setdefault(atom, []).append(spot)
            else:
                offset = occurrence.offset
                pinned.append(PinnedAxis(path, axis, offset, atom.size, atom.pin))
    return ChannelGraph(
        groups=_make_groups(traces, spots_of),
        pinned=tuple(pinned),
        unused=tuple(unused),
        trace=trace,
        others=tuple(traces[1:]),
    )


def _spots_in(leaf: int, axes: Axes) -> Iterator[_Spot]:
    """Yields where atoms lie in a leaf."""
    for i, axis in enumerate(axes):
        for occurrence in occurrences(axis):
            yield _Spot(leaf, i, occurrence)


def _make_groups(traces: Sequence[Trace], spots_of: Mapping[Axis, Spots]) -> dict[str, Group]:
    """Makes the groups by name, in the order in which the model uses their first leaves."""
    trace = traces[0]
    inexact = inexact_atoms(traces)
    owners = owners_of_lists(traces, spots_of)
    all_trips = [tuple(trace.trips.values()) for trace in traces]
    trips = set(atoms_of_values(all_trips))
    in_states = _members_in_states(traces)
    order = functools.partial(_order_of, traces)
    groups = {}
    first_spots = {}
    for atom, spots in spots_of.items():
        first_spots[atom] = min(spots, key=order)

    def order_of_first(atom: Axis) -> tuple[int, ...]:
        return order(first_spots[atom])

    for atom in sorted(spots_of, key=order_of_first):
        spots = spots_of[atom]
        reason = inexact.get(atom, '')
        name = _name_group(trace, first_spots[atom])
        members = []
        for spot in spots:
            path = trace.paths[spot.leaf]
            members.append(_make_member(path, spot))
        groups[name] = Group(
            name=name,
            size=atom.size,
            members=tuple(members),
            parameters=_count_parameters(trace, spots),
            exact=not reason,
            reason=reason,
            atom=atom,
            lists=owners.get(atom, ()),
            is_depth=atom in trips,
            in_state=tuple(in_states.get(atom, ())),
        )
    return groups


def _members_in_states(traces: Iterable[Trace]) -> dict[Axis, list[Member]]:
    """Where atoms lie in states. A leaf of several programs counts once."""
    axes_of_states: dict[Path, Axes] = {}
    for trace in traces:
        for path, axes in trace.named_states:
            axes_of_states.setdefault(path, axes)
    members: dict[Axis, list[Member]] = {}
    for leaf, (path, axes) in enumerate(axes_of_states.items()):
        for spot in _spots_in(leaf, axes):
            member = _make_member(path, spot)
            members.setdefault(spot.occurrence.atom, []).append(member)
    return members


def _order_of(traces: Iterable[Trace], spot: _Spot) -> tuple[int, ...]:
    """A key that sorts leaves by first use, axes of a leaf from last to first, and outer parts before inner ones."""
    uses = [trace.first_uses[spot.leaf] for trace in traces]
    occurrence = spot.occurrence
    return *uses, -spot.axis, occurrence.offset, -occurrence.stride


def _make_member(path: Path, spot: _Spot) -> Member:
    _, offset, stride, repeats = spot.occurrence
    return Member(path, spot.axis, offset, stride, repeats, spot.occurrence)


def _name_group(trace: Trace, spot: _Spot) -> str:
    """Names the leaf and axis of a group, with a slice if its channels are only a part of the axis."""
    path = tree_lib.path_string(trace.paths[spot.leaf])
    name = f'{path}[{spot.axis}]'
    length = trace.leaves[spot.leaf][spot.axis].size
    atom, start, stride, _ = spot.occurrence
    if atom.size == length:
        return name
    stop = start + atom.size * stride
    step = f':{stride}' if stride > 1 else ''
    return f'{name}[{start}:{stop}{step}]'


def _count_parameters(trace: Trace, spots: Spots) -> int:
    """Counts the parameters along an atom, each once."""
    # Leaf -> for each axis, flags of positions without a channel.
    has_none: dict[int, list[np.ndarray]] = {}
    for spot in spots:
        sizes = sizes_of(trace.leaves[spot.leaf])
        flags = has_none.setdefault(spot.leaf, [np.ones(size, bool) for size in sizes])
        flags[spot.axis][spot.occurrence.positions()] = False
    count = 0
    for leaf, flags in has_none.items():
        sizes_without = map(np.count_nonzero, flags)
        count += math.prod(sizes_of(trace.leaves[leaf])) - math.prod(map(int, sizes_without))
    return count
