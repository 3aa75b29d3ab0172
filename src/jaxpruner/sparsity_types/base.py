"""What a sparsity type is, the simplest one, and the groups that a type makes of a leaf."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxpruner import tree as tree_lib
from jaxpruner.core.named_fields import NamedFields


@runtime_checkable
class SparsityType(Protocol):
    """What every sparsity type has: it is hashable and checks the shapes that it is used for.

    >>> from jaxpruner.sparsity_types import Channel
    >>> isinstance(Channel(), SparsityType)
    True
    """

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Raises `ValueError` with the parameter's path `where` if the type does not fit the shape."""


@runtime_checkable
class GroupedType(SparsityType, Protocol):
    """A type whose groups of weights are kept or removed whole, ranked over the leaf.

    >>> from jaxpruner.sparsity_types import Channel, NByM
    >>> isinstance(Channel(), GroupedType), isinstance(NByM(2, 4), GroupedType)
    (True, False)
    """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Pools the scores of a leaf into an array with one score for each group."""
        ...

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each weight of a leaf of this shape the verdict of its group."""
        ...


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
        """Gives each weight of a leaf the verdict of its group, 1 if it is in none; broadcasts to the leaf."""
        ...


@runtime_checkable
class JointType(SparsityType, Protocol):
    """A sparsity type that ties leaves together; `structure.GroupedChannels` is one."""

    def join(self, shapes: Mapping[tree_lib.Path, tuple[int, ...]]) -> Sequence[JointGroups]:
        """Lists the groups whose leaders are among leaves of these paths and shapes.

        Raises:
          ValueError: the leaves are not those that the type ties.
        """
        ...

    def check_members(self, groups: Sequence[JointGroups], masked: Sequence[tree_lib.Path]) -> None:
        """Refuses groups that are to be pruned, if masks of these leaves do not remove them."""
        ...

    def kept_weights(self, counts: Sequence[tuple[JointGroups, int]], leaf: tree_lib.Path) -> int:
        """Counts the weights of a leaf that are kept where so many of some groups are."""
        ...


@dataclasses.dataclass(frozen=True)
class Unstructured(NamedFields):
    """Every weight stands alone. Config string: `'unstructured'`.

    >>> Unstructured()
    Unstructured()
    """

    _fields = ()

    def check_shape(self, shape: Sequence[int], where: str) -> None:
        """Accepts every shape.

        >>> Unstructured().check_shape((3, 5), 'kernel')
        """

    def group_scores(self, scores: jax.Array) -> jax.Array:
        """Returns the scores: each weight is a group."""
        return scores

    def spread_groups(self, group_mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns the mask as it is."""
        del shape
        return group_mask


_GROUPING = ('check_shape', 'group_scores', 'spread_groups')


def is_unstructured(sparsity_type: Any) -> bool:
    """Whether each weight is ranked by its own score, so that scores need no pooling.

    True for `Unstructured` and for subclasses that leave its methods as they are. A subclass with a method of its own
    may pool scores in another way.

    Args:
      sparsity_type: a type; `None` is not unstructured.

    >>> from jaxpruner.sparsity_types import Channel
    >>> is_unstructured(Unstructured()), is_unstructured(Channel())
    (True, False)
    """
    if not isinstance(sparsity_type, Unstructured):
        return False
    own = type(sparsity_type)
    return all(getattr(own, name) is getattr(Unstructured, name) for name in _GROUPING)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of weights of one leaf.

    Each layer of a stacked leaf has groups of its own, and its sparsity type sees one layer at a time.
    """

    sparsity_type: Any
    is_stacked: bool = False

    @property
    def is_unstructured(self) -> bool:
        """Tells whether each weight is a group."""
        return is_unstructured(self.sparsity_type)

    def layer_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what is ranked on its own: a layer of a stacked leaf, else all of it."""
        return shape[1:] if self.is_stacked else shape

    def per_layer(self, function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        """Maps a function over layers, if there are any; `in_axes` is that of `jax.vmap`."""
        return jax.vmap(function, in_axes) if self.is_stacked else function

    def pool(self, scores: jax.Array) -> jax.Array:
        """Scores groups by the scores of their weights: one score a group, `[layers, …]` where stacked."""
        if not scores.size:  # no weights make no groups: types need not know what to pool then
            shape = (*scores.shape[:1], 0) if self.is_stacked else (0,)
            return jnp.zeros(shape, scores.dtype)
        return self.per_layer(self.sparsity_type.group_scores)(scores)

    def spread(self, verdicts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Gives each weight of a leaf of this shape the verdict of its group."""
        if not verdicts.size:
            return jnp.ones(shape, verdicts.dtype)
        layer_shape = self.layer_shape(shape)

        def spread_layer(layer: jax.Array) -> jax.Array:
            return self.sparsity_type.spread_groups(layer, layer_shape)

        return self.per_layer(spread_layer)(verdicts)


def is_sparsity_type(instance_to_check: Any) -> bool:
    """Whether something is a single sparsity type; a class is not one.

    Args:
      instance_to_check: anything.

    >>> from jaxpruner.sparsity_types import NByM
    >>> is_sparsity_type(NByM(2, 4)), is_sparsity_type('2:4'), is_sparsity_type(NByM)
    (True, False, False)
    """
    return isinstance(instance_to_check, SparsityType) and not isinstance(instance_to_check, type)


def is_joint(sparsity_type: Any) -> bool:
    """Whether a sparsity type ties leaves together."""
    return isinstance(sparsity_type, JointType) and not isinstance(sparsity_type, type)


def check_whole(name: str, value: Any, minimum: int | None = None) -> None:
    """Refuses a setting that is no whole number, or below the minimum."""
    if isinstance(value, bool) or not hasattr(value, '__index__'):
        raise TypeError(f'{name} must be a whole number, got {value!r}')
    if minimum is not None and value < minimum:
        raise ValueError(f'{name} must be at least {minimum}, got {value}')


def axis_in(axis: int, shape: Sequence[int], where: str) -> int:
    """Returns the axis, and refuses one that the shape of the parameter `where` does not have."""
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f'{where}: axis {axis} does not exist in shape {tuple(shape)}; use one in [{-len(shape)}, {len(shape)})'
        )
    return axis
