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
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axes, Axis, Index, Pin, atoms, occurrences, product, size_with
from jaxpruner.structure.programs import Trace
from jaxpruner.structure.rules import EquationAxes
from jaxpruner.structure.zeros import inexact_atoms
from jaxpruner.tree import Path


@dataclasses.dataclass(frozen=True)
class Member:
    """Where the channels of a group lie along an axis of a leaf.

    Attributes:
      path: of the leaf.
      axis: of the leaf.
      offset: where the first channel begins.
      stride: how far the next channel begins after it.

    >>> import jax.numpy as jnp
    >>> from jaxpruner.structure import channel_groups
    >>> graph = channel_groups(lambda p: jnp.tanh(p.reshape(2, 3)).sum(0).sum(), jnp.ones(6))
    >>> [(group.members[0].positions().tolist()) for group in graph.groups.values()]
    [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]
    """

    path: Path
    axis: int
    offset: int
    stride: int
    _positions: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The leaf's path as text."""
        return tree_lib.path_string(self.path)

    def positions(self) -> np.ndarray:
        """Where each channel lies: whole numbers of shape (channels, positions of one channel)."""
        return self._positions


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
      axis: of the leaf.
      offset: where the part begins.
      size: how many indices it has.
      pin: why.
    """

    path: Path
    axis: int
    offset: int
    size: int
    pin: Pin


def _members_of(leaves: Mapping[Path, Axes]) -> dict[Axis, list[Member]]:
    """Where each atom of more than one index lies along axes of leaves of the parameters, or of the states."""
    members: dict[Axis, list[Member]] = defaultdict(list)
    for path, axes in leaves.items():
        for i, axis in enumerate(axes):
            for atom, positions in occurrences(axis):
                if atom.size > 1:
                    offset, second = positions[:2, 0].tolist()
                    members[atom].append(Member(path, i, offset, second - offset, positions))
    return members


def find_groups(
    traces: Sequence[Trace],
) -> tuple[dict[str, Group], tuple[PinnedAxis, ...], tuple[Path, ...]]:
    """Finds the groups of a model by name, its pinned axes, and its unused leaves.

    The groups are in the order in which the model uses their first leaves.
    """
    trace = traces[0]
    uses_of = {path: [each.first_uses[path] for each in traces] for path in trace.leaves}
    leaves = {path: axes for path, axes in trace.leaves.items() if min(uses_of[path]) < math.inf}
    # A leaf of several programs counts once.
    states = {path: axes for each in reversed(traces) for path, axes in each.states.items()}
    members_in_states = _members_of(states)
    members_of, pinned = {}, []
    for atom, members in _members_of(leaves).items():
        if atom.pin is None:
            members_of[atom] = members
            continue
        for each in members:
            pinned.append(PinnedAxis(each.path, each.axis, each.offset, atom.size, atom.pin))

    def order(member: Member) -> tuple[float, ...]:
        """Sorts leaves by first use, axes of a leaf from last to first, and outer parts before inner ones."""
        return *uses_of[member.path], -member.axis, member.offset, -member.stride

    inexact = inexact_atoms(traces)
    owners = _owners_of_lists(traces, members_of)
    trips = {atom for trace in traces for atom in atoms(*trace.trips.values())}
    first_members = {atom: min(members, key=order) for atom, members in members_of.items()}
    groups = {}
    for atom, first in sorted(first_members.items(), key=lambda entry: order(entry[1])):
        name = f'{first.name}[{first.axis}]'
        if atom.size != leaves[first.path][first.axis].size:
            step = f':{first.stride}' if first.stride > 1 else ''
            name += f'[{first.offset}:{first.offset + atom.size * first.stride}{step}]'
        parameters, without = 0, {atom: 0}
        for axes in {member.path: leaves[member.path] for member in members_of[atom]}.values():
            left = [size_with(axis, without) for axis in axes]
            parameters += math.prod([axis.size for axis in axes]) - math.prod(left)
        groups[name] = Group(
            name=name,
            size=atom.size,
            members=tuple(members_of[atom]),
            parameters=parameters,
            exact=atom not in inexact,
            reason=inexact.get(atom, ''),
            atom=atom,
            lists=owners.get(atom, ()),
            is_depth=atom in trips,
            in_state=tuple(members_in_states.get(atom, ())),
        )
    return groups, tuple(pinned), tuple([path for path in trace.leaves if path not in leaves])


def _terms_of(axis: Axis) -> list[tuple[Axis, ...]]:
    """The atoms of each summand of an expression without brackets: `(a + b) * c` has the terms (a, c) and (b, c)."""
    if axis.form == 'atom':
        return [(axis.resolved(),)]
    of_parts = map(_terms_of, axis.parts)
    if axis.form == 'sum':
        return list(itertools.chain(*of_parts))
    return [tuple(itertools.chain(*one_of_each)) for one_of_each in itertools.product(*of_parts)]


def _owners_of_lists(
    traces: Sequence[Trace], removable: Iterable[Axis]
) -> dict[Axis, tuple[Axis, ...]]:
    """For each atom of a group the atoms that own its lists: each of their indices may keep channels of its own."""
    candidates = set(removable)
    mixed: set[tuple[Axis, Axis]] = set()  # a channel's atom, and one whose indices meet for it
    values: dict[tuple[Axis, ...], None] = {}  # axes of the trips around a value, and its own
    for trace in traces:
        candidates.difference_update(atoms(*trace.trips.values()))  # the order of layers matters
        leaves = *trace.leaves.values(), *trace.states.values()
        values_at = {(): leaves} | {path: each.values for path, each in trace.equations.items()}
        for path, values_here in values_at.items():
            trips = trace.trips_around(path)
            for axes in values_here:
                values[tuple([axis.resolved() for axis in (*trips, *axes)])] = None
        for each in trace.equations.values():
            if each.is_contraction:
                mixed |= _mixed_in(each)
    # Beside a channel are the trips of scans around its value, and the other atoms of its term. All terms must have the
    # owner once. With heads h and features c, axes (h, c) and (h * c,) do. Axes (h, h * c) have it twice, and axes
    # (h + g, c) have a term without it.
    owners_of: dict[Axis, Sequence[Axis]] = {}  # those that all values so far have
    for axes in values:
        terms = _terms_of(product(axes))
        for atom in candidates.intersection(atoms(*axes)):
            own = [term for term in terms if atom in term]
            owners = owners_of.get(atom, own[0])
            is_once = [all(term.count(owner) == 1 for term in own) for owner in owners]
            owners_of[atom] = list(itertools.compress(owners, is_once))

    def may_own(owner: Axis, atom: Axis) -> bool:
        mixes = (atom, owner) in mixed or (owner.pin is not None and owner.pin.mixes)
        return owner is not atom and owner.size > 1 and not mixes

    return {
        atom: tuple([owner for owner in owners if may_own(owner, atom)])
        for atom, owners in owners_of.items()
    }


def _mixed_in(equation: EquationAxes) -> set[tuple[Axis, Axis]]:
    """The pairs of a channel's atom and an atom whose indices a contraction lets meet for it."""
    shared, summed, free = set[Axis](), set[Axis](), set[Axis]()
    for index in Index.all_of(equation.equation):
        own = index.of(equation.operands)
        (free if len(own) == 1 else shared).update(atoms(*own))
        if index.result is None:
            summed.update(atoms(*own))
    mixed = set(itertools.product((shared - summed) | free, summed))
    return mixed.union(itertools.product(shared, free))
