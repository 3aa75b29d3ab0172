"""Channels that are zero already, so that removing them changes nothing.

Not every member of such a channel has to be zero. If a column of a kernel and its bias are zero, the next kernel's row
is multiplied by zeros. If that row is zero, its input does not matter. The program decides which members suffice. Some
members of a channel are zeroed, nothing is known of the others, and the zeros are followed to every sum over channels,
as they are for exactness.

    nonzero_weights   finds where parameters, or masks of any form, are not zero
    find              finds for each group the sets of zero members, and whether they suffice
    left_over         the other channels, for a cut
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.sparse_state import only_sparse_state, sparse_states
from jaxpruner.structure import trees
from jaxpruner.structure.axes import Axis, sizes_of
from jaxpruner.structure.channel_tables import ChannelTable, leaf_numbers
from jaxpruner.structure.cut import check_shape
from jaxpruner.structure.groups import Group
from jaxpruner.structure.traces import Trace
from jaxpruner.structure.zeros import Fill, ZeroWalk, inexact_atoms
from jaxpruner.tree import Path, PyTree

# The leaf and axis of some members.
Members = frozenset[tuple[Path, int]]


def nonzero_weights(trace: Trace, tree: PyTree) -> dict[Path, jax.Array]:
    """Flags the nonzero weights of each parameter that has a value in a tree, by its path there.

    Args:
      trace: of the model.
      tree: parameters; masks, packed or not; or a state of a wrapped optimizer. It may be a subtree.

    Raises:
      TypeError: values are traced.
      ValueError: a leaf has another shape than in the model, or no leaf is a parameter of the model.
    """
    if sparse_states(tree):
        tree = only_sparse_state(tree).masks
    paths, leaves, _ = tree_lib.flatten_with_paths(tree_lib.as_arrays(tree))
    if tree_lib.has_traced(leaves):
        raise TypeError(
            'traced values do not say which channels are zero; call this outside of jit'
        )
    value_of = dict(zip(paths, leaves, strict=True))
    nonzero = {}
    for path, number in leaf_numbers(trace, paths).items():
        value = value_of[path]
        expected = sizes_of(trace.leaves[number])
        if jnp.shape(value) != expected and trees.is_packed(value, expected):
            value = sparse_state_lib.unpack_like(value, expected)
        check_shape(path, jnp.shape(value), expected)
        nonzero[path] = jnp.not_equal(value, 0)
    return nonzero


def find(
    traces: Sequence[Trace], groups: Iterable[Group], nonzero: Mapping[Path, jax.Array]
) -> dict[str, np.ndarray]:
    """Finds the channels of exact groups that can be removed without zeroing anything.

    Args:
      traces: of the programs of the model.
      groups: of the model.
      nonzero: flags of nonzero weights by leaf. Nothing is known of other leaves.

    Returns:
      Name of a group -> a flag for each channel, in the shape of the group's `ChannelTable`. Groups without such
      channels are left out.
    """
    trace = traces[0]
    numbers = leaf_numbers(trace, nonzero)
    tables = [ChannelTable.of(trace, group, numbers) for group in groups if group.exact]
    zero_members: list[list[Members]] = []  # for each group, of each channel
    undecided: dict[Axis, list[Members]] = {}  # atom of a group -> sets of them that may suffice
    sufficient: dict[Axis, list[Members]] = {}
    for table in tables:
        flags = {}  # for each member, by its path in the model, whether it is zero in each channel
        for path, members in table.indices.items():
            for axis in sorted({member.axis for member in members}):
                is_zero = ~table.any_along(nonzero[path], path, axis)
                flags[trace.paths[numbers[path]], axis] = is_zero.ravel()
        own = []
        for channel in range(math.prod(table.shape)):
            own.append(frozenset([each for each, is_zero in flags.items() if is_zero[channel]]))
        zero_members.append(own)
        atom = table.group.atom.resolved()
        undecided[atom] = sorted(filter(None, set(own)), key=len, reverse=True)
        sufficient[atom] = []
    while any(undecided.values()):
        asked = {atom: sets[0] for atom, sets in undecided.items() if sets}
        insufficient = insufficient_members(traces, asked)
        for atom, decided in asked.items():
            sets = undecided[atom]
            if atom in insufficient:  # nor do fewer members suffice
                undecided[atom] = [members for members in sets if not members <= decided]
            else:  # so do more members
                undecided[atom] = [members for members in sets if not members >= decided]
                sufficient[atom].append(decided)
    found = {}
    for table, own in zip(tables, zero_members, strict=True):
        enough = sufficient[table.group.atom.resolved()]
        flags = [any(map(members.issuperset, enough)) for members in own]
        if any(flags):
            found[table.group.name] = np.reshape(flags, table.shape)
    return found


def left_over(is_zero: np.ndarray) -> np.ndarray:
    """The indices of the other channels, ascending, at least one.

    Lists that differ between layers get the same length. Shorter ones are filled up with channels that are zero.

    >>> left_over(np.array([[True, False, True], [False, False, True]])).tolist()
    [[0, 1], [0, 1]]
    >>> left_over(np.array([[False, True], [False, True]])).tolist()
    [0]
    """
    rows = is_zero.reshape(-1, is_zero.shape[-1])
    if (rows == rows[0]).all():
        is_zero = rows[0]
    count = max(int(np.max(np.count_nonzero(~is_zero, axis=-1))), 1)
    others_first = np.argsort(is_zero, axis=-1, kind='stable')
    return np.sort(others_first[..., :count], axis=-1)


def insufficient_members(traces: Sequence[Trace], asked: Mapping[Axis, Members]) -> set[Axis]:
    """Finds the atoms whose channels the results depend on although these members are zero."""
    walk = ZeroWalk(traces[0])
    fills = []
    for path, axes in traces[0].named_leaves:
        channels = []
        for i, axis in enumerate(axes):
            zero = [atom for atom in walk.candidates(axis) if (path, i) in asked.get(atom, ())]
            channels.append(dict.fromkeys(zero, 0))
        fills.append(Fill(None, tuple(channels)))
    return set(inexact_atoms(traces, fills))
