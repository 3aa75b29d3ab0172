"""What every sparsity type has, and the checks of their settings."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax


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


def is_sparsity_type(instance_to_check: Any) -> bool:
    """Whether something is a single sparsity type; a class is none.

    Args:
      instance_to_check: anything.

    >>> from jaxpruner.sparsity_types import NByM
    >>> is_sparsity_type(NByM(2, 4)), is_sparsity_type('2:4'), is_sparsity_type(NByM)
    (True, False, False)
    """
    return isinstance(instance_to_check, SparsityType) and not isinstance(instance_to_check, type)


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
