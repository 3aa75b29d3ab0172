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
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse_state as sparse_state_lib
from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import Axis, in_table, sizes_of
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
      indices: path of a leaf -> member of the group in the leaf -> the places of its weights' channels in the table,
        counted row by row: an array in the leaf's rank, with one element along axes on which they do not depend. A
        place is beyond the end where there is no channel.
    """

    group: Group
    shape: tuple[int, ...]
    indices: Mapping[Path, Mapping[Member, np.ndarray]]

    @classmethod
    def of(cls, trace: Trace, group: Group, paths: Mapping[Path, Path]) -> 'ChannelTable':
        """Makes the table of a group.

        Args:
          trace: of the model.
          group: one of its groups.
          paths: path of a leaf -> its path in the model. Leaves that are no members are left out.
        """
        shape = *sizes_of(group.lists), group.size
        places = np.arange(math.prod(shape)).reshape(shape)
        indices: dict[Path, dict[Member, np.ndarray]] = {}
        for path, own in paths.items():
            for member in group.members:
                if member.path == own:
                    axes = trace.leaves[own]
                    channels = np.full(axes[member.axis].size, -1)
                    channels[member.positions()] = np.arange(group.size)[:, None]
                    index = in_table(axes, group.lists, member.axis, channels)
                    found = np.where(index[-1] < 0, places.size, places[index])
                    indices.setdefault(path, {})[member] = found
        return cls(group, shape, indices)

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
        total = jnp.zeros(math.prod(self.shape), jnp.float32)
        for path, value in values.items():
            dtype = tree_lib.at_least_float32(value.dtype)  # sums of 16-bit numbers would overflow
            for places, is_again in self._indices_of(path, member):
                axes = tuple([i for i, size in enumerate(places.shape) if size < value.shape[i]])
                others = jnp.where(is_again, 0, value)
                sums = jnp.sum(others, axis=axes, keepdims=True, dtype=dtype)
                total = total + jnp.zeros(total.shape, dtype).at[places].add(sums, mode='drop')
        return total.reshape(self.shape)

    def rows(self, value: jax.Array, path: Path, member: Member) -> jax.Array:
        """The weights of each channel in one member, of shape `(*shape of the table, weights of one)`.

        Take a leaf of 2 rows, which are channels, and 3 columns, which own a list each. Its elements are counted row by
        row. Sorted by owner, then by channel, they are 0, 3, 1, 4, 2 and 5, of shape (3, 2, 1).
        """
        places = self.indices[path][member]
        along = [axis for axis, size in enumerate(places.shape) if size > 1]
        elements = jnp.moveaxis(jnp.asarray(value), along, range(len(along)))
        by_place = np.argsort(places, axis=None)[: np.sum(places < math.prod(self.shape))]
        return elements.reshape(places.size, -1)[by_place].reshape(*self.shape, -1)

    def look_up(self, table: jax.Array, path: Path) -> jax.Array:
        """The elements of the table for the weights of a leaf, 1 for weights without a channel.

        The result has one element along axes of the leaf that it does not depend on.
        """
        product = jnp.ones((), table.dtype)
        for places, is_again in self._indices_of(path):
            entries = table.ravel().at[places].get(mode='fill', fill_value=1)
            product = product * jnp.where(is_again, 1, entries)
        return product

    def _indices_of(
        self, path: Path, only: Member | None = None
    ) -> Iterator[tuple[np.ndarray, jax.Array | bool]]:
        """The places of the weights' channels in a leaf, and flags of weights that an earlier place gives this channel.

        A weight on the diagonal of a square matrix has one channel, that of its input and of its output.
        """
        earlier: list[np.ndarray] = []
        for member, places in self.indices[path].items():
            if only in (None, member):
                are_again = [jnp.equal(places, other) for other in earlier]
                yield places, functools.reduce(jnp.logical_or, are_again, False)
                earlier.append(places)


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
    """Flags the nonzero weights of each parameter that has a value in a tree, by its path in the model.

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
        raise TypeError('traced values do not say what is zero; call this outside of jit')
    value_of = dict(zip(paths, leaves, strict=True))
    nonzero = {}
    for path, in_model in paths_in_model(trace, paths).items():
        value = value_of[path]
        expected = sizes_of(trace.leaves[in_model])
        if jnp.shape(value) != expected and is_packed(value, expected):
            value = sparse_state_lib.unpack_like(value, expected)
        check_shape(path, jnp.shape(value), expected)
        nonzero[in_model] = jnp.not_equal(value, 0)
    return nonzero


def nonzero_channels(
    traces: Sequence[Trace], groups: Iterable[Group], tree: PyTree
) -> dict[str, np.ndarray]:
    """Finds the channels that have to stay; see `ChannelGraph.nonzero_channels`."""
    nonzero = nonzero_weights(traces[0], tree)
    paths = {path: path for path in nonzero}
    tables = [ChannelTable.of(traces[0], group, paths) for group in groups if group.exact]
    tables = [table for table in tables if table.indices]
    zero_members: dict[Axis, list[Members]] = {}  # atom of a group -> of each channel
    for table in tables:
        zero: dict[
            tuple[Path, int], np.ndarray
        ] = {}  # of each member, the channels in which it is zero
        for path, members in table.indices.items():
            for member in members:
                is_zero = np.asarray(table.add_up({path: nonzero[path]}, member) == 0).ravel()
                key = member.path, member.axis
                zero[key] = is_zero & zero.get(key, True)
        of_channels = zip(*zero.values(), strict=True)
        own = [frozenset(itertools.compress(zero, each)) for each in of_channels]
        zero_members[table.group.atom] = own
    undecided = {atom: set(filter(None, own)) for atom, own in zero_members.items()}
    sufficient: dict[Axis, list[Members]] = {atom: [] for atom in zero_members}
    while asked := {atom: max(sets, key=len) for atom, sets in undecided.items() if sets}:
        insufficient = inexact_atoms(traces, asked)
        for atom, members in asked.items():
            if atom in insufficient:  # nor do fewer members suffice
                decided = [each for each in undecided[atom] if each <= members]
            else:  # so do more members
                decided = [each for each in undecided[atom] if each >= members]
                sufficient[atom].append(members)
            undecided[atom].difference_update(decided)
    keep = {}
    for table in tables:
        enough = sufficient[table.group.atom]
        of_channels = zero_members[table.group.atom]
        goes = [any(map(members.issuperset, enough)) for members in of_channels]
        left = _left_over(np.reshape(goes, table.shape))
        if left.shape[-1] < table.group.size:
            keep[table.group.name] = left
    return keep


def _left_over(is_zero: np.ndarray) -> np.ndarray:
    """The indices of the other channels, ascending, at least one.

    Lists that differ between layers get the same length. Shorter ones are filled up with channels that are zero.

    >>> _left_over(np.array([[True, False, True], [False, False, True]])).tolist()
    [[0, 1], [0, 1]]
    >>> _left_over(np.array([[False, True], [False, True]])).tolist()
    [0]
    """
    rows = is_zero.reshape(-1, is_zero.shape[-1])
    if (rows == rows[0]).all():
        is_zero = rows[0]
    count = max(int(np.max(np.count_nonzero(~is_zero, axis=-1))), 1)
    others_first = np.argsort(is_zero, axis=-1, kind='stable')
    return np.sort(others_first[..., :count], axis=-1)
