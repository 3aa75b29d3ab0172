"""Turns values of weights into values of channels, and the other way round; finds channels that are zero already.

A group has a table with an element for each channel. If trips of a scan, experts or heads may keep channels of their
own, the table has a row for each of them. `add_up` sums over the weights of a channel, and `rows` lists them. `look_up`
gives each weight the element of its channel.

A channel whose weights are zero can be removed, and nothing changes. Not every member has to be zero. If a column of a
kernel and its bias are zero, the next kernel's row is multiplied by zeros. If that row is zero, its input does not
matter. The program decides which members suffice. Some members of a channel are zeroed, nothing is known of the others,
and the zeros are followed to every sum over channels, as they are for exactness.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axis, Places, in_table, sizes_of
from jaxpruner.structure.cut import check_shape, is_packed
from jaxpruner.structure.groups import Group, Member
from jaxpruner.structure.programs import Trace
from jaxpruner.structure.zeros import Members, inexact_atoms
from jaxpruner.tree import Path, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelTable:
    """The channels of a group in some leaves.

    Attributes:
      group: the group.
      shape: of the table, `(*sizes of the owners of lists, channels)`.
      indices: path of a leaf -> member of the group in the leaf -> the places of its weights' channels in the table. A
        channel is beyond the end where there is none.
    """

    group: Group
    shape: tuple[int, ...]
    indices: Mapping[Path, Mapping[Member, Places]]

    @classmethod
    def of(cls, trace: Trace, group: Group, paths: Mapping[Path, Path]) -> 'ChannelTable':
        """Makes the table of a group.

        Args:
          trace: of the model.
          group: one of its groups.
          paths: path of a leaf -> its path in the model. Leaves that are no members are left out.
        """
        indices: dict[Path, dict[Member, Places]] = {}
        for path, own in paths.items():
            for member in group.members:
                if member.path == own:
                    axes = trace.leaves[own]
                    channels = np.full(axes[member.axis].size, group.size)
                    channels[member.positions()] = np.arange(group.size)[:, None]
                    index = in_table(axes, group.lists, member.axis, channels)
                    indices.setdefault(path, {})[member] = index
        return cls(group, (*sizes_of(group.lists), group.size), indices)

    def add_up(self, values: Mapping[Path, jax.Array], member: Member | None = None) -> jax.Array:
        """Sums over the weights of each channel, in float32 at least. Leaves without values add nothing.

        Args:
          values: of the weights of some leaves.
          member: the only one that counts; by default all do.

        >>> import jaxpruner
        >>> params = {'up': jnp.ones((3, 2)), 'down': jnp.array([[5.0], [0.0]])}
        >>> graph = jaxpruner.channel_groups(lambda p, x: x @ p['up'] @ p['down'], params, jnp.ones((1, 3)))
        >>> table = ChannelTable.of(graph.trace, graph.groups['up[1]'], {path: path for path in graph.trace.leaves})
        >>> table.add_up({('up',): params['up'], ('down',): params['down']})
        Array([8., 3.], dtype=float32)
        """
        total = jnp.zeros(self.shape, jnp.float32)
        for path, value in values.items():
            for index, is_again in self._indices_of(path, member):
                others = value if is_again is None else jnp.where(is_again, 0, value)
                # Sums of 16-bit numbers would overflow.
                dtype = tree_lib.at_least_float32(others.dtype)
                own = np.broadcast_shapes(*[indices.shape for indices in index])
                axes = tuple([i for i, size in enumerate(own) if size < others.shape[i]])
                sums = jnp.sum(others, axis=axes, keepdims=True, dtype=dtype)
                total = total + jnp.zeros(self.shape, dtype).at[index].add(sums, mode='drop')
        return total

    def rows(self, value: jax.Array, path: Path, member: Member) -> jax.Array:
        """The weights of each channel in one member, of shape `(*shape of the table, weights of one)`.

        Take a leaf of 2 rows, which are channels, and 3 columns, which own a list each. Its elements are counted row by
        row. Sorted by owner, then by channel, they are 0, 3, 1, 4, 2 and 5, of shape (3, 2, 1).
        """
        index = np.broadcast_arrays(*self.indices[path][member])
        along = [axis for axis, size in enumerate(index[0].shape) if size > 1]
        inside = np.flatnonzero(index[-1] < self.group.size)
        by_place = np.lexsort([each.ravel()[inside] for each in reversed(index)])
        elements = jnp.moveaxis(jnp.asarray(value), along, range(len(along)))
        elements = elements.reshape(index[0].size, -1)[inside[by_place]]
        return elements.reshape(*self.shape, -1)

    def any_along(self, flags: jax.Array, path: Path, axis: int) -> np.ndarray:
        """Flags the channels along an axis of a leaf that have a flagged weight, in the shape of the table."""
        own = [member for member in self.indices[path] if member.axis == axis]
        return np.asarray(sum([self.add_up({path: flags}, member) for member in own]) > 0)

    def look_up(self, table: jax.Array, path: Path) -> jax.Array:
        """The elements of the table for the weights of a leaf, 1 for weights without a channel.

        The result has one element along axes of the leaf that it does not depend on.
        """
        product = jnp.ones((), table.dtype)
        for index, is_again in self._indices_of(path):
            entries = table.at[index].get(mode='fill', fill_value=1)
            product = product * (entries if is_again is None else jnp.where(is_again, 1, entries))
        return product

    def _indices_of(
        self, path: Path, only: Member | None = None
    ) -> Iterator[tuple[Places, jax.Array | None]]:
        """The places of the weights' channels in a leaf, and flags of weights that an earlier place gives this channel.

        A weight on the diagonal of a square matrix has one channel, that of its input and of its output.
        """
        earlier: list[Places] = []
        for member, index in self.indices[path].items():
            if only not in (None, member):
                continue
            is_again = None
            for other in earlier:
                is_same = functools.reduce(jnp.logical_and, map(jnp.equal, index, other))
                is_again = is_same if is_again is None else is_again | is_same
            earlier.append(index)
            yield index, is_again


def paths_in_model(trace: Trace, paths: Collection[Path]) -> dict[Path, Path]:
    """Finds the path in the model of each of these leaves. Leaves that the model does not have are left out.

    A pruner may have a subtree of the parameters. Then `a/kernel` is `params/a/kernel`.

    Raises:
      ValueError: the model has none of these leaves, or has them in several subtrees.
    """
    prefix: Path = ()
    if paths and trace.leaves.keys().isdisjoint(paths):
        # The subtree that has most of the leaves.
        pairs = itertools.product(paths, trace.leaves)
        counts = Counter([own[: -len(path)] for path, own in pairs if own[-len(path) :] == path])
        best = [each for each, count in counts.items() if count == max(counts.values())]
        if len(best) != 1:
            names = ', '.join(sorted(map(tree_lib.path_string, paths)))
            own_names = ', '.join(map(tree_lib.path_string, best or trace.leaves))
            raise ValueError(
                f'the leaves {names} are not those of one subtree of the graph, which has {own_names}; give the whole '
                'tree, or make the graph of this model'
            )
        (prefix,) = best
    return {path: (*prefix, *path) for path in paths if (*prefix, *path) in trace.leaves}


def nonzero_weights(trace: Trace, tree: PyTree) -> dict[Path, jax.Array]:
    """Flags the nonzero weights of each parameter that has a value in a tree, by its path there.

    Args:
      trace: of the model.
      tree: parameters; masks, packed or not; or a state of a wrapped optimizer. It may be a subtree.

    Raises:
      TypeError: values are traced.
      ValueError: a leaf has another shape than in the model, or no leaf is a parameter of the model.
    """
    if sparse_state_lib.sparse_states(tree):
        tree = sparse_state_lib.only_sparse_state(tree).masks
    paths, leaves, _ = tree_lib.flatten_with_paths(tree_lib.as_arrays(tree))
    if tree_lib.has_traced(leaves):
        raise TypeError(
            'traced values do not say which channels are zero; call this outside of jit'
        )
    value_of = dict(zip(paths, leaves, strict=True))
    nonzero = {}
    for path, in_model in paths_in_model(trace, paths).items():
        value = value_of[path]
        expected = sizes_of(trace.leaves[in_model])
        if jnp.shape(value) != expected and is_packed(value, expected):
            value = sparse_state_lib.unpack_like(value, expected)
        check_shape(path, jnp.shape(value), expected)
        nonzero[path] = jnp.not_equal(value, 0)
    return nonzero


def zero_channels(
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
    paths = paths_in_model(trace, nonzero)
    tables = [ChannelTable.of(trace, group, paths) for group in groups if group.exact]
    zero_members: dict[Axis, list[Members]] = {}  # atom of a group -> of each channel
    for table in tables:
        flags = {}  # for each member, by its path in the model, whether it is zero in each channel
        for path, members in table.indices.items():
            for axis in sorted({member.axis for member in members}):
                is_zero = ~table.any_along(nonzero[path], path, axis)
                flags[paths[path], axis] = is_zero.ravel()
        of_channels = zip(*flags.values(), strict=True)
        own = [frozenset(itertools.compress(flags, each)) for each in of_channels]
        zero_members[table.group.atom] = own
    # Sets of members that may suffice, the largest first.
    undecided = {
        atom: sorted(filter(None, set(own)), key=len, reverse=True)
        for atom, own in zero_members.items()
    }
    sufficient: list[tuple[Axis, Members]] = []
    while asked := {atom: sets[0] for atom, sets in undecided.items() if sets}:
        insufficient = inexact_atoms(traces, asked)
        for atom, decided in asked.items():
            sets = undecided[atom]
            if atom in insufficient:  # nor do fewer members suffice
                undecided[atom] = [members for members in sets if not members <= decided]
            else:  # so do more members
                undecided[atom] = [members for members in sets if not members >= decided]
                sufficient.append((atom, decided))
    found = {}
    for table in tables:
        atom = table.group.atom
        enough = [members for other, members in sufficient if other is atom]
        is_enough = [any(map(members.issuperset, enough)) for members in zero_members[atom]]
        if any(is_enough):
            found[table.group.name] = np.reshape(is_enough, table.shape)
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
