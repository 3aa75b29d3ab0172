"""Turns values of weights into values of channels, and the other way round.

A group has a table with an element for each channel. If trips of a scan, experts or heads may keep channels of their
own, the table has a row for each of them. `add_up` sums over the weights of a channel. `look_up` gives each weight the
element of its channel.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.axes import sizes_of
from jaxpruner.structure.cut import Cut, Index
from jaxpruner.structure.groups import Group
from jaxpruner.structure.traces import Trace
from jaxpruner.tree import Path

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelTable:
    """The channels of a group in some leaves.

    Attributes:
      group: the group.
      shape: of the table, `(*sizes of the owners of lists, channels)`.
      indices: path of a leaf -> axis with channels -> the places of its weights' channels in the table, beyond the end
        if a weight has none. There are several where the channels are several factors of the axis, as in `h * h`.
    """

    group: Group
    shape: Shape
    indices: Mapping[Path, Mapping[int, Sequence[Index]]]

    @classmethod
    def of(cls, trace: Trace, group: Group, numbers: Mapping[Path, int]) -> 'ChannelTable':
        """Makes the table of a group.

        Args:
          trace: of the model.
          group: one of its groups.
          numbers: path of a leaf -> its number in the trace. Leaves that are no members are left out.
        """
        owners = [owner.resolved() for owner in group.lists]
        indices: dict[Path, dict[int, list[Index]]] = {}
        for path, number in numbers.items():
            own = {m.axis for m in group.members if m.path == trace.paths[number]}
            for i in sorted(own):
                found = Cut({}).channel_indices(
                    trace.leaves[number], i, group.atom.resolved(), owners
                )
                indices.setdefault(path, {})[i] = [
                    (*of_owners, np.where(channel < 0, group.size, channel))
                    for *of_owners, channel in found
                ]
        return cls(group, (*sizes_of(owners), group.size), indices)

    def add_up(self, values: Mapping[Path, jax.Array]) -> jax.Array:
        """Sums over the weights of each channel, in float32 at least. Leaves without values add nothing.

        >>> import jaxpruner
        >>> params = {'up': jnp.ones((3, 2)), 'down': jnp.array([[5.0], [0.0]])}
        >>> graph = jaxpruner.channel_groups(lambda p, x: x @ p['up'] @ p['down'], params, jnp.ones((1, 3)))
        >>> table = ChannelTable.of(graph.trace, graph.groups['up[1]'], {('up',): 1, ('down',): 0})
        >>> table.add_up({('up',): params['up'], ('down',): params['down']})
        Array([8., 3.], dtype=float32)
        """
        total = jnp.zeros(self.shape, jnp.float32)
        for path, value in values.items():
            for index, is_again in self._indices_of(path):
                others = value if is_again is None else jnp.where(is_again, 0, value)
                # Sums of 16-bit numbers would overflow.
                dtype = tree_lib.at_least_float32(others.dtype)
                own = np.broadcast_shapes(*[indices.shape for indices in index])
                axes = tuple([i for i, size in enumerate(own) if size < others.shape[i]])
                sums = jnp.sum(others, axis=axes, keepdims=True, dtype=dtype)
                if len(index) == 1 and np.array_equal(index[0].ravel(), np.arange(self.shape[0])):
                    sums = sums.ravel()  # position i has channel i
                else:
                    sums = jnp.zeros(self.shape, dtype).at[index].add(sums, mode='drop')
                total = total + sums
        return total

    def any_along(self, flags: jax.Array, path: Path, axis: int) -> np.ndarray:
        """Flags the channels along an axis of a leaf that have a flagged weight, in the shape of the table."""
        indices = {path: {axis: self.indices[path][axis]}}
        counts = dataclasses.replace(self, indices=indices).add_up({path: flags})
        return np.asarray(counts > 0)

    def look_up(self, table: jax.Array, path: Path) -> jax.Array:
        """The elements of the table for the weights of a leaf, 1 for weights without a channel.

        The result has one element along axes of the leaf that it does not depend on.
        """
        product = jnp.ones((), table.dtype)
        for index, is_again in self._indices_of(path):
            entries = table.at[index].get(mode='fill', fill_value=1)
            product = product * (entries if is_again is None else jnp.where(is_again, 1, entries))
        return product

    def _indices_of(self, path: Path) -> Iterator[tuple[Index, jax.Array | None]]:
        """The places of the weights' channels in a leaf, and flags of weights that an earlier place gives this channel.

        A weight on the diagonal of a square matrix has one channel, that of its input and of its output.
        """
        earlier: list[Index] = []
        for indices in self.indices[path].values():
            for index in indices:
                is_again = None
                for other in earlier:
                    is_same = functools.reduce(jnp.logical_and, map(jnp.equal, index, other))
                    is_again = is_same if is_again is None else is_again | is_same
                earlier.append(index)
                yield index, is_again


def leaf_numbers(trace: Trace, paths: Collection[Path]) -> dict[Path, int]:
    """Finds the number in a trace of each of these leaves. Leaves that the model does not have are left out.

    A pruner may have a subtree of the parameters. Then `a/kernel` is `params/a/kernel`.

    Raises:
      ValueError: the model has none of these leaves, or has them in several subtrees.
    """
    number_of: dict[Path, int] = {path: number for number, path in enumerate(trace.paths)}
    prefix: Path = ()
    if paths and number_of.keys().isdisjoint(paths):
        # The subtree that has most of the leaves.
        counts: Counter[Path] = Counter()
        for path in paths:
            for own in trace.paths:
                depth = len(own) - len(path)
                counts[own[:depth]] += own[depth:] == path
        most = max(counts.values(), default=0)
        best = [each for each, count in counts.items() if count == most > 0]
        names = ', '.join(sorted(map(tree_lib.path_string, paths)))
        if not best:
            raise ValueError(
                f'none of the leaves {names} is a parameter of the graph, which has '
                f'{", ".join(map(tree_lib.path_string, trace.paths))}'
            )
        if len(best) > 1:
            raise ValueError(
                f'the leaves {names} may be those of {" or ".join(map(tree_lib.path_string, best))}; make the graph '
                'of parameters with other names, or give the whole tree to the pruner'
            )
        (prefix,) = best
    in_model = {path: number_of.get((*prefix, *path)) for path in paths}
    return {path: number for path, number in in_model.items() if number is not None}
