"""Makes the groups of a `ChannelGraph` from the axes of a traced model."""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Sequence

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, Axis, atoms
from jaxpruner.structure.analysis.lists import owners_of_lists
from jaxpruner.structure.analysis.members import Group, Member, PinnedAxis
from jaxpruner.structure.analysis.positions import Occurrence, occurrences
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.analysis.zeros import inexact_atoms
from jaxpruner.structure.graph import ChannelGraph


@dataclasses.dataclass
class _Place:
    """An atom in an axis of a leaf: of the parameters, or of the states."""

    leaf: int
    axis: int
    occurrence: Occurrence


def find_groups(traces: Sequence[Trace]) -> ChannelGraph:
    """The groups of a model with these programs, and what is pinned or unused."""
    trace = traces[0]
    places: dict[Axis, list[_Place]] = {}
    pinned = []
    unused = []
    for leaf, (path, axes) in enumerate(zip(trace.paths, trace.leaves, strict=True)):
        if not any(each.used[leaf] for each in traces):
            unused.append(path)
            continue
        if all(axis.size <= 1 for axis in axes):
            pinned.append(PinnedAxis(path, None, 0, 1, None))
        for i, axis in enumerate(axes):
            for found in occurrences(axis):
                size, pin = found.atom.size, found.atom.pin
                if pin is not None and size > 1:
                    pinned.append(PinnedAxis(path, i, found.offset, size, pin))
                elif size > 1:
                    places.setdefault(found.atom, []).append(_Place(leaf, i, found))
    inexact = inexact_atoms(traces)
    owners = owners_of_lists(traces, places)
    trips = {atom for each in traces for axis in each.trips.values() for atom in atoms(axis)}
    in_states = _members_in_states(traces)
    order = functools.partial(_order, traces)
    groups = []
    for atom, places_of_atom in places.items():
        first = min(places_of_atom, key=order)
        reason = inexact.get(atom, '')
        members = [_member(trace.paths[place.leaf], place) for place in places_of_atom]
        group = Group(
            name=_name(trace, first),
            size=atom.size,
            members=tuple(members),
            parameters=_parameters(trace, places_of_atom),
            exact=not reason,
            reason=reason,
            atom=atom,
            lists=owners.get(atom, ()),
            is_depth=atom in trips,
            in_state=tuple(in_states.get(atom, ())),
        )
        groups.append((order(first), group))
    groups.sort(key=operator.itemgetter(0))
    by_name = {group.name: group for _, group in groups}
    return ChannelGraph(by_name, tuple(pinned), tuple(unused), trace, others=tuple(traces[1:]))


def _members_in_states(traces: Iterable[Trace]) -> dict[Axis, list[Member]]:
    """Where atoms lie in states; a leaf that several programs have counts once."""
    axes_of_states: dict[tree_lib.Path, Axes] = {}
    for trace in traces:
        for path, axes in zip(trace.state_paths, trace.states, strict=True):
            axes_of_states.setdefault(path, axes)
    members: dict[Axis, list[Member]] = {}
    for number, (path, axes) in enumerate(axes_of_states.items()):
        for i, axis in enumerate(axes):
            for found in occurrences(axis):
                member = _member(path, _Place(number, i, found))
                members.setdefault(found.atom, []).append(member)
    return members


def _order(traces: Iterable[Trace], place: _Place) -> tuple[int, ...]:
    """Leaves in the order of their first use; of one leaf the last axis first, outer parts before inner ones."""
    found = place.occurrence
    uses = [trace.first_uses[place.leaf] for trace in traces]
    return *uses, -place.axis, found.offset, -found.stride


def _member(path: tree_lib.Path, place: _Place) -> Member:
    found = place.occurrence
    return Member(path, place.axis, found.offset, found.stride, found.repeats, found)


def _name(trace: Trace, place: _Place) -> str:
    """The leaf and the axis, and where the channels lie along it if they are not all of it."""
    name = f'{tree_lib.path_string(trace.paths[place.leaf])}[{place.axis}]'
    length = trace.leaves[place.leaf][place.axis].size
    found = place.occurrence
    size = found.atom.size
    if size == length:
        return name
    stop = found.offset + size * found.stride
    step = f':{found.stride}' if found.stride > 1 else ''
    return f'{name}[{found.offset}:{stop}{step}]'


def _parameters(trace: Trace, places: Sequence[_Place]) -> int:
    """How many parameters lie along an atom, each counted once."""
    along: dict[int, dict[int, int]] = {}
    for place in places:
        found = place.occurrence
        repeats = math.prod(count for count, _ in found.repeats)
        length = found.atom.size * found.stride * repeats
        of_leaf = along.setdefault(place.leaf, {})
        of_leaf[place.axis] = of_leaf.get(place.axis, 0) + length
    count = 0
    for leaf, of_leaf in along.items():
        sizes = [axis.size for axis in trace.leaves[leaf]]
        others = [size - of_leaf.get(i, 0) for i, size in enumerate(sizes)]
        count += math.prod(sizes) - math.prod(others)
    return count
