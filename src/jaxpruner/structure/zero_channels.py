"""Channels that are zero already, so that removing them changes nothing.

Not every member of such a channel has to be zero. Where a column of a kernel and its bias are zero, the row of the next
kernel meets zeros only. Where that row is zero, it does not matter what meets it. Which members suffice is a question
to the program: of a channel some members are known to be zero, nothing is known of the others, and the zeros are
followed to every sum over channels, as they are for exactness.

    leaf_zeros   where leaves are zero throughout
    find         for each group the members that are zero together, and whether they suffice
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.core import tree as tree_lib
from jaxpruner.structure.axes import Axis
from jaxpruner.structure.fills import Fill
from jaxpruner.structure.members import Group
from jaxpruner.structure.records import Trace
from jaxpruner.structure.zeros import ZeroFlow, inexact_atoms

# For each axis of a leaf, whether all elements at an index are zero.
AxisZeros = Sequence[np.ndarray]
# Leaf and axis of members.
Places = frozenset[tuple[tree_lib.Path, int]]


def leaf_zeros(
    tree: tree_lib.PyTree, treedef: Any, paths: Sequence[tree_lib.Path]
) -> dict[tree_lib.Path, AxisZeros]:
    """Where the leaves of a tree are zero; of a leaf that is `None` nothing is.

    Args:
      tree: parameters or masks.
      treedef: the structure of the parameters.
      paths: of the parameters.
    """
    zeros = {}
    for path, leaf in zip(paths, tree_lib.leaves_like(treedef, tree), strict=True):
        if leaf is not None:
            zeros[path] = tuple(map(np.asarray, _zero_indices(leaf)))
    return zeros


@jax.jit
def _zero_indices(leaf: jax.Array) -> list[jax.Array]:
    is_zero = jnp.equal(leaf, 0)
    flags = []
    for axis in range(leaf.ndim):
        others = [i for i in range(leaf.ndim) if i != axis]
        flags.append(jnp.all(is_zero, axis=others))
    return flags


def find(
    traces: Sequence[Trace], groups: Iterable[Group], zeros: Mapping[tree_lib.Path, AxisZeros]
) -> dict[str, np.ndarray]:
    """The channels of exact groups that can be removed although nothing is zeroed.

    Args:
      traces: of the programs of the model.
      groups: of the model.
      zeros: where leaves are zero; of leaves that are not named nothing is.

    Returns:
      Name of a group -> indices, ascending; groups without such channels are left out.

    Raises:
      ValueError: a leaf has another shape than the model's.
    """
    _check_shapes(traces[0], zeros)
    searches = []
    for group in groups:
        if group.exact:
            searches.append(_Search(group, zeros))
    while any(search.undecided for search in searches):
        asked = {search.atom: search.undecided[0] for search in searches if search.undecided}
        insufficient = _insufficient(traces, asked)
        for search in searches:
            if search.undecided:
                search.decide(search.atom not in insufficient)
    found = {}
    for search in searches:
        channels = search.channels()
        if len(channels):
            found[search.name] = channels
    return found


def _check_shapes(trace: Trace, zeros: Mapping[tree_lib.Path, AxisZeros]) -> None:
    for path, axes in zip(trace.paths, trace.leaves, strict=True):
        expected = tuple([axis.size for axis in axes])
        shape = tuple(map(len, zeros[path])) if path in zeros else expected
        if shape != expected:
            raise ValueError(
                f'{tree_lib.path_string(path)} has shape {shape}, and in the model {expected}; give the parameters of '
                'the whole model, or masks in their shapes, unpacked'
            )


class _Search:
    """Which channels of a group can be removed.

    Attributes:
      name: of the group.
      atom: of the group.
      undecided: sets of members that are zero in some channel, of which it is not known yet whether they suffice.
    """

    def __init__(self, group: Group, zeros: Mapping[tree_lib.Path, AxisZeros]):
        self.name = group.name
        self.atom = group.atom.resolved()
        self._places = _zero_places(group, zeros)
        self.undecided = sorted(filter(None, set(self._places)), key=len, reverse=True)
        self._sufficient: list[Places] = []

    def decide(self, suffices: bool) -> None:
        """Notes whether the first undecided set suffices; with it all larger ones do, or no smaller one does."""
        decided = self.undecided[0]
        undecided = []
        for places in self.undecided[1:]:
            is_known = decided <= places if suffices else places <= decided
            if not is_known:
                undecided.append(places)
        self.undecided = undecided
        if suffices:
            self._sufficient.append(decided)

    def channels(self) -> np.ndarray:
        """The indices of the channels that can be removed."""
        flags = [any(known <= places for known in self._sufficient) for places in self._places]
        return np.flatnonzero(flags)


def _zero_places(group: Group, zeros: Mapping[tree_lib.Path, AxisZeros]) -> list[Places]:
    """For each channel the members that are zero; one that occurs twice along an axis has to be so twice."""
    by_place: dict[tuple[tree_lib.Path, int], np.ndarray] = {}
    for member in group.members:
        if member.path in zeros:
            along_axis = zeros[member.path][member.axis]
            is_zero: np.ndarray = np.all(along_axis[member.positions()], axis=1)
            place = member.path, member.axis
            if place in by_place:
                is_zero = np.logical_and(by_place[place], is_zero)
            by_place[place] = is_zero
    places = []
    for channel in range(group.size):
        places.append(frozenset([place for place, flags in by_place.items() if flags[channel]]))
    return places


def _insufficient(traces: Sequence[Trace], asked: Mapping[Axis, Places]) -> set[Axis]:
    """The atoms whose channels have a part in the results although these members are zero."""
    trace = traces[0]
    flow = ZeroFlow(trace)
    inputs = []
    for path, axes in zip(trace.paths, trace.leaves, strict=True):
        channels = []
        for i, axis in enumerate(axes):
            known = [
                atom for atom in flow.candidates(axis) if (path, i) in asked.get(atom, frozenset())
            ]
            channels.append(dict.fromkeys(known, 0))
        inputs.append(Fill(None, tuple(channels)))
    return set(inexact_atoms(traces, inputs))
