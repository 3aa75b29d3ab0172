"""Turns values of weights into values of channels, and the other way round.

A group has a table with an element for each channel. If trips of a scan, experts or heads may keep channels of their
own, the table has a row for each of them. `add_up` sums over the weights of a channel. `look_up` gives each weight the
element of its channel.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axes, resolve_each, sizes_of
from jaxpruner.structure.analysis.members import Group
from jaxpruner.structure.analysis.records import Trace
from jaxpruner.structure.cutting.cut import Cut
from jaxpruner.tree import Path

Shape = tuple[int, ...]
# The place of each weight's channel in the table of its group: an array for each axis of the table, in the rank of the
# leaf, with one element along axes that it does not depend on. It is beyond the end if a weight has no channel.
Index = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelTable:
    """The channels of a group in some leaves.

    Attributes:
      group: the group.
      shape: of the table, `(*sizes of the owners of lists, channels)`.
      indices: path of a leaf -> axis with channels -> the places of its weights' channels. There are several where the
        channels are several factors of the axis, as in `h * h`.
    """

    group: Group
    shape: Shape
    indices: Mapping[Path, Mapping[int, Sequence[Index]]]

    def add_up(self, values: Mapping[Path, jax.Array]) -> jax.Array:
        """Sums over the weights of each channel, in float32 at least. Leaves without values add nothing.

        >>> import jaxpruner
        >>> params = {'up': jnp.ones((3, 2)), 'down': jnp.array([[5.0], [0.0]])}
        >>> graph = jaxpruner.channel_groups(lambda p, x: x @ p['up'] @ p['down'], params, jnp.ones((1, 3)))
        >>> table = channel_table(graph.trace, graph.groups['up[1]'], {('up',): 1, ('down',): 0})
        >>> table.add_up({('up',): params['up'], ('down',): params['down']})
        Array([8., 3.], dtype=float32)
        """
        total = jnp.zeros(self.shape, jnp.float32)
        for path, value in values.items():
            for index, is_again in self._indices_of(path):
                others = value if is_again is None else jnp.where(is_again, 0, value)
                total = total + _add_up(others, index, self.shape)
        return total

    def any_along(self, flags: jax.Array, path: Path, axis: int) -> np.ndarray:
        """Flags the channels along an axis of a leaf that have a flagged weight, in the shape of the table."""
        *owners, size = self.shape
        table = np.zeros((*owners, size + 1), bool)  # the last is for weights without a channel
        for index in self.indices[path][axis]:
            other_axes = _other_axes(flags.shape, index)
            flagged = _any_over(flags, other_axes)
            np.logical_or.at(table, index, np.asarray(flagged))
        return table[..., :size]

    def look_up(self, table: jax.Array, path: Path) -> jax.Array:
        """The elements of the table for the weights of a leaf, 1 for weights without a channel.

        The result has one element along axes of the leaf that it does not depend on.
        """
        product = jnp.ones((), table.dtype)
        for index, is_again in self._indices_of(path):
            entries = table.at[index].get(mode='fill', fill_value=1)
            if is_again is not None:
                entries = jnp.where(is_again, 1, entries)
            product = product * entries
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


def channel_table(trace: Trace, group: Group, numbers: Mapping[Path, int]) -> ChannelTable:
    """Makes the table of a group.

    Args:
      trace: of the model.
      group: one of its groups.
      numbers: path of a leaf -> its number in the trace. Leaves that are no members are left out.
    """
    member_axes = _member_axes(trace, group)
    indices: dict[Path, dict[int, list[Index]]] = {}
    for path, number in numbers.items():
        if number not in member_axes:
            continue
        indices[path] = {}
        axes = trace.leaves[number]
        for i in member_axes[number]:
            indices[path][i] = _find_indices(axes, i, group)
    owners = sizes_of(group.lists)
    return ChannelTable(group, (*owners, group.size), indices)


def _member_axes(trace: Trace, group: Group) -> dict[int, list[int]]:
    """Number of a leaf with channels of a group -> the axes along which they lie."""
    number_of = trace.leaf_numbers
    member_axes: dict[int, list[int]] = {}
    for member in group.members:
        number = number_of[member.path]
        axes_of_leaf = member_axes.setdefault(number, [])
        if member.axis not in axes_of_leaf:
            axes_of_leaf.append(member.axis)
    return member_axes


def _find_indices(axes: Axes, i: int, group: Group) -> list[Index]:
    """The places of the channels along an axis of a leaf in the table of their group."""
    atom = group.atom.resolved()
    owners = resolve_each(group.lists)
    whole = Cut({})
    beyond_the_end = group.size
    indices = []
    for *owner_indices, channel in whole.channel_indices(axes, i, atom, owners):
        has_channel = channel >= 0
        channel = np.where(has_channel, channel, beyond_the_end)
        indices.append((*owner_indices, channel))
    return indices


def _add_up(value: Any, index: Index, shape: Shape) -> jax.Array:
    """Sums over the weights of each channel, in the shape of the table."""
    # Sums of 16-bit numbers would overflow.
    dtype = tree_lib.at_least_float32(value.dtype)
    other_axes = _other_axes(value.shape, index)
    sums = jnp.sum(value, axis=other_axes, keepdims=True, dtype=dtype)
    if _is_in_order(index, shape):
        return sums.ravel()
    zeros = jnp.zeros(shape, dtype)
    return zeros.at[index].add(sums, mode='drop')


def _is_in_order(index: Index, shape: Shape) -> bool:
    """Whether position i has channel i."""
    if len(index) != 1:
        return False
    (channels,) = index
    (count,) = shape
    return np.array_equal(channels.ravel(), np.arange(count))


@functools.partial(jax.jit, static_argnums=1)
def _any_over(flags: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.any(flags, axis=axes, keepdims=True)


def _other_axes(shape: Shape, index: Index) -> tuple[int, ...]:
    """The axes of a leaf that an index does not depend on."""
    shapes = [indices.shape for indices in index]
    index_shape = np.broadcast_shapes(*shapes)
    other_axes = []
    for i, size in enumerate(index_shape):
        if size < shape[i]:
            other_axes.append(i)
    return tuple(other_axes)
