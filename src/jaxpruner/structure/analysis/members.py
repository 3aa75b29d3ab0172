"""The records of a graph: groups, where their channels lie, and axes that stay."""

import dataclasses
from typing import Any

import numpy as np

from jaxpruner import tree as tree_lib
from jaxpruner.structure.analysis.axes import Axis, Pin
from jaxpruner.structure.analysis.positions import Occurrence
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
        occurrence: Occurrence = self._occurrence
        return occurrence.positions()


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
        are kept)`; `cutting.cut.Lists` holds it, with these atoms as its `owners`. Empty if all keep the same channels.
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
