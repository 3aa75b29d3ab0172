"""Groups: which channels can be removed together, where they lie, and which may differ between layers and heads.

Layers of a scan share the group of their hidden units, so all have the same number of units. But layer 3 may keep other
units than layer 5, since no operation compares units of different layers. The same holds for the features of heads and
the hidden units of experts. Each index of an atom t owns a list of channels of its own if

- every value with the channels also has t, once, or lies in the body of the scan whose trips t counts. A bias of the
  features alone, which all heads share, breaks this;
- no operation mixes different indices of t, as sorting the heads would;
- no contraction over t leaves the channels in its result, as the sum of all heads, feature by feature, would;
- no contraction of the channels has t in only one operand, as the product of the queries of many heads with the keys of
  one does: it pairs the features of different heads.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis, Pin, atoms, drop, occurrences, sizes_of
from jaxpruner.structure.traces import Trace
from jaxpruner.structure.zeros import inexact_atoms
from jaxpruner.tree import Path


@dataclasses.dataclass(frozen=True)
class Member:
    """Where the channels of a group lie along an axis of a leaf.

    Attributes:
      path: of the leaf.
      axis: of the leaf.
      offset: where the first channel begins.
      stride: how many neighbouring positions make one channel.
      repeats: pairs of a count and a distance, outermost first. For each pair, the channels occur `count` times, each
        time `distance` positions further on.

    >>> Member(('mlp', 'kernel'), axis=1, offset=0, stride=1, repeats=()).name
    'mlp/kernel'
    """

    path: Path
    axis: int
    offset: int
    stride: int
    repeats: tuple[tuple[int, int], ...]
    _occurrence: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The leaf's path as text."""
        return tree_lib.path_string(self.path)

    def positions(self) -> np.ndarray:
        """Where each channel lies: whole numbers of shape (channels, positions of one channel)."""
        return self._occurrence.positions()


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Channels that can be removed from a model, each with all of its members.

    Attributes:
      name: the leaf and the axis that make the channels, such as `mlp/up/kernel[1]`. If they are a part of the axis, a
        slice follows: `attention/qkv[1][0:64:16]` are 4 heads of 16 features.
      size: how many channels there are.
      members: what is removed with a channel, by path and axis.
      parameters: how many parameters lie along all channels together.
      exact: whether removing a channel is the same as setting its members to zero.
      reason: why it is not exact; empty if it is.
      atom: the group's atom in the axes of a `Trace`.
      lists: atoms that own lists of channels. Each of their indices, such as a trip of a scan, an expert or a head, may
        keep channels of its own. The kept channels are then an array of shape `(*sizes of these atoms, channels that
        are kept)`; `cut.Lists` holds it, with these atoms as its `owners`. Empty if all keep the same channels.
      is_depth: whether the channels are trips of a scan, such as stacked layers. Such a group is exact if a trip with
        zero parameters returns what it got, as a residual block does.
      in_state: where the channels lie in the state, which is cut and holds no parameters.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> graph = channel_groups(lambda p, x: (x @ p['a']) @ p['b'], {'a': jnp.ones((3, 8)), 'b': jnp.ones((8, 2))},
    ...                        jnp.ones((1, 3)))
    >>> group = graph.groups['a[1]']
    >>> group.size, group.parameters, group.members[1].positions()[:2].tolist()
    (8, 40, [[0], [1]])
    """

    name: str
    size: int
    members: tuple[Member, ...]
    parameters: int
    exact: bool
    reason: str
    atom: Axis = dataclasses.field(repr=False)
    lists: tuple[Axis, ...] = dataclasses.field(default=(), repr=False)
    is_depth: bool = False
    in_state: tuple[Member, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class PinnedAxis:
    """A leaf's axis, or a part of one, along which nothing can be removed.

    Attributes:
      path: of the leaf.
      axis: of the leaf; `None` if no axis of the leaf has more than one element.
      offset: where the part begins.
      size: how many indices it has.
      pin: why.
    """

    path: Path
    axis: int | None
    offset: int
    size: int
    pin: Pin | None


def _members(leaves: Iterable[tuple[Path, Axes]]) -> Iterator[tuple[Axis, Member]]:
    """Where each atom lies along an axis of a leaf of the parameters or of the states."""
    for path, axes in leaves:
        for i, axis in enumerate(axes):
            for occurrence in occurrences(axis):
                atom, offset, stride, repeats = occurrence
                yield atom, Member(path, i, offset, stride, repeats, occurrence)


def find_groups(
    traces: Sequence[Trace],
) -> tuple[dict[str, Group], tuple[PinnedAxis, ...], tuple[Path, ...]]:
    """Finds the groups of a model by name, its pinned axes, and its unused leaves.

    The groups are in the order in which the model uses their first leaves.
    """
    trace = traces[0]
    leaves = dict(trace.named_leaves)
    numbers = {path: number for number, path in enumerate(trace.paths)}
    used = {path: any(each.used[number] for each in traces) for path, number in numbers.items()}
    pinned: list[PinnedAxis] = []
    members_of: dict[Axis, list[Member]] = defaultdict(list)
    for path, axes in leaves.items():
        if used[path] and max(sizes_of(axes), default=1) <= 1:
            pinned.append(PinnedAxis(path, None, 0, 1, None))
    for atom, member in _members(leaves.items()):
        if not used[member.path] or atom.size <= 1:
            continue
        if atom.pin is None:
            members_of[atom].append(member)
        else:
            place = member.path, member.axis, member.offset
            pinned.append(PinnedAxis(*place, atom.size, atom.pin))
    axes_of_states: dict[Path, Axes] = {}
    for each in traces:  # a leaf of several programs counts once
        axes_of_states = dict(each.named_states) | axes_of_states
    in_states: dict[Axis, list[Member]] = defaultdict(list)
    for atom, member in _members(axes_of_states.items()):
        in_states[atom].append(member)

    def order(member: Member) -> tuple[int, ...]:
        """Sorts leaves by first use, axes of a leaf from last to first, and outer parts before inner ones."""
        uses = [trace.first_uses[numbers[member.path]] for trace in traces]
        return *uses, -member.axis, member.offset, -member.stride

    inexact = inexact_atoms(traces)
    owners = _owners_of_lists(traces, members_of)
    trips = {atom for trace in traces for atom in atoms(*trace.trips.values())}
    first_members = {atom: min(members, key=order) for atom, members in members_of.items()}
    groups = {}
    for atom in sorted(members_of, key=lambda atom: order(first_members[atom])):
        reason = inexact.get(atom, '')
        first, members = first_members[atom], members_of[atom]
        name = f'{first.name}[{first.axis}]'
        if atom.size != leaves[first.path][first.axis].size:
            start, stride = first.offset, first.stride
            step = f':{stride}' if stride > 1 else ''
            name += f'[{start}:{start + atom.size * stride}{step}]'
        groups[name] = Group(
            name=name,
            size=atom.size,
            members=tuple(members),
            parameters=_count_parameters(leaves, members),
            exact=not reason,
            reason=reason,
            atom=atom,
            lists=owners.get(atom, ()),
            is_depth=atom in trips,
            in_state=tuple(in_states.get(atom, ())),
        )
    unused = [path for path, is_used in used.items() if not is_used]
    return groups, tuple(pinned), tuple(unused)


def _count_parameters(leaves: Mapping[Path, Axes], members: Iterable[Member]) -> int:
    """Counts the parameters along an atom, each once."""
    # For each axis of a leaf, flags of positions without a channel.
    has_none: dict[Path, list[np.ndarray]] = {}
    for member in members:
        sizes = sizes_of(leaves[member.path])
        flags = has_none.setdefault(member.path, [np.ones(size, bool) for size in sizes])
        flags[member.axis][member.positions()] = False
    count = 0
    for path, flags in has_none.items():
        count += math.prod(sizes_of(leaves[path]))
        count -= math.prod([int(np.count_nonzero(own)) for own in flags])
    return count


# The atoms of one part of an axis, without sums: `(a + b) * c` has the terms (a, c) and (b, c).
_Term = tuple[Axis, ...]


def _terms_of(axis: Axis) -> list[_Term]:
    """The terms of an expression, in order."""
    if axis.form == 'atom':
        return [(axis.resolved(),)]
    of_parts = map(_terms_of, axis.parts)
    if axis.form == 'sum':
        return list(itertools.chain.from_iterable(of_parts))
    # One of each factor.
    return [tuple(itertools.chain.from_iterable(each)) for each in itertools.product(*of_parts)]


class _Value(NamedTuple):
    """A value that has a group's channels.

    Attributes:
      terms: of each axis.
      trips: atoms of the scans around it.
    """

    terms: Sequence[Sequence[_Term]]
    trips: Sequence[Axis]

    def has_one_owner(self, atom: Axis, owner: Axis) -> bool:
        """Whether each channel has exactly one index of an owner beside it.

        A channel lies in a term of one axis. Beside it are the scans around the value, the rest of that term, and one
        term of each other axis. Together they must have the owner once:

            trips.count(owner) + term.count(owner) + sum over the other axes of term.count(owner) = 1

        With heads h and features c, axes (h, c) and (h * c,) have one owner. Axes (h, h * c) have two. Axes (h + g, c)
        have one beside the first elements of axis 0 and none beside the others, which counts as none.
        """
        counts = [{term.count(owner) for term in terms} for terms in self.terms]
        # Infinity if the terms of an axis differ, so that no sum with it is 1.
        times_in = [own.pop() if len(own) == 1 else math.inf for own in counts]
        for i, terms in enumerate(self.terms):
            beside = self.trips.count(owner) + sum(drop(times_in, [i]))
            for term in terms:
                # Two channels in one axis would need two owners.
                if atom in term and (term.count(atom) > 1 or term.count(owner) + beside != 1):
                    return False
        return True


def _owners_of_lists(
    traces: Sequence[Trace], removable: Iterable[Axis]
) -> dict[Axis, tuple[Axis, ...]]:
    """For each atom of a group the atoms that own its lists: each of their indices may keep channels of its own."""
    candidates = set(removable)
    mixed: set[tuple[Axis, Axis]] = (
        set()
    )  # a channel's atom, and one whose indices are mixed for it
    for trace in traces:
        candidates.difference_update(atoms(*trace.trips.values()))  # the order of layers matters
        for contraction in trace.contractions:
            shared, summed, free = set[Axis](), set[Axis](), set[Axis]()
            for index in contraction.indices:
                places = zip(contraction.operands, index[:2], strict=False)
                own = [axes[i] for axes, i in places if i is not None]
                kind = free if len(own) == 1 else shared
                kind.update(atoms(*own))
                if index.result is None:
                    summed.update(atoms(*own))
            mixed.update(itertools.product((shared - summed) | free, summed))
            mixed.update(itertools.product(shared, free))
    values: dict[Axis, list[_Value]] = defaultdict(list)
    for trace in traces:
        for axes, trips in _distinct_values(trace):
            atoms_along = candidates.intersection(atoms(*axes))
            if atoms_along:
                value = _Value(list(map(_terms_of, axes)), trips)
                for atom in atoms_along:
                    values[atom].append(value)
    owners_of: dict[Axis, tuple[Axis, ...]] = {}
    for atom, of_atom in values.items():
        terms_beside = itertools.chain.from_iterable(of_atom[0].terms)
        beside = [*of_atom[0].trips, *itertools.chain.from_iterable(terms_beside)]
        owners_of[atom] = tuple(
            [
                owner
                for owner in dict.fromkeys(beside)
                if owner is not atom
                and owner.size > 1
                and (atom, owner) not in mixed
                and not (owner.pin is not None and owner.pin.mixes)
                and all(value.has_one_owner(atom, owner) for value in of_atom)
            ]
        )
    return owners_of


def _distinct_values(trace: Trace) -> Iterable[tuple[Axes, Sequence[Axis]]]:
    """The axes of values, and the atoms of the scans around them, without duplicates."""
    values: dict[Any, tuple[Axes, Sequence[Axis]]] = {}
    places = [((), (*trace.leaves, *trace.states))]
    places += [(path, equation.values) for path, equation in trace.equations.items()]
    for path, values_here in places:
        scans = [path[:length] for length in range(1, len(path) - 1)]
        trips = tuple(atoms(*[trace.trips[scan] for scan in scans if scan in trace.trips]))
        for axes in values_here:
            identities = [id(axis.resolved()) for axis in axes]
            key = len(axes), *identities, *map(id, trips)
            values.setdefault(key, (axes, trips))
    return values.values()
