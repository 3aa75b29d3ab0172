"""Sparsity types whose groups have weights in several leaves, so that one decision holds for all of these."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from jaxpruner.core import tree as tree_lib
from jaxpruner.sparsity_types.base import SparsityType


class JointGroups(Protocol):
    """Groups that are ranked among themselves, such as the channels of a layer. Leaves are named by their paths.

    Attributes:
      leader: the leaf whose sparsity is that of the groups.
      members: all leaves that have weights of the groups, the leader among them.
      size: how many groups there are, in each layer where they are stacked.
      is_stacked: whether the first axis of pooled scores counts layers, each of which is ranked on its own.
    """

    @property
    def leader(self) -> tree_lib.Path: ...
    @property
    def members(self) -> Sequence[tree_lib.Path]: ...
    @property
    def size(self) -> int: ...
    @property
    def is_stacked(self) -> bool: ...

    def pool(self, scores: Mapping[tree_lib.Path, jax.Array]) -> jax.Array:
        """Adds the scores of weights in some leaves up: one score a group."""
        ...

    def spread(self, verdicts: jax.Array, leaf: tree_lib.Path) -> jax.Array:
        """The verdict on the group of each weight of a leaf, 1 for those in none; broadcasts to the leaf."""
        ...


@runtime_checkable
class JointType(SparsityType, Protocol):
    """A sparsity type that ties leaves together; `structure.GroupedChannels` is one."""

    def join(self, shapes: Mapping[tree_lib.Path, tuple[int, ...]]) -> Sequence[JointGroups]:
        """The groups whose leaders are among leaves of these paths and shapes.

        Raises:
          ValueError: the leaves are not those that the type ties.
        """
        ...

    def check_members(self, groups: Sequence[JointGroups], masked: Sequence[tree_lib.Path]) -> None:
        """Refuses groups that are to be pruned, if masks of these leaves do not remove them."""
        ...

    def kept_weights(self, counts: Sequence[tuple[JointGroups, int]], leaf: tree_lib.Path) -> int:
        """How many weights of a leaf are kept where so many of some groups are."""
        ...


def is_joint(sparsity_type: Any) -> bool:
    """Whether a sparsity type ties leaves together."""
    return isinstance(sparsity_type, JointType) and not isinstance(sparsity_type, type)
